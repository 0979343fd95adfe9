//! Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and experts with a shared one whose gate is a
//! sigmoid. Source: transformers 5.24 `models/qwen2_moe`; mlx-lm 0.32 `models/qwen2_moe.py`;
//! llama.cpp `src/models/qwen2moe.cpp`.

use super::biases::{Biases, Promise, QKV};
use super::qwen3_moe::feedforward;
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Flag, Float, Int};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, Key};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms, LayerSpec, MixerSpec, MoeConfig,
};
use crate::names::{self, ATTENTION, FFN_NORM, INPUT_NORM, MLP, SHARED_EXPERT, SHARED_EXPERT_GATE, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const QWEN2_MOE: Architecture = Architecture {
    model_types: &[ModelType { name: "qwen2_moe", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "qwen2moe",
    gguf_keys: &[GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, names::EXPERTS, &SHARED_EXPERT, &[SHARED_EXPERT_GATE, FFN_NORM]],
    aliases: &[],
    biases: &[Biases { promise: Promise::Flag("qkv_bias"), modules: QKV }],
    conversion: Conversion { mlx_lm: MlxLm::UNSCALED_UNTIED, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    // Of the layers without experts.
    Key::optional("intermediate_size"),
    Key::size("num_key_value_heads", 16),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 32768),
    Key::disputed("rope_theta", Float(10000.0)),
    Key::flag("qkv_bias", true),
    Key::only("use_sliding_window", &[Flag(false)]),
    Key::no_effect("sliding_window"),
    Key::no_effect("max_window_layers"),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
    Key::size("num_experts", 60),
    Key::size("num_experts_per_tok", 4),
    Key::size("moe_intermediate_size", 1408),
    Key::size("shared_expert_intermediate_size", 5632),
    // mlx-lm does not divide, whatever this says.
    Key::flag("norm_topk_prob", false),
    Key::size("decoder_sparse_step", 1),
    Key::optional("mlp_only_layers"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("feed_forward_length"),
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_feed_forward_length"),
    Key::required("expert_shared_feed_forward_length"),
    // llama.cpp computes softmax without a norm for this model, whatever the file says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(false)]),
    Key::only("expert_gating_func", &[Int(1)]),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let attention = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let moe = MoeConfig::new(config, false)?;
    let layers = sizes.num_hidden_layers;
    decoder(sizes, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: feedforward(config, weights, &moe, index)?,
        })
    })
}
