//! Every kernel, compiled for every language without a device: one that no longer compiles fails
//! here by name.

use cubecl_core::prelude::CubeKernel;
#[cfg(feature = "cuda")]
use cubecl_core::prelude::KernelId;
use lowbit_device::KernelError;
#[cfg(feature = "vulkan")]
use lowbit_device::gpu::caps::Matrices;
use lowbit_device::gpu::compile::{self, Target};
#[cfg(feature = "cuda")]
use lowbit_device::gpu::compile::{CudaDevice, Source};
#[cfg(feature = "cuda")]
use lowbit_device::gpu::cuda::nvrtc::{Architecture, Compiler};
#[cfg(feature = "vulkan")]
use lowbit_formats::FloatType;
use rayon::prelude::*;
#[cfg(feature = "cuda")]
use std::collections::HashMap;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use std::collections::HashSet;
#[cfg(feature = "cuda")]
use std::sync::Arc;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
use std::sync::Mutex;
#[cfg(feature = "vulkan")]
use std::sync::atomic::{AtomicUsize, Ordering};

/// CUDA as tests use it: with the compiler and headers in `CUDA_HOME`, a toolkit or a folder of
/// Python's packages, and with the kernels of the compute capability `LOWBIT_CUDA_ARCH`, as in 80.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_options() -> lowbit_device::gpu::CudaOptions {
    let architecture = std::env::var("LOWBIT_CUDA_ARCH").ok();
    let architecture =
        architecture.map(|value| value.parse().expect("LOWBIT_CUDA_ARCH is a number, as in 80"));
    lowbit_device::gpu::CudaOptions::new([
        std::env::var_os("CUDA_HOME").unwrap_or_else(|| "/usr/local/cuda".into())
    ])
    .with_architecture(architecture)
}

/// A function that lists kernels for a target. Each op registers its own.
pub(crate) struct Kernels(pub fn(&Target) -> Vec<Box<dyn CubeKernel>>);
inventory::collect!(Kernels);

/// All kernels of all ops.
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let kernels: Vec<_> = inventory::iter::<Kernels>.into_iter().flat_map(|list| (list.0)(target)).collect();
    assert!(!kernels.is_empty());
    kernels
}

/// Compiles all kernels for `target`, each with its place in the list, and fails with the names of
/// those that `compile` refuses.
fn all(target: &Target, compile: impl Fn(usize, &dyn CubeKernel) -> Result<(), KernelError> + Sync) {
    let kernels = kernels(target);
    let refusals: Vec<String> = kernels
        .par_iter()
        .enumerate()
        .filter_map(|(at, kernel)| compile(at, &**kernel).err())
        .map(|error| error.to_string())
        .collect();
    assert!(refusals.is_empty(), "{} of {}:\n{}", refusals.len(), kernels.len(), refusals.join("\n\n"));
}

/// With the feature `msl` clang reads it, too.
#[cfg(feature = "metal")]
#[test]
fn every_kernel_compiles_to_msl() {
    all(&Target::apple(), |_, kernel| {
        let source = compile::msl(kernel)?;
        let name = compile::name(kernel);
        assert!(source.text.contains("[[kernel]]"), "{name}");
        // Metal takes floats for finite by default.
        assert!(source.text.contains("{\n#pragma METAL fp math_mode(safe)\n"), "{name}:\n{}", source.text);
        #[cfg(feature = "msl")]
        lowbit_device::gpu::msl::check(&source).map_err(|problem| KernelError::Kernel { name, problem })?;
        Ok(())
    });
}

/// SPIR-V for a device that promises no more than Vulkan 1.3 does, with the shared memory that
/// CubeCL lays out.
#[cfg(feature = "vulkan")]
fn words(kernel: &dyn CubeKernel) -> Result<Vec<u32>, KernelError> {
    let mut options =
        cubecl_core::WgpuCompilationOptions { supports_vulkan_compiler: true, ..Default::default() };
    options.vulkan.max_spirv_version = (1, 6);
    options.vulkan.max_vector_size = 4;
    options.vulkan.push_constant_size = 128;
    options.vulkan.supports_explicit_smem = true;
    Ok(bytemuck::pod_collect_to_vec(&compile::spirv(kernel, &options)?.bytes))
}

/// For each size of planes the kernels that are chosen there. The size itself decides nothing of a
/// kernel but what its compile-time values say, so that a kernel of several sizes is compiled once.
#[cfg(feature = "vulkan")]
#[test]
fn every_kernel_compiles_to_spirv() {
    let known = Mutex::new(HashSet::new());
    for plane in [8, 32, 64] {
        all(&Target::offline(plane, 4), |_, kernel| {
            if known.lock().unwrap().insert(kernel.id()) {
                assert_eq!(words(kernel)?[0], 0x0723_0203, "{}", compile::name(kernel));
            }
            Ok(())
        });
    }
}

/// Those that multiply cooperative matrices, as an NVIDIA GPU, an AMD GPU and an Intel GPU get
/// them: with the instruction `OpCooperativeMatrixMulAddKHR`. The others are as without matrices.
#[cfg(feature = "vulkan")]
#[test]
fn every_kernel_with_matrices_compiles_to_spirv() {
    const HEADER: usize = 5;
    const MULTIPLY: u32 = 4459;
    let opcodes = |words: &[u32]| {
        let (mut at, mut all) = (HEADER, HashSet::new());
        while let Some(word) = words.get(at) {
            all.insert(word & 0xffff);
            at += (word >> 16).max(1) as usize;
        }
        all
    };
    for (plane, m, dtypes) in [
        (32, 16, &[FloatType::F16, FloatType::BF16][..]),
        (64, 16, &[FloatType::F16]),
        (32, 8, &[FloatType::F16]),
    ] {
        let target = Target::offline(plane, 4).with_matrices(Matrices { m, n: 16, k: 16 }, dtypes);
        let compiled = AtomicUsize::new(0);
        all(&target, |_, kernel| {
            let name = compile::name(kernel);
            if name.contains("Cmma") {
                assert!(opcodes(&words(kernel)?).contains(&MULTIPLY), "{name}");
                compiled.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        // Crates with such kernels have every cut of each type.
        let least = if env!("CARGO_PKG_NAME") == "lowbit-device" { 0 } else { dtypes.len() * 3 };
        assert!(compiled.into_inner() >= least, "every cut of each type");
    }
}

/// Every generation of CUDA devices with tensor cores for bf16: Ampere, Ada, Hopper and Blackwell.
#[cfg(feature = "cuda")]
const CAPABILITIES: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// PTX that one generation alone has.
#[cfg(feature = "cuda")]
const OWN_INSTRUCTIONS: [&str; 2] = ["wgmma", "setmaxnreg"];

/// For each of [`CAPABILITIES`] the kernels that are chosen there. Needs NVRTC and its headers. A
/// program that compiled for an older device compiles for certain, and is not compiled again: all
/// but those with [`OWN_INSTRUCTIONS`] are compiled without the instructions that no later device
/// has.
#[cfg(feature = "cuda")]
#[test]
fn every_kernel_compiles_to_machine_code() {
    if let Some(folder) = std::env::var_os("KERNEL_CODE") {
        return leave_code(std::path::Path::new(&folder));
    }
    let proven = Mutex::new(HashSet::new());
    // CubeCL is told of the device only whether launches overlap.
    let sources = [false, true].map(|_| Mutex::new(HashMap::<KernelId, Arc<Source>>::new()));
    for capability in CAPABILITIES {
        let [portable, own] = [false, true].map(|own_instructions| {
            let architecture = Architecture { capability, driver: (u32::MAX, 0), own_instructions };
            Compiler::new(&cuda_options().places, architecture).unwrap()
        });
        let device = CudaDevice::example(capability);
        let target = Target::cuda(device);
        let sources = &sources[usize::from(target.overlaps())];
        all(&target, |_, kernel| {
            let id = kernel.id();
            let known = sources.lock().unwrap().get(&id).cloned();
            let source = match known {
                Some(source) => source,
                None => {
                    let source = Arc::new(compile::cuda(kernel)?);
                    sources.lock().unwrap().insert(id, source.clone());
                    source
                }
            };
            let name = format!("sm_{capability}: {}", compile::name(kernel));
            if source.shared > device.shared_memory {
                let problem = format!("it wants {} bytes of shared memory", source.shared);
                return Err(KernelError::Kernel { name, problem });
            }
            let text = source.text.replace(&source.entry, "kernel_entry");
            let program = program(&text);
            if proven.lock().unwrap().contains(&program) {
                return Ok(());
            }
            let has_own = OWN_INSTRUCTIONS.iter().any(|instruction| text.contains(instruction));
            let code = if has_own { &own } else { &portable }.compile(&name, &text)?;
            assert!(code.starts_with(b"\x7fELF"), "{name}");
            if !has_own {
                proven.lock().unwrap().insert(program);
            }
            Ok(())
        });
    }
}

/// The part of a source that decides whether it compiles, the same for the same kernel on devices
/// with and without launches that overlap: without the instructions that wait for the launch
/// before, with pointers through which all may be written (CubeCL says `const` where it sees that
/// nothing is), and with variables (`v7`) counted as they come (CubeCL's numbers are others each
/// time).
#[cfg(feature = "cuda")]
pub(crate) fn program(source: &str) -> String {
    let wait = format!("asm volatile(\"{}\" :  :  : \"memory\");", compile::OVERLAP);
    let source = source.replace(&wait, "").replace("const* const", "* const").replace("const *", "*");
    let (mut numbers, mut program) = (HashMap::new(), String::with_capacity(source.len()));
    let mut parts = source.split('v');
    program.extend(parts.next());
    for part in parts {
        // `v4` within a word is none, nor is it in PTX, as in `ld.global.v4`.
        let within = program.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '.');
        let (number, rest) = part.split_at(part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len()));
        program.push('v');
        if within || number.is_empty() {
            program.push_str(number);
        } else {
            let next = numbers.len();
            program.push_str(&numbers.entry(number).or_insert(next).to_string());
        }
        program.push_str(rest);
    }
    program
}

/// Leaves each kernel's source and machine code for Hopper, or for [`options`]' architecture, in
/// `folder` under its place in the list, with one name for all entries, so that
/// `tools/compare_kernels` can compare those of two commits.
#[cfg(feature = "cuda")]
fn leave_code(folder: &std::path::Path) {
    let options = cuda_options();
    let device = CudaDevice::example(options.architecture.unwrap_or(CudaDevice::H100.capability));
    let architecture =
        Architecture { capability: device.capability, driver: (u32::MAX, 0), own_instructions: true };
    let compiler = Compiler::new(&options.places, architecture).unwrap();
    all(&Target::cuda(device), |at, kernel| {
        let source = compile::cuda(kernel)?;
        let name = compile::name(kernel);
        let text = source.text.replace(&source.entry, "kernel_entry");
        let file = folder.join(format!("{}-{at:04}", env!("CARGO_PKG_NAME")));
        // A source that is refused is left, too.
        std::fs::write(file.with_extension("cu"), format!("// {name}\n{text}")).unwrap();
        std::fs::write(file.with_extension("cubin"), compiler.compile(&name, &text)?).unwrap();
        Ok(())
    });
}
