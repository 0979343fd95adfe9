//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers.
//! Source: transformers 5 `models/qwen3_moe`; llama.cpp `src/models/qwen3moe.cpp`.

use super::biases::BY_FLAGS;
use super::qwen3::attention;
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder, window};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_EXPERTS, Key, Role};
use crate::layers::{
    DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MlpConfig, MoeConfig,
};
use crate::names::{self, ATTENTION, FFN_NORM, HEAD_NORMS, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

pub const QWEN3_MOE: Architecture = Architecture {
    model_types: &[ModelType { name: "qwen3_moe", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "qwen3moe",
    gguf_keys: &[GGUF_EXPERTS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, &MLP, names::EXPERTS, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { mlx_lm: MlxLm::UNSCALED, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    // Of the layers without experts.
    Key::optional("intermediate_size"),
    Key::size("num_key_value_heads", 4),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 32768),
    Key::flag("attention_bias", false),
    Key::flag("use_sliding_window", false),
    Key::size("sliding_window", 4096),
    // All layers have the window, if there is one.
    Key::no_effect("max_window_layers"),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
    Key::size("num_experts", 128),
    Key { name: "num_local_experts", role: Role::Alias("num_experts") },
    Key::size("num_experts_per_tok", 8),
    Key::size("moe_intermediate_size", 768),
    // There is none in this architecture, whatever this says.
    Key::no_effect("shared_expert_intermediate_size"),
    Key::flag("norm_topk_prob", false),
    Key::size("decoder_sparse_step", 1),
    Key::optional("mlp_only_layers"),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = attention(config, weights, &sizes)?;
    if !config.is_gguf() && config.flag("use_sliding_window", false)? {
        attention.sliding_window = window(config)?;
    }
    // llama.cpp always normalises here; transformers' default is not to.
    let moe = MoeConfig::new(config, config.is_gguf())?;
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

/// Layer `index`'s experts, or the plain MLP that `mlp_only_layers` and `decoder_sparse_step` leave
/// it.
pub(super) fn feedforward(
    config: &Config<'_>,
    weights: &Weights<'_>,
    moe: &MoeConfig,
    index: usize,
) -> Result<FeedforwardSpec, ModelError> {
    let sparse = match config.is_gguf() {
        true => weights.layer(index).has("", "ffn_gate_inp.weight"),
        false => {
            let step = config.size("decoder_sparse_step", "")?;
            !config.sizes("mlp_only_layers")?.contains(&index) && (index + 1).is_multiple_of(step)
        }
    };
    if sparse {
        return Ok(FeedforwardSpec::Sparse(moe.clone()));
    }
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    Ok(FeedforwardSpec::Dense(MlpConfig::new(intermediate_size)))
}
