//! A router that knows caches by their events alone.

use crate::CacheEvent;
use crate::prefix::PrefixTree;
use crate::runner::BLOCK;
use std::collections::HashMap;

/// The blocks that it heard of.
#[derive(Default)]
pub(super) struct Router {
    /// Those that follow a block, with their tokens; `None` is a text's start.
    next: HashMap<Option<u64>, Vec<(u64, Vec<u32>)>>,
    /// The block before each.
    before: HashMap<u64, Option<u64>>,
}

impl Router {
    pub(super) fn len(&self) -> usize {
        self.before.len()
    }

    fn follow(&self, before: Option<u64>, tokens: &[u32]) -> Option<u64> {
        let next = self.next.get(&before)?.iter().find(|(_, known)| known == tokens);
        next.map(|(block, _)| *block)
    }

    /// Hears events, of which none may say what it knows.
    pub(super) fn hear(&mut self, events: Vec<CacheEvent>) {
        for event in events {
            match event {
                CacheEvent::Stored { parent, blocks, tokens } => {
                    assert_eq!(tokens.len(), blocks.len() * BLOCK);
                    assert!(parent.is_none_or(|parent| self.before.contains_key(&parent)));
                    let mut before = parent;
                    for (&block, tokens) in blocks.iter().zip(tokens.chunks(BLOCK)) {
                        assert_eq!(self.follow(before, tokens), None);
                        assert_eq!(self.before.insert(block, before), None);
                        self.next.entry(before).or_default().push((block, tokens.to_vec()));
                        before = Some(block);
                    }
                }
                CacheEvent::Removed { blocks } => {
                    for block in blocks {
                        let before = self.before.remove(&block).expect("it was stored");
                        self.next.entry(before).or_default().retain(|(other, _)| *other != block);
                    }
                }
                CacheEvent::Cleared => *self = Self::default(),
            }
        }
    }

    /// Tokens of a prompt that it expects to be found.
    fn expected(&self, prompt: &[u32]) -> usize {
        let mut before = None;
        let known = prompt.chunks_exact(BLOCK).take_while(|block| {
            before = self.follow(before, block);
            before.is_some()
        });
        known.count() * BLOCK
    }

    /// The tree finds as many tokens as it expects. With marks, a prompt may leave the text before
    /// the next mark.
    pub(super) fn check(&self, tree: &PrefixTree, prompt: &[u32], marks: bool) {
        let (found, expected) = (tree.find(prompt, usize::MAX, marks), self.expected(prompt));
        match marks {
            true => assert!((found.tokens..=found.shared).contains(&expected), "{expected}: {found:?}"),
            false => assert_eq!(found.tokens, expected),
        }
    }
}
