//! A kernel and its compile-time values to source or code for a GPU, without that GPU.

mod offline;

use super::caps::{Caps, Matrices};
use crate::KernelError;
use cubecl_core as cubecl;
use cubecl_core::CubeDim;
use cubecl_core::ir::features::Tma;
use cubecl_core::ir::settings::ExecutionMode;
use cubecl_core::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use std::sync::Arc;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use std::sync::atomic::{AtomicUsize, Ordering};

/// The device that kernels are compiled for.
#[derive(Clone, Debug)]
pub struct Target {
    properties: Arc<DeviceProperties>,
    registers: Arc<TargetProperties>,
    caps: Caps,
    binding: usize,
}

/// The arguments that every kernel's generated constructor begins with.
pub type Start = (KernelSettings, Arc<DeviceProperties>, Arc<TargetProperties>);

/// A device's properties as CUDA reports them.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct CudaDevice {
    /// Its compute capability, as in 90.
    pub capability: u32,
    /// Each runs cubes of its own.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a cube may ask for.
    pub shared_memory: usize,
    /// Bytes of the second-level cache.
    pub cache: usize,
}

#[cfg(feature = "cuda")]
impl CudaDevice {
    /// An H100 (SXM) or H200, for kernels that are listed or compiled without a device.
    pub const H100: Self =
        Self { capability: 90, multiprocessors: 132, shared_memory: 227 << 10, cache: 50 << 20 };

    /// A device of this compute capability, as large as an H100.
    ///
    /// # Panics
    /// When there is none.
    pub fn example(capability: u32) -> Self {
        Self { capability: 121, ..Self::H100 }.like(capability).expect("a compute capability")
    }

    /// Compute capabilities, and the KiB of shared memory that a cube may ask for there: "Technical
    /// specifications per compute capability" in the CUDA C++ programming guide 13.0.
    const GENERATIONS: [(u32, usize); 10] = [
        (75, 64),
        (80, 163),
        (86, 99),
        (87, 163),
        (89, 99),
        (90, 227),
        (100, 227),
        (103, 227),
        (120, 99),
        (121, 99),
    ];

    /// The same device with what an older one of `capability` has of abilities and shared memory.
    ///
    /// # Errors
    /// Both capabilities, where this device is the older one or the other is none.
    pub fn like(self, capability: u32) -> Result<Self, String> {
        let known = Self::GENERATIONS.iter().find(|(known, _)| *known == capability);
        let Some((_, kib)) = known.filter(|_| capability <= self.capability) else {
            let own = self.capability;
            let known = Self::GENERATIONS.map(|(known, _)| known);
            let known = known.iter().filter(|&&known| known <= own).map(u32::to_string);
            let known = known.collect::<Vec<_>>().join(", ");
            return Err(format!(
                "it has compute capability {own}, and runs kernels for {known}, not for {capability}"
            ));
        };
        Ok(Self { capability, shared_memory: self.shared_memory.min(kib << 10), ..self })
    }
}

impl Target {
    #[cfg(any(feature = "vulkan", feature = "metal"))]
    /// A device with these properties.
    pub fn new(properties: Arc<DeviceProperties>, registers: Arc<TargetProperties>) -> Self {
        let caps = portable(&properties);
        Self { properties, registers, caps, binding: 1 }
    }

    /// The same device through Metal.
    #[cfg(feature = "metal")]
    pub fn on_metal(mut self) -> Self {
        Arc::make_mut(&mut self.properties).identity.fingerprint = METAL.into();
        Self { binding: METAL_BINDING, ..self }
    }

    /// A CUDA device.
    #[cfg(feature = "cuda")]
    pub fn cuda(device: CudaDevice) -> Self {
        let mut target = Self::offline(32, 16);
        let overlaps = device.capability >= 90;
        if overlaps {
            Arc::make_mut(&mut target.properties).features.tma.insert(Tma::Base);
        }
        let caps = Caps {
            multiprocessors: device.multiprocessors,
            shared_memory: device.shared_memory,
            cache: device.cache,
            tensor_cores: device.capability >= 80,
            warp_groups: device.capability == 90,
            overlaps,
            ..target.caps
        };
        Self { caps, ..target }
    }

    /// The properties that decide which kernels run.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Bytes that a bound buffer's start is a multiple of: more than 1 on Metal alone, where wgpu
    /// does not take addresses.
    pub fn binding(&self) -> usize {
        self.binding
    }

    /// [`Caps::tensor_cores`].
    pub fn tensor_cores(&self) -> bool {
        self.caps.tensor_cores
    }

    /// [`Caps::overlaps`].
    pub fn overlaps(&self) -> bool {
        self.caps.overlaps
    }

    /// Elements of the longest vector that kernels can have.
    pub fn vector(&self) -> usize {
        self.properties.hardware.max_vector_size
    }

    /// [`Caps::plane`].
    pub fn plane(&self) -> Option<usize> {
        self.caps.plane
    }

    /// [`Caps::units`].
    pub fn units(&self) -> usize {
        self.caps.units
    }

    /// The least number of units that run in step.
    pub fn smallest_plane(&self) -> usize {
        self.properties.hardware.plane_size_min as usize
    }

    /// A kernel's first arguments, for cubes of `units` along x. Kernels guard their own accesses,
    /// and index with 32 bits.
    pub fn start(&self, units: u32) -> Start {
        let settings =
            KernelSettings::new(*CubeDim::new_1d(units), ExecutionMode::Unchecked, AddressType::U32);
        (settings, self.properties.clone(), self.registers.clone())
    }
}

/// A kernel's type and compile-time values.
pub fn name(kernel: &dyn CubeKernel) -> String {
    format!("{:?}", kernel.id())
}

/// Source for another compiler.
#[cfg(any(feature = "cuda", feature = "metal"))]
#[derive(Clone, Debug)]
pub struct Source {
    /// In the compiler's language.
    pub text: String,
    /// The kernel's name in it.
    pub entry: String,
    /// Bytes of memory that a cube's units share.
    pub shared: usize,
}

#[cfg(any(feature = "cuda", feature = "metal"))]
fn cpp<C>(
    kernel: &dyn CubeKernel,
    options: &cubecl_cpp::shared::CompilationOptions,
) -> Result<Source, KernelError>
where
    C: Default
        + cubecl_core::Compiler<
            Representation = cubecl_cpp::ComputeKernel,
            CompilationOptions = cubecl_cpp::shared::CompilationOptions,
        >,
{
    let refuse = |error: cubecl_core::CompilationError| KernelError::Kernel {
        name: name(kernel),
        problem: error.to_string(),
    };
    let definition = cubecl_core::define_kernel(kernel).map_err(refuse)?;
    let entry = definition.settings.kernel_name.clone();
    let compiled = C::default().compile(definition, options).map_err(refuse)?;
    Ok(Source { text: compiled.source, entry, shared: compiled.shared_memory_size })
}

/// CUDA C++.
#[cfg(feature = "cuda")]
pub fn cuda(kernel: &dyn CubeKernel) -> Result<Source, KernelError> {
    let supports_features =
        cubecl_cpp::shared::CppSupportedFeatures { grid_constants: true, dp4a: true, ..Default::default() };
    let options = cubecl_cpp::shared::CompilationOptions { supports_features, ..Default::default() };
    let mut source = cpp::<cubecl_cpp::shared::CppCompiler<cubecl_cpp::target::Cuda>>(kernel, &options)?;
    source.text = without_restrict(&source.text).ok_or_else(|| KernelError::Kernel {
        name: name(kernel),
        problem: "pointers are restricted in an unknown way".into(),
    })?;
    Ok(source)
}

/// CubeCL's source with `__restrict__` at the buffers alone that are read [`early`]. CubeCL has no
/// option for it. The compiler takes restricted memory that is only read for constant while the
/// kernel runs, and loads it before the kernel waits. `None` where pointers are restricted in
/// another way.
#[cfg(feature = "cuda")]
fn without_restrict(source: &str) -> Option<String> {
    const RESTRICT: &str = "__restrict__ ";
    let early = source.find(EARLY).and_then(|at| source[at + EARLY.len()..].chars().next()?.to_digit(10));
    let early = early.unwrap_or(0) as usize;
    let ends: Vec<_> =
        source.match_indices(RESTRICT).map(|(at, _)| at + RESTRICT.len()).take(early).collect();
    let split = ends.last().copied().unwrap_or(0);
    let all_known = source.matches("restrict").count() == source.matches(RESTRICT).count();
    (all_known && ends.len() == early)
        .then(|| source[..split].to_owned() + &source[split..].replace(RESTRICT, ""))
}

/// The comment that [`early`] leaves in a kernel's source.
const EARLY: &str = "// early buffers: ";

/// Lets CUDA's assembler load a kernel's first `count` buffers, up to 9, whenever it likes: those
/// that are read before the last launch has ended, too, in every launch of the kernel.
#[cube]
pub fn early(#[comptime] count: usize) {
    gpu_asm!("{early}{count}", early = const EARLY, count = const count, options(nomem));
}

/// Waits for the end of the launch before, then lets the next launch begin. So all launches but the
/// last have ended when one begins.
pub const OVERLAP: &str = "griddepcontrol.wait; griddepcontrol.launch_dependents;";

/// On Hopper and later, where a launch may begin before the one before it has ended: waits for that
/// end, and lets the next launch begin. A kernel may read before it only what it says is
/// [read early](super::launch::kernel).
#[cube]
pub fn overlap() {
    gpu_asm!("{both}", both = const OVERLAP);
}

/// The start of every kernel that does not wait later: [`overlap`] where there is something to wait
/// for, and on Metal a block of floats as IEEE 754 has them.
#[cube]
pub fn begin() {
    let properties = comptime::device_properties();
    if comptime!(overlaps(&properties)) {
        overlap();
    }
    if comptime!(is_metal(&properties)) {
        source(SAFE_FLOATS);
    }
}

/// The end of every kernel that starts with [`begin`].
#[cube]
pub fn end() {
    let properties = comptime::device_properties();
    if comptime!(is_metal(&properties)) {
        source(END_OF_BLOCK);
    }
}

/// Bytes that wgpu wants a buffer's start to be a multiple of on Metal:
/// `min_storage_buffer_offset_alignment` in wgpu-hal 30.0.1's `metal/adapter.rs`.
#[cfg(feature = "metal")]
pub const METAL_BINDING: usize = 32;

/// By default Metal's compiler takes all floats for finite, and wgpu 30 has no option for it: the
/// source says otherwise. The pragma must stand at the start of a block, and CubeCL puts statements
/// of its own at the start of a kernel's.
const SAFE_FLOATS: &str = "floats may be NaN */ {\n#pragma METAL fp math_mode(safe)\n/*";
const END_OF_BLOCK: &str = "*/ }\n/* of floats that may be NaN";

/// Source in the place of a comment: CubeCL writes `/* text */` where the text has several lines.
#[cube]
#[allow(unused_variables)] // It is used in the expansion.
fn source(#[comptime] text: &'static str) {
    intrinsic!(|scope| cube_comment::expand(scope, text))
}

/// The name that [`Target::on_metal`] gives a device.
const METAL: &str = "metal";

fn is_metal(properties: &DeviceProperties) -> bool {
    properties.identity.fingerprint == METAL
}

/// True if kernels are compiled for a device whose launches overlap: Hopper or later. That it has a
/// tensor memory accelerator says so: all devices with one are Hopper or later.
pub fn overlaps(properties: &DeviceProperties) -> bool {
    properties.features.tma.contains(Tma::Base)
}

fn float_kind(dtype: FloatType) -> FloatKind {
    match dtype {
        FloatType::F32 => FloatKind::F32,
        FloatType::F16 => FloatKind::F16,
        FloatType::BF16 => FloatKind::BF16,
    }
}

/// The largest of the device's cooperative matrices of `dtype` with sums in f32, of those that
/// whole tiles are made of.
fn matrices(properties: &DeviceProperties, dtype: FloatType) -> Option<Matrices> {
    /// A common divisor of a plane's tiles and of a run.
    const SIZES: [usize; 2] = [8, 16];
    let operand = ElemType::Float(float_kind(dtype));
    let sums = ElemType::Float(FloatKind::F32);
    let listed = properties.features.matmul.cmma.iter();
    let of_type = listed.filter(|it| it.a_type == operand && it.b_type == operand && it.cd_type == sums);
    let all = of_type.map(|it| Matrices { m: it.m as usize, n: it.n as usize, k: it.k as usize });
    let fitting = all.filter(|it| [it.m, it.n, it.k].iter().all(|size| SIZES.contains(size)));
    fitting.max_by_key(|it| it.m * it.n * it.k)
}

/// A device's abilities as CubeCL has them, for every vendor.
fn portable(properties: &DeviceProperties) -> Caps {
    let hardware = &properties.hardware;
    // Vulkan and Metal do not say: planes below 32 are a CPU's.
    let assumed = if hardware.plane_size_max < 32 { 4 } else { 132 };
    Caps {
        plane: (hardware.plane_size_min == hardware.plane_size_max)
            .then_some(hardware.plane_size_min as usize),
        largest_plane: hardware.plane_size_max as usize,
        units: (hardware.max_units_per_cube as usize).min(1024),
        multiprocessors: hardware.num_streaming_multiprocessors.map_or(assumed, |count| count as usize),
        shared_memory: hardware.max_shared_memory_size,
        cache: hardware.last_level_cache_size.unwrap_or(0),
        f16_matrices: matrices(properties, FloatType::F16),
        bf16_matrices: matrices(properties, FloatType::BF16),
        tensor_cores: false,
        warp_groups: false,
        overlaps: false,
        vendor_blas: false,
    }
}

/// Metal Shading Language.
#[cfg(feature = "metal")]
pub fn msl(kernel: &dyn CubeKernel) -> Result<Source, KernelError> {
    cpp::<cubecl_cpp::MslCompiler>(kernel, &Default::default())
}

/// SPIR-V, for a device that takes what `options` say.
#[cfg(feature = "vulkan")]
pub fn spirv(
    kernel: &dyn CubeKernel,
    options: &cubecl_core::WgpuCompilationOptions,
) -> Result<Code, KernelError> {
    use cubecl_core::Compiler;
    let refuse = |problem: String| KernelError::Kernel { name: name(kernel), problem };
    let definition = cubecl_core::define_kernel(kernel).map_err(|error| refuse(error.to_string()))?;
    let entry = definition.settings.kernel_name.clone();
    let compiled = cubecl_spirv::SpirvCompiler.compile(definition, options);
    let compiled = compiled.map_err(|error| refuse(error.to_string()))?;
    if compiled.immediate_size.is_none() {
        return Err(refuse("it takes more buffers than the device's push constants have room for".into()));
    }
    let bytes = bytemuck::cast_slice(&compiled.assembled_module).to_vec();
    Ok(Code { entry, shared: compiled.shared_size, bytes })
}

/// A build of a crate's kernels: each crate that has some registers its
/// [`sources!`](super::launch::sources).
#[derive(Debug)]
pub struct Sources(pub &'static str);
inventory::collect!(Sources);
inventory::submit!(Sources(super::launch::sources!()));

/// The name of this build of all kernels.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
fn build() -> String {
    let mut sources: Vec<&str> = inventory::iter::<Sources>.into_iter().map(|sources| sources.0).collect();
    sources.sort_unstable();
    hash(sources.concat().as_bytes())
}

/// Code compiled for a device, on disk: one file a kernel, named by its type and compile-time
/// values.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
#[derive(Debug)]
pub struct DiskCache {
    folder: std::path::PathBuf,
    extension: &'static str,
}

/// A compiler's output for a kernel.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
#[derive(Clone, Debug, PartialEq)]
pub struct Code {
    /// The kernel's name in it.
    pub entry: String,
    /// Bytes of memory that a cube's units share.
    pub shared: usize,
    /// Machine code, or SPIR-V.
    pub bytes: Vec<u8>,
}

#[cfg(any(feature = "cuda", feature = "vulkan"))]
impl DiskCache {
    /// A cache in `folder` for code of this build for one `architecture`, in files with this
    /// extension.
    pub fn new(folder: &std::path::Path, architecture: &str, extension: &'static str) -> Self {
        Self { folder: folder.join(format!("{}-{architecture}", build())), extension }
    }

    /// The code of the kernel of this name. A file that cannot be read counts as none.
    pub fn get(&self, name: &str) -> Option<Code> {
        let file = std::fs::read(self.path(name)).ok()?;
        let mut lines = file.splitn(5, |&byte| byte == b'\n');
        let mut line = || lines.next();
        let (stored, entry, shared, digest, bytes) = (line()?, line()?, line()?, line()?, line()?);
        // Names are cut to a hash in the file's name. A file that was not on the disk when the
        // machine went down has its length at best.
        if stored != name.as_bytes() || digest != hash(bytes).as_bytes() {
            return None;
        }
        let entry = String::from_utf8(entry.to_vec()).ok()?;
        Some(Code { entry, shared: std::str::from_utf8(shared).ok()?.parse().ok()?, bytes: bytes.to_vec() })
    }

    /// True if there is a file for the kernel of this name. It may still turn out to be of no use.
    pub fn has(&self, name: &str) -> bool {
        self.path(name).is_file()
    }

    /// Keeps `code`. A disk that is full or read-only costs the next start time and nothing else.
    pub fn put(&self, name: &str, code: &Code) {
        let digest = hash(&code.bytes);
        let mut file = format!("{name}\n{}\n{}\n{digest}\n", code.entry, code.shared).into_bytes();
        file.extend(&code.bytes);
        let path = self.path(name);
        // Two threads may keep the same kernel.
        static PARTS: AtomicUsize = AtomicUsize::new(0);
        let part = (std::process::id(), PARTS.fetch_add(1, Ordering::Relaxed));
        let part = path.with_extension(format!("{}-{}.part", part.0, part.1));
        // Renamed into place, so that no other process reads half a file.
        let written = std::fs::create_dir_all(&self.folder)
            .and_then(|()| std::fs::write(&part, file))
            .and_then(|()| std::fs::rename(&part, path));
        if written.is_err() {
            let _ = std::fs::remove_file(part);
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.join(format!("{}.{}", hash(name.as_bytes()), self.extension))
    }
}

/// 64 bits in hexadecimal digits.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
fn hash(bytes: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    format!("{:016x}", hasher.finish())
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::super::launch::kernel;
    use super::*;

    #[kernel]
    fn compile_test_late(x: &[f32], y: &mut [f32], n: u32) {
        if ABSOLUTE_POS < n as usize {
            y[ABSOLUTE_POS] = x[ABSOLUTE_POS];
        }
    }

    #[kernel(waits)]
    fn compile_test_early(#[early] weight: &[f32], x: &[f32], y: &mut [f32]) {
        early(1usize);
        let weight = weight[ABSOLUTE_POS];
        overlap();
        y[ABSOLUTE_POS] = x[ABSOLUTE_POS] * weight;
    }

    fn source(kernel: &dyn CubeKernel) -> String {
        cuda(kernel).unwrap().text
    }

    /// A kernel's signature, and its body up to the wait for the launch before.
    fn before_the_wait(source: &str) -> (&str, &str) {
        let (_, kernel) = source.split_once("__global__").expect("a kernel");
        let (signature, body) = kernel.split_once('{').expect("a body");
        (signature, body.split_once(OVERLAP).expect("the wait").0)
    }

    /// The parts of CubeCL's output that [`cuda`] relies on, and its result.
    #[test]
    fn kernels_wait_before_they_read_memory() {
        let target = Target::cuda(CudaDevice::H100);
        let late = source(&*CompileTestLate::kernel(&target, 32).code());
        let (signature, body) = before_the_wait(&late);
        assert!(!signature.contains("restrict"), "{signature}");
        assert!(!body.contains("restrict") && !body.replace("scalars_u32[0]", "").contains('['), "{body}");

        let early = source(&*CompileTestEarly::kernel(&target, 32).code());
        let (signature, body) = before_the_wait(&early);
        assert_eq!(signature.matches("const __restrict__").count(), 1, "{signature}");
        assert!(signature.find("restrict") < signature.find(','), "{signature}");
        assert!(body.contains('['), "{body}");

        let ampere = Target::cuda(CudaDevice::example(86));
        assert!(!source(&*CompileTestLate::kernel(&ampere, 32).code()).contains("griddepcontrol"));
        assert_eq!(without_restrict("float const* const restrict x"), None);
    }

    /// A newer device with an older one's abilities.
    #[test]
    fn devices_stand_for_older_ones() {
        let caps = |capability| *Target::cuda(CudaDevice::H100.like(capability).unwrap()).caps();
        let abilities =
            |caps: Caps| (caps.tensor_cores, caps.warp_groups, caps.overlaps, caps.shared_memory >> 10);
        assert_eq!(abilities(caps(75)), (false, false, false, 64));
        assert_eq!(abilities(caps(80)), (true, false, false, 163));
        assert_eq!(abilities(caps(86)), (true, false, false, 99));
        assert_eq!(abilities(caps(90)), (true, true, true, 227));
        assert_eq!(caps(80).multiprocessors, 132);
        for (device, asked) in
            [(CudaDevice::H100, 100), (CudaDevice::H100, 81), (CudaDevice::example(80), 90)]
        {
            let message = device.like(asked).unwrap_err();
            let own = device.capability;
            assert!(message.starts_with(&format!("it has compute capability {own}, ")), "{message}");
            assert!(message.ends_with(&format!("{own}, not for {asked}")) || asked == 81, "{message}");
        }
    }

    #[test]
    fn code_comes_back_from_disk_under_its_own_name() {
        let folder = std::env::temp_dir().join(format!("lowbit-kernel-cache-{}", std::process::id()));
        let cache = DiskCache::new(&folder, "sm_90a", "cubin");
        let code = Code { entry: "entry".into(), shared: 12, bytes: vec![0, b'\n', 255] };
        assert_eq!(cache.get("kernel 4 bits"), None);
        assert!(!cache.has("kernel 4 bits"));
        cache.put("kernel 4 bits", &code);
        assert!(cache.has("kernel 4 bits") && !cache.has("kernel 5 bits"));
        assert_eq!(cache.get("kernel 4 bits"), Some(code));
        assert_eq!(cache.get("kernel 5 bits"), None);
        assert_eq!(DiskCache::new(&folder, "sm_80", "cubin").get("kernel 4 bits"), None);
        let path = cache.path("kernel 4 bits");
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(cache.get("kernel 4 bits"), None, "{cut} bytes");
        }
        let zeros = [&whole[..whole.len() - 3], &[0; 3]].concat();
        std::fs::write(&path, zeros).unwrap();
        assert_eq!(cache.get("kernel 4 bits"), None);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
