//! A GPU as ops see it: memory, and a queue that takes dispatches in order.

use super::caps::Caps;
use super::compile::Target;
use crate::{KernelError, Tensor};
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::FloatType;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A GPU and its queue. Clones share them.
///
/// Ops record their dispatches in order; the driver submits them together, at the latest when
/// something is read.
#[derive(Clone, Debug)]
pub struct Gpu(pub(super) Arc<dyn Driver>);

/// A range of device memory, freed when no tensor has it and no captured pass uses it. Clones share
/// it. Only the driver that made it can use it.
#[derive(Clone, Debug)]
pub struct Memory {
    range: Range,
    /// Counts the clones; a captured pass keeps the range alone.
    tensors: Arc<()>,
}

/// A driver's own handle of a range of memory.
pub type Range = Arc<dyn Any + Send + Sync>;

impl Memory {
    /// A driver's range.
    pub fn new(range: impl Any + Send + Sync) -> Self {
        Self::of(Arc::new(range))
    }

    /// A range that no tensor has.
    pub fn of(range: Range) -> Self {
        Self { range, tensors: Arc::new(()) }
    }

    /// The range as the driver that made it knows it.
    pub fn range<T: Any>(&self) -> &T {
        self.range.downcast_ref().expect("ops check that their operands are on one device")
    }

    /// The handle that keeps the range from being freed.
    pub fn keep(&self) -> Range {
        self.range.clone()
    }

    /// A number that tells the range from all others that are alive.
    fn address(&self) -> usize {
        address(&self.range)
    }

    /// True if another tensor has it too.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.tensors) > 1
    }
}

fn address(range: &Range) -> usize {
    Arc::as_ptr(range).cast::<()>().addr()
}

/// A thread that panicked left nothing half done that others rely on.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cubes that every device takes along any dimension: Vulkan promises no more.
pub const CUBES: usize = 65535;

/// One launch of a kernel, its arguments bound: see [`launch`](super::launch).
#[cfg_attr(not(all(feature = "cuda", feature = "vulkan")), allow(dead_code))] // Vulkan asks what is written, CUDA what is read early.
pub struct Dispatch<'a> {
    /// The kernel with its compile-time values.
    pub kernel: Box<dyn CubeKernel>,
    /// Cubes (CUDA's blocks, Vulkan's workgroups) along x, y and z.
    pub cubes: [u32; 3],
    /// The buffers in the kernel's order, each with its first byte.
    pub buffers: Vec<(&'a Memory, usize)>,
    /// The buffers that the kernel writes: a bit for each, the first one's the lowest.
    pub written: u64,
    /// The numbers in the kernel's order.
    pub scalars: Vec<u32>,
    /// The number of the first buffers that the kernel may read before the previous launch has
    /// ended.
    pub early: usize,
}

/// A kernel that is to be compiled and not launched, and how many buffers and numbers it takes.
#[cfg_attr(not(feature = "metal"), allow(dead_code))] // cubecl-wgpu alone must launch to compile.
pub struct Unlaunched {
    pub kernel: Box<dyn CubeKernel>,
    pub buffers: usize,
    pub scalars: usize,
}

/// The layout of a product's operands, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// `y[m, n] = sum over k of x[m, k] * weight[n, k]`
    Rows,
    /// `y[m, n] = sum over k of x[m, k] * weight[k, n]`
    Columns,
    /// `y[m, n] = sum over k of x[k, m] * weight[k, n]`, with so many elements from a row of x to
    /// the next.
    Outer(usize),
}

/// Dense products for the vendor BLAS, which sums in f32.
pub struct Dense<'a> {
    /// The operands that are transposed.
    pub form: Form,
    /// The number of products, the operands of each behind those of the one before.
    pub count: usize,
    /// Memory, and the byte in it at which x starts; of the others likewise.
    pub x: (&'a Memory, usize),
    /// The right operand.
    pub weight: (&'a Memory, usize),
    /// The result.
    pub y: (&'a Memory, usize),
    /// `m`, `n`, `k`.
    pub sizes: [usize; 3],
    /// Of x and the weight, and of y.
    pub dtypes: [FloatType; 2],
}

/// A GPU's interface to its maker's software.
pub trait Driver: std::fmt::Debug + Send + Sync {
    /// As `--device` spells it.
    fn name(&self) -> String;
    /// As its maker calls it; empty if it does not say.
    fn product(&self) -> String;
    /// True if it is a program for the processor, such as Mesa's lavapipe.
    fn is_software(&self) -> bool {
        false
    }
    /// True if it only lists kernels: see [`Gpu::dry_run`].
    fn is_dry_run(&self) -> bool {
        false
    }
    /// The device that kernels are compiled for.
    fn target(&self) -> &Target;
    /// Uninitialised memory.
    fn allocate(&self, bytes: usize) -> Result<Memory, KernelError>;
    /// Memory with a copy of `bytes`.
    fn upload(&self, bytes: &[u8]) -> Result<Memory, KernelError> {
        let memory = self.allocate(bytes.len())?;
        self.write(&memory, 0, bytes)?;
        Ok(memory)
    }
    /// Writes `bytes` over what `memory` holds from byte `start` on, once all that was recorded is
    /// done.
    fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError>;
    /// Copies from `memory`, from byte `start` on, once all that was recorded is done.
    fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError>;
    /// Asks for the `count` words from byte `start` on as they are when all recorded work is done.
    /// Work recorded later does not wait until the host has them, if the driver has such reads;
    /// other drivers wait here.
    fn read_later(
        &self,
        memory: &Memory,
        start: usize,
        count: usize,
    ) -> Result<Box<dyn Pending>, KernelError> {
        let mut words = vec![0u32; count];
        self.download(memory, start, bytemuck::cast_slice_mut(&mut words))?;
        Ok(Box::new(words))
    }
    /// Records a launch.
    ///
    /// # Safety
    /// Buffers and scalars are the kernel's, in its order, and with them it stays within its
    /// buffers.
    #[allow(unsafe_code)]
    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError>;
    /// True if launching the kernel compiles nothing, because this process or its cache on the disk
    /// has the code.
    fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool;
    /// Compiles a kernel, so that launching it need not. Called from several threads.
    fn compile(&self, kernel: Unlaunched) -> Result<(), KernelError>;
    /// The best number of kernels to compile at a time.
    fn compilers(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }
    /// The number of kernels compiled so far.
    fn compilations(&self) -> usize;
    /// Waits for all that was recorded.
    fn synchronize(&self) -> Result<(), KernelError>;
    /// True if a pass is captured, by this thread where others may launch meanwhile.
    fn is_capturing(&self) -> bool {
        false
    }
    /// Refuses `what` a pass cannot hold while one is captured.
    fn forbid_in_capture(&self, what: &str) -> Result<(), KernelError> {
        let problem = || format!("{what} while a pass is captured");
        if self.is_capturing() {
            Err(KernelError::Gpu { device: self.name(), problem: problem() })
        } else {
            Ok(())
        }
    }
    /// Captures what `work` records, for replays.
    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError>;
    /// The device's time for what `work` records.
    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError>;
    /// The bandwidth of the driver's own copies within the device's memory, in bytes read and
    /// written a second; `None` where it has none that are timed.
    fn copy_bandwidth(&self) -> Result<Option<f64>, KernelError> {
        Ok(None)
    }
    /// The device's total memory in bytes, if its interface tells.
    fn total_memory(&self) -> Option<usize> {
        None
    }
    /// The vendor BLAS, if one was found when the device was opened.
    fn library(&self) -> Option<&'static str> {
        None
    }
    /// Another engine's memory of `size` bytes at `address`, and what is to be dropped with it.
    #[cfg(feature = "cuda")]
    fn foreign(&self, _address: u64, _size: usize, _owner: Range) -> Result<Memory, KernelError> {
        Err(KernelError::Unsupported { op: "a tensor over a CUDA address", device: self.name() })
    }
    /// The address of byte `start` of the memory.
    #[cfg(feature = "cuda")]
    fn address(&self, (_memory, _start): (&Memory, usize)) -> Result<u64, KernelError> {
        Err(KernelError::Unsupported { op: "cuda_ptr", device: self.name() })
    }
    /// Records a dense product by the vendor BLAS.
    fn multiply(&self, _: Dense<'_>) -> Result<(), KernelError> {
        Err(KernelError::Unsupported { op: "matmul by a library", device: self.name() })
    }
}

/// Words on their way to the host.
pub trait Pending: std::fmt::Debug {
    /// Waits for them.
    fn wait(self: Box<Self>) -> Result<Vec<u32>, KernelError>;
}

/// Words that are there.
impl Pending for Vec<u32> {
    fn wait(self: Box<Self>) -> Result<Self, KernelError> {
        Ok(*self)
    }
}

/// A captured sequence of launches.
#[allow(unnameable_types)] // Drivers alone implement it.
pub trait Replay: std::fmt::Debug + Send + Sync {
    /// Records the sequence again.
    fn replay(&self) -> Result<(), KernelError>;
}

/// The launches of a pass, captured once: a replay costs the host one call. A replay reads and
/// writes the same memory as the captured launches; the pass keeps it alive.
#[derive(Clone, Debug)]
pub struct Pass {
    launches: Arc<dyn Replay>,
    /// The ranges that the launches read and write, each once, in the order of addresses.
    memory: Arc<[Range]>,
}

impl Pass {
    /// Of launches that read and write `memory`.
    pub fn new(launches: impl Replay + 'static, mut memory: Vec<Range>) -> Self {
        memory.sort_unstable_by_key(address);
        memory.dedup_by_key(|range| address(range));
        Self { launches: Arc::new(launches), memory: memory.into() }
    }

    /// Records the pass again.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when the driver refuses.
    pub fn replay(&self) -> Result<(), KernelError> {
        self.launches.replay()
    }

    /// True if the pass reads or writes this tensor's memory, and no other tensor sees what it
    /// writes there.
    pub fn uses(&self, tensor: &Tensor) -> bool {
        let Ok((memory, _)) = tensor.memory() else { return false };
        !memory.is_shared() && self.memory.binary_search_by_key(&memory.address(), address).is_ok()
    }
}

impl Gpu {
    /// Runs `work` twice, first to compile its kernels and fill the memory pool, then to capture
    /// what it records. `work` must only record: reading a result inside it is refused.
    ///
    /// # Errors
    /// The error of `work`; [`KernelError::Gpu`] when it does what cannot be captured.
    pub fn capture(&self, mut work: impl FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        self.0.capture(&mut work)
    }

    /// Waits for all that was recorded.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when some of it failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.0.synchronize()
    }

    /// The device's time for what `work` records, without the host's.
    ///
    /// # Errors
    /// As [`Self::synchronize`]; what `work` gives.
    pub fn time(&self, mut work: impl FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        self.0.time(&mut work)
    }

    /// The bandwidth of a copy within the device's memory, in bytes read and written a second.
    ///
    /// # Errors
    /// As [`Self::synchronize`].
    pub fn copy_bandwidth(&self) -> Result<f64, KernelError> {
        match self.0.copy_bandwidth()? {
            Some(rate) => Ok(rate),
            None => self.kernel_copy_bandwidth(),
        }
    }

    /// The device's total memory in bytes; `None` if its interface does not tell.
    pub fn total_memory(&self) -> Option<usize> {
        self.0.total_memory()
    }

    /// The vendor BLAS, which multiplies large products, if one was found when the device was
    /// opened.
    pub fn library(&self) -> Option<&'static str> {
        self.0.library()
    }

    /// A dense product by [`Self::library`].
    #[doc(hidden)] // It trusts its caller.
    pub fn multiply(&self, product: Dense<'_>) -> Result<(), KernelError> {
        self.0.multiply(product)
    }

    /// Another engine's memory: see [`Tensor::from_cuda_ptr`].
    #[cfg(feature = "cuda")]
    #[doc(hidden)] // It trusts its caller.
    pub fn foreign(&self, address: u64, size: usize, owner: Range) -> Result<Memory, KernelError> {
        self.0.foreign(address, size, owner)
    }

    /// The address of byte `place.1` of the memory on a CUDA device.
    #[cfg(feature = "cuda")]
    #[doc(hidden)] // It trusts its caller.
    pub fn address(&self, place: (&Memory, usize)) -> Result<u64, KernelError> {
        self.0.address(place)
    }

    /// The device's name as its maker spells it; empty if it has none.
    pub fn product(&self) -> String {
        self.0.product()
    }

    /// True if it is no GPU, but a program that does its work on the processor, such as Mesa's
    /// lavapipe.
    pub fn is_software(&self) -> bool {
        self.0.is_software()
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn target(&self) -> &Target {
        self.0.target()
    }

    /// The properties that decide which kernels the device runs.
    #[doc(hidden)] // It trusts its caller.
    pub fn caps(&self) -> Caps {
        Caps { vendor_blas: self.library().is_some(), ..*self.target().caps() }
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, KernelError> {
        self.0.allocate(bytes.next_multiple_of(4))
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn upload(&self, bytes: &[u8]) -> Result<Memory, KernelError> {
        self.0.upload(bytes)
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        self.0.write(memory, start, bytes)
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn read_later(
        &self,
        memory: &Memory,
        start: usize,
        count: usize,
    ) -> Result<Box<dyn Pending>, KernelError> {
        self.0.read_later(memory, start, count)
    }

    #[doc(hidden)] // It trusts its caller.
    pub fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.0.download(memory, start, bytes)
    }

    /// Records a launch whose arguments are bound.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    #[allow(unsafe_code)]
    pub(super) unsafe fn dispatch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller answers for it.
        unsafe { self.0.launch(dispatch) }
    }

    /// True if both are the same device with the same queue.
    #[doc(hidden)] // It trusts its caller.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name())
    }
}
