//! Tells changes of the tree: what prompts can find.

use super::{Node, PrefixTree};
use crate::CacheEvent;

/// The changes of what prompts can find, since they were last taken.
#[derive(Debug)]
pub(super) struct Log {
    events: Vec<CacheEvent>,
    /// True if caches are entered at marks alone.
    marks: bool,
}

/// The name of `block` after the prefix `parent`: 63 bits, since some readers' integers are signed.
pub(super) fn name_of(parent: u64, block: &[u32]) -> u64 {
    // SplitMix64's mixer (Steele, Lea, Flood, 2014), chained.
    let mixed = block.iter().fold(parent, |hash, &id| {
        let mut bits = hash.wrapping_add(u64::from(id)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    });
    mixed >> 1
}

impl PrefixTree {
    /// A tree that logs its changes. With `marks`, caches are entered at marks alone.
    pub(crate) fn logging(marks: bool) -> Self {
        Self { log: Some(Log { events: vec![], marks }), ..Self::default() }
    }

    /// Forgets all holders.
    pub(crate) fn clear(&mut self) {
        let mut log = self.log.take();
        if let Some(log) = log.as_mut().filter(|_| !self.paths.is_empty()) {
            log.events.push(CacheEvent::Cleared);
        }
        *self = Self { log, ..Self::default() };
    }

    /// The changes since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.log.as_mut().map_or_else(Vec::new, |log| std::mem::take(&mut log.events))
    }

    /// True if a log has the nodes that are entered at marks, or, if not, that have a holder.
    pub(super) fn logs(&self, marks: bool) -> bool {
        self.log.as_ref().is_some_and(|log| log.marks == marks)
    }

    /// Logs nodes, each the child of the one before, that prompts can find from now on.
    pub(super) fn log_stored(&mut self, nodes: &[usize]) {
        let (Some(log), Some(&first)) = (&mut self.log, nodes.first()) else { return };
        let parent = self.nodes[first].parent;
        log.events.push(CacheEvent::Stored {
            parent: (parent != 0).then(|| self.nodes[parent].name),
            blocks: nodes.iter().map(|&node| self.nodes[node].name).collect(),
            tokens: nodes.iter().flat_map(|&node| self.nodes[node].block.iter().copied()).collect(),
        });
    }

    /// Logs blocks that no prompt finds any more.
    pub(super) fn log_removed(&mut self, blocks: Vec<u64>) {
        if let Some(log) = self.log.as_mut().filter(|_| !blocks.is_empty()) {
            log.events.push(CacheEvent::Removed { blocks });
        }
    }

    /// A node lost a mark. Adds the blocks to `gone` that are not entered any more.
    pub(super) fn lost_mark(&mut self, mut node: usize, gone: &mut Vec<u64>) {
        while self.logs(true) && node != 0 {
            let Node { parent, name, marks, .. } = &mut self.nodes[node];
            *marks -= 1;
            gone.extend((*marks == 0).then_some(*name));
            node = *parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::BLOCK;

    fn text(blocks: &[u32]) -> Vec<u32> {
        blocks.iter().flat_map(|&block| vec![block; BLOCK]).collect()
    }

    #[test]
    fn blocks_are_told_from_the_first_holder_to_the_last() {
        let mut tree = PrefixTree::logging(false);
        tree.extend(1, &text(&[1, 2]));
        tree.extend(2, &text(&[1, 2, 3]));
        let first = name_of(0, &text(&[1]));
        let second = name_of(first, &text(&[2]));
        let third = name_of(second, &text(&[3]));
        let stored = |parent, blocks: &[u64], of: &[u32]| CacheEvent::Stored {
            parent,
            blocks: blocks.to_vec(),
            tokens: text(of),
        };
        let expected = [stored(None, &[first, second], &[1, 2]), stored(Some(second), &[third], &[3])];
        assert_eq!(tree.take_events(), expected);
        tree.remove(1);
        assert_eq!(tree.take_events(), []);
        tree.truncate(2, BLOCK);
        assert_eq!(tree.take_events(), [CacheEvent::Removed { blocks: vec![third, second] }]);
        tree.clear();
        tree.clear();
        assert_eq!(tree.take_events(), [CacheEvent::Cleared]);
    }

    #[test]
    fn with_marks_blocks_are_told_up_to_the_last_one() {
        let mut tree = PrefixTree::logging(true);
        tree.extend(1, &text(&[1, 2, 3, 4]));
        assert_eq!(tree.take_events(), []);
        let tokens_of = |events: Vec<CacheEvent>| match &events[..] {
            [CacheEvent::Stored { blocks, tokens, .. }] => (blocks.len(), tokens.clone()),
            [CacheEvent::Removed { blocks }] => (blocks.len(), vec![]),
            events => panic!("one event is wanted: {events:?}"),
        };
        tree.mark(1, 2 * BLOCK);
        assert_eq!(tokens_of(tree.take_events()), (2, text(&[1, 2])));
        tree.mark(1, 3 * BLOCK);
        assert_eq!(tokens_of(tree.take_events()), (1, text(&[3])));
        tree.mark(1, 3 * BLOCK);
        tree.unmark(1, 2 * BLOCK);
        tree.unmark(1, 2 * BLOCK);
        assert_eq!(tree.take_events(), [], "the later one stands behind it");
        tree.remove(1);
        assert_eq!(tokens_of(tree.take_events()), (3, vec![]));
    }
}
