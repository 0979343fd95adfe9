use crate::{KernelError, buffer::Spares, gpu::Gpu, pool::Pool, simd::Isa};
use lowbit_formats::FloatType;
use std::sync::{Arc, Mutex};

/// A device, in whose memory tensors are and on which ops run.
#[derive(Clone, Debug)]
pub enum Device {
    /// This machine's processor.
    Cpu(Arc<Cpu>),
    /// A GPU. There is none in a build without the features `cuda`, `vulkan` and `metal`.
    Gpu(Gpu),
}

/// The processor: its threads and the instruction set found on it.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    /// Memory of dropped tensors.
    #[doc(hidden)]
    pub spares: Spares,
}

impl Device {
    /// The CPU with `threads` threads, or one a core.
    ///
    /// # Errors
    /// [`KernelError::Threads`] for 0 threads, or more than 16 per hardware thread;
    /// [`KernelError::ThreadPool`] when the system refuses them.
    pub fn cpu(threads: Option<usize>) -> Result<Self, KernelError> {
        Self::cpu_with(threads, Isa::detect())
    }

    /// The CPU with a chosen instruction set, so that tests reach every implementation that this
    /// machine can run.
    ///
    /// # Errors
    /// As [`Self::cpu`].
    pub fn cpu_with(threads: Option<usize>, isa: Isa) -> Result<Self, KernelError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // More only wait for each other: a thousand on two cores take seconds for a prompt.
        let limit = (16 * cores).min(1024);
        let threads = threads.unwrap_or(cores.min(limit));
        if !(1..=limit).contains(&threads) {
            return Err(KernelError::Threads { threads, cores, limit });
        }
        let pool = Pool::new(threads).map_err(KernelError::ThreadPool)?;
        Ok(Self::Cpu(Arc::new(Cpu { pool, isa, spares: Spares::default() })))
    }

    /// CUDA device `ordinal`.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is no driver or no such device; [`KernelError::Gpu`] when
    /// it cannot be used, or when there is no compiler for its kernels.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize, options: &crate::gpu::CudaOptions) -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::cuda(ordinal, options).map(Self::Gpu)
    }

    /// The Vulkan device that `options` name, or the machine's best.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none, or none of this number; [`KernelError::Gpu`] when
    /// it cannot run the kernels.
    #[cfg(feature = "vulkan")]
    pub fn vulkan(options: &crate::gpu::VulkanOptions) -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::vulkan(options).map(Self::Gpu)
    }

    /// The Metal device.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none; [`KernelError::Gpu`] when it does not take Metal
    /// Shading Language 3.2.
    #[cfg(feature = "metal")]
    pub fn metal() -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::metal().map(Self::Gpu)
    }

    /// A device for tests, which compiles Metal's kernels with clang and runs them on the
    /// processor. Each call makes a device of its own, for one thread.
    #[cfg(feature = "msl")]
    #[doc(hidden)]
    pub fn msl() -> Self {
        Self::Gpu(Gpu::msl())
    }

    /// The processor, for an op that runs there alone.
    pub fn as_cpu(&self, op: &'static str) -> Result<&Arc<Cpu>, KernelError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu),
            Self::Gpu(gpu) => Err(KernelError::Unsupported { op, device: gpu.to_string() }),
        }
    }

    /// A device that the host can read and write: this one if it is a CPU, else the CPU.
    ///
    /// # Errors
    /// As [`Self::cpu`].
    pub fn host(&self) -> Result<Self, KernelError> {
        match self {
            Self::Cpu(_) => Ok(self.clone()),
            Self::Gpu(_) => Self::cpu(None),
        }
    }

    /// The default type of activations: f32 without matrix units; else f16, which is as fast as
    /// bf16 and rounds eight times finer. Models keep the residual stream, which could grow past
    /// f16's range, in f32.
    pub fn activations(&self) -> FloatType {
        match self {
            Self::Cpu(_) => FloatType::F32,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) if gpu.target().caps().has_matrix_units() => FloatType::F16,
            Self::Gpu(_) => FloatType::F32,
        }
    }

    /// The default type of activations of a model that learns: bf16 on NVIDIA's tensor cores, since
    /// gradients are too small for f16; else f32.
    pub fn activations_for_gradients(&self) -> FloatType {
        match self {
            Self::Cpu(_) => FloatType::F32,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) if gpu.target().tensor_cores() => FloatType::BF16,
            Self::Gpu(_) => FloatType::F32,
        }
    }

    /// A GPU's total memory in bytes; `None` if its interface does not tell, and for a CPU.
    pub fn gpu_memory(&self) -> Option<usize> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(gpu) => gpu.total_memory(),
        }
    }

    /// Waits until the device has finished all recorded work; on the CPU there is none.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when some of it failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        match self {
            Self::Cpu(_) => Ok(()),
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) => gpu.synchronize(),
            #[cfg(not(feature = "gpu"))]
            Self::Gpu(gpu) => match *gpu {},
        }
    }

    /// True if tensors on both can be operands of one op.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu(_), Self::Cpu(_)) => true,
            #[cfg(feature = "gpu")]
            (Self::Gpu(a), Self::Gpu(b)) => a.is(b),
            _ => false,
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu(_) => f.write_str("cpu"),
            Self::Gpu(gpu) => gpu.fmt(f),
        }
    }
}

/// The least number of simple operations in a task.
const GRAIN: usize = 1 << 15;

/// Simple operations, in vectors, per thread and nanosecond, approximately.
const OPERATIONS: usize = 16;

impl Cpu {
    /// The instruction set that kernels run with.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that ops run on, the caller's own among them.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Cuts `y` into rows of `row` elements and calls `f(first_row, rows)` on runs of whole rows,
    /// on all threads. `cost` is the work of one row in simple operations; small jobs stay on the
    /// calling thread.
    pub fn for_each_rows<T: Send>(
        &self,
        y: &mut [T],
        row: usize,
        cost: usize,
        f: impl Fn(usize, &mut [T]) + Sync + Send,
    ) {
        if y.is_empty() {
            return;
        }
        let rows = y.len() / row;
        let per_task = self.rows_per_task(rows, cost);
        if per_task >= rows {
            return f(0, y);
        }
        let work = Self::work(rows.saturating_mul(cost));
        let rows = y.chunks_mut(per_task * row).enumerate().collect();
        self.for_each_of(work, rows, |(task, rows)| f(task * per_task, rows));
    }

    /// Rows per task, of `rows` rows of which each costs `cost` simple operations.
    pub fn rows_per_task(&self, rows: usize, cost: usize) -> usize {
        match self.threads() {
            1 => rows.max(1),
            threads => (GRAIN / cost.max(1)).max(rows.div_ceil(threads * 4)).max(1),
        }
    }

    /// Nanoseconds of one thread for this many simple operations in vectors, approximately.
    pub fn work(operations: usize) -> usize {
        operations / OPERATIONS
    }

    /// Calls `f` on each of `tasks`, on all threads; a single task stays on the calling thread.
    /// This is for work of milliseconds; for less, use [`Self::for_each_of`], which is told the
    /// amount of work.
    ///
    /// # Panics
    /// With a call's own panic, after the others have ended.
    pub fn for_each<T: Send>(&self, tasks: Vec<T>, f: impl Fn(T) + Sync + Send) {
        self.for_each_of(usize::MAX, tasks, f);
    }

    /// As [`Self::for_each`], for tasks that take one thread about `work` nanoseconds together: if
    /// that is little, they stay on the calling thread.
    ///
    /// # Panics
    /// With a call's own panic, after the others have ended.
    pub fn for_each_of<T: Send>(&self, work: usize, tasks: Vec<T>, f: impl Fn(T) + Sync + Send) {
        let work = work as u64;
        if tasks.len() <= 1 || !self.pool.shares(work) {
            return tasks.into_iter().for_each(f);
        }
        let tasks: Vec<_> = tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
        self.pool.run(tasks.len(), work, &|i| {
            let task = tasks[i].lock().expect("a task's lock is held only to take it").take();
            f(task.expect("each task is taken once"));
        });
    }
}
