//! Mixtral: Mistral's attention and a mixture of experts in every layer. Source: transformers 5.24
//! `models/mixtral`; mlx-lm 0.32 `models/mixtral.py`; llama.cpp `src/models/llama.cpp`.

use super::llama::ROPE_DIVISORS;
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder, permuted, window};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_DENSE, Key, Role};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MoeConfig,
};
use crate::names::{self, ATTENTION, FFN_NORM, INPUT_NORM, TOP};
use crate::{Config, ModelError, Weights};

pub const MIXTRAL: Architecture = Architecture {
    model_types: &[ModelType { name: "mixtral", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "llama",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, names::EXPERTS, &[FFN_NORM]],
    aliases: &[
        ("mlp.gate", "block_sparse_moe.gate"),
        ("mlp.switch_mlp", "block_sparse_moe.switch_mlp"),
        ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
        ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
        ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
    ],
    biases: &[],
    conversion: Conversion {
        like_llama: true,
        rope_divisors: ROPE_DIVISORS,
        mlx_lm: MlxLm::UNSCALED,
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    // Of an expert.
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(8)),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 131_072),
    Key::disputed("rope_theta", Float(1e6)),
    Key::optional("sliding_window"),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
    Key::size("num_local_experts", 8),
    Key { name: "num_experts", role: Role::Alias("num_local_experts") },
    Key::size("num_experts_per_tok", 2),
    // Of training.
    Key::no_effect("router_jitter_noise"),
];

const GGUF_KEYS: &[Key] = &[Key::required("expert_count"), Key::required("expert_used_count")];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, permuted(config))?;
    if !config.is_gguf() {
        attention.sliding_window = window(config)?;
    }
    let moe = MoeConfig::of(
        config,
        config.size("num_local_experts", "expert_count")?,
        config.size("intermediate_size", "feed_forward_length")?,
    )?;
    let layers = sizes.num_hidden_layers;
    decoder(sizes, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: FeedforwardSpec::Sparse(moe.clone()),
        })
    })
}
