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

pub mod argmax;
pub mod attention;
pub mod cache_places;
pub mod cache_rows;
pub mod causal_conv1d;
pub mod delta_gates;
pub mod gated_delta_rule;
pub mod hadamard_transform;
pub mod kv_append;
pub mod kv_gather;
pub mod l2_norm;
pub mod latent_attention;
pub mod logit_bias;
pub mod logit_mask;
pub mod pages;
pub mod rms_norm_rope;
pub mod rope;
pub mod router_top_k;
pub mod sample;
pub mod top_logprobs;

pub use argmax::argmax;
pub use attention::{AttentionGradient, AttentionParams, attention, attention_backward, attention_paged};
pub use cache_places::cache_places;
pub use cache_rows::{CacheType, expand_cache};
pub use causal_conv1d::{
    Activation, CausalConv1dGradient, CausalConv1dInputs, SlotState, causal_conv1d, causal_conv1d_backward,
    causal_conv1d_parts,
};
pub use delta_gates::{
    ChannelDecay, DeltaGatesGradient, StepLimits, channel_gates, delta_gates, delta_gates_backward,
    step_gates,
};
pub use gated_delta_rule::{
    DeltaGates, Form, GatedDeltaInputs, GatedDeltaRule, GatedDeltaRuleGradient, GatesGradient, HeadMap, Rule,
    gated_delta_rule, gated_delta_rule_backward,
};
pub use hadamard_transform::hadamard_transform;
pub use kv_append::{kv_append, kv_append_paged};
pub use kv_gather::kv_gather;
pub use l2_norm::{l2_norm, l2_norm_backward};
pub use latent_attention::{
    LatentAttentionGradient, LatentAttentionParams, latent_attention, latent_attention_backward,
    latent_attention_paged,
};
pub use logit_bias::{LogitBias, logit_bias};
pub use logit_mask::{LogitMask, logit_mask};
pub use pages::{PAGE_TOKENS, Pages, PagesMut, gather_pages};
pub use rms_norm_rope::{
    RmsNormRope, RmsNormRopeGradient, rms_norm_rope, rms_norm_rope_append, rms_norm_rope_append_paged,
    rms_norm_rope_backward,
};
pub use rope::{Llama3, LongRope, Rope, RopeLayout, RopeParams, RopeScaling, Yarn, rope, rope_backward};
pub use router_top_k::{RouterParams, RouterScores, RouterTopKGradient, router_top_k, router_top_k_backward};
pub use sample::{
    DecodeBatch, DecodeState, Drawn, DrawnRows, RowText, SampleKind, SampleParams, sample, sample_next,
    sample_rows,
};
pub use top_logprobs::{LogprobRows, RowLogprobs, top_logprobs};

pub(crate) use lowbit_device::Check;
pub use lowbit_device::{concat, concat_rows, narrow};
#[doc(inline)]
pub use lowbit_linear::ops::*;

#[cfg(test)]
pub(crate) use crate::testing;
