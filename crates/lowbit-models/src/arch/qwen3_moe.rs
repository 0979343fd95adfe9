//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers.
//! Source: transformers 5 `models/qwen3_moe`; llama.cpp `src/models/qwen3moe.cpp`.

use super::qwen3::{attention, windowed};
use super::{Architecture, Loaded, is_extra, text_model};
use crate::layers::{
    Attention, Block, Decoder, DecoderConfig, Feedforward, Mixer, Mlp, MoeConfig, SparseMoe,
};
use crate::{Config, ModelError, Weights};

pub const QWEN3_MOE: Architecture = Architecture { model_types: &["qwen3_moe"], gguf: "qwen3moe", load };

fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let decoder = DecoderConfig::new(config, weights)?;
    let full = attention(config, weights, &decoder)?;
    // llama.cpp always normalises here; transformers' default is not to.
    let moe = MoeConfig::new(config, config.is_gguf())?;
    let block = |index: usize, weights: &Weights<'_>| {
        let mixer = Mixer::Attention(Attention::load(weights, &windowed(config, &full, index)?)?.into());
        let feedforward = feedforward(config, weights, &decoder, &moe, index)?;
        Block::load(weights, &decoder, ("ffn_norm", false), mixer, feedforward)
    };
    let model = Decoder::load(weights, &text_model(weights), &decoder, false, block)?;
    weights.finish(|name| is_extra(name, decoder.num_hidden_layers))?;
    Ok((decoder, model))
}

/// Layer `index`'s experts, or the plain MLP that `mlp_only_layers` and `decoder_sparse_step` leave it.
pub(super) fn feedforward(
    config: &Config<'_>,
    weights: &Weights<'_>,
    decoder: &DecoderConfig,
    moe: &MoeConfig,
    index: usize,
) -> Result<Feedforward, ModelError> {
    let sparse = if config.is_gguf() {
        weights.has("", "ffn_gate_inp.weight")
    } else {
        let step = config.optional_size("decoder_sparse_step", "")?.unwrap_or(1).max(1);
        let dense = config.json("mlp_only_layers").and_then(serde_json::Value::as_array);
        let listed =
            dense.is_some_and(|layers| layers.iter().any(|layer| layer.as_u64() == Some(index as u64)));
        !listed && (index + 1).is_multiple_of(step)
    };
    if sparse {
        return Ok(Feedforward::Sparse(SparseMoe::load(weights, moe, decoder.hidden_size)?.into()));
    }
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    Ok(Feedforward::Dense(Mlp::load(weights, "mlp.", "", decoder.hidden_size, intermediate_size)?.into()))
}
