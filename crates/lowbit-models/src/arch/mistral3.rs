//! Ministral 3: Mistral's block, whose queries grow with their position beyond the original
//! training's context. Source: transformers 5.24 `models/{ministral3,mistral3}`; mlx-lm 0.32
//! `models/ministral3.py`; llama.cpp `src/models/mistral3.cpp`.

use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, permuted, window};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Tables, WRAPPER};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms, QueryScale};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

pub const MISTRAL3: Architecture = Architecture {
    model_types: &[
        ModelType { name: "mistral3", tables: TABLES, wraps: true },
        ModelType { name: "ministral3", tables: TABLES, wraps: false },
    ],
    gguf: "mistral3",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: &[],
    conversion: Conversion { like_llama: true, query_scale: true, ..Conversion::PLAIN },
    mlx_prefix: "language_model.",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

const TABLES: Tables = &[KEYS, DECODER, BASE, WRAPPER];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(8)),
    Key::disputed("head_dim", Int(128)),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::disputed("max_position_embeddings", Int(262_144)),
    // Without it transformers has YaRN's parameters of the published models, and mlx-lm none.
    Key::required("rope_parameters"),
    Key::optional("sliding_window"),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("attention.temperature_scale"),
    Key::optional("rope.scaling.yarn_log_multiplier"),
    Key::optional("rope.scaling.yarn_beta_fast"),
    Key::optional("rope.scaling.yarn_beta_slow"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, permuted(config))?;
    if !config.is_gguf() {
        attention.sliding_window = window(config)?;
    }
    let positions = weights.context().unwrap_or(usize::MAX).min(sizes.max_position_embeddings);
    attention.query_scale = query_scale(config, positions)?;
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(attention.clone())
    })
}

/// The factor of queries, for sequences of up to `positions` tokens.
fn query_scale(config: &Config<'_>, positions: usize) -> Result<Option<QueryScale>, ModelError> {
    if config.is_gguf() {
        let beta = config.optional_float("", "attention.temperature_scale")?.filter(|&beta| beta != 0.0);
        let Some(beta) = beta else { return Ok(None) };
        let original = config.size("", "rope.scaling.original_context_length")?;
        return Ok(Some(QueryScale { beta: beta as f32, original, positions }));
    }
    let section = config.section("rope_parameters")?.ok_or_else(|| config.missing("rope_parameters"))?;
    let beta = section.float("llama_4_scaling_beta", "")? as f32;
    if beta == 0.0 {
        return Ok(None);
    }
    let original = section.size("original_max_position_embeddings", "")?;
    Ok(Some(QueryScale { beta, original, positions }))
}
