//! Qwen3.5 (and 3.6), dense and with experts: Qwen3-Next's blocks with the projections apart.
//! Source: transformers 5 `models/{qwen3_5,qwen3_5_moe}`; llama.cpp `src/models/{qwen35,qwen35moe}.cpp`.

use super::qwen3_next::Hybrid;
use super::{Architecture, Loaded, is_extra, text_model};
use crate::layers::{Block, Decoder, DecoderConfig, Feedforward, Mlp, MoeConfig, SparseMoe};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::HeadMap;

pub const QWEN3_5: Architecture =
    Architecture { model_types: &["qwen3_5", "qwen3_5_text"], gguf: "qwen35", load: load_dense };

pub const QWEN3_5_MOE: Architecture =
    Architecture { model_types: &["qwen3_5_moe", "qwen3_5_moe_text"], gguf: "qwen35moe", load: load_moe };

fn load_dense(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    load(config, weights, |weights, decoder| {
        let mlp = Mlp::load(weights, "mlp.", "", decoder.hidden_size, intermediate_size)?;
        Ok(Feedforward::Dense(mlp.into()))
    })
}

fn load_moe(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let moe = MoeConfig::new(config, true)?;
    load(config, weights, |weights, decoder| {
        Ok(Feedforward::Sparse(SparseMoe::load(weights, &moe, decoder.hidden_size)?.into()))
    })
}

fn load(
    config: &Config<'_>,
    weights: &Weights<'_>,
    feedforward: impl Fn(&Weights<'_>, &DecoderConfig) -> Result<Feedforward, ModelError>,
) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    // The GGUF converter reorders value heads so that they tile the key heads.
    let head_map = if config.is_gguf() { HeadMap::Tiled } else { HeadMap::Grouped };
    let hybrid = Hybrid::new(config, weights, &decoder, head_map)?;
    let block = |index: usize, weights: &Weights<'_>| {
        let mixer = hybrid.mixer(config, weights, index)?;
        let names = ("post_attention_norm", hybrid.offset);
        Block::load(weights, &decoder, names, mixer, feedforward(weights, &decoder)?)
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, hybrid.offset, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}
