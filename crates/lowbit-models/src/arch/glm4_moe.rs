//! GLM-4.5, 4.6 and Air: experts chosen by sigmoids with a bias, a shared expert without a gate,
//! and dense layers before them; half of each head rotated. The layers that predict further tokens
//! are a [`Predictor`](crate::Predictor)'s. Source: transformers 5.24 `models/glm4_moe`; mlx-lm
//! 0.32 `models/glm4_moe.py`; llama.cpp `src/models/glm4-moe.cpp`.

use super::biases::{Biases, Promise, QKV};
use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_SIGMOIDS, Key, Role};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, MoeConfig,
};
use crate::names::{
    self, ATTENTION, HEAD_NORMS, INPUT_NORM, MLP, POST_ATTENTION_NORM, Q_NORM, SELECTION_BIAS, SHARED_EXPERT,
    TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const GLM4_MOE: Architecture = Architecture {
    model_types: &[ModelType { name: "glm4_moe", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "glm4moe",
    gguf_keys: &[GGUF_KEYS, GGUF_SIGMOIDS, GGUF],
    offset_norms: None,
    names: &[
        TOP,
        ATTENTION,
        HEAD_NORMS,
        &MLP,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SELECTION_BIAS, POST_ATTENTION_NORM],
    ],
    aliases: &[("mlp.shared_expert", "mlp.shared_experts")],
    biases: &[Biases { promise: Promise::Flag("attention_bias"), modules: QKV }],
    conversion: Conversion {
        rotary_dimension: true,
        predicts_in_layers: true,
        mlx_lm: MlxLm::UNSCALED_UNTIED,
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    // Of the layers without experts.
    Key::size("intermediate_size", 10944),
    Key::size("num_key_value_heads", 8),
    Key::optional("head_dim"),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 131_072),
    Key::flag("attention_bias", false),
    Key::flag("use_qk_norm", false),
    Key::or("partial_rotary_factor", Float(0.5)),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::size("n_routed_experts", 128),
    Key { name: "num_local_experts", role: Role::Alias("n_routed_experts") },
    Key::size("num_experts_per_tok", 8),
    Key::size("moe_intermediate_size", 1408),
    Key::size("n_shared_experts", 1),
    Key::size("first_k_dense_replace", 1),
    Key::flag("norm_topk_prob", true),
    Key::or("routed_scaling_factor", Float(1.0)),
    Key::size("n_group", 1),
    Key::size("topk_group", 1),
    // mlx-lm's names of what this architecture always does.
    Key::only("scoring_func", &[Text("sigmoid")]),
    Key::only("topk_method", &[Text("noaux_tc")]),
    // Multi-token prediction: `Predictor` looks for its tensors.
    Key::no_effect("num_nextn_predict_layers"),
    Key::no_effect("num_mtp_layers"),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("feed_forward_length"),
    Key::required("expert_shared_count"),
    Key::only("expert_gating_func", &[Int(2), Int(0)]),
    Key::optional("rope.dimension_sections"),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let mut attention = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let normed = match config.is_gguf() {
        true => weights.layer(0).has_module(Q_NORM),
        false => config.flag("use_qk_norm", false)?,
    };
    attention.head_norm = normed.then_some(sizes.rms_norm_eps);
    let moe = experts(config, weights)?;
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    let dense = config.optional_size("first_k_dense_replace", "leading_dense_block_count")?.unwrap_or(0);
    decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, POST_ATTENTION_NORM),
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: match index < dense {
                true => FeedforwardSpec::Dense(mlp),
                false => FeedforwardSpec::Sparse(moe.clone()),
            },
        })
    })
}

/// Experts that are chosen by sigmoids with a bias.
pub(super) fn experts(config: &Config<'_>, weights: &Weights<'_>) -> Result<MoeConfig, ModelError> {
    let moe = with_shared(config, weights)?.with_sigmoids(config, 1e-20)?;
    Ok(MoeConfig { selection_bias: true, ..moe })
}

/// The experts, and as the shared one all shared experts beside each other.
pub(super) fn with_shared(config: &Config<'_>, weights: &Weights<'_>) -> Result<MoeConfig, ModelError> {
    let count = config.size("n_routed_experts", "expert_count")?;
    let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
    let shared = config.size("n_shared_experts", "expert_shared_count")?;
    let moe = MoeConfig::of(config, count, inner)?;
    Ok(MoeConfig {
        shared_expert_intermediate_size: weights
            .product(["moe_intermediate_size", "n_shared_experts"], [inner, shared])?,
        shared_expert_gate: false,
        ..moe
    })
}
