//! Olmo 2: norms of what attention and MLP give alone, and of all query heads and all key heads
//! together. Source: transformers 5.24 `models/olmo2`; mlx-lm 0.32 `models/olmo2.py`; llama.cpp
//! `src/models/olmo2.cpp`.

use super::biases::{Biases, Promise};
use super::{Architecture, Conversion, ModelType, TiedByDefault, check_heads_make_up_hidden, dense};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, HeadNorms, LayerNorms};
use crate::names::{
    HEAD_NORMS, K_PROJ, MLP, Names, O_PROJ, POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM, Q_PROJ, TOP, V_PROJ,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const OLMO2: Architecture = Architecture {
    model_types: &[ModelType { name: "olmo2", tables: &[KEYS, OLMO_KEYS, DECODER, BASE], wraps: false }],
    gguf: "olmo2",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: NAMES,
    aliases: &[],
    biases: BIASES,
    conversion: Conversion { gguf_never_ties: true, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

/// The names of a model without norms before its parts.
pub(super) const NAMES: &[Names] =
    &[TOP, HEAD_NORMS, &MLP, &[Q_PROJ, K_PROJ, V_PROJ, O_PROJ, POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM]];

pub(super) const NORMS: LayerNorms = LayerNorms::after(POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM);

pub(super) const BIASES: &[Biases] = &[Biases {
    promise: Promise::Flag("attention_bias"),
    modules: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
}];

pub(super) const OLMO_KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::flag("attention_bias", false),
    Key::no_effect("partial_rotary_factor"),
];

const KEYS: &[Key] = &[
    Key::size("max_position_embeddings", 2048),
    // Masks are read from them in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::no_effect("layer_types"),
];

const GGUF_KEYS: &[Key] = &[Key::only("attention.sliding_window", &[Int(0)])];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let plain = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let attention = normed(config, weights, plain, sizes.rms_norm_eps)?;
    dense(config, sizes, NORMS, |_| Ok(attention.clone()))
}

/// The same with norms of all heads together, as all of Olmo has them.
pub(super) fn normed(
    config: &Config<'_>,
    weights: &Weights<'_>,
    attention: AttentionConfig,
    eps: f32,
) -> Result<AttentionConfig, ModelError> {
    if config.is_gguf() {
        check_heads_make_up_hidden(config, weights, &attention, "llama.cpp's files of this model")?;
    }
    Ok(AttentionConfig { head_norm: Some(eps), norms_of: HeadNorms::AllHeads, ..attention })
}
