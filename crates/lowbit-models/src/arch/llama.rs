//! Llama 2 and 3, and Mistral: grouped-query attention and SwiGLU, no norms inside.
//! Source: transformers 5 `models/{llama,mistral}`; llama.cpp `src/models/llama.cpp`.

use super::biases::BY_FLAGS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, permuted, window};
use crate::keys::Fixed::{Flag, Int};
use crate::keys::{BASE, DECODER, GGUF, Key, WRAPPER};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

pub const LLAMA: Architecture = Architecture {
    model_types: &[
        ModelType { name: "llama", tables: &[LLAMA_KEYS, DECODER, BASE], wraps: false },
        ModelType { name: "mistral", tables: &[MISTRAL_KEYS, DECODER, BASE], wraps: false },
        // Mistral Small 3.1 and its kin, with a vision tower.
        ModelType { name: "mistral3", tables: &[MISTRAL_KEYS, DECODER, BASE, WRAPPER], wraps: true },
    ],
    gguf: "llama",
    gguf_keys: &[GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { like_llama: true, rope_divisors: ROPE_DIVISORS, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

/// Those that llama.cpp reads for this architecture.
pub(super) const ROPE_DIVISORS: &[&str] =
    &["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

const LLAMA_KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 2048),
    Key::flag("attention_bias", false),
    Key::flag("mlp_bias", false),
    // transformers ignores it; mlx-lm takes windows from it.
    Key::optional("layer_types"),
    // Published in models that have neither; no peer computes them.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
    // Slices of the same products.
    Key::no_effect("pretraining_tp"),
];

const MISTRAL_KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(8)),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 131_072),
    Key::disputed("sliding_window", Int(4096)),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
    // Mistral has no biases, whatever this says; mlx-lm's would.
    Key::only("attention_bias", &[Flag(false)]),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("feed_forward_length"),
    // Mixtral has this name, too.
    Key::only("expert_count", &[Int(0)]),
    Key::only("expert_used_count", &[Int(0)]),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, permuted(config))?;
    if !config.is_gguf() {
        attention.sliding_window = window(config)?;
    }
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        // Windows of some layers alone are mlx-lm's, not transformers'.
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(attention.clone())
    })
}
