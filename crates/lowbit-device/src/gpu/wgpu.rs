//! Metal (MSL) through cubecl-wgpu.

use super::compile::{self, Target};
use super::encoder::{Dispatch, Driver, Pass, Replay, Unlaunched, lock};
use super::recording::Recording;
use super::{Gpu, Memory};
use crate::KernelError;
use cubecl_core::CubeKernel;
use cubecl_core::InfoBuilder;
use cubecl_core::bytes::Bytes;
use cubecl_core::client::{Client, Graph};
use cubecl_core::environment::stream::StreamId;
use cubecl_core::ir::AddressType;
use cubecl_core::prelude::KernelId;
use cubecl_core::server::{CubeCount, Handle, KernelArguments, KernelResource, ServerError};
use cubecl_wgpu::wgpu::{AdapterInfo, DeviceType};
use cubecl_wgpu::{
    AutoCompiler, RuntimeOptions, WgpuBackend, WgpuDevice, WgpuDeviceKind, WgpuInitError, WgpuServer,
};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

struct Wgpu {
    client: Client,
    target: Target,
    /// The adapter's name.
    product: String,
    is_software: bool,
    /// The memory of a running capture.
    recording: Mutex<Option<Recording>>,
    /// Kernels that were launched or compiled.
    compiled: Mutex<HashSet<KernelId>>,
    gate: Arc<Gate>,
}

/// Keeps other threads' work out of a capture: the device has one stream for all.
#[derive(Debug, Default)]
struct Gate {
    /// Held for writing while a pass is captured.
    lock: RwLock<()>,
    /// The thread that captures.
    owner: Mutex<Option<ThreadId>>,
}

impl Gate {
    fn owner(&self) -> MutexGuard<'_, Option<ThreadId>> {
        lock(&self.owner)
    }

    /// Waits until no other thread captures.
    fn enter(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let mine = *self.owner() == Some(std::thread::current().id());
        (!mine).then(|| self.lock.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `capture` with other threads kept out.
    fn alone<T>(&self, capture: impl FnOnce() -> T) -> T {
        let _closed = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        *self.owner() = Some(std::thread::current().id());
        let result = capture();
        *self.owner() = None;
        result
    }
}

impl std::fmt::Debug for Wgpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAME)
    }
}

/// As `--device` spells it.
const NAME: &str = "metal";
const NEEDED: &str = "macOS with Metal 3.2 or newer";

fn set_up() -> Result<(Client, AdapterInfo), KernelError> {
    let options = RuntimeOptions { tasks_max: 32, memory_config: Default::default() };
    let device = WgpuDevice::new(WgpuDeviceKind::DefaultDevice).on(WgpuBackend::Metal);
    let setup = cubecl_wgpu::try_init_setup::<cubecl_wgpu::Metal>(&device, options);
    let setup = setup.map_err(|error| {
        let (device, problem) = (NAME.into(), format!("{error}; {NEEDED} is needed"));
        match error {
            WgpuInitError::AdapterUnavailable { .. } => KernelError::NoGpu { device, problem },
            // Only Apple's systems have it.
            _ if !cfg!(target_vendor = "apple") => KernelError::NoGpu { device, problem },
            _ => KernelError::Gpu { device, problem },
        }
    })?;
    let client = Client::load::<WgpuServer<AutoCompiler>>(cubecl_core::device::Device::to_id(&device));
    Ok((client, setup.adapter.get_info()))
}

/// cubecl-wgpu sets a device up once a process.
static DEVICE: Mutex<Option<Gpu>> = Mutex::new(None);

impl Gpu {
    /// The Metal device.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none; [`KernelError::Gpu`] when it does not take Metal
    /// Shading Language 3.2.
    #[allow(unsafe_code)]
    pub fn metal() -> Result<Self, KernelError> {
        let mut known = lock(&DEVICE);
        if let Some(gpu) = &*known {
            return Ok(gpu.clone());
        }
        let (mut client, adapter) = set_up()?;
        // cubecl-wgpu's WGSL is never taken: it has no 8-bit and 16-bit storage, and some of its
        // faults give wrong numbers without an error.
        if client.name() != "wgpu<msl>" {
            let problem = format!("it runs {} alone, and {NEEDED} is needed", client.name());
            return Err(KernelError::Gpu { device: NAME.into(), problem });
        }
        // SAFETY: all of this device's work goes through this client and its clones, so one stream
        // orders it.
        unsafe { client.set_stream(StreamId { value: 0 }) };
        let target = Target::new(client.properties_shared(), client.target_properties_shared()).on_metal();
        let gpu = Self(Arc::new(Wgpu {
            client,
            target,
            is_software: adapter.device_type == DeviceType::Cpu,
            product: adapter.name,
            recording: Mutex::new(None),
            compiled: Mutex::default(),
            gate: Arc::default(),
        }));
        *known = Some(gpu.clone());
        Ok(gpu)
    }
}

impl Wgpu {
    fn check<T>(&self, result: Result<T, ServerError>) -> Result<T, KernelError> {
        result.map_err(|error| KernelError::Gpu { device: self.name(), problem: format!("{error}") })
    }

    fn handle(memory: &Memory) -> &Handle {
        memory.range()
    }

    fn recording(&self) -> MutexGuard<'_, Option<Recording>> {
        lock(&self.recording)
    }

    fn compiled(&self) -> MutexGuard<'_, HashSet<KernelId>> {
        lock(&self.compiled)
    }

    /// Runs `work` to warm up, and again to record it.
    fn record(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        work()?;
        let kept = self.recording().as_ref().map_or_else(Vec::new, Recording::kept);
        let spare: Vec<_> = kept.into_iter().map(|bytes| self.allocate(bytes)).collect::<Result<_, _>>()?;
        drop(spare);
        self.check(self.client.start_capture())?;
        let done = work();
        let graph = self.check(self.client.stop_capture());
        done?;
        graph
    }

    /// Hands a launch to cubecl-wgpu, which compiles the kernel if it does not know it.
    #[allow(unsafe_code)]
    fn submit(
        &self,
        kernel: Box<dyn CubeKernel>,
        [x, y, z]: [u32; 3],
        buffers: &[(&Memory, usize)],
        scalars: &[u32],
    ) {
        let mut compiled = self.compiled();
        let id = kernel.id();
        if !compiled.contains(&id) {
            compiled.insert(id);
        }
        drop(compiled);
        let mut info = InfoBuilder::default();
        scalars.iter().for_each(|&scalar| info.scalars.push(scalar));
        let mut arguments = KernelArguments::new();
        for &(memory, start) in buffers {
            info.metadata.register_buffer(0, AddressType::U32);
            let handle = Self::handle(memory).clone().offset_start(start as u64);
            arguments.resources.push(KernelResource::Buffer(handle.binding()));
        }
        arguments.info = info.finish(AddressType::U32);
        // Errors show when the result is read.
        self.client.launch(kernel, CubeCount::Static(x, y, z), arguments);
    }
}

impl Driver for Wgpu {
    fn name(&self) -> String {
        NAME.into()
    }

    fn product(&self) -> String {
        self.product.clone()
    }

    fn is_software(&self) -> bool {
        self.is_software
    }

    fn target(&self) -> &Target {
        &self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, KernelError> {
        let _entered = self.gate.enter();
        let most = self.client.properties().memory.max_page_size;
        if bytes as u64 > most {
            let problem = format!("{bytes} bytes were asked for at once, and a buffer holds at most {most}");
            return Err(KernelError::Gpu { device: self.name(), problem });
        }
        let mut recording = self.recording();
        if let Some(memory) = recording.as_ref().and_then(|recording| recording.reuse(bytes)) {
            return Ok(memory);
        }
        let memory = Memory::new(self.client.empty(bytes.max(4)));
        if let Some(recording) = &mut *recording {
            recording.add(bytes, &memory);
        }
        Ok(memory)
    }

    fn upload(&self, bytes: &[u8]) -> Result<Memory, KernelError> {
        if bytes.is_empty() {
            return self.allocate(0);
        }
        let _entered = self.gate.enter();
        Ok(Memory::new(self.client.create_from_slice(bytes)))
    }

    fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.gate.enter();
        let handle = Self::handle(memory).clone();
        let rest = handle.size_in_used() - (start + bytes.len()) as u64;
        let place = handle.offset_start(start as u64).offset_end(rest);
        self.client.write(&place, Bytes::from_bytes_vec(bytes.to_vec()));
        Ok(())
    }

    fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.gate.enter();
        let all = self.check(self.client.read_one(Self::handle(memory).clone()))?;
        bytes.copy_from_slice(&all[start..start + bytes.len()]);
        Ok(())
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        let _entered = self.gate.enter();
        let Dispatch { kernel, cubes, buffers, scalars, .. } = dispatch;
        let [x, y, z] = cubes;
        // wgpu would panic.
        let (most_x, most_y, most_z) = self.client.properties().hardware.max_cube_count;
        if x > most_x || y > most_y || z > most_z {
            let name = compile::name(&*kernel);
            let problem = format!(
                "{name}: {cubes:?} cubes were asked for, and it launches {:?}",
                [most_x, most_y, most_z]
            );
            return Err(KernelError::Gpu { device: self.name(), problem });
        }
        if let Some(recording) = &mut *self.recording() {
            recording.launch(buffers.iter().map(|&(memory, _)| memory));
        }
        self.submit(kernel, cubes, &buffers, &scalars);
        Ok(())
    }

    fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool {
        self.compiled().contains(&kernel.id())
    }

    /// Captures a launch of the kernel and replays it never: cubecl-wgpu compiles at launches
    /// alone.
    fn compile(&self, Unlaunched { kernel, buffers, scalars }: Unlaunched) -> Result<(), KernelError> {
        let name = compile::name(&*kernel);
        let buffers = (0..buffers).map(|_| self.allocate(256)).collect::<Result<Vec<_>, _>>()?;
        let buffers: Vec<_> = buffers.iter().map(|memory| (memory, 0)).collect();
        let captured = self.gate.alone(|| {
            self.client.graph_prepare()?;
            self.client.start_capture()?;
            self.submit(kernel, [1; 3], &buffers, &vec![0; scalars]);
            self.client.stop_capture()
        });
        captured.map(drop).map_err(|error| KernelError::Kernel { name, problem: error.to_string() })
    }

    /// Its one thread compiles.
    fn compilers(&self) -> usize {
        1
    }

    fn compilations(&self) -> usize {
        self.compiled().len()
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        let _entered = self.gate.enter();
        self.check(cubecl_core::future::block_on(self.client.sync()))
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        self.gate.alone(|| {
            self.check(self.client.graph_prepare())?;
            *self.recording() = Some(Recording::default());
            let result = self.record(work);
            let memory = self.recording().take().map_or_else(Vec::new, Recording::into_memory);
            let launches = Captured { device: self.name(), gate: self.gate.clone(), graph: result? };
            Ok(Pass::new(launches, memory))
        })
    }

    /// Without timestamps on every driver: the host's clock, from an idle device to an idle device.
    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        self.synchronize()?;
        let start = Instant::now();
        work()?;
        self.synchronize()?;
        Ok(start.elapsed())
    }
}

#[derive(Debug)]
struct Captured {
    device: String,
    gate: Arc<Gate>,
    graph: Graph,
}

impl Replay for Captured {
    #[allow(unsafe_code)]
    fn replay(&self) -> Result<(), KernelError> {
        let _entered = self.gate.enter();
        // SAFETY: the pass keeps all memory of its launches alive, and one stream orders
        // everything.
        unsafe { self.graph.replay() }
            .map_err(|error| KernelError::Gpu { device: self.device.clone(), problem: error.to_string() })
    }
}
