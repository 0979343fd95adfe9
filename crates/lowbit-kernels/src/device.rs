use crate::{KernelError, buffer::Spares, gpu::Gpu, pool::Pool, simd::Isa};
use lowbit_formats::FloatType;
use std::sync::{Arc, Mutex};

/// Where tensors live and ops run.
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
    pub(crate) spares: Spares,
}

impl Device {
    /// The CPU with `threads` threads, or one a core.
    ///
    /// # Errors
    /// [`KernelError::Threads`] for 0, or more than 16 for each that the machine runs at once;
    /// [`KernelError::ThreadPool`] when the system refuses them.
    pub fn cpu(threads: Option<usize>) -> Result<Self, KernelError> {
        Self::cpu_with(threads, Isa::detect())
    }

    /// The CPU with a chosen instruction set, so that tests reach every implementation that this machine can run.
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
    /// [`KernelError::NoGpu`] when there is no driver or no such device; [`KernelError::Gpu`] when it cannot be used, or when
    /// there is no compiler for its kernels.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize, options: &crate::gpu::CudaOptions) -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::cuda(ordinal, options).map(Self::Gpu)
    }

    /// The best Vulkan device that is there.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none; [`KernelError::Gpu`] when it cannot run the kernels.
    #[cfg(feature = "vulkan")]
    pub fn vulkan(options: &crate::gpu::VulkanOptions) -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::vulkan(options).map(Self::Gpu)
    }

    /// The Metal device.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none; [`KernelError::Gpu`] when it does not take Metal Shading Language 3.2.
    #[cfg(feature = "metal")]
    pub fn metal() -> Result<Self, KernelError> {
        crate::gpu::start_threads()?;
        Gpu::metal().map(Self::Gpu)
    }

    /// What Metal is given, run on the processor by clang: for tests. Each call is a device of its own, for one thread.
    #[cfg(feature = "msl")]
    #[doc(hidden)]
    pub fn msl() -> Self {
        Self::Gpu(Gpu::msl())
    }

    /// The processor, for an op that runs there alone.
    pub(crate) fn as_cpu(&self, op: &'static str) -> Result<&Arc<Cpu>, KernelError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu),
            Self::Gpu(gpu) => Err(KernelError::Unsupported { op, device: gpu.to_string() }),
        }
    }

    /// Where the host can read and write: the device itself where that is a processor.
    ///
    /// # Errors
    /// As [`Self::cpu`].
    pub fn host(&self) -> Result<Self, KernelError> {
        match self {
            Self::Cpu(_) => Ok(self.clone()),
            Self::Gpu(_) => Self::cpu(None),
        }
    }

    /// The type of activations that serves best: f32 where there are no matrix units to feed; else f16, which is as fast as
    /// bf16 and rounds eight times finer. Models keep what could grow past its range, the residual stream, in f32.
    pub fn activations(&self) -> FloatType {
        match self {
            Self::Cpu(_) => FloatType::F32,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) if gpu.target().caps().has_matrix_units() => FloatType::F16,
            Self::Gpu(_) => FloatType::F32,
        }
    }

    /// The type of activations that serves best where a model learns: bf16 where tensor cores of NVIDIA's multiply it, since gradients
    /// are too small for f16; else f32.
    pub fn activations_for_gradients(&self) -> FloatType {
        match self {
            Self::Cpu(_) => FloatType::F32,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) if gpu.target().tensor_cores() => FloatType::BF16,
            Self::Gpu(_) => FloatType::F32,
        }
    }

    /// Bytes of memory that a GPU has, whoever uses it; `None` where its interface does not tell, and for a CPU.
    pub fn gpu_memory(&self) -> Option<usize> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(gpu) => gpu.total_memory(),
        }
    }

    /// Waits for all that was recorded; on the CPU nothing is left to wait for.
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

    /// Whether tensors on both can be operands of one op.
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

/// Fewer simple operations than this are no task of their own.
const GRAIN: usize = 1 << 15;

/// Simple operations, in vectors, that a thread does in a nanosecond, about.
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

    /// Cuts `y` into rows of `row` elements and calls `f(first_row, rows)` on runs of whole rows, on all threads.
    /// `cost` is the work of one row in simple operations; small jobs stay on the calling thread.
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

    /// How many of `rows` rows that cost as much each are a task.
    pub(crate) fn rows_per_task(&self, rows: usize, cost: usize) -> usize {
        match self.threads() {
            1 => rows.max(1),
            threads => (GRAIN / cost.max(1)).max(rows.div_ceil(threads * 4)).max(1),
        }
    }

    /// Nanoseconds that a thread takes for so many simple operations in vectors, about.
    pub(crate) fn work(operations: usize) -> usize {
        operations / OPERATIONS
    }

    /// Calls `f` on every one of `tasks`, on all threads; a single task stays on the calling thread. It is for work of milliseconds:
    /// where it may be less, [`Self::for_each_of`] says how much there is.
    ///
    /// # Panics
    /// With what a call panicked with, after the others have ended.
    pub fn for_each<T: Send>(&self, tasks: Vec<T>, f: impl Fn(T) + Sync + Send) {
        self.for_each_of(usize::MAX, tasks, f);
    }

    /// As [`Self::for_each`], where one thread takes about `work` nanoseconds for all tasks: too little stays on the calling thread.
    ///
    /// # Panics
    /// With what a call panicked with, after the others have ended.
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
