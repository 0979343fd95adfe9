//! Tests of whole conversions.

mod support;

mod convert;
mod gguf;
mod gguf_sources;
mod gpt_oss;
mod learn;
mod learn_blocks;
mod learn_gguf;
mod learn_gpu;
mod learn_targets;
mod makers;
mod mlx_sources;
mod routers;
mod same_computation;
mod target_bpw;
