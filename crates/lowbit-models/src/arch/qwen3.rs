//! Qwen3: Llama's block with RMSNorm on each query and key head.
//! Source: transformers 5 `models/qwen3`; mlx-lm 0.32 `models/qwen3.py`.

use super::{Architecture, Loaded, is_extra, text_model};
use crate::layers::{Attention, AttentionConfig, Block, Decoder, DecoderConfig, Feedforward, Mixer, Mlp};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const QWEN3: Architecture = Architecture { model_types: &["qwen3"], gguf: "qwen3", load };

fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    let full = attention(config, weights, &decoder)?;
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    let block = |index: usize, weights: &Weights<'_>| {
        let mixer = Mixer::Attention(Attention::load(weights, &windowed(config, &full, index)?)?.into());
        let mlp = Mlp::load(weights, "mlp.", "", decoder.hidden_size, intermediate_size)?;
        Block::load(weights, &decoder, ("ffn_norm", false), mixer, Feedforward::Dense(mlp.into()))
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, false, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}

/// Attention as all of Qwen3 has it.
pub(super) fn attention(
    config: &Config<'_>,
    weights: &Weights<'_>,
    decoder: &DecoderConfig,
) -> Result<AttentionConfig, ModelError> {
    let plain = AttentionConfig::new(config, weights, decoder.hidden_size, RopeLayout::HalfSplit)?;
    Ok(AttentionConfig { head_norm: Some((decoder.rms_norm_eps, false)), ..plain })
}

/// The same for layer `index`: with the window where `layer_types` says so.
pub(super) fn windowed(
    config: &Config<'_>,
    full: &AttentionConfig,
    index: usize,
) -> Result<AttentionConfig, ModelError> {
    let sliding = match config.layer_type(index)? {
        Some(kind) => kind == "sliding_attention",
        None => config.flag("use_sliding_window", false)? && index >= config.size("max_window_layers", "")?,
    };
    let sliding_window = if sliding { Some(config.size("sliding_window", "")?) } else { None };
    Ok(AttentionConfig { sliding_window, ..full.clone() })
}
