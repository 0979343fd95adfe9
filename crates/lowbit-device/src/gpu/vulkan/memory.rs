//! The device's memory: a few large allocations, cut into blocks; and the host's, which the device
//! reads and writes.
//!
//! A driver need not give more than 4096 allocations, so tensors share them. Work on the device is
//! in the order of one queue, and a launch that touches what an earlier one touched waits for it,
//! whoever had the memory then: so a freed block can be used again at once.

use super::device::{Context, described, refused};
use crate::KernelError;
use crate::gpu::encoder::lock;
use ash::prelude::VkResult;
use ash::vk;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use vk::MemoryPropertyFlags as Kind;

/// Bytes that blocks are rounded up to, and begin at multiples of.
pub(super) const ALIGNMENT: u64 = 256;

/// Bytes of an allocation that blocks share: at the least, and at the most. Larger blocks have one
/// of their own.
const SHARED: [u64; 2] = [16 << 20, 256 << 20];

/// A buffer with all of an allocation.
#[derive(Debug)]
struct Buffer {
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    address: u64,
}

impl Buffer {
    /// A buffer of `size` bytes in memory of the first of `kinds` that the device has.
    fn new(context: &Context, size: u64, kinds: &[Kind]) -> VkResult<Self> {
        let info = vk::BufferCreateInfo::default().size(size).usage(
            vk::BufferUsageFlags::STORAGE_BUFFER
                | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
                | vk::BufferUsageFlags::TRANSFER_SRC
                | vk::BufferUsageFlags::TRANSFER_DST,
        );
        let device = &context.device;
        // SAFETY: the buffer is bound to memory of the size that it asks for before anything else
        // is done with it; on an error what was made is destroyed, and nothing has used it.
        unsafe {
            let buffer = device.create_buffer(&info, None)?;
            let requirements = device.get_buffer_memory_requirements(buffer);
            let memory = match context.allocate(&requirements, kinds) {
                Ok(memory) => memory,
                Err(error) => {
                    device.destroy_buffer(buffer, None);
                    return Err(error);
                }
            };
            if let Err(error) = device.bind_buffer_memory(buffer, memory, 0) {
                device.destroy_buffer(buffer, None);
                context.free(memory);
                return Err(error);
            }
            let info = vk::BufferDeviceAddressInfo::default().buffer(buffer);
            Ok(Self { buffer, memory, address: device.get_buffer_device_address(&info) })
        }
    }

    /// Gives it back.
    ///
    /// # Safety
    /// It is the device's, and nothing uses it any more.
    unsafe fn destroy(&self, context: &Context) {
        // SAFETY: the caller answers for it.
        unsafe {
            context.device.destroy_buffer(self.buffer, None);
            context.free(self.memory);
        }
    }
}

/// An allocation and the parts of it that no block has: the length of each by its first byte.
#[derive(Debug)]
struct Slab {
    buffer: Buffer,
    size: u64,
    free: BTreeMap<u64, u64>,
}

impl Slab {
    fn is_free(&self) -> bool {
        self.free.get(&0) == Some(&self.size)
    }

    /// The smallest free part that holds `size` bytes: its length and its first byte.
    fn fitting(&self, size: u64) -> Option<(u64, u64)> {
        let fitting = self.free.iter().filter(|(_, length)| **length >= size);
        fitting.map(|(start, length)| (*length, *start)).min()
    }

    /// Takes `size` bytes from the free part at `start`.
    fn take(&mut self, start: u64, size: u64) {
        let length = self.free.remove(&start).expect("a free part begins there");
        if length > size {
            self.free.insert(start + size, length - size);
        }
    }

    /// Gives `size` bytes at `start` back, joined with their free neighbours.
    fn give(&mut self, mut start: u64, mut size: u64) {
        if let Some(length) = self.free.remove(&(start + size)) {
            size += length;
        }
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            (start, size) = (before, length + size);
        }
        self.free.insert(start, size);
    }
}

/// The device's memory.
#[derive(Debug)]
pub(super) struct Pool {
    context: Arc<Context>,
    /// By address.
    slabs: Mutex<BTreeMap<u64, Slab>>,
}

/// A range of the device's memory, which goes back to its pool.
#[derive(Debug)]
pub(super) struct Block {
    /// The buffer that it lies in, and where.
    pub buffer: vk::Buffer,
    pub offset: u64,
    pub address: u64,
    pub size: u64,
    pool: Arc<Pool>,
}

impl Block {
    /// Its addresses, to tell whether it is another block's.
    pub fn range(&self) -> [u64; 2] {
        [self.address, self.address + self.size]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut slabs = lock(&self.pool.slabs);
        let (_, slab) = slabs.range_mut(..=self.address).next_back().expect("a block lies in a slab");
        slab.give(self.offset, self.size);
    }
}

impl Pool {
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, slabs: Mutex::default() })
    }

    /// A block of `bytes`, rounded up.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] for more than an allocation holds; `Ok(None)` where no memory is left.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Option<Block>, KernelError> {
        let most = self.context.sizes.allocation;
        let size = rounded(bytes as u64);
        if size > most {
            return Err(refused(format!(
                "{bytes} bytes were asked for at once, and an allocation holds at most {most}"
            )));
        }
        let mut slabs = lock(&self.slabs);
        let fitting = slabs.iter().filter_map(|(address, slab)| Some((slab.fitting(size)?, *address))).min();
        let (start, address) = match fitting {
            Some(((_, start), address)) => (start, address),
            None => {
                let total: u64 = slabs.values().map(|slab| slab.size).sum();
                let shared = (total / 4).next_power_of_two().clamp(SHARED[0], SHARED[1]).min(most);
                let wanted = if size > shared / 2 { size } else { shared };
                // A last block that fits need not fail because others would not.
                let made = self
                    .slab(wanted)
                    .or_else(|error| if wanted > size { self.slab(size) } else { Err(error) });
                let slab = match made {
                    Ok(slab) => slab,
                    Err(error) if is_shortage(error) => return Ok(None),
                    Err(error) => return Err(refused(format!("vkAllocateMemory: {}", described(error)))),
                };
                let address = slab.buffer.address;
                slabs.insert(address, slab);
                (0, address)
            }
        };
        let slab = slabs.get_mut(&address).expect("it was found, or is new");
        slab.take(start, size);
        let (buffer, address) = (slab.buffer.buffer, address + start);
        Ok(Some(Block { buffer, offset: start, address, size, pool: self.clone() }))
    }

    fn slab(&self, size: u64) -> VkResult<Slab> {
        let buffer = Buffer::new(&self.context, size, &[Kind::DEVICE_LOCAL])?;
        Ok(Slab { buffer, size, free: [(0, size)].into() })
    }

    /// Gives what no block has back to the driver. The device must have done all that was recorded.
    pub fn release(&self) {
        lock(&self.slabs).retain(|_, slab| {
            if slab.is_free() {
                // SAFETY: no block lies in it, and no work that was given to the device is left.
                unsafe { slab.buffer.destroy(&self.context) };
            }
            !slab.is_free()
        });
    }

    /// The error for `bytes` that there is no memory for.
    pub fn shortage(&self, bytes: usize) -> KernelError {
        let (_, total) = self.context.heap();
        let state = match self.context.free_memory() {
            Some(free) => format!("{} of {} MiB are free", free >> 20, total >> 20),
            None => format!("the device has {} MiB", total >> 20),
        };
        let asked = (bytes as u64).div_ceil(1 << 20);
        refused(format!("{asked} MiB of memory were asked for, and {state}: out of memory"))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Blocks hold the pool, and so do captured passes by their blocks: nothing uses it any
        // more. SAFETY: the device is the pool's own.
        let _ = unsafe { self.context.device.device_wait_idle() };
        self.release();
    }
}

fn is_shortage(error: vk::Result) -> bool {
    let all = [
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
        vk::Result::ERROR_OUT_OF_HOST_MEMORY,
        vk::Result::ERROR_TOO_MANY_OBJECTS,
    ];
    all.contains(&error)
}

/// Larger blocks are whole MiB, so that they leave parts that others fit.
fn rounded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(if bytes < 1 << 20 { ALIGNMENT } else { 1 << 20 })
}

/// The purpose of memory of the host's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    /// The host writes, and a copy reads.
    Staging,
    /// The host writes a little, and kernels read: the device's own memory, where the host reaches
    /// it.
    Numbers,
    /// A copy writes, and the host reads.
    Reading,
}

/// Memory that the host has mapped and the device reaches, coherent.
#[derive(Debug)]
pub(super) struct HostMemory {
    context: Arc<Context>,
    buffer: Buffer,
    mapped: NonNull<u8>,
    size: usize,
}

// SAFETY: the mapping is its own, and calls may come from any thread.
unsafe impl Send for HostMemory {}
// SAFETY: as above. Writes to it go through `&mut`, or through calls whose callers answer for it.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn new(context: &Arc<Context>, size: usize, of: Use) -> Result<Self, KernelError> {
        let host = Kind::HOST_VISIBLE | Kind::HOST_COHERENT;
        let first = match of {
            Use::Staging => host,
            Use::Numbers => host | Kind::DEVICE_LOCAL,
            Use::Reading => host | Kind::HOST_CACHED,
        };
        let failed = |error| refused(format!("{size} bytes of the host's memory: {}", described(error)));
        let buffer = Buffer::new(context, size as u64, &[first, host]).map_err(failed)?;
        // SAFETY: the memory is visible to the host, and mapped once, until it is freed.
        let mapped = unsafe {
            context.device.map_memory(buffer.memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty())
        };
        let mapped = mapped
            .and_then(|it: *mut c_void| NonNull::new(it.cast()).ok_or(vk::Result::ERROR_MEMORY_MAP_FAILED));
        match mapped {
            Ok(mapped) => Ok(Self { context: context.clone(), buffer, mapped, size }),
            Err(error) => {
                // SAFETY: nothing has used it.
                unsafe { buffer.destroy(context) };
                Err(failed(error))
            }
        }
    }

    pub fn buffer(&self) -> vk::Buffer {
        self.buffer.buffer
    }

    pub fn address(&self) -> u64 {
        self.buffer.address
    }

    pub fn len(&self) -> usize {
        self.size
    }

    /// Writes `bytes` at `start`.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= self.size, "they fit");
        // SAFETY: the range was checked, and nothing else is mapped there. That the device does not
        // read it now, its user knows; otherwise it reads other numbers.
        unsafe {
            let to = self.mapped.as_ptr().add(start);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Reads what lies at `start`.
    pub fn read(&self, start: usize, bytes: &mut [u8]) {
        assert!(start + bytes.len() <= self.size, "they are there");
        // SAFETY: the range was checked; `bytes` is memory of Rust's own.
        unsafe {
            let from = self.mapped.as_ptr().add(start);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: its owner has waited for the work that uses it. Freeing unmaps it.
        unsafe { self.buffer.destroy(&self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_parts_are_joined() {
        let buffer = Buffer { buffer: vk::Buffer::null(), memory: vk::DeviceMemory::null(), address: 0 };
        let mut slab = Slab { buffer, size: 4096, free: [(0, 4096)].into() };
        for start in (0..4096).step_by(1024) {
            slab.take(start, 1024);
        }
        assert_eq!(slab.fitting(1), None);
        slab.give(1024, 1024);
        slab.give(3072, 1024);
        assert_eq!(slab.fitting(1024), Some((1024, 1024)));
        assert_eq!(slab.fitting(1025), None);
        slab.give(2048, 1024);
        assert_eq!(slab.fitting(1025), Some((3072, 1024)));
        assert!(!slab.is_free());
        slab.take(1024, 256);
        slab.give(0, 1024);
        slab.give(1024, 256);
        assert!(slab.is_free());
    }

    #[test]
    fn sizes_are_rounded() {
        assert_eq!([0, 1, 256, 257].map(rounded), [256, 256, 256, 512]);
        assert_eq!([1 << 20, (1 << 20) + 1].map(rounded), [1 << 20, 2 << 20]);
    }
}
