//! Llama 2 and 3, and Mistral: grouped-query attention and SwiGLU, no norms inside.
//! Source: transformers 5 `models/{llama,mistral}`; llama.cpp `src/models/llama.cpp`.

use super::{Architecture, Loaded, is_extra, text_model};
use crate::layers::{Attention, AttentionConfig, Block, Decoder, DecoderConfig, Feedforward, Mixer, Mlp};
use crate::{Config, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const LLAMA: Architecture = Architecture { model_types: &["llama", "mistral"], gguf: "llama", load };

fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    // The GGUF converter permutes q's and k's rows so that pairs are neighbours.
    let layout = if config.is_gguf() { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
    let mut attention = AttentionConfig::new(config, weights, decoder.hidden_size, layout)?;
    attention.sliding_window = config.optional_size("sliding_window", "attention.sliding_window")?;
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    let block = |_: usize, weights: &Weights<'_>| {
        let mixer = Mixer::Attention(Attention::load(weights, &attention)?.into());
        let mlp = Mlp::load(weights, "mlp.", "", decoder.hidden_size, intermediate_size)?;
        Block::load(weights, &decoder, ("ffn_norm", false), mixer, Feedforward::Dense(mlp.into()))
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, false, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}
