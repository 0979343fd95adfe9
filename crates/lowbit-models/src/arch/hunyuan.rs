//! Hunyuan, dense: Llama's block with an RMSNorm of each query and key head after it was rotated.
//! Source: transformers 5.24 `models/hunyuan_v1_dense`; mlx-lm 0.32 `models/hunyuan_v1_dense.py`;
//! llama.cpp `src/models/hunyuan-dense.cpp`.

use super::olmo2::BIASES;
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, dense};
use crate::keys::Fixed::{Flag, Float};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{AttentionConfig, DecoderConfig, DecoderSpec, HeadNorms, LayerNorms};
use crate::names::{ATTENTION, FFN_NORM, HEAD_NORMS, INPUT_NORM, MLP, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const HUNYUAN: Architecture = Architecture {
    model_types: &[ModelType { name: "hunyuan_v1_dense", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "hunyuan-dense",
    gguf_keys: &[GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, &MLP, &[FFN_NORM]],
    aliases: &[
        ("self_attn.q_norm", "self_attn.query_layernorm"),
        ("self_attn.k_norm", "self_attn.key_layernorm"),
    ],
    biases: BIASES,
    conversion: Conversion { alpha_rope: true, mlx_lm: MlxLm::UNSCALED, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 2048),
    Key::flag("attention_bias", false),
    // mlx-lm's name of what this architecture always does.
    Key::only("use_qk_norm", &[Flag(true)]),
    // Keys shared across layers, which published models do not have.
    Key::only("use_cla", &[Flag(false)]),
    Key::no_effect("cla_share_factor"),
    Key::no_effect("partial_rotary_factor"),
    // Masks are read from them in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::no_effect("layer_types"),
    // Slices of the same products.
    Key::no_effect("pretraining_tp"),
    // Ids of tokens, and what published configurations have of other models and of training.
    Key::no_effect("eod_token_id"),
    Key::no_effect("eoc_token_id"),
    Key::no_effect("im_end_id"),
    Key::no_effect("im_newline_id"),
    Key::no_effect("im_start_id"),
    Key::no_effect("mask_init_id"),
    Key::no_effect("text_end_id"),
    Key::no_effect("text_start_id"),
    Key::no_effect("org_vocab_size"),
    Key::no_effect("add_classification_head"),
    Key::no_effect("class_num"),
    Key::no_effect("pool_type"),
    Key::no_effect("norm_type"),
    Key::no_effect("use_rotary_pos_emb"),
    // The older name of head_dim, which no peer reads.
    Key::no_effect("attention_head_dim"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, FFN_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let plain = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let (head_norm, norms_of) = (Some(sizes.rms_norm_eps), HeadNorms::RotatedHeads);
    let attention = AttentionConfig { head_norm, norms_of, ..plain };
    dense(config, sizes, NORMS, |_| Ok(attention.clone()))
}
