//! Phi-3 and Phi-4: Llama's block, with q, k and v in one matrix, and gate and up in another.
//! Source: transformers 5.24 `models/phi3`; mlx-lm 0.32 `models/phi3.py`; llama.cpp
//! `src/models/phi3.cpp`.

use super::{Architecture, Conversion, LONG_ROPE, MlxLm, ModelType, TiedByDefault, decoder, window};
use crate::keys::Fixed::Float;
use crate::keys::{BASE, DECODER, GGUF, GGUF_DENSE, Key};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MlpConfig,
};
use crate::names::{FFN_NORM, FUSED_MLP, FUSED_QKV, INPUT_NORM, MLP, O_PROJ, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const PHI3: Architecture = Architecture {
    model_types: &[ModelType { name: "phi3", tables: &[KEYS, DECODER, BASE], wraps: false }],
    gguf: "phi3",
    gguf_keys: &[GGUF_KEYS, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, &[INPUT_NORM, FUSED_QKV, O_PROJ, FUSED_MLP, MLP[2], FFN_NORM]],
    aliases: &[],
    biases: &[],
    conversion: Conversion {
        rotary_dimension: true,
        rope_divisors: LONG_ROPE,
        mlx_lm: MlxLm { rope_types: Some(&["linear", "longrope"]), ..MlxLm::ALL },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 4096),
    Key::size("original_max_position_embeddings", 4096),
    Key::optional("sliding_window"),
    Key::or("partial_rotary_factor", Float(1.0)),
    Key::optional("layer_types"),
    // No bias exists in this architecture, whatever this says.
    Key::no_effect("attention_bias"),
    Key::no_effect("embd_pdrop"),
    Key::no_effect("resid_pdrop"),
];

const GGUF_KEYS: &[Key] = &[
    // 0 stands for none.
    Key::optional("attention.sliding_window"),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    attention.fused = true;
    attention.sliding_window = match config.is_gguf() {
        true => config.optional_size("", "attention.sliding_window")?.filter(|&window| window > 0),
        false => window(config)?,
    };
    let intermediate_size = config.size("intermediate_size", "feed_forward_length")?;
    let mlp = MlpConfig { fused: Some(FUSED_MLP), ..MlpConfig::new(intermediate_size) };
    let layers = sizes.num_hidden_layers;
    decoder(sizes, |index| {
        config.layer_type(index, layers, &["full_attention"])?;
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: FeedforwardSpec::Dense(mlp),
        })
    })
}
