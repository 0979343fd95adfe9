//! Caches that are kept for later requests.

use crate::EngineError;
use crate::prefix::{Found, HolderId, PrefixTree};
use crate::runner::{BLOCK, Runner, Sizes};
use std::collections::HashMap;
use std::time::Duration;

/// A cache with the place that it has reached, and the states at places before.
pub(crate) struct Held<R: Runner> {
    pub id: HolderId,
    pub cache: R::Cache,
    /// Tokens that fit.
    pub capacity: usize,
    /// Places and their states, in order; empty in models without states.
    pub marks: Vec<(usize, R::Mark)>,
}

impl<R: Runner> Held<R> {
    /// Bytes of the cache and its marks. Nothing is counted twice: a fork has memory of its own,
    /// and a mark's states are those of the running cache only until its next pass, which copies
    /// them.
    pub(crate) fn bytes(&self, sizes: &Sizes) -> usize {
        sizes.bytes(self.capacity) + self.marks.len() * sizes.mark
    }

    /// Recurrent states that it has: its own, and the marks'.
    pub(crate) fn states(&self) -> usize {
        1 + self.marks.len()
    }

    /// The states after `tokens` tokens.
    pub(crate) fn mark_at(&self, tokens: usize) -> Option<&R::Mark> {
        mark_at::<R>(&self.marks, tokens)
    }

    /// Goes back to the first `tokens` tokens.
    pub(crate) fn go_back(&mut self, runner: &R, tokens: usize) -> Result<(), EngineError> {
        runner.go_back(&mut self.cache, tokens, mark_at::<R>(&self.marks, tokens))?;
        self.marks.retain(|&(place, _)| place <= tokens);
        Ok(())
    }
}

fn mark_at<R: Runner>(marks: &[(usize, R::Mark)], tokens: usize) -> Option<&R::Mark> {
    marks.iter().find(|(place, _)| *place == tokens).map(|(_, mark)| mark)
}

struct Kept<R: Runner> {
    held: Held<R>,
    used: Duration,
}

/// The tree over all texts with caches, and the caches that no request runs on. Pages with tables
/// of their own (several texts on one copy of a prefix) would replace this module and
/// [`Runner::fork`] alone.
pub(crate) struct Store<R: Runner> {
    sizes: Sizes,
    pub tree: PrefixTree,
    kept: HashMap<HolderId, Kept<R>>,
    /// Of all kept caches.
    bytes: usize,
    next: HolderId,
}

impl<R: Runner> Store<R> {
    /// With a tree that logs its changes, if `logs`.
    pub(crate) fn new(sizes: Sizes, logs: bool) -> Self {
        let tree = if logs { PrefixTree::logging(sizes.states > 0) } else { PrefixTree::default() };
        Self { sizes, tree, kept: HashMap::new(), bytes: 0, next: 0 }
    }

    /// A name for a new cache.
    pub(crate) fn holder(&mut self) -> HolderId {
        self.next += 1;
        self.next
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Recurrent states of all kept caches.
    pub(crate) fn states(&self) -> usize {
        self.kept.values().map(|kept| kept.held.states()).sum()
    }

    fn has_states(&self) -> bool {
        self.sizes.states > 0
    }

    /// The longest cached prefix of a prompt, of which at least one token has to run.
    pub(crate) fn find(&self, prompt: &[u32]) -> Found {
        self.tree.find(prompt, prompt.len().saturating_sub(1), self.has_states())
    }

    /// A kept cache. `None` if a running request owns it.
    pub(crate) fn get(&self, id: HolderId) -> Option<&Held<R>> {
        self.kept.get(&id).map(|kept| &kept.held)
    }

    pub(crate) fn touch(&mut self, id: HolderId, now: Duration) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.used = now;
        }
    }

    /// Marks of all kept caches.
    pub(crate) fn marks(&self) -> usize {
        self.kept.values().map(|kept| kept.held.marks.len()).sum()
    }

    /// Keeps a cache whose first tokens the tree knows, unless others make it useless.
    pub(crate) fn keep(&mut self, runner: &R, mut held: Held<R>, now: Duration) {
        if self.tree.gain(held.id, self.has_states()) == 0 {
            self.tree.remove(held.id);
            return;
        }
        held.capacity = runner.park(&mut held.cache, self.tree.length(held.id), held.capacity);
        self.bytes += held.bytes(&self.sizes);
        self.kept.insert(held.id, Kept { held, used: now });
    }

    /// Takes a kept cache out, which stays in the tree.
    pub(crate) fn take(&mut self, id: HolderId) -> Option<Held<R>> {
        let held = self.kept.remove(&id)?.held;
        self.bytes -= held.bytes(&self.sizes);
        Some(held)
    }

    /// Drops the cache that is worth least: the fewest tokens to compute again per byte, by the
    /// time since it was used. False if there is none beside `but`.
    pub(crate) fn evict(&mut self, but: Option<HolderId>, now: Duration) -> bool {
        let worth = |(&id, kept): (&HolderId, &Kept<R>)| {
            let gain = self.tree.gain(id, self.has_states()) as f64;
            let age = now.saturating_sub(kept.used).as_secs_f64() + 1.0;
            (gain / kept.held.bytes(&self.sizes).max(1) as f64 / age, id)
        };
        let least = self.kept.iter().filter(|(id, _)| Some(**id) != but).map(worth);
        let Some((_, id)) = least.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else {
            return false;
        };
        self.tree.remove(id);
        self.take(id);
        true
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.tree.clear();
        self.kept.clear();
        self.bytes = 0;
    }

    /// The places of a prompt at which the states are worth keeping, in order: its last multiples
    /// of a block, what the request names, every `backbone` tokens, and where it leaves the texts
    /// that are cached, if no such place is near.
    pub(crate) fn places(&self, prompt: &[u32], named: &[usize], found: Found) -> Vec<usize> {
        /// A cached place so near before the branch serves it, too.
        const NEAR: usize = 1024;
        /// States may take a quarter of what keys and values take.
        const SHARE: usize = 4;
        if !self.has_states() {
            return vec![];
        }
        let total = prompt.len();
        let down = |tokens: usize| tokens - tokens % BLOCK;
        let backbone = (SHARE * self.sizes.states).div_ceil(self.sizes.per_token.max(1));
        let backbone = backbone.next_multiple_of(BLOCK);
        let mut places = vec![down(total.saturating_sub(1)), down(total)];
        places.extend(named.iter().map(|&tokens| down(tokens.min(total))));
        places.extend((backbone..total).step_by(backbone));
        if found.shared > found.tokens && (found.tokens == 0 || found.shared - found.tokens > NEAR) {
            places.push(down(found.shared.min(total)));
        }
        places.retain(|&place| place > found.tokens);
        places.sort_unstable();
        places.dedup();
        places
    }
}
