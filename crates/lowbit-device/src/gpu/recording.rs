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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_used_again_once_no_tensor_has_it() {
        let mut recording = Recording::default();
        let [first, second] = [64, 64].map(|bytes| {
            let memory = Memory::new(bytes);
            recording.add(bytes, &memory);
            memory
        });
        assert!(recording.reuse(64).is_none(), "tensors have both");
        let (clone, range) = (first.clone(), Arc::as_ptr(&first.keep()).addr());
        drop(first);
        assert!(recording.reuse(64).is_none(), "a clone is left");
        drop(clone);
        assert!(recording.reuse(32).is_none(), "of another size");
        let again = recording.reuse(64).unwrap();
        assert_eq!(Arc::as_ptr(&again.keep()).addr(), range);
        assert!(recording.reuse(64).is_none(), "it is in use again");
        // Memory from outside is kept as well; memory that is used again counts once.
        let outside = Memory::new(0usize);
        recording.launch([&again, &second, &outside].into_iter());
        assert_eq!(recording.into_memory().len(), 3);
    }
}
