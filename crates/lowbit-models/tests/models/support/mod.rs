//! Helpers that the tests of whole models share.
#![allow(dead_code)] // Each test uses its part.

use lowbit_files::Checkpoint;
use lowbit_formats::FloatType;
use lowbit_kernels::Device;
use lowbit_kernels::ops::CacheType;
use std::path::{Path, PathBuf};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Vulkan's device, which a software driver gives everywhere, or what `LOWBIT_GPU` names: CUDA's
/// with the kernels of `LOWBIT_CUDA_ARCH`, as in 80, if that is set.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
pub fn gpu() -> Device {
    let name = std::env::var("LOWBIT_GPU").unwrap_or_else(|_| "vulkan".into());
    match name.as_str() {
        #[cfg(feature = "cuda")]
        "cuda" => {
            let home = std::env::var_os("CUDA_HOME").unwrap_or_else(|| "/usr/local/cuda".into());
            let architecture = std::env::var("LOWBIT_CUDA_ARCH").ok();
            let architecture = architecture.map(|value| value.parse().expect("LOWBIT_CUDA_ARCH is a number"));
            let options = lowbit_kernels::gpu::CudaOptions::new([home]).with_architecture(architecture);
            Device::cuda(0, &options).expect("a CUDA device")
        }
        #[cfg(feature = "vulkan")]
        "vulkan" => {
            // One for all threads, with the kernels that other tests' processes compiled.
            static VULKAN: std::sync::LazyLock<Device> = std::sync::LazyLock::new(|| {
                let cache = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/kernels");
                let options = lowbit_kernels::gpu::VulkanOptions::default().with_cache(cache);
                Device::vulkan(&options).expect("a Vulkan driver, such as Mesa's lavapipe")
            });
            VULKAN.clone()
        }
        #[cfg(feature = "metal")]
        "metal" => Device::metal().expect("a Metal device"),
        // Metal's kernels on the processor.
        #[cfg(feature = "msl")]
        "msl" => Device::msl(),
        _ => panic!("LOWBIT_GPU is {name}, which this build does not have"),
    }
}

/// True if it is software that stands for a GPU: whole models take it seconds for each token.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
pub fn is_software(device: &Device) -> bool {
    matches!(device, Device::Gpu(gpu) if gpu.is_software())
}

/// [`gpu`] without the kernels that are kept on the disk.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
pub fn gpu_that_keeps_nothing() -> Device {
    match gpu() {
        #[cfg(feature = "vulkan")]
        device if device.to_string() == "vulkan" => {
            Device::vulkan(&Default::default()).expect("there is one")
        }
        device => device,
    }
}

pub fn load(path: &Path, device: &Device, activations: FloatType) -> crate::Model {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let target = crate::Target::new(device, Some(activations)).unwrap().with_exact(true);
    crate::Model::load_for(&checkpoint, target).unwrap_or_else(|error| panic!("{error}"))
}

/// For gradients.
pub fn load_to_learn(path: &Path, device: &Device, activations: FloatType) -> crate::Model {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let target = crate::Target::for_gradients(device, Some(activations)).unwrap();
    crate::Model::load_for(&checkpoint, target).unwrap_or_else(|error| panic!("{error}"))
}

/// As [`load`] in f32, with keys and values cached in a type of their own.
pub fn load_with_cache(path: &Path, device: &Device, cache: impl Into<CacheType>) -> crate::Model {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let target = crate::Target::new(device, Some(FloatType::F32)).unwrap().with_exact(true);
    let target = target.with_cache(cache.into());
    crate::Model::load_for(&checkpoint, target).unwrap_or_else(|error| panic!("{error}"))
}

/// Ids of the demo model's vocabulary.
pub const PROMPT: [u32; 40] = [
    523, 88, 1020, 7, 311, 4096, 17, 902, 2048, 33, 5, 640, 77, 8100, 254, 19, 3111, 61, 908, 12, 400, 733,
    2, 1555, 96, 4711, 320, 21, 58, 640, 1001, 3, 77, 912, 6000, 41, 8, 230, 519, 11,
];
