//! Another engine's stream and memory.
//!
//! Compiled in every check of the GPU kernels; no test runs it, since it takes another engine on a
//! CUDA device. The example `foreign_memory` does on one.

use super::{Block, Cuda, CudaOptions, Home, describe};
use crate::foreign::check_address;
use crate::gpu::Gpu;
use crate::gpu::Memory;
use crate::gpu::encoder::Range;
use crate::{Device, KernelError, Tensor};
use cudarc::driver::{DriverError, sys};
use lowbit_formats::DType;
use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

/// Blocks of CUDA's own allocator begin at a multiple of as many bytes, and kernels' loads of
/// vectors rely on it.
const ALIGNMENT: u64 = 256;

impl Device {
    /// CUDA device `ordinal` with another engine's `stream` (a `CUstream`, which is a
    /// `cudaStream_t`) for its queue: ops and the engine's own work on that stream run in the order
    /// in which they were called, and neither waits for the other on the host.
    ///
    /// The stream belongs to the device's primary context, which CUDA's runtime API and most
    /// engines use. The legacy default stream (null) can run ops, but CUDA does not let it be
    /// captured: [`Gpu::capture`], and with it a session's replayed steps, is an error there.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when there is no driver or no such device, or when the stream belongs
    /// to another context.
    ///
    /// # Safety
    /// `stream` must be a stream that lives until the device, all its clones, and all tensors and
    /// passes on it are gone. While [`Gpu::capture`] runs, the engine must not use the stream; and
    /// no op may be called while the engine itself captures it, because ops allocate and free
    /// memory.
    #[allow(unsafe_code)]
    pub unsafe fn cuda_on_stream(
        ordinal: usize,
        stream: *mut c_void,
        options: &CudaOptions,
    ) -> Result<Self, KernelError> {
        let stream: sys::CUstream = stream.cast();
        let gpu = Gpu::open_cuda(ordinal, options, |context| {
            context.bind_to_thread()?;
            let mut own = std::ptr::null_mut();
            // SAFETY: the caller promises a stream; its context is written to a variable of that
            // type.
            unsafe { sys::cuStreamGetCtx(stream, &raw mut own) }.result()?;
            if own != context.cu_ctx() {
                return Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT));
            }
            // SAFETY: it belongs to this context, and the caller keeps it for as long as the device
            // is used.
            Ok(unsafe { context.wrap_borrowed_stream(stream) })
        })?;
        Ok(Self::Gpu(gpu))
    }
}

impl Tensor {
    /// A tensor over memory of a CUDA device that another engine allocated, `start` being its first
    /// element's address (a `CUdeviceptr`). lowbit does not free it; `owner` is dropped when no
    /// tensor and no captured pass uses it any more (`()` where the engine sees to that otherwise),
    /// which can be before the device has done what was recorded.
    ///
    /// Ops that write in place (`kv_append`, convolution and delta states, [`Tensor::write`],
    /// [`Tensor::clear`]) write into this memory, unless a clone or view of the tensor shares it:
    /// then they take a copy, as with any tensor.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for another device than CUDA's; [`KernelError::Value`] for a
    /// null address, or one that is no multiple of `dtype`'s size; [`KernelError::TooLarge`] when
    /// the bytes of `shape` overflow; [`KernelError::Gpu`] when the address is not memory of this
    /// device.
    ///
    /// # Safety
    /// - **Size and lifetime**: the bytes of `shape` from `start` on belong to one allocation,
    ///   initialised, that stays until the device has done all that was recorded with this tensor,
    ///   its clones and views, and every pass that captured it.
    /// - **Order**: what the engine does with the memory until then is on the stream of
    ///   [`Device::cuda_on_stream`], or ordered with it by events.
    /// - **Aliasing**: nothing that lowbit writes overlaps it, but for tensors that share its
    ///   storage.
    #[allow(unsafe_code)]
    pub unsafe fn from_cuda_ptr(
        start: u64,
        shape: &[usize],
        dtype: DType,
        device: &Device,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, KernelError> {
        let bytes = crate::tensor::size(shape, dtype)?;
        check_address(start, dtype)?;
        let Device::Gpu(gpu) = device else {
            return Err(KernelError::Unsupported {
                op: "a tensor over a CUDA address",
                device: device.to_string(),
            });
        };
        // Kernels ask whether a tensor's offset is aligned, not its memory: the memory begins where
        // all of them are.
        let before = (start % ALIGNMENT) as usize;
        let memory = gpu.foreign(start - before as u64, before + bytes, Arc::new(owner))?;
        Ok(Self::on_gpu(memory, before / dtype.size(), (shape, dtype), device))
    }

    /// The address of the first element in a CUDA device's memory (a `CUdeviceptr`), for an engine
    /// that reads it on the stream of [`Device::cuda_on_stream`] while the tensor lives. It is not
    /// to be written: other tensors may share it.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when the tensor is not on a CUDA device.
    pub fn cuda_ptr(&self) -> Result<u64, KernelError> {
        match self.device() {
            Device::Gpu(gpu) => gpu.address(self.memory()?),
            Device::Cpu(_) => {
                Err(KernelError::Unsupported { op: "cuda_ptr", device: self.device().to_string() })
            }
        }
    }
}

impl Cuda {
    /// A block of another engine's memory, which keeps `owner`.
    #[allow(unsafe_code)]
    pub(super) fn foreign_block(
        &self,
        address: u64,
        size: usize,
        owner: Range,
    ) -> Result<Memory, KernelError> {
        self.check(self.context.bind_to_thread())?;
        let mut ordinal = -1i32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: the driver looks the address up without using it; this attribute is an int.
        let found = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) };
        match found.result() {
            Ok(()) if usize::try_from(ordinal) == Ok(self.ordinal) => {
                Ok(Memory::new(Block { address, size, home: Home::Foreign(owner) }))
            }
            Ok(()) => Err(self.refuse(format!("the address {address:#x} is memory of device {ordinal}"))),
            Err(error) => {
                Err(self
                    .refuse(format!("the address {address:#x} is no device's memory: {}", describe(error))))
            }
        }
    }
}
