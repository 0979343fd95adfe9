//! SmolLM3: Llama's block, of which every fourth does not rotate queries and keys. Source:
//! transformers 5.24 `models/smollm3`; mlx-lm 0.32 `models/smollm3.py`; llama.cpp
//! `src/models/smollm3.cpp`.

use super::biases::BY_FLAGS;
use super::{Architecture, Conversion, ModelType, TiedByDefault, dense, permuted, switched_window};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};

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
    let rotated = AttentionConfig::new(config, weights, sizes.hidden_size, permuted(config))?;
    let still = rotated.without_rope()?;
    let layers = sizes.num_hidden_layers;
    let rotates = rotates(config, layers)?;
    dense(config, sizes, NORMS, |index| {
        let attention = if rotates[index] { &rotated } else { &still };
        // Without `layer_types`, those that do not rotate have the window.
        let sliding_window = switched_window(config, layers, index, || Ok(!rotates[index]))?;
        Ok(AttentionConfig { sliding_window, ..attention.clone() })
    })
}

/// For each layer, true if it rotates: `no_rope_layers` has 1 for those that do.
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
