//! GLM-4 (0414) and GLM-Z1: norms before and after attention and MLP, half of each head rotated in
//! pairs of neighbours. Source: transformers 5.24 `models/glm4`; mlx-lm 0.32 `models/glm4.py`;
//! llama.cpp `src/models/glm4.cpp`.

use super::biases::{Biases, Promise, QKV};
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Flag, Float};
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MlpConfig,
};
use crate::names::{
    ATTENTION, FFN_NORM, FUSED_MLP, INPUT_NORM, MLP, POST_MLP_NORM, POST_SELF_ATTN_NORM, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const GLM4: Architecture = Architecture {
    model_types: &[ModelType { name: "glm4", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "glm4",
    gguf_keys: &[GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, &[POST_SELF_ATTN_NORM, FUSED_MLP, MLP[2], FFN_NORM, POST_MLP_NORM]],
    aliases: &[],
    biases: &[Biases { promise: Promise::Flag("attention_bias"), modules: QKV }],
    conversion: Conversion { rotary_dimension: true, mlx_lm: MlxLm::UNSCALED_UNTIED, ..Conversion::PLAIN },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::size("num_key_value_heads", 2),
    Key::size("head_dim", 128),
    Key::or("rms_norm_eps", Float(1.5625e-7)),
    Key::size("max_position_embeddings", 131_072),
    Key::disputed("attention_bias", Flag(true)),
    Key::or("partial_rotary_factor", Float(0.5)),
    Key::optional("layer_types"),
    // Masks are read from it in other models; here no layer is of that kind.
    Key::no_effect("sliding_window"),
    // mlx-lm's name of what this architecture always does.
    Key::only("rope_traditional", &[Flag(true)]),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let attention = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::Interleaved)?;
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    let mlp = MlpConfig { fused: Some(FUSED_MLP), ..MlpConfig::new(intermediate_size) };
    let norms = LayerNorms {
        mixer: Some(INPUT_NORM),
        after_mixer: Some(POST_SELF_ATTN_NORM),
        feedforward: Some(FFN_NORM),
        after_feedforward: Some(POST_MLP_NORM),
    };
    let layers = sizes.num_hidden_layers;
    decoder(sizes, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(LayerSpec {
            norms,
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: FeedforwardSpec::Dense(mlp),
        })
    })
}
