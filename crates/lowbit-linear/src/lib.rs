//! Linear layers of low-bit language models, and all that a product with a quantised weight reads,
//! makes and learns: norms, gates and sums, the routing of experts, gradients, losses and Adam.
//! `lowbit-kernels` exports these ops beside those that mix tokens.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod ops;
#[cfg(test)]
#[path = "../../lowbit-device/src/testing/mod.rs"]
mod testing;

#[cfg(feature = "gpu")]
use lowbit_device::gpu;
use lowbit_device::{Cpu, Device, KernelError, QuantizedTensor, Tensor, bench, simd};
// Tiles of bf16 widen and round.
#[cfg(any(test, target_arch = "x86_64"))]
use lowbit_device::cast;
use lowbit_device::{buffer, gamma, gemm, inputs, panels, random};

#[cfg(feature = "gpu")]
inventory::submit!(gpu::compile::Sources(gpu::launch::sources!()));
