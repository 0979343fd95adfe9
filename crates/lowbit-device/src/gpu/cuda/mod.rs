//! CUDA: the driver, NVIDIA's compiler and its dense products, all loaded when first used, and the
//! PTX that kernels for NVIDIA's hardware are written with. The kernels themselves stand in
//! `ops/<op>/cuda/`.

#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
pub mod nvrtc;
#[allow(missing_docs)] // `#[cube]` makes modules without a word.
pub mod ptx;
#[cfg(feature = "cuda")]
mod toolkit;

#[cfg(feature = "cuda")]
pub use driver::cuda_driver_version;
#[cfg(feature = "cuda")]
pub use nvrtc::try_cuda_compiler;
#[cfg(feature = "cuda")]
pub use toolkit::CudaOptions;
