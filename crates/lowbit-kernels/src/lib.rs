//! The ops of low-bit language models. Each folder of [`ops`] has an op's contract, its f64
//! reference, its implementations, its tests and its benchmark cases. The modules below the ops
//! ([`Device`], [`Tensor`], [`QuantizedTensor`], [`simd`]) name no op.
//!
//! Another engine calls an op on its own memory through [`Tensor::from_owner`],
//! [`Tensor::from_host_ptr`] and, on a CUDA device, `Tensor::from_cuda_ptr`; the example
//! `foreign_memory` shows all three.
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

pub mod bench;
mod buffer;
mod cast;
mod device;
mod error;
mod foreign;
mod gamma;
mod gemm;
pub mod gpu;
mod inputs;
pub mod ops;
mod panels;
mod pool;
mod quantized;
mod random;
mod scan;
pub mod simd;
mod tensor;

pub use device::{Cpu, Device};
pub use error::KernelError;
pub use quantized::QuantizedTensor;
pub use tensor::{Element, Tensor};

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
