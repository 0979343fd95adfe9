//! Qwen3: Llama's block with RMSNorm on each query and key head.
//! Source: transformers 5 `models/qwen3`; mlx-lm 0.32 `models/qwen3.py`.

use super::{Architecture, Loaded, ModelType, TiedByDefault, is_extra, text_model, window};
use crate::keys::{BASE, DECODER, GGUF, Key};
use crate::layers::{
    Attention, AttentionConfig, Decoder, DecoderConfig, Feedforward, Mixer, Mlp, PreNormBlock,
};
use crate::names::{ATTENTION, FFN_NORM, HEAD_NORMS, MLP, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const QWEN3: Architecture = Architecture {
    model_types: &[ModelType { name: "qwen3", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "qwen3",
    gguf_keys: &[GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, &MLP, &[FFN_NORM]],
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    load,
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

fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    let full = attention(config, weights, &decoder)?;
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    let block = |index: usize, weights: &Weights<'_>| {
        let mixer =
            Mixer::Attention(Attention::load(weights, &windowed(config, &decoder, &full, index)?)?.into());
        let mlp = Mlp::load(weights, MLP, decoder.hidden_size, intermediate_size)?;
        PreNormBlock::load(weights, &decoder, FFN_NORM, mixer, Feedforward::Dense(mlp.into()))
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}

/// Attention with norms of the heads, as all of Qwen3 has it.
pub(super) fn attention(
    config: &Config<'_>,
    weights: &Weights<'_>,
    decoder: &DecoderConfig,
) -> Result<AttentionConfig, ModelError> {
    let plain = AttentionConfig::new(config, weights, decoder.hidden_size, RopeLayout::HalfSplit)?;
    Ok(AttentionConfig { head_norm: Some(decoder.rms_norm_eps), ..plain })
}

/// The same for layer `index`: with the window where `layer_types`, or without it `max_window_layers`, says so.
fn windowed(
    config: &Config<'_>,
    decoder: &DecoderConfig,
    full: &AttentionConfig,
    index: usize,
) -> Result<AttentionConfig, ModelError> {
    if config.is_gguf() {
        return Ok(full.clone());
    }
    let window = match config.flag("use_sliding_window", false)? {
        true => window(config)?,
        false => None,
    };
    let kinds = &["full_attention", "sliding_attention"];
    let sliding = match config.layer_type(index, decoder.num_hidden_layers, kinds)? {
        Some(kind) => kind == "sliding_attention",
        None => window.is_some() && index >= config.optional_size("max_window_layers", "")?.unwrap_or(0),
    };
    let sliding_window = match (sliding, window) {
        (true, None) => {
            let key = format!("layer_types[{index}]");
            let want = "use_sliding_window is false, or sliding_window null";
            return Err(config.refuse(&key, "sliding_attention", want));
        }
        (true, window) => window,
        (false, _) => None,
    };
    Ok(AttentionConfig { sliding_window, ..full.clone() })
}
