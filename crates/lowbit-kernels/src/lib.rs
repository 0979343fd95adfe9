//! The ops of low-bit language models. Each folder of [`ops`] has an op's contract, its f64
//! reference, its implementations, its tests and its benchmark cases. The crate below them,
//! `lowbit-device` ([`Device`], [`Tensor`], [`QuantizedTensor`], [`simd`], [`gpu`]), names no op.
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

pub mod ops;
#[cfg(test)]
#[path = "../../lowbit-device/src/testing/mod.rs"]
mod testing;
#[cfg(test)]
mod tests;

pub use lowbit_device::{
    Cpu, Device, DevicePlan, Element, KernelError, QuantizedTensor, Tensor, bench, gpu, simd,
};
// Tiles of bf16 keep x there.
#[cfg(any(test, target_arch = "x86_64"))]
use lowbit_device::buffer;
use lowbit_device::{cast, gamma, gemm, inputs, random, scan};

#[cfg(feature = "gpu")]
inventory::submit!(gpu::compile::Sources(gpu::launch::sources!()));

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
