//! GPUs: kernels are written once, in CubeCL, and launched through an encoder over three drivers.
//! Nothing here names an op.
//!
//! | file | holds |
//! |---|---|
//! | `compile.rs` | a kernel to CUDA C++, SPIR-V or MSL, without a device; the disk cache |
//! | `caps.rs` | the features of a device that decide which kernels it runs |
//! | `launch.rs` | typed launches: a kernel's arguments by name |
//! | `encoder.rs` | the interface to ops: memory, launches, captured passes |
//! | `dry_run.rs` | the kernels that work needs, to compile them before it |
//! | `cuda/` | CUDA: the driver, the compiler and dense products through cudarc, loaded when first used; PTX |
//! | `vulkan/` | Vulkan through ash, loaded when first used |
//! | `wgpu.rs` | Metal through cubecl-wgpu |
//! | `recording.rs` | the memory of passes that Vulkan and Metal capture |
//! | `msl/` | for tests: Metal's kernels on this machine's processor |
//! | `layout.rs`, `components.rs`, `decode.rs`, `loaded.rs` | the layout of weights on a GPU, and their loading and decoding by kernels |
//! | `float.rs`, `key.rs`, `math.rs` | reading, writing and ordering floats; functions of them |
//! | `rows.rs`, `sequences.rs` | the rows that cubes take; the places of the tokens of several sequences |
//! | `copy.rs` | copies and casts |

#[cfg(feature = "gpu")]
pub mod caps;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod compile;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod components;
#[cfg(feature = "gpu")]
pub mod copy;
#[cfg(feature = "gpu")]
pub mod cuda;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod decode;
#[cfg(feature = "gpu")]
mod dry_run;
#[cfg(feature = "gpu")]
mod encoder;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod float;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod key;
#[cfg(feature = "gpu")]
pub mod launch;
#[cfg(feature = "gpu")]
pub mod layout;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod loaded;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod math;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod matrices;
#[cfg(feature = "msl")]
pub mod msl;
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
mod recording;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod rows;
#[cfg(feature = "gpu")]
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod sequences;
#[cfg(all(test, feature = "cuda"))]
mod tests;
#[cfg(feature = "vulkan")]
mod vulkan;
#[cfg(feature = "metal")]
mod wgpu;

#[cfg(feature = "cuda")]
pub use cuda::{CudaOptions, cuda_driver_version, try_cuda_compiler};
#[cfg(feature = "gpu")]
pub use dry_run::DryRun;
#[cfg(feature = "gpu")]
pub use encoder::{CUBES, Dense, Form, Memory, Pending};
#[cfg(feature = "gpu")]
pub use encoder::{Gpu, Pass};
#[cfg(feature = "vulkan")]
pub use vulkan::VulkanOptions;

/// Starts the threads that repack weights: where that fails, using them would panic.
///
/// # Errors
/// [`KernelError::ThreadPool`](crate::KernelError::ThreadPool).
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
pub fn start_threads() -> Result<(), crate::KernelError> {
    use std::error::Error;
    match rayon::ThreadPoolBuilder::new().build_global() {
        // That the threads are there already has no source.
        Err(error) if error.source().is_some() => {
            Err(crate::KernelError::ThreadPool(std::io::Error::other(error)))
        }
        _ => Ok(()),
    }
}

/// The error of a device of `kind` that was asked for by a number that none of the devices `names`
/// has.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
fn no_such_device(kind: &str, number: usize, names: &[String]) -> crate::KernelError {
    let known = names.iter().enumerate().map(|(index, name)| format!("{kind}:{index} {name}"));
    let known = known.collect::<Vec<_>>().join(", ");
    let known = if known.is_empty() { "none" } else { &known };
    crate::KernelError::NoGpu {
        device: format!("{kind}:{number}"),
        problem: format!("no device has this number; there is {known}"),
    }
}

/// A GPU and its queue. This build has none: the features `cuda`, `vulkan` and `metal` compile them
/// in.
#[cfg(not(feature = "gpu"))]
#[derive(Clone, Debug)]
pub enum Gpu {}

#[cfg(not(feature = "gpu"))]
impl Gpu {
    /// There is no GPU to capture on.
    ///
    /// # Errors
    /// None: there is nothing to call this on.
    pub fn capture(
        &self,
        _: impl FnMut() -> Result<(), crate::KernelError>,
    ) -> Result<Pass, crate::KernelError> {
        match *self {}
    }

    /// There is no GPU that would have a name.
    pub fn product(&self) -> String {
        match *self {}
    }

    /// There is no GPU that could be one.
    pub fn is_software(&self) -> bool {
        match *self {}
    }

    /// There is no GPU that would have memory.
    pub fn total_memory(&self) -> Option<usize> {
        match *self {}
    }

    /// There is no GPU whose kernels could be listed.
    pub fn dry_run(&self) -> DryRun {
        match *self {}
    }

    /// There is no GPU that could list kernels.
    pub fn is_dry_run(&self) -> bool {
        match *self {}
    }

    /// There is no GPU that compiles kernels.
    #[doc(hidden)]
    pub fn compilations(&self) -> usize {
        match *self {}
    }
}

/// The kernels that work on a GPU needs. This build has none.
#[cfg(not(feature = "gpu"))]
#[derive(Clone, Debug)]
pub enum DryRun {}

#[cfg(not(feature = "gpu"))]
impl DryRun {
    /// There is no device.
    pub fn device(&self) -> crate::Device {
        match *self {}
    }

    /// There is nothing to compile.
    ///
    /// # Errors
    /// None: there is nothing to call this on.
    pub fn compile(self, _: impl FnMut(usize, usize)) -> Result<(), crate::KernelError> {
        match self {}
    }
}

/// A captured pass of a GPU. This build has none.
#[cfg(not(feature = "gpu"))]
#[derive(Clone, Debug)]
pub enum Pass {}

#[cfg(not(feature = "gpu"))]
impl Pass {
    /// There is nothing to replay.
    ///
    /// # Errors
    /// None: there is nothing to call this on.
    pub fn replay(&self) -> Result<(), crate::KernelError> {
        match *self {}
    }

    /// There is nothing that it uses.
    pub fn uses(&self, _: &crate::Tensor) -> bool {
        match *self {}
    }
}

#[cfg(not(feature = "gpu"))]
impl std::fmt::Display for Gpu {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {}
    }
}
