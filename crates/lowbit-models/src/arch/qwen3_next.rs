//! Qwen3-Next: gated delta nets with gated full attention every fourth layer, and a mixture of experts.
//! Source: transformers 5 `models/qwen3_next`; llama.cpp `src/models/qwen3next.cpp`.

use super::qwen3::attention;
use super::qwen3_moe::feedforward;
use super::{Architecture, Loaded, is_extra, text_model};
use crate::layers::{
    Attention, AttentionConfig, Block, Decoder, DecoderConfig, DeltaNetConfig, GatedDeltaNet, Mixer,
    MoeConfig,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::HeadMap;

pub const QWEN3_NEXT: Architecture = Architecture { model_types: &["qwen3_next"], gguf: "qwen3next", load };

fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    let hybrid = Hybrid::new(config, weights, &decoder, HeadMap::Grouped)?;
    let moe = MoeConfig::new(config, true)?;
    let block = |index: usize, weights: &Weights<'_>| {
        let mixer = hybrid.mixer(config, weights, index)?;
        let feedforward = feedforward(config, weights, &decoder, &moe, index)?;
        Block::load(weights, &decoder, ("post_attention_norm", hybrid.offset), mixer, feedforward)
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, hybrid.offset, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}

/// What Qwen3-Next and Qwen3.5 share: which layers mix how, and how norms are stored.
pub(super) struct Hybrid {
    attention: AttentionConfig,
    delta_net: DeltaNetConfig,
    /// Norms are stored as `w - 1`: so they are in a checkpoint as published, but not in MLX's and GGUF's.
    pub offset: bool,
}

impl Hybrid {
    pub(super) fn new(
        config: &Config<'_>,
        weights: &Weights<'_>,
        decoder: &DecoderConfig,
        head_map: HeadMap,
    ) -> Result<Self, ModelError> {
        let delta_net = DeltaNetConfig::new(config, head_map)?;
        // MLX moves the kernel [C, 1, W] to [C, W, 1] when it adds 1 to the norms; mlx-lm tells them apart so.
        let model = text_model(weights);
        let width = delta_net.linear_conv_kernel_dim;
        let is_raw = |layer: usize| {
            let conv = model.layer(layer).shape("linear_attn.conv1d.weight", "");
            conv.is_some_and(|shape| shape.last() == Some(&width))
        };
        let offset = !config.is_gguf() && (0..decoder.num_hidden_layers).any(is_raw);
        let mut attention = attention(config, weights, decoder)?;
        attention.gated = true;
        attention.head_norm = Some((decoder.rms_norm_eps, offset));
        Ok(Self { attention, delta_net, offset })
    }

    pub(super) fn mixer(
        &self,
        config: &Config<'_>,
        weights: &Weights<'_>,
        index: usize,
    ) -> Result<Mixer, ModelError> {
        let interval =
            config.optional_size("full_attention_interval", "full_attention_interval")?.unwrap_or(4);
        let full = match config.layer_type(index)? {
            Some("full_attention") => true,
            Some("linear_attention") => false,
            Some(other) => {
                return Err(config.refuse(
                    "layer_types",
                    other,
                    "full_attention and linear_attention are supported",
                ));
            }
            None => (index + 1).is_multiple_of(interval.max(1)),
        };
        Ok(match full {
            true => Mixer::Attention(Attention::load(weights, &self.attention)?.into()),
            false => Mixer::DeltaNet(GatedDeltaNet::load(weights, &self.delta_net)?.into()),
        })
    }
}
