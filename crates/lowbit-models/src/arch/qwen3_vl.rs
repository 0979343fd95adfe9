//! Qwen3-VL as a text model: Qwen3 inside a multimodal one. Source: transformers 5.24
//! `models/qwen3_vl`; mlx-lm 0.32 `models/qwen3_vl.py`; llama.cpp `src/models/qwen3vl.cpp`.

use super::biases::BY_FLAGS;
use super::qwen3::attention;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Tables, WRAPPER};
use crate::layers::{DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, HEAD_NORMS, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

pub const QWEN3_VL: Architecture = Architecture {
    model_types: &[
        ModelType { name: "qwen3_vl", tables: TABLES, wraps: true },
        ModelType { name: "qwen3_vl_text", tables: TABLES, wraps: false },
    ],
    gguf: "qwen3vl",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { sections: true, ..Conversion::PLAIN },
    mlx_prefix: "language_model.",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const TABLES: Tables = &[KEYS, DECODER, BASE, WRAPPER];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(32)),
    Key::disputed("head_dim", Int(128)),
    Key::size("max_position_embeddings", 128_000),
    Key::disputed("rope_theta", Float(500_000.0)),
    Key::flag("attention_bias", false),
    Key::optional("layer_types"),
    // Masks are read from it in other models; here no layer is of that kind.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
    // Layers to which the vision tower adds its states, for images alone.
    Key::no_effect("deepstack_visual_indexes"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("rope.dimension_sections"),
    // The number of layers to which the vision tower adds its states, for images alone.
    Key::no_effect("n_deepstack_layers"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let attention = attention(config, weights, &sizes)?;
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(attention.clone())
    })
}
