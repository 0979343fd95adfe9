//! Gemma 3 as a text model: norms around attention and MLP, five layers with a window and a rotary
//! embedding of their own to each one without, and an embedding that is scaled. EmbeddingGemma is
//! the same with tokens that see those after them, windows on both sides. Source: transformers 5.24
//! `models/gemma3`; mlx-lm 0.32 `models/gemma3_text.py`; llama.cpp `src/models/gemma3.cpp`,
//! `src/models/gemma-embedding.cpp`.

use super::biases::BY_FLAGS;
use super::{
    Architecture, Conversion, ModelType, OffsetNorms, TiedByDefault, WindowKeys, Windows, decoder, window,
};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Tables, WRAPPER};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, Multipliers, RopeKind, rope_params_of,
};
use crate::names::{
    ATTENTION, HEAD_NORMS, INPUT_NORM, MLP, POST_ATTENTION_NORM, POST_FEEDFORWARD_NORM, PRE_FEEDFORWARD_NORM,
    TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_files::Layout;
use lowbit_kernels::ops::{Gate, Rope};
use std::sync::Arc;

pub const GEMMA3: Architecture = Architecture {
    model_types: &[
        ModelType { name: "gemma3_text", tables: TABLES, wraps: false },
        ModelType { name: "gemma3", tables: TABLES, wraps: true },
    ],
    gguf: "gemma3",
    gguf_keys: &[GGUF_KEYS, GGUF_WINDOWS, GGUF_DENSE, GGUF],
    offset_norms: Some(OFFSET_NORMS),
    names: &[
        TOP,
        ATTENTION,
        HEAD_NORMS,
        &MLP,
        &[POST_ATTENTION_NORM, PRE_FEEDFORWARD_NORM, POST_FEEDFORWARD_NORM],
    ],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: Conversion { mlx_is_text: true, windows: Some(WINDOWS), ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault { transformers: true, mlx_lm: true },
    describe,
};

pub const GEMMA_EMBEDDING: Architecture = Architecture {
    model_types: &[ModelType { name: "gemma3_text", tables: EMBEDDING, wraps: false }],
    gguf: "gemma-embedding",
    gguf_keys: &[GGUF_EMBEDDING_KEYS, GGUF_KEYS, GGUF_WINDOWS, GGUF_DENSE, GGUF],
    conversion: Conversion { sees_later: true, ..GEMMA3.conversion },
    ..GEMMA3
};

const WINDOWS: Windows = Windows { interval: 6, ropes: true, keys: WindowKeys::Interval };

/// All norms, those of Gemma 2 too; llama.cpp's converter adds the 1.
pub(super) const OFFSET_NORMS: OffsetNorms = OffsetNorms {
    layouts: &[Layout::HuggingFace, Layout::Mlx],
    names: &[
        ".input_layernorm",
        ".post_attention_layernorm",
        ".pre_feedforward_layernorm",
        ".post_feedforward_layernorm",
        "model.norm",
        ".q_norm",
        ".k_norm",
    ],
};

const TABLES: Tables = &[KEYS, DECODER, BASE, WRAPPER];

const EMBEDDING: Tables = &[EMBEDDING_KEYS, KEYS, DECODER, BASE];

const EMBEDDING_KEYS: &[Key] = &[Key::flag("use_bidirectional_attention", false)];

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_attention_heads", Int(8)),
    Key::disputed("num_key_value_heads", Int(4)),
    Key::size("head_dim", 256),
    Key::disputed("max_position_embeddings", Int(131_072)),
    // Not `hidden_act`, which its configuration does not have.
    Key::no_effect("hidden_act"),
    Key::only("hidden_activation", &[Text("gelu_pytorch_tanh")]),
    Key::only("attention_bias", &[Flag(false)]),
    Key::only("attn_logit_softcapping", &[]),
    Key::only("final_logit_softcapping", &[]),
    Key::only("use_bidirectional_attention", &[Flag(false)]),
    Key::or("query_pre_attn_scalar", Int(256)),
    Key::disputed("sliding_window", Int(4096)),
    Key::size("sliding_window_pattern", 6),
    Key::no_effect("_sliding_window_pattern"),
    Key::optional("layer_types"),
    Key::or("rope_theta", Float(1e6)),
    Key::or("rope_local_base_freq", Float(10000.0)),
    Key::no_effect("partial_rotary_factor"),
    // Caches of other programs.
    Key::no_effect("cache_implementation"),
];

const GGUF_EMBEDDING_KEYS: &[Key] = &[
    Key::only("attention.causal", &[Flag(false)]),
    // The shapes of the layers behind pooling say these.
    Key::no_effect("dense_2_feat_in"),
    Key::no_effect("dense_2_feat_out"),
    Key::no_effect("dense_3_feat_in"),
    Key::no_effect("dense_3_feat_out"),
];

const GGUF_KEYS: &[Key] = &[Key::only("final_logit_softcapping", &[Float(0.0)])];

/// Of layers of which some have a window, those of Gemma 2 too.
pub(super) const GGUF_WINDOWS: &[Key] = &[
    Key::optional("attention.sliding_window"),
    Key::optional("attention.sliding_window_pattern"),
    Key::optional("rope.freq_base_swa"),
];

pub(super) const NORMS: LayerNorms = LayerNorms {
    mixer: Some(INPUT_NORM),
    after_mixer: Some(POST_ATTENTION_NORM),
    feedforward: Some(PRE_FEEDFORWARD_NORM),
    after_feedforward: Some(POST_FEEDFORWARD_NORM),
};

/// The number of layers by which llama.cpp recognises the 27B, whose queries are scaled by the
/// width of the model, not of a head.
const LAYERS_OF_27B: usize = 62;

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let later = config.found().is_some_and(|found| found.conversion.sees_later);
    // It makes no logits, though the embedding could.
    let sizes = DecoderConfig { causal: !later, headless: sizes.headless || later, ..sizes };
    let rope = |kind| move |head_dim| rope_params_of(config, weights, head_dim, kind);
    let hidden = sizes.hidden_size;
    let mut full = AttentionConfig::with_rope(config, weights, hidden, rope(RopeKind::Full))?;
    full.head_norm = Some(sizes.rms_norm_eps);
    full.scale = scale(config, &sizes, &full, if later { usize::MAX } else { LAYERS_OF_27B })?;
    let mut sliding = full.clone();
    sliding.sliding_window = match config.is_gguf() {
        true => config.optional_size("", "attention.sliding_window")?.filter(|&window| window > 0),
        false => window(config)?,
    };
    if later {
        full.look_ahead = usize::MAX;
        // Half the window on each side, and the token itself.
        sliding.look_ahead = sliding.sliding_window.map_or(usize::MAX, |window| window / 2);
        sliding.sliding_window = sliding.sliding_window.map(|window| window / 2 + 1);
    }
    sliding.rope = Arc::new(Rope::new(&rope(RopeKind::Sliding)(full.head_dim)?)?);
    let mlp = MlpConfig {
        gate: Gate::GeluTanh,
        ..MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?)
    };
    let (layers, embedding_scale) = (sizes.num_hidden_layers, (sizes.hidden_size as f64).sqrt() as f32);
    let spec = decoder(sizes, |index| {
        let attention = match is_sliding(config, layers, index, sliding.sliding_window)? {
            true => sliding.clone(),
            false => full.clone(),
        };
        Ok(LayerSpec {
            norms: NORMS,
            mixer: MixerSpec::Attention(attention),
            feedforward: FeedforwardSpec::Dense(mlp),
        })
    })?;
    let multipliers = Multipliers { embedding: embedding_scale, ..Multipliers::NONE };
    Ok(DecoderSpec { multipliers, ..spec })
}

/// The factor of scores, of Gemma 2 too. A GGUF file does not say it: `special` is the number of
/// layers by which llama.cpp recognises a model whose factor is another one.
pub(super) fn scale(
    config: &Config<'_>,
    sizes: &DecoderConfig,
    attention: &AttentionConfig,
    special: usize,
) -> Result<f32, ModelError> {
    let scalar = match config.is_gguf() {
        true if sizes.num_hidden_layers == special => sizes.hidden_size / attention.num_attention_heads,
        true => attention.head_dim,
        false => config.size("query_pre_attn_scalar", "")?,
    };
    Ok((scalar as f64).sqrt().recip() as f32)
}

/// True if layer `index` has the window, and its rotary embedding.
fn is_sliding(
    config: &Config<'_>,
    layers: usize,
    index: usize,
    window: Option<usize>,
) -> Result<bool, ModelError> {
    let kinds = &["full_attention", "sliding_attention"];
    let sliding = match config.is_gguf() {
        true => {
            let key = "attention.sliding_window_pattern";
            window.is_some() && config.gguf_pattern(key, WINDOWS.interval, layers)?[index]
        }
        false => match config.layer_type(index, layers, kinds)? {
            Some(kind) => kind == "sliding_attention",
            None => !(index + 1).is_multiple_of(config.size("sliding_window_pattern", "")?),
        },
    };
    match sliding && window.is_none() {
        true => Err(config.refuse("sliding_window", "missing", &format!("layer {index} has a window"))),
        false => Ok(sliding),
    }
}
