//! MiniMax-M2: experts chosen by sigmoids with a bias in every layer, norms of all query heads and
//! all key heads together, and a part of each head rotated. Source: transformers 5.24
//! `models/minimax_m2`; mlx-lm 0.32 `models/minimax.py`; llama.cpp `src/models/minimax-m2.cpp`.

use super::{Architecture, Conversion, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, Key, Role};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, HeadNorms, LayerNorms, LayerSpec,
    MixerSpec, MoeConfig,
};
use crate::names::{self, ATTENTION, FFN_NORM, HEAD_NORMS, INPUT_NORM, SELECTION_BIAS, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::RopeLayout;

pub const MINIMAX_M2: Architecture = Architecture {
    model_types: &[ModelType { name: "minimax_m2", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "minimax-m2",
    gguf_keys: &[GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, HEAD_NORMS, names::EXPERTS, &[SELECTION_BIAS, FFN_NORM]],
    aliases: &[
        (SELECTION_BIAS.0, "block_sparse_moe.e_score_correction_bias"),
        ("mlp.gate", "block_sparse_moe.gate"),
        ("mlp.switch_mlp", "block_sparse_moe.switch_mlp"),
        ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
        ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
        ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
    ],
    biases: &[],
    conversion: Conversion {
        rotary_dimension: true,
        predicts_in_layers: true,
        gguf_never_ties: true,
        mlx_lm: MlxLm::UNSCALED,
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const KEYS: &[Key] = &[
    // Of an expert.
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(8)),
    Key::disputed("head_dim", Int(128)),
    Key::disputed("max_position_embeddings", Int(196_608)),
    Key::disputed("rope_theta", Float(5e6)),
    Key::optional("rotary_dim"),
    Key::optional("partial_rotary_factor"),
    Key::disputed("num_local_experts", Int(256)),
    Key { name: "num_experts", role: Role::Alias("num_local_experts") },
    Key::disputed("num_experts_per_tok", Int(8)),
    // Published configurations say them of what this architecture always does.
    Key::only("scoring_func", &[Text("sigmoid")]),
    Key::only("use_qk_norm", &[Flag(true)]),
    Key::only("qk_norm_type", &[Text("per_layer")]),
    Key::only("use_routing_bias", &[Flag(true)]),
    Key::only("shared_intermediate_size", &[Int(0)]),
    // Of the older MiniMax.
    Key::no_effect("attn_type_list"),
    Key::no_effect("layernorm_full_attention_beta"),
    Key::no_effect("layernorm_linear_attention_beta"),
    Key::no_effect("layernorm_mlp_beta"),
    Key::no_effect("mlp_intermediate_size"),
    Key::no_effect("shared_moe_mode"),
    // Masks are read from them in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::no_effect("layer_types"),
    // Of training.
    Key::no_effect("router_jitter_noise"),
    // Multi-token prediction, which is not computed.
    Key::no_effect("use_mtp"),
    Key::no_effect("num_mtp_modules"),
    Key::no_effect("mtp_transformer_layers"),
];

const GGUF_KEYS: &[Key] = &[
    // Both are of an expert.
    Key::optional("feed_forward_length"),
    Key::required("expert_feed_forward_length"),
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::only("expert_gating_func", &[Int(2)]),
    // llama.cpp always divides by the sum, and does not scale, whatever the file says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(true)]),
];

/// The number that mlx-lm adds to the sum of weights, which does not change it.
const SUM_EPS: f32 = 1e-20;

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let plain = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    let (head_norm, norms_of) = (Some(sizes.rms_norm_eps), HeadNorms::AllHeads);
    let attention = AttentionConfig { head_norm, norms_of, ..plain };
    let count = config.size("num_local_experts", "expert_count")?;
    let inner = config.size("intermediate_size", "expert_feed_forward_length")?;
    let moe = MoeConfig::of(config, count, inner)?.with_sigmoids(config, SUM_EPS)?;
    let moe = MoeConfig { selection_bias: true, ..moe };
    decoder(sizes, |_| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: MixerSpec::Attention(attention.clone()),
            feedforward: FeedforwardSpec::Sparse(moe.clone()),
        })
    })
}
