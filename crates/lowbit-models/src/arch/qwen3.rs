//! Qwen3: Llama's block with RMSNorm on each query and key head.
//! Source: transformers 5 `models/qwen3`; mlx-lm 0.32 `models/qwen3.py`.

use super::biases::BY_FLAGS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, switched_window};
use crate::keys::{BASE, DECODER, GGUF, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, HEAD_NORMS, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const QWEN3: Architecture = Architecture {
    model_types: &[ModelType { name: "qwen3", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "qwen3",
    gguf_keys: &[GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion::PLAIN,
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::size("num_key_value_heads", 32),
    Key::size("head_dim", 128),
    Key::size("max_position_embeddings", 32768),
    Key::flag("attention_bias", false),
    Key::flag("use_sliding_window", false),
    Key::size("sliding_window", 4096),
    Key::size("max_window_layers", 28),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
];

const GGUF_KEYS: &[Key] = &[Key::required("feed_forward_length")];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let full = attention(config, weights, &sizes)?;
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        let sliding_window = layer_window(config, layers, index)?;
        Ok(AttentionConfig { sliding_window, ..full.clone() })
    })
}

/// Attention with norms of the heads, as all of Qwen3 has it.
pub(super) fn attention(
    config: &Config<'_>,
    weights: &Weights<'_>,
    sizes: &DecoderConfig,
) -> Result<AttentionConfig, ModelError> {
    let plain = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    Ok(AttentionConfig { head_norm: Some(sizes.rms_norm_eps), ..plain })
}

/// The window of layer `index`, where `layer_types`, or without it `max_window_layers`, says that
/// it has one.
pub(super) fn layer_window(
    config: &Config<'_>,
    layers: usize,
    index: usize,
) -> Result<Option<usize>, ModelError> {
    switched_window(config, layers, index, || {
        Ok(index >= config.optional_size("max_window_layers", "")?.unwrap_or(0))
    })
}
