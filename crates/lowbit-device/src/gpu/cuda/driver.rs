//! CUDA: cudarc's driver calls, loaded when first used; code from NVRTC; memory from a pool;
//! graphs.

mod arriving;
mod calls;
mod foreign;

use arriving::{Arriving, Slot};
pub use calls::cuda_driver_version;
use calls::{describe, elapsed};

use super::CudaOptions;
use super::cublas::{self, Cublas};
use super::nvrtc::{Architecture, Compiler};
use crate::KernelError;
use crate::gpu::compile::{self, Code, CudaDevice, DiskCache, Target};
use crate::gpu::encoder::{Dense, Dispatch, Driver, Pass, Pending, Range, Replay, Unlaunched, lock};
use crate::gpu::recording::Recording;
use crate::gpu::{Gpu, Memory, no_such_device};

use cubecl_core::InfoBuilder;
use cubecl_core::ir::AddressType;
use cubecl_core::prelude::{CubeKernel, KernelId};
use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaStream, DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use sys::CUdevice_attribute as Attribute;

/// A CUDA device with one stream, which everything goes through in order.
#[derive(Debug)]
struct Cuda {
    ordinal: usize,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    target: Target,
    compiler: Compiler,
    disk: Option<DiskCache>,
    kernels: Mutex<HashMap<KernelId, Loaded>>,
    /// Kernels that the compiler compiled.
    compilations: AtomicUsize,
    pool: Arc<Pool>,
    /// Slots of host memory in which words arrive, for the next reads.
    slots: Arc<Mutex<Vec<Slot>>>,
    /// The memory that the launches of a running capture use, which the pass must keep alive.
    captured: Mutex<Option<Recording>>,
    /// The memory that the last launch reads and writes.
    last: Mutex<Vec<sys::CUdeviceptr>>,
    /// True if cuBLASLt is installed: to find out is to open it, which takes 80 ms.
    library: OnceLock<bool>,
    /// The opened library with its workspace, from the first product on.
    cublas: OnceLock<(Cublas, Memory)>,
}

#[derive(Clone, Debug)]
struct Loaded {
    function: CudaFunction,
    shared: u32,
    units: [u32; 3],
}

/// Freed blocks by size. Work on them is ordered by the one stream, so a block can be used again at
/// once.
#[derive(Debug)]
struct Pool {
    context: Arc<CudaContext>,
    free: Mutex<HashMap<usize, Vec<sys::CUdeviceptr>>>,
}

/// A range of device memory.
#[derive(Debug)]
struct Block {
    address: sys::CUdeviceptr,
    size: usize,
    home: Home,
}

/// The origin of a block.
#[derive(Debug)]
enum Home {
    /// The pool that it goes back to.
    Pool(Arc<Pool>),
    /// Another engine, and what it wants dropped with the block.
    Foreign(#[expect(dead_code, reason = "it is kept to be dropped")] Range),
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Home::Pool(pool) = &self.home {
            lock(&pool.free).entry(self.size).or_default().push(self.address);
        }
    }
}

impl Gpu {
    /// CUDA device `ordinal`.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is no driver or no such device; [`KernelError::Gpu`] when
    /// it cannot be used, or when there is no compiler for its kernels.
    pub fn cuda(ordinal: usize, options: &CudaOptions) -> Result<Self, KernelError> {
        Self::open_cuda(ordinal, options, CudaContext::new_stream)
    }

    /// CUDA device `ordinal` with the stream that `stream` makes or finds.
    #[allow(unsafe_code)]
    fn open_cuda(
        ordinal: usize,
        options: &CudaOptions,
        stream: impl FnOnce(&Arc<CudaContext>) -> Result<Arc<CudaStream>, DriverError>,
    ) -> Result<Self, KernelError> {
        let device = name(ordinal);
        let refuse = |problem: String| KernelError::Gpu { device: device.clone(), problem };
        let absent = |problem: String| KernelError::NoGpu { device: device.clone(), problem };
        let failed = |error: DriverError| refuse(describe(error));
        let driver = cuda_driver_version()?.ok_or_else(|| {
            let problem = "NVIDIA's driver is not installed (there is no libcuda): install it, or choose another device";
            absent(problem.into())
        })?;
        match result::init() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
                return Err(absent("NVIDIA's driver has no device".into()));
            }
            done => done.map_err(failed)?,
        }
        let count = CudaContext::device_count().map_err(failed)?;
        if ordinal >= count.max(0) as usize {
            let name = |index| result::device::get_name(result::device::get(index)?);
            let names = (0..count).map(name).collect::<Result<Vec<_>, _>>().map_err(failed)?;
            return Err(no_such_device("cuda", ordinal, &names));
        }
        let context = CudaContext::new(ordinal).map_err(failed)?;
        // SAFETY: one stream orders all work, so that cudarc need not order it by events.
        unsafe { context.disable_event_tracking() };
        let (major, minor) = context.compute_capability().map_err(failed)?;
        let attribute = |name| {
            let value = context.attribute(name).map_err(failed)?;
            usize::try_from(value).map_err(|_| refuse(format!("{name:?} is {value}")))
        };
        let device = CudaDevice {
            capability: (major * 10 + minor) as u32,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            cache: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        };
        let architecture = Architecture { capability: device.capability, driver, own_instructions: true };
        // Machine code that the NVRTC of a newer driver made may not run on an older one.
        let mut kept = format!("{}-cuda{}", architecture.name(), driver.0);
        let device = match options.architecture {
            None => device,
            Some(capability) => {
                // Kernels of the same name are others there.
                kept += &format!("-as-{capability}");
                device.like(capability).map_err(refuse)?
            }
        };
        let compiler = Compiler::new(&options.places, architecture).map_err(refuse)?;
        Ok(Self(Arc::new(Cuda {
            ordinal,
            stream: stream(&context).map_err(failed)?,
            target: Target::cuda(device),
            disk: options.cache.as_deref().map(|folder| DiskCache::new(folder, &kept, "cubin")),
            compiler,
            kernels: Mutex::default(),
            compilations: AtomicUsize::new(0),
            pool: Arc::new(Pool { context: context.clone(), free: Mutex::default() }),
            slots: Arc::default(),
            captured: Mutex::new(None),
            last: Mutex::default(),
            library: OnceLock::new(),
            cublas: OnceLock::new(),
            context,
        })))
    }
}

fn name(ordinal: usize) -> String {
    format!("cuda:{ordinal}")
}

impl Cuda {
    fn refuse(&self, problem: impl Into<String>) -> KernelError {
        KernelError::Gpu { device: self.name(), problem: problem.into() }
    }

    fn check<T>(&self, result: Result<T, DriverError>) -> Result<T, KernelError> {
        result.map_err(|error| self.refuse(describe(error)))
    }

    /// The kernel ready to launch: from memory, from disk, or compiled.
    fn load(&self, kernel: &dyn CubeKernel) -> Result<Loaded, KernelError> {
        let id = kernel.id();
        if let Some(loaded) = lock(&self.kernels).get(&id) {
            return Ok(loaded.clone());
        }
        let name = compile::name(kernel);
        let kept = self.disk.as_ref().and_then(|disk| disk.get(&name));
        let code = match kept {
            Some(code) => code,
            None => {
                let source = compile::cuda(kernel)?;
                let bytes = self.compiler.compile(&name, &source.text)?;
                self.compilations.fetch_add(1, Ordering::Relaxed);
                let code = Code { entry: source.entry, shared: source.shared, bytes };
                if let Some(disk) = &self.disk {
                    disk.put(&name, &code);
                }
                code
            }
        };
        let module = self.check(self.context.load_module(cudarc::nvrtc::Ptx::from_binary(code.bytes)))?;
        let function = self.check(module.load_function(&code.entry))?;
        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.check(function.set_attribute(dynamic, code.shared as i32))?;
        let units = [id.cube_dim.x, id.cube_dim.y, id.cube_dim.z];
        let loaded = Loaded { function, shared: code.shared as u32, units };
        lock(&self.kernels).insert(id, loaded.clone());
        Ok(loaded)
    }

    /// cuBLASLt, from the first product on, and its workspace.
    fn cublas(&self) -> Result<&(Cublas, Memory), KernelError> {
        if let Some(cublas) = self.cublas.get() {
            return Ok(cublas);
        }
        let cublas = Cublas::new().map_err(|error| self.refuse(format!("cuBLASLt: {error:?}")))?;
        let workspace = self.allocate(cublas::WORKSPACE)?;
        Ok(self.cublas.get_or_init(|| (cublas, workspace)))
    }

    fn block(memory: &Memory) -> &Block {
        memory.range()
    }

    /// A block of this size, which [`rounded`] gave. Where the device has no memory left, the spare
    /// blocks of other sizes are freed for it, if that `may_free`.
    #[allow(unsafe_code)]
    fn block_of(&self, size: usize, may_free: bool) -> Result<Block, KernelError> {
        let pool = self.pool.clone();
        let spare = lock(&pool.free).get_mut(&size).and_then(Vec::pop);
        if let Some(address) = spare {
            return Ok(Block { address, size, home: Home::Pool(pool) });
        }
        self.check(self.context.bind_to_thread())?;
        // SAFETY: the address is used through its block alone.
        let mut address = unsafe { result::malloc_sync(size) };
        if address.is_err() && may_free {
            self.synchronize()?;
            pool.release();
            // SAFETY: as above.
            address = unsafe { result::malloc_sync(size) };
        }
        match address {
            Ok(address) => Ok(Block { address, size, home: Home::Pool(pool) }),
            Err(error) => {
                let (free, total) = self.check(self.context.mem_get_info())?;
                Err(self.refuse(format!(
                    "{} MiB of memory were asked for, and {} of {} MiB are free: {}",
                    size >> 20,
                    free >> 20,
                    total >> 20,
                    describe(error)
                )))
            }
        }
    }

    /// The address of `len` bytes.
    fn range(memory: &Memory, start: usize, len: usize) -> sys::CUdeviceptr {
        let block = Self::block(memory);
        assert!(start + len <= block.size, "a tensor lies in its memory");
        block.address + start as u64
    }

    fn event(&self) -> Result<CudaEvent, KernelError> {
        let event = self.check(self.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)))?;
        self.check(event.record(&self.stream))?;
        Ok(event)
    }
}

/// Sizes are rounded up, so that blocks find new users: to powers of two below a MiB, above to
/// whole MiB.
fn rounded(bytes: usize) -> usize {
    if bytes < 1 << 20 { bytes.next_power_of_two().max(256) } else { bytes.next_multiple_of(1 << 20) }
}

#[allow(unsafe_code)]
impl Driver for Cuda {
    fn name(&self) -> String {
        name(self.ordinal)
    }

    fn product(&self) -> String {
        self.context.name().unwrap_or_default()
    }

    fn target(&self) -> &Target {
        &self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, KernelError> {
        let size = rounded(bytes);
        let mut captured = lock(&self.captured);
        let Some(recording) = &mut *captured else {
            drop(captured);
            return Ok(Memory::new(self.block_of(size, true)?));
        };
        if let Some(memory) = recording.reuse(size) {
            return Ok(memory);
        }
        // Nothing is freed for it: the device does not wait while a pass is captured.
        let memory = Memory::new(self.block_of(size, false)?);
        recording.add(size, &memory);
        Ok(memory)
    }

    fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("memory was written")?;
        let place = Self::range(memory, start, bytes.len());
        self.check(self.context.bind_to_thread())?;
        // SAFETY: the range was checked; the driver has read the bytes when the call returns,
        // because they are not pinned.
        self.check(unsafe { result::memcpy_htod_async(place, bytes, self.stream.cu_stream()) })
    }

    fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("memory was read")?;
        let place = Self::range(memory, start, bytes.len());
        self.check(self.context.bind_to_thread())?;
        // SAFETY: the range was checked, and the stream is waited for before `bytes` is used again.
        self.check(unsafe { result::memcpy_dtoh_async(bytes, place, self.stream.cu_stream()) })?;
        self.synchronize()
    }

    fn read_later(
        &self,
        memory: &Memory,
        start: usize,
        count: usize,
    ) -> Result<Box<dyn Pending>, KernelError> {
        self.forbid_in_capture("memory was read")?;
        let size = count * size_of::<u32>();
        let place = Self::range(memory, start, size);
        let spare = {
            let mut slots = lock(&self.slots);
            let at = slots.iter().position(|slot| slot.room >= count);
            at.map(|at| slots.swap_remove(at))
        };
        let slot = match spare {
            Some(slot) => slot,
            None => self.check(Slot::new(&self.context, count.next_power_of_two()))?,
        };
        self.check(self.context.bind_to_thread())?;
        // SAFETY: the range was checked, and the slot has room for the words. It lives until the
        // copy is done: only a slot's drop frees its memory, and waits for the event.
        self.check(unsafe {
            let to = slot.words.as_ptr().cast();
            sys::cuMemcpyDtoHAsync_v2(to, place, size, self.stream.cu_stream()).result()
        })?;
        self.check(slot.event.record(&self.stream))?;
        let (slot, slots) = (Some(slot), self.slots.clone());
        Ok(Box::new(Arriving { ordinal: self.ordinal, slot, count, slots }))
    }

    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        let Dispatch { kernel, cubes, buffers, written: _, scalars, early } = dispatch;
        let loaded = self.load(&*kernel)?;
        let mut addresses: Vec<_> =
            buffers.iter().map(|&(memory, start)| Self::block(memory).address + start as u64).collect();
        let mut info = info(&scalars, buffers.len());
        let mut arguments: Vec<*mut c_void> = addresses.iter_mut().map(|a| (a as *mut u64).cast()).collect();
        arguments.push(info.as_mut_ptr().cast());
        if let Some(recording) = &mut *lock(&self.captured) {
            recording.launch(buffers.iter().map(|&(memory, _)| memory));
        }
        self.check(self.context.bind_to_thread())?;
        let ([x, y, z], [units_x, units_y, units_z]) = (cubes, loaded.units);
        let blocks: Vec<_> = buffers.iter().map(|&(memory, _)| Self::block(memory).address).collect();
        let mut last = lock(&self.last);
        // Another engine's memory may have been written by its own launches since.
        let is_foreign =
            |&(memory, _): &(&Memory, usize)| matches!(Self::block(memory).home, Home::Foreign(_));
        let overlaps = self.target.overlaps()
            && !blocks[..early].iter().any(|block| last.contains(block))
            && !buffers[..early].iter().any(is_foreign);
        *last = blocks;
        // SAFETY: an attribute is plain data, and zeros are one of its values.
        let mut overlap: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        overlap.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        overlap.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: units_x,
            blockDimY: units_y,
            blockDimZ: units_z,
            sharedMemBytes: loaded.shared,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut overlap,
            numAttrs: overlaps.into(),
        };
        // SAFETY: the arguments are the buffers in the kernel's order and then its info struct, as
        // CubeCL's CUDA C++ declares them; the caller answers for what the kernel indexes.
        self.check(unsafe {
            let function = loaded.function.cu_function();
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut())
                .result()
        })
    }

    fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool {
        let on_disk = |disk: &DiskCache| disk.has(&compile::name(kernel));
        lock(&self.kernels).contains_key(&kernel.id()) || self.disk.as_ref().is_some_and(on_disk)
    }

    /// NVRTC has locks per stage instead of a global one since CUDA 11.5. In 13.0 two threads are
    /// as fast as two processes.
    fn compile(&self, Unlaunched { kernel, .. }: Unlaunched) -> Result<(), KernelError> {
        self.load(&*kernel).map(drop)
    }

    fn compilations(&self) -> usize {
        self.compilations.load(Ordering::Relaxed)
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.check(self.stream.synchronize())
    }

    fn is_capturing(&self) -> bool {
        lock(&self.captured).is_some()
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        work()?;
        self.synchronize()?;
        *lock(&self.captured) = Some(Recording::default());
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let done = self.check(self.stream.begin_capture(relaxed)).and_then(|()| work());
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.check(self.stream.end_capture(flags));
        let memory = lock(&self.captured).take().map_or_else(Vec::new, Recording::into_memory);
        if let Err(error) = done {
            // It may have been for want of memory: the next capture finds what is spare now.
            drop(memory);
            self.synchronize()?;
            self.pool.release();
            return Err(error);
        }
        let graph = graph?.ok_or_else(|| self.refuse("nothing was captured"))?;
        Ok(Pass::new(Captured { device: self.name(), graph: Mutex::new(Graph(graph)) }, memory))
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        let start = self.event()?;
        work()?;
        let end = self.event()?;
        self.check(end.synchronize())?;
        let milliseconds = self.check(elapsed(&start, &end))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }

    fn foreign(&self, address: u64, size: usize, owner: Range) -> Result<Memory, KernelError> {
        self.foreign_block(address, size, owner)
    }

    fn address(&self, (memory, start): (&Memory, usize)) -> Result<u64, KernelError> {
        Ok(Self::block(memory).address + start as u64)
    }

    fn total_memory(&self) -> Option<usize> {
        self.context.total_mem().ok()
    }

    fn library(&self) -> Option<&'static str> {
        self.library.get_or_init(cublas::is_installed).then_some("cuBLASLt")
    }

    fn multiply(&self, product: Dense<'_>) -> Result<(), KernelError> {
        self.check(self.context.bind_to_thread())?;
        let (cublas, workspace) = self.cublas()?;
        let operands = [product.x, product.weight, product.y];
        if let Some(recording) = &mut *lock(&self.captured) {
            recording.launch(operands.iter().map(|&(memory, _)| memory));
        }
        let addresses = operands.map(|(memory, start)| Self::block(memory).address + start as u64);
        let workspace = Self::block(workspace).address;
        // SAFETY: the op has checked the sizes and the alignment; blocks are aligned to more.
        let done = unsafe { cublas.multiply(&product, addresses, workspace, self.stream.cu_stream()) };
        done.map_err(|error| self.refuse(format!("cuBLASLt: {error:?}")))
    }

    fn copy_bandwidth(&self) -> Result<Option<f64>, KernelError> {
        const SIZE: usize = 1 << 30;
        let (from, to) = (self.allocate(SIZE)?, self.allocate(SIZE)?);
        let (from, to) = (Self::block(&from).address, Self::block(&to).address);
        let mut best = 0.0f64;
        for _ in 0..10 {
            let time = self.time(&mut || {
                // SAFETY: both blocks hold as many bytes.
                self.check(unsafe { result::memcpy_dtod_async(to, from, SIZE, self.stream.cu_stream()) })
            })?;
            best = best.max(2.0 * SIZE as f64 / time.as_secs_f64());
        }
        Ok(Some(best))
    }
}

impl Pool {
    /// Gives what is free back to the driver.
    #[allow(unsafe_code)]
    fn release(&self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for (_, addresses) in lock(&self.free).drain() {
            for address in addresses {
                // SAFETY: no block has this address any more, and the stream was waited for.
                let _ = unsafe { result::free_sync(address) };
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.release();
    }
}

/// The struct that follows the buffers among a kernel's arguments: the numbers, then the buffers'
/// lengths, which no kernel asks for.
fn info(scalars: &[u32], buffers: usize) -> Vec<u64> {
    let mut builder = InfoBuilder::default();
    scalars.iter().for_each(|&scalar| builder.scalars.push(scalar));
    (0..buffers).for_each(|_| builder.metadata.register_buffer(0, AddressType::U32));
    let mut data = builder.finish(AddressType::U32).data;
    // A kernel without numbers takes no struct; the driver then ignores this.
    data.resize(data.len().max(1), 0);
    data
}

#[derive(Debug)]
struct Captured {
    device: String,
    graph: Mutex<Graph>,
}

struct Graph(CudaGraph);

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

// SAFETY: a graph may be used by any thread, by one at a time; it is kept in a mutex.
#[allow(unsafe_code)]
unsafe impl Send for Graph {}

impl Replay for Captured {
    fn replay(&self) -> Result<(), KernelError> {
        lock(&self.graph)
            .0
            .launch()
            .map_err(|error| KernelError::Gpu { device: self.device.clone(), problem: describe(error) })
    }
}
