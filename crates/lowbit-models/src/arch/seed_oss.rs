//! Seed-OSS: Llama's block with biases on q, k and v. Source: transformers 5.24 `models/seed_oss`;
//! mlx-lm 0.32 `models/seed_oss.py`; llama.cpp `src/models/seed-oss.cpp`.

use super::biases::{Biases, MLP as MLP_MODULES, Promise, QKV};
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense};
use crate::keys::Fixed::Flag;
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, INPUT_NORM, MLP, POST_ATTENTION_NORM, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const SEED_OSS: Architecture = Architecture {
    model_types: &[ModelType { name: "seed_oss", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "seed_oss",
    gguf_keys: &[GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[POST_ATTENTION_NORM]],
    aliases: &[],
    biases: &[
        Biases { promise: Promise::Flag("attention_bias"), modules: QKV },
        Biases { promise: Promise::Flag("attention_out_bias"), modules: &["self_attn.o_proj"] },
        Biases { promise: Promise::Flag("mlp_bias"), modules: MLP_MODULES },
    ],
    conversion: Conversion::PLAIN,
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::size("num_key_value_heads", 8),
    Key::size("head_dim", 128),
    Key::size("max_position_embeddings", 524_288),
    Key::disputed("attention_bias", Flag(true)),
    Key::flag("attention_out_bias", false),
    Key::flag("mlp_bias", false),
    Key::optional("layer_types"),
    // Masks are read from it in other models; here no layer is of that kind.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
    Key::no_effect("residual_dropout"),
    // Slices of the same products.
    Key::no_effect("pretraining_tp"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, POST_ATTENTION_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let attention = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(attention.clone())
    })
}
