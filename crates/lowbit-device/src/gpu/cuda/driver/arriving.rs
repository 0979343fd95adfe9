//! Words on their way from a device to the host.

use super::calls::describe;
use super::name;
use crate::KernelError;
use crate::gpu::encoder::{Pending, lock};

use cudarc::driver::{CudaContext, CudaEvent, DriverError, result, sys};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Pinned host memory that words arrive in, and the event behind their copy. It is used again
/// without waiting: the one stream orders copies and events.
#[derive(Debug)]
pub(super) struct Slot {
    pub words: NonNull<u32>,
    /// The number of words that it has room for.
    pub room: usize,
    pub event: CudaEvent,
}

// SAFETY: the memory is the slot's alone, and CUDA's calls may come from any thread.
#[allow(unsafe_code)]
unsafe impl Send for Slot {}

#[allow(unsafe_code)]
impl Slot {
    pub fn new(context: &Arc<CudaContext>, room: usize) -> Result<Self, DriverError> {
        let event = context.new_event(None)?;
        // SAFETY: the memory is used through its slot alone, which frees it.
        let words = unsafe { result::malloc_host(room * size_of::<u32>(), 0) }?;
        let words = NonNull::new(words.cast()).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        Ok(Self { words, room, event })
    }
}

#[allow(unsafe_code)]
impl Drop for Slot {
    fn drop(&mut self) {
        let _ = self.event.synchronize();
        // SAFETY: the slot made it, and the last copy into it is done.
        let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
    }
}

/// Words on their way to a slot, which then goes back to the others.
#[derive(Debug)]
pub(super) struct Arriving {
    pub ordinal: usize,
    pub slot: Option<Slot>,
    /// The number of words, for which the slot has room.
    pub count: usize,
    pub slots: Arc<Mutex<Vec<Slot>>>,
}

#[allow(unsafe_code)]
impl Pending for Arriving {
    fn wait(self: Box<Self>) -> Result<Vec<u32>, KernelError> {
        let slot = self.slot.as_ref().expect("it is there until it is dropped");
        let failed = |error| KernelError::Gpu { device: name(self.ordinal), problem: describe(error) };
        slot.event.synchronize().map_err(failed)?;
        let word = |at| {
            // SAFETY: the copy of as many words is done, and no other one begins before the slot is
            // given back.
            unsafe { slot.words.add(at).read_volatile() }
        };
        Ok((0..self.count).map(word).collect())
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        lock(&self.slots).extend(self.slot.take());
    }
}
