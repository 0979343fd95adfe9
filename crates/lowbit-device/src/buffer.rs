//! Memory for tensors on the CPU.

use crate::Cpu;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Cache lines: storage is aligned to them, so that it can be viewed as any element type and vector
/// loads do not straddle lines.
struct Lines {
    memory: Memory,
    count: usize,
}

enum Memory {
    /// Not of an alignment of 64, with which the allocator writes zeros itself, on one thread,
    /// instead of asking the system for memory that is zero when it is first touched.
    Allocated(Vec<u128>),
    /// In huge pages, the first of which begins at this byte.
    #[cfg(target_os = "linux")]
    Mapped(memmap2::MmapMut, usize),
}

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

impl Lines {
    const SIZE: usize = 64;
    /// Words per line.
    const WORDS: usize = Self::SIZE / size_of::<u128>();

    /// Zeros. None where the system does not give as many.
    fn zeros(count: usize) -> Option<Self> {
        let words = count.checked_mul(Self::WORDS)?.checked_add(Self::WORDS - 1)?;
        Some(Self { memory: Memory::Allocated(bytemuck::allocation::try_zeroed_vec(words).ok()?), count })
    }

    /// Zeros, in huge pages where the system has them, but for the rest that is no whole one: large
    /// tensors are read from end to end, and the processor's table of pages has few entries. None
    /// where the system does not give as many.
    #[cfg(target_os = "linux")]
    fn huge(count: usize) -> Option<Self> {
        let bytes = count.checked_mul(Self::SIZE)?;
        let map = memmap2::MmapMut::map_anon(bytes.checked_add(HUGE)?).ok()?;
        let start = map.as_ptr().addr().next_multiple_of(HUGE) - map.as_ptr().addr();
        // A system without huge pages refuses, and gives small ones.
        let _ = map.advise_range(memmap2::Advice::HugePage, start, bytes / HUGE * HUGE);
        Some(Self { memory: Memory::Mapped(map, start), count })
    }

    fn bytes(&self) -> &[u8] {
        let bytes = match &self.memory {
            Memory::Allocated(words) => &bytemuck::cast_slice(words)[start(words)..],
            #[cfg(target_os = "linux")]
            Memory::Mapped(map, start) => &map[*start..],
        };
        &bytes[..self.count * Self::SIZE]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.memory {
            Memory::Allocated(words) => {
                let start = start(words);
                &mut bytemuck::cast_slice_mut(words)[start..]
            }
            #[cfg(target_os = "linux")]
            Memory::Mapped(map, start) => &mut map[*start..],
        };
        &mut bytes[..self.count * Self::SIZE]
    }
}

/// The first byte of the first line.
fn start(words: &[u128]) -> usize {
    words.as_ptr().addr().next_multiple_of(Lines::SIZE) - words.as_ptr().addr()
}

/// Bytes that go back to their processor's [`Spares`] when the last tensor over them is gone, or to
/// the system, where [`Buffer::zeros`] made them.
pub struct Buffer {
    /// `None` in `drop` alone.
    lines: Option<Lines>,
    /// A multiple of a line.
    len: usize,
    home: Arc<Cpu>,
    /// True if it goes back to the spares. Zeros are never taken from there: with theirs among them
    /// the spares would grow with each cache that is dropped.
    is_spare: bool,
}

impl Buffer {
    /// At least `bytes` bytes with anything in them. In debug builds they are all ones (NaN in
    /// every float, an absurd id), so that an element left unwritten shows. None where the system
    /// does not give as many.
    pub fn any(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        let count = bytes.div_ceil(Lines::SIZE);
        let lines = match home.spares.take(count) {
            Some(lines) => lines,
            #[cfg(target_os = "linux")]
            None if bytes >= HUGE => Lines::huge(count)?,
            None => Lines::zeros(count)?,
        };
        let (len, home) = (count * Lines::SIZE, home.clone());
        let mut buffer = Self { lines: Some(lines), len, home, is_spare: true };
        if cfg!(debug_assertions) {
            buffer.bytes_mut().fill(0xff);
        }
        Some(buffer)
    }

    /// As [`Self::any`], for what is used once and read over and over meanwhile: whole huge pages,
    /// unless that is over four times as much. Small ones may fall on each other in the
    /// second-level cache.
    // Kernels that multiply tiles use them.
    pub fn any_cached(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        let whole = bytes.checked_next_multiple_of(HUGE)?;
        Self::any(if whole <= 4 * bytes { whole } else { bytes }, home)
    }

    /// At least `bytes` bytes of zeros, in small pages: of a cache that grows, most may never be
    /// touched. None where the system does not give as many.
    pub fn zeros(bytes: usize, home: &Arc<Cpu>) -> Option<Self> {
        // Fresh memory: the system has zeroed it, and takes it from no one before it is touched.
        let lines = Lines::zeros(bytes.div_ceil(Lines::SIZE))?;
        let len = lines.count * Lines::SIZE;
        Some(Self { lines: Some(lines), len, home: home.clone(), is_spare: false })
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.lines.as_ref().expect("lines until it is dropped").bytes()[..self.len]
    }

    /// All bytes, to write them.
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
        if let Some(lines) = self.lines.take().filter(|_| self.is_spare) {
            self.home.spares.put(lines);
        }
    }
}

/// Buffers for the next tensors: the first touch of fresh memory costs a page fault every few
/// kilobytes, which is more than what most ops do with it.
#[derive(Default)]
pub struct Spares(Mutex<BySize>);

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
    /// Lines kept in all: what a prompt of 512 tokens needs at once in a model of some 30 billion
    /// parameters.
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
    fn what_is_large_is_in_huge_pages() {
        let cpu = cpu();
        for bytes in [HUGE, 3 * HUGE + 64] {
            let mut huge = Buffer::any(bytes, &cpu).unwrap();
            huge.bytes_mut().fill(7);
            assert_eq!(huge.bytes().len(), bytes);
            assert!(cfg!(not(target_os = "linux")) || huge.bytes().as_ptr().addr().is_multiple_of(HUGE));
        }
        let len = |bytes: usize| Buffer::any_cached(bytes, &cpu).unwrap().bytes().len();
        assert_eq!([HUGE / 4 - 64, HUGE / 4, HUGE + 1].map(len), [HUGE / 4 - 64, HUGE, 2 * HUGE]);
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
    fn zeros_do_not_become_spares() {
        let cpu = cpu();
        drop(Buffer::any(64 << 10, &cpu).unwrap());
        let held = cpu.spares.spares().lines;
        assert!(held > 0);
        for _ in 0..3 {
            drop(Buffer::zeros(1 << 20, &cpu).unwrap());
        }
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
