//! The memory of a pass while it is captured.

use super::encoder::{Memory, Range};
use std::sync::Arc;

/// The memory that the launches of a running capture use, which the pass must keep alive.
///
/// Were each intermediate given a range of its own, a pass would need more memory than the same
/// launches outside, and on Metal cubecl-wgpu's pool cannot grow while a pass is recorded. So the
/// capture reuses its own ranges, as a pool does outside. The launches run in the order in which
/// they were recorded, in a replay too.
#[derive(Debug, Default)]
pub(super) struct Recording {
    /// The ranges that the capture allocated, with their sizes in bytes.
    own: Vec<(usize, Range)>,
    /// The ranges from before it.
    other: Vec<Range>,
}

impl Recording {
    /// A range of the capture's own that no tensor has any more.
    pub fn reuse(&self, bytes: usize) -> Option<Memory> {
        let (_, range) = self.own.iter().find(|(size, range)| *size == bytes && is_free(range))?;
        Some(Memory::of(range.clone()))
    }

    /// Adds what the capture allocated.
    pub fn add(&mut self, bytes: usize, memory: &Memory) {
        self.own.push((bytes, memory.keep()));
    }

    /// A launch uses `memory`.
    pub fn launch<'a>(&mut self, memory: impl Iterator<Item = &'a Memory>) {
        for memory in memory.map(Memory::keep) {
            if !self.own.iter().any(|(_, own)| Arc::ptr_eq(own, &memory)) {
                self.other.push(memory);
            }
        }
    }

    /// The sizes of what the warm-up allocated and tensors still have: the recording needs as much
    /// again.
    #[cfg(feature = "metal")]
    pub fn kept(&self) -> Vec<usize> {
        self.own.iter().filter(|(_, range)| !is_free(range)).map(|(bytes, _)| *bytes).collect()
    }

    /// All of it.
    pub fn into_memory(self) -> Vec<Range> {
        self.own.into_iter().map(|(_, range)| range).chain(self.other).collect()
    }
}

/// True if the capture alone has the range.
fn is_free(range: &Range) -> bool {
    Arc::strong_count(range) == 1
}
