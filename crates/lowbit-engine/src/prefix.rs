//! The texts that are cached, and how far: a tree over blocks of token ids.

mod log;

use crate::runner::BLOCK;
use log::{Log, name_of};
use std::collections::HashMap;

/// A text with a cache, which a running request owns or the store keeps.
pub(crate) type HolderId = u64;

/// A tree whose edges are blocks of [`BLOCK`] ids. A node is a prefix of one or more texts: its
/// holders have the keys and values of all its tokens, those in `marked` also the states after the
/// last one. Ids are compared, not hashes of them: two texts never share what is not theirs.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    nodes: Vec<Node>,
    /// Free places of `nodes`.
    free: Vec<usize>,
    /// Each holder's nodes, from the root's child on.
    paths: HashMap<HolderId, Vec<usize>>,
    log: Option<Log>,
}

#[derive(Debug, Default)]
struct Node {
    parent: usize,
    block: Box<[u32]>,
    children: HashMap<Box<[u32]>, usize>,
    holders: Vec<HolderId>,
    marked: Vec<HolderId>,
    /// The name of the prefix in a log's events.
    name: u64,
    /// Marks here and below, if a log wants to know: without any, nothing is entered here.
    marks: usize,
}

/// The part of a text that the tree has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Tokens that a cached text begins with, too, whether or not it can be entered there.
    pub shared: usize,
    /// The longest prefix that a cache can be entered at (0 for none), and its holder.
    pub tokens: usize,
    pub holder: Option<HolderId>,
}

impl Default for PrefixTree {
    fn default() -> Self {
        Self { nodes: vec![Node::default()], free: vec![], paths: HashMap::new(), log: None }
    }
}

impl PrefixTree {
    /// Looks up the first `limit` ids of `ids`. With `marks`, a cache can be entered at marks
    /// alone. Of several holders the newest is returned.
    pub(crate) fn find(&self, ids: &[u32], limit: usize, marks: bool) -> Found {
        let (mut node, mut found) = (0, Found::default());
        for (index, block) in ids.chunks_exact(BLOCK).enumerate() {
            let Some(&child) = self.nodes[node].children.get(block) else { break };
            node = child;
            found.shared = (index + 1) * BLOCK;
            let enterable = if marks { &self.nodes[node].marked } else { &self.nodes[node].holders };
            if let (true, Some(&holder)) = (found.shared <= limit, enterable.last()) {
                (found.tokens, found.holder) = (found.shared, Some(holder));
            }
        }
        found
    }

    /// Tokens of `holder`'s text that the tree knows.
    pub(crate) fn length(&self, holder: HolderId) -> usize {
        self.paths.get(&holder).map_or(0, |path| path.len() * BLOCK)
    }

    /// `holder` now has the keys and values of all whole blocks of `ids`, which continue what it
    /// had.
    pub(crate) fn extend(&mut self, holder: HolderId, ids: &[u32]) {
        let mut path = self.paths.remove(&holder).unwrap_or_default();
        let mut new = vec![];
        for block in ids.chunks_exact(BLOCK).skip(path.len()) {
            let parent = path.last().copied().unwrap_or(0);
            let node = match self.nodes[parent].children.get(block) {
                Some(&node) => node,
                None => {
                    new.push(self.add(parent, block));
                    new[new.len() - 1]
                }
            };
            self.nodes[node].holders.push(holder);
            path.push(node);
        }
        if self.logs(false) {
            self.log_stored(&new);
        }
        if !path.is_empty() {
            self.paths.insert(holder, path);
        }
    }

    fn add(&mut self, parent: usize, block: &[u32]) -> usize {
        let name = self.log.as_ref().map_or(0, |_| name_of(self.nodes[parent].name, block));
        let node = Node { parent, block: block.into(), name, ..Node::default() };
        let index = match self.free.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.nodes[parent].children.insert(block.into(), index);
        index
    }

    /// `holder` now has the states after `tokens` tokens, too, which its path reaches.
    pub(crate) fn mark(&mut self, holder: HolderId, tokens: usize) {
        let Some(node) = self.node(holder, tokens) else { return };
        if self.nodes[node].marked.contains(&holder) {
            return;
        }
        self.nodes[node].marked.push(holder);
        if self.logs(true) {
            let path = self.paths[&holder][..tokens / BLOCK].to_vec();
            path.iter().for_each(|&node| self.nodes[node].marks += 1);
            let known = path.iter().take_while(|&&node| self.nodes[node].marks > 1).count();
            self.log_stored(&path[known..]);
        }
    }

    /// `holder` dropped the states after `tokens` tokens.
    pub(crate) fn unmark(&mut self, holder: HolderId, tokens: usize) {
        let Some(node) = self.node(holder, tokens) else { return };
        let marked = &mut self.nodes[node].marked;
        let Some(place) = marked.iter().position(|&other| other == holder) else { return };
        marked.remove(place);
        let mut gone = vec![];
        self.lost_mark(node, &mut gone);
        self.log_removed(gone);
    }

    fn node(&self, holder: HolderId, tokens: usize) -> Option<usize> {
        self.paths.get(&holder)?.get((tokens / BLOCK).checked_sub(1)?).copied()
    }

    /// `holder` keeps its first `tokens` tokens alone.
    pub(crate) fn truncate(&mut self, holder: HolderId, tokens: usize) {
        let Some(mut path) = self.paths.remove(&holder) else { return };
        let mut gone = vec![];
        while path.len() > tokens / BLOCK {
            let Some(node) = path.pop() else { break };
            let Node { holders, marked, .. } = &mut self.nodes[node];
            holders.retain(|&other| other != holder);
            if let Some(place) = marked.iter().position(|&other| other == holder) {
                marked.remove(place);
                self.lost_mark(node, &mut gone);
            }
            let Node { parent, block, holders, name, .. } = &mut self.nodes[node];
            if holders.is_empty() {
                // Nobody has what follows, either.
                let (parent, block, name) = (*parent, std::mem::take(block), *name);
                self.nodes[parent].children.remove(&block);
                self.free.push(node);
                gone.extend(self.logs(false).then_some(name));
            }
        }
        self.log_removed(gone);
        if !path.is_empty() {
            self.paths.insert(holder, path);
        }
    }

    /// Forgets `holder`.
    pub(crate) fn remove(&mut self, holder: HolderId) {
        self.truncate(holder, 0);
    }

    /// Tokens that would have to be computed again without `holder`.
    pub(crate) fn gain(&self, holder: HolderId, marks: bool) -> usize {
        let Some(path) = self.paths.get(&holder) else { return 0 };
        if !marks {
            return path.iter().filter(|&&node| self.nodes[node].holders.len() == 1).count() * BLOCK;
        }
        let mut others = 0;
        let mut own = 0;
        for (index, &node) in path.iter().enumerate() {
            match &self.nodes[node].marked[..] {
                [] => {}
                [only] if *only == holder => own = index + 1,
                _ => others = index + 1,
            }
        }
        own.saturating_sub(others) * BLOCK
    }

    /// Nodes beside the root: 0 when no holder is left.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - 1 - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(blocks: &[u32]) -> Vec<u32> {
        blocks.iter().flat_map(|&block| vec![block; BLOCK]).collect()
    }

    #[test]
    fn the_longest_shared_prefix_is_found() {
        let mut tree = PrefixTree::default();
        tree.extend(1, &text(&[1, 2, 3]));
        tree.extend(2, &text(&[1, 2, 4, 5]));
        let found = |tree: &PrefixTree, blocks: &[u32]| {
            let found = tree.find(&text(blocks), usize::MAX, false);
            (found.tokens, found.holder)
        };
        assert_eq!(found(&tree, &[1, 2, 3, 9]), (192, Some(1)));
        assert_eq!(found(&tree, &[1, 2, 9]), (128, Some(2)));
        assert_eq!(found(&tree, &[9]), (0, None));
        let limited = tree.find(&text(&[1, 2, 3]), 130, false);
        assert_eq!((limited.tokens, limited.shared), (128, 192));
        tree.remove(2);
        assert_eq!(found(&tree, &[1, 2, 4, 5]), (128, Some(1)));
        tree.remove(1);
        assert_eq!((found(&tree, &[1]), tree.len()), ((0, None), 0));
    }

    #[test]
    fn models_with_states_enter_at_marks_alone() {
        let mut tree = PrefixTree::default();
        tree.extend(1, &text(&[1, 2, 3]));
        tree.mark(1, 128);
        let found = tree.find(&text(&[1, 2, 3, 4]), usize::MAX, true);
        assert_eq!(found, Found { shared: 192, tokens: 128, holder: Some(1) });
        tree.unmark(1, 128);
        let found = tree.find(&text(&[1, 2, 3, 4]), usize::MAX, true);
        assert_eq!(found, Found { shared: 192, tokens: 0, holder: None });
    }

    #[test]
    fn a_text_that_others_cover_gains_nothing() {
        let mut tree = PrefixTree::default();
        tree.extend(1, &text(&[1, 2]));
        tree.extend(2, &text(&[1, 2, 3]));
        assert_eq!((tree.gain(1, false), tree.gain(2, false)), (0, 64));
        tree.mark(1, 64);
        tree.mark(2, 64);
        tree.mark(2, 192);
        assert_eq!((tree.gain(1, true), tree.gain(2, true)), (0, 128));
        tree.truncate(2, 64);
        assert_eq!((tree.gain(1, false), tree.length(2)), (64, 64));
    }
}
