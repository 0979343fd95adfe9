//! EXAONE 4: norms of what attention and MLP give alone, and of each query and key head; where some
//! layers have a window, the others do not rotate. Source: transformers 5.24 `models/exaone4`;
//! mlx-lm 0.32 `models/exaone4.py`; llama.cpp `src/models/exaone4.cpp`.

use super::olmo2::{NAMES, NORMS};
use super::{
    Architecture, Conversion, MlxLm, ModelType, TiedByDefault, WindowKeys, Windows,
    check_heads_make_up_hidden, dense, window,
};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;
use serde_json::Value;

pub const EXAONE4: Architecture = Architecture {
    model_types: &[ModelType { name: "exaone4", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "exaone4",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: NAMES,
    aliases: &[],
    biases: &[],
    conversion: Conversion {
        rope_divisors: &["rope_freqs.weight"],
        windows: Some(WINDOWS),
        names_plain_rope: true,
        mlx_lm: MlxLm { wants_both_kinds: true, ..MlxLm::ALL },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const WINDOWS: Windows = Windows { interval: 4, ropes: false, keys: WindowKeys::Letters };

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(32)),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::disputed("max_position_embeddings", Int(2048)),
    Key::disputed("sliding_window", Int(4096)),
    Key::disputed("sliding_window_pattern", Int(4)),
    Key::optional("layer_types"),
    Key::no_effect("partial_rotary_factor"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("attention.sliding_window"),
    Key::optional("attention.sliding_window_pattern"),
    // llama.cpp reads it, and rotates by the base of all layers.
    Key::no_effect("rope.freq_base_swa"),
];

/// The number of layers by which llama.cpp recognises the 32B, which alone has windows there, and
/// its window where a file does not say it.
const LAYERS_OF_32B: usize = 64;
const WINDOW_OF_32B: usize = 4096;

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let plain = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let rotated = AttentionConfig { head_norm: Some(sizes.rms_norm_eps), ..plain };
    let layers = sizes.num_hidden_layers;
    let sliding_window = match config.is_gguf() {
        true => {
            check_heads_make_up_hidden(config, weights, &rotated, "llama.cpp's files of this model")?;
            gguf_window(config, layers)?
        }
        false => window(config)?,
    };
    let still = rotated.without_rope()?;
    let sliding = sliding(config, layers, sliding_window.is_some())?;
    dense(config, sizes, NORMS, |index| {
        Ok(match (sliding[index], sliding_window) {
            (true, _) => AttentionConfig { sliding_window, ..rotated.clone() },
            (false, Some(_)) => still.clone(),
            (false, None) => rotated.clone(),
        })
    })
}

/// The window of a GGUF file's model, if llama.cpp takes it for one that has windows.
fn gguf_window(config: &Config<'_>, layers: usize) -> Result<Option<usize>, ModelError> {
    let key = "attention.sliding_window";
    match config.optional_size("", key)? {
        Some(0) => Err(config.refuse(key, "0", "a token sees itself at least")),
        Some(window) if layers != LAYERS_OF_32B => {
            let want = format!("llama.cpp has windows in models of {LAYERS_OF_32B} layers alone");
            Err(config.refuse(key, &window.to_string(), &format!("{want}; this one has {layers}")))
        }
        None if layers == LAYERS_OF_32B => Ok(Some(WINDOW_OF_32B)),
        window => Ok(window),
    }
}

/// The layers that have the window, if there is one.
fn sliding(config: &Config<'_>, layers: usize, windows: bool) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        let key = "attention.sliding_window_pattern";
        return match windows {
            true => config.gguf_pattern(key, WINDOWS.interval, layers),
            false => Ok(vec![false; layers]),
        };
    }
    let kinds = &["full_attention", "sliding_attention"];
    let mut listed = vec![];
    for index in 0..layers {
        listed.extend(config.layer_type(index, layers, kinds)?.map(|kind| kind == "sliding_attention"));
    }
    let key = "sliding_window_pattern";
    let value = config.json(key)?;
    let by_pattern = match value.as_deref() {
        None => vec![false; layers],
        Some(Value::String(letters)) => by_letters(config, letters, layers)?,
        Some(_) => {
            let interval = config.optional_size(key, "")?.unwrap_or(0);
            (1..=layers).map(|n| interval > 0 && !n.is_multiple_of(interval)).collect()
        }
    };
    // mlx-lm reads the letters alone, and transformers the list, if there is one.
    if config.is_mlx() && !listed.is_empty() && listed != by_pattern {
        let got = value.map_or("null".into(), |value| value.to_string());
        return Err(config.refuse(key, &got, "layer_types says other layers, and mlx-lm does not read it"));
    }
    let sliding = if listed.is_empty() { by_pattern } else { listed };
    match sliding.iter().position(|&sliding| sliding).filter(|_| !windows) {
        None => Ok(sliding),
        Some(index) => {
            Err(config.refuse("sliding_window", "missing", &format!("layer {index} has a window")))
        }
    }
}

/// `L` where there is a window and `G` where there is none, again and again.
fn by_letters(config: &Config<'_>, letters: &str, layers: usize) -> Result<Vec<bool>, ModelError> {
    if letters.is_empty() || letters.chars().any(|letter| !"LG".contains(letter)) {
        let want = "letters are wanted, L for a window and G for none";
        return Err(config.refuse("sliding_window_pattern", letters, want));
    }
    Ok(letters.chars().cycle().take(layers).map(|letter| letter == 'L').collect())
}
