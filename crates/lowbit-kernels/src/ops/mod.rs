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
pub mod argmax;
pub mod attention;
pub mod causal_conv1d;
mod check;
pub mod combine_experts;
pub mod concat;
pub mod copy_rows;
pub mod delta_gates;
pub mod dequant_gather;
pub mod distillation_loss;
pub mod distillation_loss_top_k;
mod elementwise;
pub mod gated_delta_rule;
pub mod gather_qmm;
pub mod glu;
pub mod grow;
pub mod kv_append;
pub mod kv_gather;
pub mod l2_norm;
pub mod logit_bias;
pub mod logit_mask;
pub mod matmul;
pub mod mul;
pub mod narrow;
pub mod pages;
pub mod qdq;
pub mod quantized_matmul;
pub mod rms_norm;
pub mod rms_norm_rope;
pub mod rope;
pub mod router_top_k;
pub mod sample;
pub mod sum_rows;
#[cfg(test)]
pub(crate) mod testing;

pub use adam::{Adam, AdamStep, adam, adam_slices};
pub use add::add;
pub use add_rms_norm::{AddRmsNormGradient, add_rms_norm, add_rms_norm_backward};
pub use argmax::argmax;
pub use attention::{AttentionGradient, AttentionParams, attention, attention_backward, attention_paged};
pub use causal_conv1d::{
    Activation, CausalConv1dGradient, CausalConv1dInputs, SlotState, causal_conv1d, causal_conv1d_backward,
    causal_conv1d_parts,
};
pub use combine_experts::{CombineExpertsGradient, combine_experts, combine_experts_backward};
pub use concat::{concat, concat_rows};
pub use copy_rows::copy_rows;
pub use delta_gates::{DeltaGatesGradient, delta_gates, delta_gates_backward};
pub use dequant_gather::{dequant_gather, dequant_gather_backward_scales, dequant_gather_backward_values};
pub use distillation_loss::{
    DistillationLoss, DistillationTarget, OutputDistillation, OutputDistillationGradient, distillation_loss,
    output_distillation,
};
pub use distillation_loss_top_k::{TopKTargets, distillation_loss_top_k, top_k_targets};
pub use gated_delta_rule::{
    DecaySign, DeltaGates, Form, GatedDeltaInputs, GatedDeltaRule, GatedDeltaRuleGradient, GatesGradient,
    HeadMap, StateLayout, gated_delta_rule, gated_delta_rule_backward,
};
pub use gather_qmm::{
    gather_qmm, gather_qmm_backward_scales, gather_qmm_backward_weight, gather_qmm_backward_x,
};
pub use glu::{Gate, GluGradient, glu, glu_backward};
pub use grow::grow;
pub use kv_append::kv_append;
pub use kv_gather::kv_gather;
pub use l2_norm::{L2Norm, L2NormConvention, l2_norm, l2_norm_backward};
pub use logit_bias::{LogitBias, logit_bias};
pub use logit_mask::{LogitMask, logit_mask};
pub use matmul::matmul;
pub use mul::{MulGradient, mul, mul_backward};
pub use narrow::narrow;
pub use pages::{PAGE_TOKENS, Pages, PagesMut, gather_pages};
pub use qdq::{Qdq, qdq_backward_biases, qdq_backward_scales, qdq_forward, qdq_init};
pub use quantized_matmul::{
    AddRmsNorm, Input, Norm, Operand, ScalesGradient, WeightGradient, WeightPart, gated_mlp,
    quantized_matmul, quantized_matmul_and_sum, quantized_matmul_backward_scales,
    quantized_matmul_backward_weight, quantized_matmul_backward_x, quantized_matmul_each,
    quantized_matmul_glu, quantized_matmul_parts, quantized_matmul_to,
};
pub use rms_norm::{
    GatedRmsNormGradient, RmsNormGradient, gated_rms_norm, gated_rms_norm_backward, rms_norm,
    rms_norm_backward, rms_norm_to,
};
pub use rms_norm_rope::{
    RmsNormRope, RmsNormRopeGradient, rms_norm_rope, rms_norm_rope_append, rms_norm_rope_append_paged,
    rms_norm_rope_backward,
};
pub use rope::{Llama3, LongRope, Rope, RopeLayout, RopeParams, RopeScaling, Yarn, rope, rope_backward};
pub use router_top_k::{RouterParams, RouterScores, RouterTopKGradient, router_top_k, router_top_k_backward};
pub use sample::{
    DecodeBatch, DecodeState, Drawn, DrawnRows, SampleKind, SampleParams, sample, sample_next, sample_rows,
};
pub use sum_rows::sum_rows;

pub(crate) use check::Check;
