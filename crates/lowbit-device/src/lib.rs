//! The ground that lowbit's ops stand on: [`Device`], [`Tensor`] and [`QuantizedTensor`], [`simd`]
//! for the CPU, and [`gpu`], where kernels are written once for CUDA, Vulkan and Metal. Nothing
//! here names an op: those of language models are in `lowbit-kernels`, which exports what a program
//! needs of this crate.
//!
//! Another engine's memory becomes a tensor by [`Tensor::from_owner`], [`Tensor::from_host_ptr`]
//! and, on a CUDA device, `Tensor::from_cuda_ptr`.
//!
//! # Features
//!
//! The default build runs on the CPU and has none of these. Building them needs nothing but Rust;
//! running them needs what the last column says.
//!
//! | feature | brings | needs at run time |
//! |---|---|---|
//! | `cuda` | `Device::cuda`, `Device::cuda_on_stream` | a driver for CUDA 12 or newer; NVRTC and CUDA's headers, see `CudaOptions` |
//! | `vulkan` | `Device::vulkan` | Vulkan 1.3 |
//! | `metal` | `Device::metal` | Metal Shading Language 3.2 (run by clang on a CPU, not on a Mac yet) |
//! | `gpu` | the code that the three share; not for use by itself | |

#![cfg_attr(docsrs, feature(doc_cfg))]

// The code that `#[kernel]` writes, and the tests that other crates include, name this crate from
// outside.
extern crate self as lowbit_device;

pub mod bench;
pub mod buffer;
pub mod cast;
mod check;
mod concat;
mod device;
mod error;
mod foreign;
/// The error of sums in f32.
pub mod gamma;
pub mod gemm;
pub mod gpu;
pub mod inputs;
mod narrow;
pub mod panels;
mod plan;
mod pool;
mod quantized;
/// Reproducible numbers.
pub mod random;
pub mod scan;
pub mod simd;
mod tensor;
#[cfg(test)]
mod testing;

pub use check::Check;
pub use concat::{concat, concat_rows};
pub use device::{Cpu, Device};
pub use error::KernelError;

pub use narrow::narrow;
pub use plan::DevicePlan;
pub use quantized::QuantizedTensor;

pub use tensor::{Element, Tensor};
