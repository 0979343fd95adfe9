//! Memory for tensors on the CPU.

use crate::Cpu;
use std::sync::{Arc, Mutex, PoisonError};

/// A cache line: storage is aligned to it, so that it can be viewed as any element type and vector loads do not
/// straddle lines.
#[derive(Clone, Copy, Debug, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Bytes that go back to their processor's [`Spares`] when the last tensor over them is gone.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    home: Arc<Cpu>,
}

impl Buffer {
    /// At least `bytes` bytes with anything in them. In debug builds they are all ones (NaN in every float, an absurd
    /// id), so that an element left unwritten shows. None where the system does not give as many.
    pub fn any(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        let count = bytes.div_ceil(size_of::<Line>());
        let mut lines = match home.spares.take(count) {
            Some(lines) => lines,
            None => bytemuck::allocation::try_zeroed_vec(count).ok()?,
        };
        lines.resize(count, Line([0; 64]));
        if cfg!(debug_assertions) {
            lines.fill(Line([0xff; 64]));
        }
        Some(Self { lines, home: home.clone() })
    }

    /// At least `bytes` bytes of zeros. None where the system does not give as many.
    pub fn zeros(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        // Fresh memory: the system has zeroed it, and takes it from no one before it is touched.
        let lines = bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(size_of::<Line>())).ok()?;
        Some(Self { lines, home: home.clone() })
    }

    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Self::any(self.bytes().len(), &self.home).expect("memory for a copy");
        copy.lines.copy_from_slice(&self.lines);
        copy
    }
}

impl std::fmt::Debug for Buffer {
    /// Not the bytes, of which there may be gigabytes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes().len()).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.spares.put(std::mem::take(&mut self.lines));
    }
}

/// Buffers for the next tensors: the first touch of fresh memory costs a page fault every few kilobytes, which is
/// more than what most ops do with it.
#[derive(Default)]
pub(crate) struct Spares(Mutex<Vec<Vec<Line>>>);

impl std::fmt::Debug for Spares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Spares").field("buffers", &spares.len()).finish_non_exhaustive()
    }
}

impl Spares {
    /// Smaller buffers come from the allocator's own lists without a page fault.
    const SMALLEST: usize = (64 << 10) / size_of::<Line>();
    /// Lines kept in all.
    const MOST: usize = (48 << 20) / size_of::<Line>();

    /// The smallest spare buffer of at least `count` lines, unless it is twice as large.
    fn take(&self, count: usize) -> Option<Vec<Line>> {
        if count < Self::SMALLEST {
            return None;
        }
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |lines: &Vec<Line>| (count..2 * count).contains(&lines.capacity());
        let fitting = spares.iter().enumerate().filter(|(_, lines)| fits(lines));
        let (index, _) = fitting.min_by_key(|(_, lines)| lines.capacity())?;
        Some(spares.swap_remove(index))
    }

    fn put(&self, lines: Vec<Line>) {
        let capacity = lines.capacity();
        if !(Self::SMALLEST..=Self::MOST).contains(&capacity) {
            return;
        }
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The oldest go first: sizes that a model has stopped using.
        while spares.iter().map(Vec::capacity).sum::<usize>() + capacity > Self::MOST {
            spares.remove(0);
        }
        spares.push(lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    fn cpu() -> Arc<Cpu> {
        Device::cpu(Some(1)).unwrap().as_cpu("test").unwrap().clone()
    }

    #[test]
    fn a_buffer_is_used_again_and_zeros_are_zeros() {
        let cpu = cpu();
        let mut first = Buffer::any(100 << 10, &cpu).unwrap();
        first.bytes_mut().fill(7);
        let address = first.bytes().as_ptr();
        drop(first);
        assert!(Buffer::zeros(100 << 10, &cpu).unwrap().bytes().iter().all(|&byte| byte == 0));
        let smaller = Buffer::any(90 << 10, &cpu).unwrap();
        assert_eq!(smaller.bytes().as_ptr(), address);
        assert_eq!(smaller.bytes().len(), 90 << 10);
        if cfg!(debug_assertions) {
            assert!(smaller.bytes().iter().all(|&byte| byte == 0xff), "poisoned again");
        }
    }

    #[test]
    fn only_so_much_is_kept() {
        let cpu = cpu();
        for _ in 0..3 {
            let all: Vec<_> = (0..20).map(|_| Buffer::any(8 << 20, &cpu).unwrap()).collect();
            drop(all);
        }
        let held: usize = cpu.spares.0.lock().unwrap().iter().map(Vec::capacity).sum();
        assert!(held > 0 && held <= Spares::MOST, "{held} lines");
        drop(Buffer::any(Spares::MOST * 64 + 64, &cpu).unwrap());
        drop(Buffer::any(64, &cpu).unwrap());
        assert_eq!(cpu.spares.0.lock().unwrap().iter().map(Vec::capacity).sum::<usize>(), held);
    }

    #[test]
    fn a_clone_is_a_copy() {
        let cpu = cpu();
        let mut first = Buffer::zeros(256, &cpu).unwrap();
        let copy = first.clone();
        first.bytes_mut()[0] = 1;
        assert_eq!(copy.bytes()[0], 0);
    }
}
