//! Olmo 3: Olmo 2 with a window in three of four layers, whose rotary embedding is not scaled.
//! Source: transformers 5.24 `models/olmo3`; mlx-lm 0.32 `models/olmo3.py`; llama.cpp
//! `src/models/olmo2.cpp`.

use super::olmo2::{BIASES, NAMES, NORMS, OLMO_KEYS, normed};
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, WindowKeys, Windows, dense, window};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, RopeKind, rope_params_of};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Rope, RopeParams};
use std::sync::Arc;

pub const OLMO3: Architecture = Architecture {
    model_types: &[ModelType { name: "olmo3", tables: &[KEYS, OLMO_KEYS, DECODER, BASE], wraps: false }],
    gguf: "olmo2",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: NAMES,
    aliases: &[],
    biases: BIASES,
    conversion: Conversion {
        windows: Some(WINDOWS),
        gguf_never_ties: true,
        mlx_lm: MlxLm { wants_both_kinds: true, ..MlxLm::ALL },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const WINDOWS: Windows = Windows { interval: 4, ropes: true, keys: WindowKeys::Types };

const KEYS: &[Key] = &[
    Key::disputed("max_position_embeddings", Int(2048)),
    Key::disputed("rope_theta", Float(THETA)),
    Key::disputed("sliding_window", Int(4096)),
    Key::optional("layer_types"),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("attention.sliding_window"),
    Key::optional("attention.sliding_window_pattern"),
    Key::optional("rope.freq_base_swa"),
];

/// transformers' base of layers with a window, where they have none of their own.
const THETA: f64 = 500_000.0;

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let rope = |kind| move |head_dim| rope_params_of(config, weights, head_dim, kind);
    let plain = AttentionConfig::with_rope(config, weights, sizes.hidden_size, rope(RopeKind::Full))?;
    let full = normed(config, weights, plain, sizes.rms_norm_eps)?;
    let of_full = rope(RopeKind::Full)(full.head_dim)?;
    let of_sliding = rope(RopeKind::Sliding)(full.head_dim)?;
    check_bases(config, [&of_full, &of_sliding])?;
    let sliding_window = match config.is_gguf() {
        true => Some(config.size("", "attention.sliding_window")?),
        false => window(config)?,
    };
    let sliding = AttentionConfig { sliding_window, rope: Arc::new(Rope::new(&of_sliding)?), ..full.clone() };
    let layers = sizes.num_hidden_layers;
    dense(config, sizes, NORMS, |index| match is_sliding(config, layers, index)? {
        false => Ok(full.clone()),
        true if sliding_window.is_some() => Ok(sliding.clone()),
        true => Err(config.refuse("sliding_window", "missing", &format!("layer {index} has a window"))),
    })
}

/// True if layer `index` has the window, and its rotary embedding.
fn is_sliding(config: &Config<'_>, layers: usize, index: usize) -> Result<bool, ModelError> {
    if config.is_gguf() {
        let key = "attention.sliding_window_pattern";
        return Ok(config.gguf_pattern(key, WINDOWS.interval, layers)?[index]);
    }
    let kind = config.layer_type(index, layers, &["full_attention", "sliding_attention"])?;
    let by_default = !(index + 1).is_multiple_of(WINDOWS.interval);
    Ok(kind.map_or(by_default, |kind| kind == "sliding_attention"))
}

/// Refuses bases of the two kinds of layers that peers do not take for what they are: mlx-lm and
/// llama.cpp have one for both, and transformers does not take a `rope_theta` beside the sections
/// for that of layers with a window.
fn check_bases(config: &Config<'_>, [full, sliding]: [&RopeParams; 2]) -> Result<(), ModelError> {
    let (key, peer) = match () {
        () if config.is_gguf() => ("rope.freq_base_swa", "llama.cpp"),
        () if config.is_mlx() => ("rope_theta of sliding_attention", "mlx-lm"),
        () => {
            let section = match config.section("rope_parameters")? {
                Some(both) => both.section("sliding_attention")?,
                None => None,
            };
            let own = section.map_or(Ok(None), |section| section.optional_float("rope_theta", ""))?;
            return match own.is_some() || sliding.theta == THETA {
                true => Ok(()),
                false => {
                    let want =
                        format!("transformers takes {THETA} in layers with a window, and mlx-lm this one");
                    Err(config.refuse("rope_theta", &sliding.theta.to_string(), &want))
                }
            };
        }
    };
    let beside = if config.is_mlx() { config.float("rope_theta", "")? } else { full.theta };
    if full.theta == sliding.theta && beside == full.theta {
        return Ok(());
    }
    let want = format!("{peer} rotates all layers of this model by one base, {beside}");
    Err(config.refuse(key, &sliding.theta.to_string(), &want))
}
