//! Every kernel, compiled for every language without a device: one that no longer compiles fails here by name.

#[cfg(feature = "cuda")]
use super::compile::CudaDevice;
use super::compile::{self, Target};
use crate::KernelError;
use cubecl_core::prelude::CubeKernel;
use rayon::prelude::*;

/// CUDA as tests use it. `CUDA_HEADERS` names the folder that has `cuda_fp16.h`.
#[cfg(feature = "cuda")]
pub(crate) fn options() -> super::CudaOptions {
    let headers = std::env::var("CUDA_HEADERS").expect("CUDA_HEADERS names the folder with cuda_fp16.h");
    super::CudaOptions { cache: None, headers: headers.into() }
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

/// Compiles all kernels for `target`, each with its place in the list, and fails with the names of those that `compile`
/// refuses.
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

#[cfg(feature = "metal")]
#[test]
fn every_kernel_compiles_to_msl() {
    all(&Target::offline(32, 4).on_metal(), |_, kernel| {
        let source = compile::msl(kernel)?;
        let name = compile::name(kernel);
        assert!(source.text.contains("[[kernel]]"), "{name}");
        // Metal takes floats for finite by default.
        assert!(source.text.contains("{\n#pragma METAL fp math_mode(safe)\n"), "{name}:\n{}", source.text);
        Ok(())
    });
}

/// Needs clang. It compiles what no test runs, too.
#[cfg(feature = "msl")]
#[test]
fn every_kernel_compiles_in_clang() {
    all(&Target::offline(32, 4).on_metal(), |_, kernel| super::msl::compile(kernel));
}

#[cfg(feature = "vulkan")]
#[test]
fn every_kernel_compiles_to_spirv() {
    for plane in [8, 32, 64] {
        all(&Target::offline(plane, 4), |_, kernel| {
            assert_eq!(compile::spirv(kernel)?[0], 0x0723_0203, "{}", compile::name(kernel));
            Ok(())
        });
    }
}

/// Needs NVRTC on the loader's path. Where `KERNEL_CODE` names a folder, each kernel's source and machine code are left
/// there under its place in the list, with one name for all entries, so that `tools/compare_kernels` can compare those of
/// two commits.
#[cfg(feature = "cuda")]
#[test]
fn every_kernel_compiles_to_machine_code() {
    let headers = options().headers;
    let folder = std::env::var_os("KERNEL_CODE").map(std::path::PathBuf::from);
    all(&Target::cuda(CudaDevice::H100), |at, kernel| {
        let source = compile::cuda(kernel)?;
        let name = compile::name(kernel);
        let text = source.text.replace(&source.entry, "kernel_entry");
        let code = super::cuda::nvrtc::compile(&name, &text, "sm_90a", &headers)?;
        assert!(code.starts_with(b"\x7fELF"), "{name}");
        if let Some(folder) = &folder {
            let file = folder.join(format!("{at:04}"));
            std::fs::write(file.with_extension("cu"), format!("// {name}\n{text}")).unwrap();
            std::fs::write(file.with_extension("cubin"), code).unwrap();
        }
        Ok(())
    });
}
