//! Granite 3 and 4, dense: Llama's block, with factors of the embedding, of scores, of what each
//! layer adds, and of logits. Source: transformers 5.24 `models/granite`; mlx-lm 0.32
//! `models/granite.py`; llama.cpp `src/models/granite.cpp`.

use super::biases::BY_FLAGS;
use super::llama::ROPE_DIVISORS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, permuted};
use crate::keys::Fixed::{Flag, Float};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms, Multipliers};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

pub const GRANITE: Architecture = Architecture {
    model_types: &[ModelType { name: "granite", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "granite",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { like_llama: true, rope_divisors: ROPE_DIVISORS, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 2048),
    Key::flag("attention_bias", false),
    Key::flag("mlp_bias", false),
    Key::or("embedding_multiplier", Float(1.0)),
    Key::or("residual_multiplier", Float(1.0)),
    Key::or("attention_multiplier", Float(1.0)),
    Key::or("logits_scaling", Float(1.0)),
    Key::optional("layer_types"),
    // Masks are read from it in other models; here no layer is of that kind.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("embedding_scale"),
    Key::optional("residual_scale"),
    Key::optional("attention.scale"),
    Key::required("logit_scale"),
    Key::only("rope.scaling.finetuned", &[Flag(true)]),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, permuted(config))?;
    let factor = |json, gguf| Ok::<_, ModelError>(config.optional_float(json, gguf)?.unwrap_or(0.0));
    // llama.cpp takes 0 and a missing factor for none.
    let or_one = |factor: f64| if config.is_gguf() && factor == 0.0 { 1.0 } else { factor as f32 };
    let scale = factor("attention_multiplier", "attention.scale")?;
    if !config.is_gguf() || scale != 0.0 {
        attention.scale = scale as f32;
    }
    let divisor = factor("logits_scaling", "logit_scale")?;
    if divisor == 0.0 {
        let key = if config.is_gguf() { "logit_scale" } else { "logits_scaling" };
        return Err(config.refuse(key, "0", "logits are divided by it"));
    }
    let multipliers = Multipliers {
        embedding: or_one(factor("embedding_multiplier", "embedding_scale")?),
        residual: or_one(factor("residual_multiplier", "residual_scale")?),
        logits: (1.0 / divisor) as f32,
        ..Multipliers::NONE
    };
    let layers = sizes.num_hidden_layers;
    let spec = dense(config, sizes, NORMS, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(attention.clone())
    })?;
    Ok(DecoderSpec { multipliers, ..spec })
}
