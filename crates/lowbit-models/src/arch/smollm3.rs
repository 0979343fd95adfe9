//! SmolLM3: Llama's block, of which every fourth does not rotate queries and keys.
//! Source: transformers 5.24 `models/smollm3`; mlx-lm 0.32 `models/smollm3.py`; llama.cpp `src/models/smollm3.cpp`.

use super::biases::BY_FLAGS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, window};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const SMOLLM3: Architecture = Architecture {
    model_types: &[ModelType { name: "smollm3", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "smollm3",
    gguf_keys: &[GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &MLP, &[FFN_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { like_llama: true, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: true, mlx_lm: true },
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(4)),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 32768),
    Key::disputed("rope_theta", Float(2e6)),
    Key::flag("attention_bias", false),
    Key::flag("mlp_bias", false),
    Key::flag("use_sliding_window", false),
    Key::optional("sliding_window"),
    Key::no_effect("max_window_layers"),
    Key::optional("layer_types"),
    Key::optional("no_rope_layers"),
    Key::size("no_rope_layer_interval", 4),
    Key::no_effect("partial_rotary_factor"),
    // Slices of the same products.
    Key::no_effect("pretraining_tp"),
];

/// llama.cpp has this interval, and no key for it.
const GGUF_INTERVAL: usize = 4;

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    // The GGUF converter permutes q's and k's rows so that pairs are neighbours.
    let layout = if config.is_gguf() { RopeLayout::Interleaved } else { RopeLayout::HalfSplit };
    let rotated = AttentionConfig::new(config, weights, sizes.hidden_size, layout)?;
    let still = rotated.without_rope()?;
    let layers = sizes.num_hidden_layers;
    let rotates = rotates(config, layers)?;
    dense(config, sizes, NORMS, |index| {
        let attention = if rotates[index] { &rotated } else { &still };
        let sliding_window = layer_window(config, layers, index, rotates[index])?;
        Ok(AttentionConfig { sliding_window, ..attention.clone() })
    })
}

/// Whether each layer rotates: `no_rope_layers` has 1 for those that do.
fn rotates(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let by_interval = |interval: usize| (1..=layers).map(|n| !n.is_multiple_of(interval)).collect();
    if config.is_gguf() {
        return Ok(by_interval(GGUF_INTERVAL));
    }
    match config.sizes("no_rope_layers")? {
        list if list.is_empty() => Ok(by_interval(config.size("no_rope_layer_interval", "")?)),
        list if list.len() == layers => Ok(list.iter().map(|&flag| flag != 0).collect()),
        list => {
            let (got, want) = (format!("a list of {}", list.len()), format!("num_hidden_layers is {layers}"));
            Err(config.refuse("no_rope_layers", &got, &want))
        }
    }
}

/// The window of layer `index`: without `layer_types`, of those that do not rotate.
fn layer_window(
    config: &Config<'_>,
    layers: usize,
    index: usize,
    rotates: bool,
) -> Result<Option<usize>, ModelError> {
    if config.is_gguf() {
        return Ok(None);
    }
    let window = match config.flag("use_sliding_window", false)? {
        true => window(config)?,
        false => None,
    };
    let kinds = &["full_attention", "sliding_attention"];
    let sliding = match config.layer_type(index, layers, kinds)? {
        Some(kind) => kind == "sliding_attention",
        None => !rotates,
    };
    match config.has("layer_types") && sliding && window.is_none() {
        true => {
            let want = "use_sliding_window is false, or sliding_window null";
            Err(config.refuse(&format!("layer_types[{index}]"), "sliding_attention", want))
        }
        false => Ok(window.filter(|_| sliding)),
    }
}
