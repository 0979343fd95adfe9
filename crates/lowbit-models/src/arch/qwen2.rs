//! Qwen2 and 2.5, QwQ, and DeepSeek-R1's distillations into them: Llama's block with biases on q, k
//! and v. Source: transformers 5.24 `models/qwen2`; mlx-lm 0.32 `models/qwen2.py`; llama.cpp
//! `src/models/qwen2.cpp`.

use super::biases::{Biases, Promise, QKV};
use super::qwen3::layer_window;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense};
use crate::keys::Fixed::Float;
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const QWEN2: Architecture = Architecture {
    model_types: &[ModelType { name: "qwen2", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "qwen2",
    gguf_keys: &[GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BIASES,
    conversion: Conversion::PLAIN,
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: false, mlx_lm: true },
    describe,
};

pub(super) const BIASES: &[Biases] = &[Biases { promise: Promise::Always, modules: QKV }];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::size("num_key_value_heads", 32),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 32768),
    Key::disputed("rope_theta", Float(10000.0)),
    Key::flag("use_sliding_window", false),
    Key::size("sliding_window", 4096),
    Key::size("max_window_layers", 28),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let full = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| {
        let sliding_window = layer_window(config, layers, index)?;
        Ok(AttentionConfig { sliding_window, ..full.clone() })
    })
}
