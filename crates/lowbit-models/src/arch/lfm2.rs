//! LFM2 and 2.5: gated short convolutions, and attention in some layers; the dense ones here, those
//! with experts in `lfm2_moe.rs`. Source: transformers 5.24 `models/lfm2`; mlx-lm 0.32
//! `models/lfm2.py`; llama.cpp `src/models/lfm2.cpp`.

use super::{
    Alias, Architecture, Conversion, MlxLm, ModelType, TiedByDefault, check_heads_make_up_hidden, decoder,
};
use crate::keys::Fixed::{Flag, Float, Int};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key, Role};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, ShortConvConfig,
};
use crate::names::{
    ATTENTION, EMBED_TOKENS, EMBEDDING_NORM, FFN_NORM, HEAD_NORMS, INPUT_NORM, LM_HEAD, MLP, Names,
    SHORT_CONV, SHORT_CONV_IN, SHORT_CONV_OUT,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const LFM2: Architecture = Architecture {
    model_types: &[ModelType { name: "lfm2", tables: &[KEYS, LFM2_KEYS, DECODER, BASE], wraps: false }],
    gguf: "lfm2",
    gguf_keys: &[LFM2_GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[LFM2_NAMES, &MLP],
    aliases: &[
        NORMS[0],
        NORMS[1],
        NORMS[2],
        NORMS[3],
        O_PROJ,
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
    ],
    biases: &[],
    conversion: Conversion { mlx_lm: MlxLm::UNSCALED, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TIED,
    describe,
};

pub(super) const TIED: TiedByDefault = TiedByDefault { transformers: true, mlx_lm: true };

pub(super) const LFM2_NAMES: Names = &[
    EMBED_TOKENS,
    EMBEDDING_NORM,
    LM_HEAD,
    ATTENTION[0],
    ATTENTION[1],
    ATTENTION[2],
    ATTENTION[3],
    ATTENTION[4],
    HEAD_NORMS[0],
    HEAD_NORMS[1],
    FFN_NORM,
    SHORT_CONV_IN,
    SHORT_CONV,
    SHORT_CONV_OUT,
];

pub(super) const NORMS: [Alias; 4] = [
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
];
pub(super) const O_PROJ: Alias = ("self_attn.o_proj", "self_attn.out_proj");

const KEYS: &[Key] = &[
    Key::size("intermediate_size", 12288),
    Key { name: "block_ff_dim", role: Role::Alias("intermediate_size") },
    Key::flag("block_auto_adjust_ff_dim", true),
    Key::size("block_multiple_of", 256),
    Key::or("block_ffn_dim_multiplier", Float(1.0)),
    Key::optional("full_attn_idxs"),
    Key::optional("layer_types"),
    // The MLP's width in mlx-lm, which its tensors show.
    Key::no_effect("block_dim"),
];

pub(super) const LFM2_KEYS: &[Key] = &[
    Key::size("num_key_value_heads", 8),
    Key::optional("head_dim"),
    Key::or("norm_eps", Float(1e-5)),
    Key::no_effect("rms_norm_eps"),
    // The gate is always silu.
    Key::no_effect("hidden_act"),
    Key::size("max_position_embeddings", 128_000),
    Key::or("rope_theta", Float(1e6)),
    Key::size("conv_L_cache", 3),
    Key::only("conv_bias", &[Flag(false)]),
    // transformers prefers it to tie_word_embeddings.
    Key::only("tie_embedding", &[Flag(true)]),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
    // Published, but no peer reads them.
    Key::no_effect("block_mlp_init_scale"),
    Key::no_effect("block_out_init_scale"),
    Key::no_effect("block_use_swiglu"),
    Key::no_effect("block_use_xavier_init"),
    Key::no_effect("block_norm_eps"),
    Key::no_effect("conv_dim"),
    Key::no_effect("conv_dim_out"),
    Key::no_effect("conv_use_xavier_init"),
    Key::no_effect("num_heads"),
    Key::no_effect("theta"),
    Key::no_effect("use_pos_enc"),
];

pub(super) const LFM2_GGUF_KEYS: &[Key] =
    &[Key::required("shortconv.l_cache"), Key::only("attention.sliding_window", &[Int(0)])];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let hybrid = Hybrid::new(config, weights)?;
    let mlp = MlpConfig::new(intermediate_size(config)?);
    hybrid.decoder(|_| FeedforwardSpec::Dense(mlp))
}

/// Rows of gate, and of up: the configuration's number, adjusted where it says so.
fn intermediate_size(config: &Config<'_>) -> Result<usize, ModelError> {
    let size = config.size("intermediate_size", "feed_forward_length")?;
    if config.is_gguf() || !config.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(size);
    }
    let key = "block_ffn_dim_multiplier";
    let multiplier = config.float(key, "")?;
    let whole = (multiplier * (2.0 * size as f64 / 3.0).floor()).floor();
    let multiple = config.size("block_multiple_of", "")?;
    // More than any tensor has; the shapes of tensors are checked later.
    if !(1.0..1e12).contains(&whole) || multiple > 1 << 40 {
        return Err(config.refuse(
            key,
            &multiplier.to_string(),
            "it leaves no MLP of a size that memory holds",
        ));
    }
    Ok((whole as usize).next_multiple_of(multiple))
}

/// The parts that all of LFM2 has.
pub(super) struct Hybrid {
    sizes: DecoderConfig,
    attention: AttentionConfig,
    conv: ShortConvConfig,
    /// The layers that attend.
    attends: Vec<bool>,
}

impl Hybrid {
    pub fn new(config: &Config<'_>, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let sizes = DecoderConfig::new(config, weights)?;
        let hidden = sizes.hidden_size;
        if !sizes.tie_word_embeddings && (config.is_mlx() || config.has("tie_embedding")) {
            let want = "mlx-lm always ties, as transformers does where tie_embedding says so";
            return Err(config.refuse("tie_word_embeddings", "false", want));
        }
        let attention = AttentionConfig::new(config, weights, hidden, RopeLayout::HalfSplit)?;
        let attention = AttentionConfig { head_norm: Some(sizes.rms_norm_eps), ..attention };
        check_heads_make_up_hidden(config, weights, &attention, "mlx-lm and llama.cpp")?;
        let conv = ShortConvConfig {
            hidden_size: hidden,
            conv_L_cache: config.size("conv_L_cache", "shortconv.l_cache")?,
        };
        let attends = attends(config, sizes.num_hidden_layers)?;
        Ok(Self { sizes, attention, conv, attends })
    }

    /// All layers, with these feed-forward parts.
    pub fn decoder(self, feedforward: impl Fn(usize) -> FeedforwardSpec) -> Result<DecoderSpec, ModelError> {
        let Self { sizes, attention, conv, attends } = self;
        let spec = decoder(sizes, |index| {
            Ok(LayerSpec {
                norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
                mixer: match attends[index] {
                    true => MixerSpec::Attention(attention.clone()),
                    false => MixerSpec::ShortConv(conv),
                },
                feedforward: feedforward(index),
            })
        })?;
        Ok(DecoderSpec { norm: EMBEDDING_NORM, ..spec })
    }
}

/// The layers with attention. GGUF has no key heads in the others.
fn attends(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        return config.gguf_attends(layers);
    }
    let indices = match config.computes("full_attn_idxs") && config.has("full_attn_idxs") {
        true => Some(config.sizes("full_attn_idxs")?),
        false => None,
    };
    let is_listed = |index: usize| indices.as_ref().is_none_or(|indices| indices.contains(&index));
    let mut attends = vec![];
    for index in 0..layers {
        let kind = config.layer_type(index, layers, &["full_attention", "conv"])?;
        if kind.is_none() && !config.computes("full_attn_idxs") {
            return Err(config.missing("layer_types"));
        }
        let by_kind = kind.map(|kind| kind == "full_attention");
        if let Some(attends) = by_kind.filter(|attends| indices.is_some() && *attends != is_listed(index)) {
            let want = format!(
                "layer_types says that layer {index} {}",
                if attends { "attends" } else { "does not" }
            );
            let got = format!("{:?}", indices.as_deref().unwrap_or_default());
            return Err(config.refuse("full_attn_idxs", &got, &want));
        }
        attends.push(by_kind.unwrap_or_else(|| is_listed(index)));
    }
    Ok(attends)
}
