//! One folder per op:
//!
//! | file or folder | holds |
//! |---|---|
//! | `mod.rs` | the contract and the checks |
//! | `cpu`, `gpu`, `cuda` | the implementations: on the CPU, on every GPU, on NVIDIA's alone |
//! | `gradient` | the derivatives |
//! | `policy.rs`, `plan.rs` | the choice among several kernels |
//! | `reference.rs` | the formula in f64, with which tests compare |
//! | `tests.rs`, `gpu_tests.rs` | the tests |
//! | `bench.rs` | the benchmark cases, which register themselves |
//!
//! An op has those that it needs: one that is made of another op, or that runs on the CPU alone,
//! has fewer.

pub mod adam;
pub mod add;
pub mod add_rms_norm;
pub mod combine_experts;
pub mod copy_rows;
pub mod dequant_gather;
pub mod distillation_loss;
pub mod distillation_loss_top_k;
pub mod elementwise;
pub mod gather_qmm;
pub mod glu;
pub mod grow;
pub mod matmul;
pub mod mul;
pub mod qdq;
pub mod quantized_matmul;
pub mod rms_norm;
pub mod softcap;
pub mod sum_rows;

pub use adam::{Adam, AdamStep, adam, adam_slices};
pub use add::add;
pub use add_rms_norm::{AddRmsNormGradient, add_rms_norm, add_rms_norm_backward};
pub use combine_experts::{CombineExpertsGradient, combine_experts, combine_experts_backward};
pub use copy_rows::copy_rows;
pub use dequant_gather::{dequant_gather, dequant_gather_backward_scales, dequant_gather_backward_values};
pub use distillation_loss::{
    DistillationLoss, DistillationTarget, LogitFunction, OutputDistillation, OutputDistillationGradient,
    distillation_loss, output_distillation,
};
pub use distillation_loss_top_k::{TopKTargets, distillation_loss_top_k, top_k_targets};
pub use gather_qmm::{
    gated_experts, gather_qmm, gather_qmm_backward_scales, gather_qmm_backward_weight, gather_qmm_backward_x,
    streams_experts,
};
pub use glu::{Gate, GluGradient, glu, glu_backward};
pub use grow::grow;
pub use matmul::matmul;
pub use mul::{MulGradient, mul, mul_backward};
pub use qdq::{Qdq, qdq_backward_biases, qdq_backward_scales, qdq_forward, qdq_init};
pub use quantized_matmul::{
    AddRmsNorm, Input, Norm, Operand, ScalesGradient, WeightGradient, WeightPart, gated_mlp,
    quantized_matmul, quantized_matmul_and_sum, quantized_matmul_backward_scales,
    quantized_matmul_backward_weight, quantized_matmul_backward_x, quantized_matmul_each,
    quantized_matmul_glu, quantized_matmul_parts, quantized_matmul_to,
};
pub use rms_norm::{
    GatedRmsNormGradient, RmsNormGradient, gated_rms_norm, gated_rms_norm_backward, rms_norm,
    rms_norm_backward,
};
pub use softcap::{softcap, softcap_backward};
pub use sum_rows::sum_rows;

pub(crate) use lowbit_device::{Check, concat_rows, narrow};

#[cfg(test)]
pub(crate) use crate::testing;
