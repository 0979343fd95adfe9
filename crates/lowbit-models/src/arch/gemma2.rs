//! Gemma 2: norms around attention and MLP, every other layer with a window, an embedding that is
//! scaled, and soft caps of scores and logits. Source: transformers 5.24 `models/gemma2`; mlx-lm
//! 0.32 `models/gemma2.py`; llama.cpp `src/models/gemma2.cpp`.

use super::biases::BY_FLAGS;
use super::gemma3::{self, GGUF_WINDOWS, NORMS, OFFSET_NORMS};
use super::gpt_oss::{check_local_base, is_sliding};
use super::{
    Architecture, Conversion, MlxLm, ModelType, TiedByDefault, WindowKeys, Windows, decoder, window,
};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Tables};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerSpec, MixerSpec, MlpConfig,
    Multipliers,
};
use crate::names::{ATTENTION, MLP, POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM, PRE_FEEDFORWARD_NORM, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Gate, RopeLayout};

pub const GEMMA2: Architecture = Architecture {
    model_types: &[ModelType { name: "gemma2", tables: TABLES, wraps: false }],
    gguf: "gemma2",
    gguf_keys: &[GGUF_KEYS, GGUF_WINDOWS, GGUF_DENSE, GGUF],
    offset_norms: Some(OFFSET_NORMS),
    names: &[TOP, ATTENTION, &MLP, &[POST_ATTENTION_NORM, PRE_FEEDFORWARD_NORM, POST_FEEDFORWARD_NORM]],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion {
        windows: Some(WINDOWS),
        gguf_always_ties: true,
        mlx_lm: MlxLm { always_ties: true, ignores_windows: true, wants_caps: true, ..MlxLm::UNSCALED },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: true, mlx_lm: true },
    describe,
};

const WINDOWS: Windows = Windows { interval: 2, ropes: false, keys: WindowKeys::Types };

const TABLES: Tables = &[KEYS, DECODER, BASE];

/// The caps of scores and of logits, under the same names in GGUF.
const CAPS: [(&str, f64); 2] = [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(4)),
    Key::disputed("head_dim", Int(256)),
    Key::size("max_position_embeddings", 8192),
    // Not `hidden_act`, which its configuration does not have.
    Key::no_effect("hidden_act"),
    Key::only("hidden_activation", &[Text("gelu_pytorch_tanh")]),
    Key::only("attention_bias", &[Flag(false)]),
    Key::or(CAPS[0].0, Float(CAPS[0].1)),
    Key::or(CAPS[1].0, Float(CAPS[1].1)),
    Key::only("use_bidirectional_attention", &[Flag(false)]),
    Key::disputed("query_pre_attn_scalar", Int(256)),
    Key::size("sliding_window", 4096),
    Key::optional("layer_types"),
    Key::or("rope_theta", Float(10000.0)),
    Key::no_effect("partial_rotary_factor"),
    // Caches of other programs.
    Key::no_effect("cache_implementation"),
];

const GGUF_KEYS: &[Key] = &[Key::optional(CAPS[0].0), Key::optional(CAPS[1].0)];

/// llama.cpp's window where a file has none.
const GGUF_WINDOW: usize = 4096;

/// The number of layers by which llama.cpp recognises the 27B, whose queries are scaled by the
/// width of the model, not of a head.
const LAYERS_OF_27B: usize = 46;

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut full = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    full.scale = gemma3::scale(config, &sizes, &full, LAYERS_OF_27B)?;
    let [scores, logits] = CAPS.map(|cap| softcap(config, cap));
    full.softcap = scores?;
    let mut sliding = full.clone();
    sliding.sliding_window = match config.is_gguf() {
        true => {
            let stored = config.optional_size("", "attention.sliding_window")?;
            Some(stored.unwrap_or(GGUF_WINDOW)).filter(|&window| window > 0)
        }
        false => window(config)?,
    };
    check_local_base(config)?;
    let mlp = MlpConfig {
        gate: Gate::GeluTanh,
        ..MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?)
    };
    let (layers, embedding) = (sizes.num_hidden_layers, (sizes.hidden_size as f64).sqrt() as f32);
    let spec = decoder(sizes, |index| {
        let attention = match is_sliding(config, layers, index)? {
            true if sliding.sliding_window.is_none() && !config.is_gguf() => {
                return Err(config.refuse(
                    "sliding_window",
                    "missing",
                    &format!("layer {index} has a window"),
                ));
            }
            true => sliding.clone(),
            false => full.clone(),
        };
        Ok(LayerSpec {
            norms: NORMS,
            mixer: MixerSpec::Attention(attention),
            feedforward: FeedforwardSpec::Dense(mlp),
        })
    })?;
    let multipliers = Multipliers { embedding, softcap: logits?, ..Multipliers::NONE };
    Ok(DecoderSpec { multipliers, ..spec })
}

/// A cap, if there is one: in GGUF, where it cannot be left out, a missing one is the default.
fn softcap(config: &Config<'_>, (key, default): (&str, f64)) -> Result<Option<f32>, ModelError> {
    let stored = config.optional_float(key, key)?;
    match stored.or(config.is_gguf().then_some(default)) {
        Some(cap) if cap <= 0.0 => Err(config.refuse(key, &cap.to_string(), "a number above 0 is wanted")),
        cap => Ok(cap.map(|cap| cap as f32)),
    }
}
