//! GPUs: kernels are written once, in CubeCL, and launched through an encoder over two drivers. Nothing here
//! names an op.
//!
//! | file | holds |
//! |---|---|
//! | `compile.rs` | a kernel to CUDA C++, SPIR-V or MSL, without a device; the disk cache |
//! | `encoder.rs` | what ops see: memory, dispatches, captured passes |
//! | `cuda.rs`, `nvrtc.rs`, `cublas.rs` | CUDA, its compiler and its dense products through cudarc, loaded when first used |
//! | `wgpu.rs` | Vulkan and Metal through cubecl-wgpu |
//! | `layout.rs`, `decode.rs` | how weights lie on a GPU, and how kernels decode them |
//! | `float.rs`, `key.rs`, `math.rs` | how kernels read, write and order floats; functions of them |
//! | `ptx.rs` | what kernels for CUDA's tensor cores share of PTX |
//! | `rows.rs`, `sequences.rs` | how cubes take rows; where the tokens of several sequences are |
//! | `copy.rs` | copies and casts |

#[cfg(feature = "gpu")]
pub(crate) mod compile;
#[cfg(feature = "gpu")]
pub(crate) mod copy;
#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod decode;
#[cfg(feature = "gpu")]
mod encoder;
#[cfg(feature = "gpu")]
pub(crate) mod float;
#[cfg(feature = "gpu")]
pub(crate) mod key;
#[cfg(feature = "gpu")]
pub(crate) mod layout;
#[cfg(feature = "gpu")]
pub(crate) mod math;
#[cfg(feature = "cuda")]
pub(crate) mod nvrtc;
#[cfg(feature = "gpu")]
pub(crate) mod ptx;
#[cfg(feature = "gpu")]
pub(crate) mod rows;
#[cfg(feature = "gpu")]
pub(crate) mod sequences;
#[cfg(all(test, feature = "gpu"))]
pub(crate) mod tests;
#[cfg(any(feature = "vulkan", feature = "metal"))]
mod wgpu;

#[cfg(feature = "cuda")]
pub use cuda::CudaOptions;
#[cfg(feature = "cuda")]
pub(crate) use encoder::Dense;
#[cfg(feature = "gpu")]
pub(crate) use encoder::{CUBES, Dispatch, Memory, Pending};
#[cfg(feature = "gpu")]
pub use encoder::{Gpu, Pass};

/// A GPU and its queue. This build has none: the features `cuda`, `vulkan` and `metal` compile them in.
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
}

/// What a GPU captured. This build has none.
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
