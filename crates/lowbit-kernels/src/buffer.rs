//! Memory for tensors on the CPU.

use crate::Cpu;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Cache lines: storage is aligned to them, so that it can be viewed as any element type and vector loads do not straddle lines.
struct Lines {
    /// Not of an alignment of 64, with which the allocator writes zeros itself, on one thread, instead of asking the system for
    /// memory that is zero when it is first touched.
    words: Vec<u128>,
    count: usize,
}

impl Lines {
    const SIZE: usize = 64;
    /// Words per line.
    const WORDS: usize = Self::SIZE / size_of::<u128>();

    /// Zeros. None where the system does not give as many.
    fn zeros(count: usize) -> Option<Self> {
        let words = count.checked_mul(Self::WORDS)?.checked_add(Self::WORDS - 1)?;
        Some(Self { words: bytemuck::allocation::try_zeroed_vec(words).ok()?, count })
    }

    /// The first word of the first line.
    fn start(&self) -> usize {
        let past = self.words.as_ptr().addr() % Self::SIZE;
        (Self::SIZE - past) % Self::SIZE / size_of::<u128>()
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words[self.start()..][..self.count * Self::WORDS])
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        bytemuck::cast_slice_mut(&mut self.words[start..][..self.count * Self::WORDS])
    }
}

/// Bytes that go back to their processor's [`Spares`] when the last tensor over them is gone.
pub(crate) struct Buffer {
    /// `None` in `drop` alone.
    lines: Option<Lines>,
    /// A multiple of a line.
    len: usize,
    home: Arc<Cpu>,
}

impl Buffer {
    /// At least `bytes` bytes with anything in them. In debug builds they are all ones (NaN in every float, an absurd
    /// id), so that an element left unwritten shows. None where the system does not give as many.
    pub fn any(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        let count = bytes.div_ceil(Lines::SIZE);
        let mut buffer = match home.spares.take(count) {
            Some(lines) => Self { lines: Some(lines), len: count * Lines::SIZE, home: home.clone() },
            None => Self::zeros(bytes, home)?,
        };
        if cfg!(debug_assertions) {
            buffer.bytes_mut().fill(0xff);
        }
        Some(buffer)
    }

    /// At least `bytes` bytes of zeros. None where the system does not give as many.
    pub fn zeros(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        // Fresh memory: the system has zeroed it, and takes it from no one before it is touched.
        let lines = Lines::zeros(bytes.div_ceil(Lines::SIZE))?;
        Some(Self { len: lines.count * Lines::SIZE, lines: Some(lines), home: home.clone() })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.lines.as_ref().expect("lines until it is dropped").bytes()[..self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.lines.as_mut().expect("lines until it is dropped").bytes_mut()[..self.len]
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Self::any(self.bytes().len(), &self.home).expect("memory for a copy");
        copy.bytes_mut().copy_from_slice(self.bytes());
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
        self.lines.take().into_iter().for_each(|lines| self.home.spares.put(lines));
    }
}

/// Buffers for the next tensors: the first touch of fresh memory costs a page fault every few kilobytes, which is
/// more than what most ops do with it.
#[derive(Default)]
pub(crate) struct Spares(Mutex<BySize>);

/// Spare buffers by their lines: a decoded token takes and gives back some hundreds.
#[derive(Default)]
struct BySize {
    /// Of each size, the oldest first, with the number of those that were given back before it.
    sizes: BTreeMap<usize, VecDeque<(u64, Lines)>>,
    given: u64,
    lines: usize,
}

impl std::fmt::Debug for Spares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spares").field("lines", &self.spares().lines).finish_non_exhaustive()
    }
}

impl Spares {
    /// Smaller buffers come from the allocator's own lists without a page fault.
    const SMALLEST: usize = (4 << 10) / Lines::SIZE;
    /// Lines kept in all: what a prompt of 512 tokens needs at once in a model of some 30 billion parameters.
    const MOST: usize = (256 << 20) / Lines::SIZE;

    fn spares(&self) -> MutexGuard<'_, BySize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest spare buffer of at least `count` lines, unless it is twice as large.
    fn take(&self, count: usize) -> Option<Lines> {
        if count < Self::SMALLEST {
            return None;
        }
        let mut spares = self.spares();
        let mut fitting = spares.sizes.range_mut(count..2 * count);
        let (_, lines) = fitting.find_map(|(_, all)| all.pop_back())?;
        spares.lines -= lines.count;
        Some(lines)
    }

    fn put(&self, lines: Lines) {
        if !(Self::SMALLEST..=Self::MOST).contains(&lines.count) {
            return;
        }
        let mut spares = self.spares();
        while spares.lines + lines.count > Self::MOST {
            spares.drop_oldest();
        }
        let given = spares.given;
        spares.given += 1;
        spares.lines += lines.count;
        spares.sizes.entry(lines.count).or_default().push_back((given, lines));
    }
}

impl BySize {
    /// Sizes that a model has stopped using go first.
    fn drop_oldest(&mut self) {
        self.sizes.retain(|_, all| !all.is_empty());
        let oldest = self.sizes.values_mut().min_by_key(|all| all[0].0);
        let (_, lines) = oldest.and_then(VecDeque::pop_front).expect("lines are held");
        self.lines -= lines.count;
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
        let zeros = Buffer::zeros(100 << 10, &cpu).unwrap();
        assert!(zeros.bytes().iter().all(|&byte| byte == 0));
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
            let all: Vec<_> = (0..40).map(|_| Buffer::any(8 << 20, &cpu).unwrap()).collect();
            drop(all);
        }
        let held = cpu.spares.spares().lines;
        assert!(held > 0 && held <= Spares::MOST, "{held} lines");
        let counted =
            |spares: &BySize| spares.sizes.values().flatten().map(|(_, lines)| lines.count).sum::<usize>();
        assert_eq!(counted(&cpu.spares.spares()), held);
        drop(Buffer::any(Spares::MOST * 64 + 64, &cpu).unwrap());
        drop(Buffer::any(64, &cpu).unwrap());
        let now = cpu.spares.spares().lines;
        assert_eq!(now, held);
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
