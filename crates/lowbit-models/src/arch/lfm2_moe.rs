//! LFM2-MoE: LFM2's layers with experts behind some dense ones, chosen by sigmoids with a bias.
//! Source: transformers 5.24 `models/lfm2_moe`; mlx-lm 0.32 `models/lfm2_moe.py`; llama.cpp
//! `src/models/lfm2moe.cpp`.

use super::lfm2::{Hybrid, LFM2_GGUF_KEYS, LFM2_KEYS, LFM2_NAMES, NORMS, O_PROJ, TIED};
use super::{Architecture, Conversion, MlxLm, ModelType};
use crate::keys::Fixed::{Flag, Float, Int};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, Key};
use crate::layers::{DecoderSpec, FeedforwardSpec, MlpConfig, MoeConfig};
use crate::names::{self, MLP, SELECTION_BIAS};
use crate::{Config, ModelError, Weights};

pub const LFM2_MOE: Architecture = Architecture {
    model_types: &[ModelType {
        name: "lfm2_moe",
        tables: &[KEYS, LFM2_KEYS, EXPERTS, DECODER, BASE],
        wraps: false,
    }],
    gguf: "lfm2moe",
    gguf_keys: &[GGUF_KEYS, LFM2_GGUF_KEYS, GGUF],
    offset_norms: None,
    names: &[LFM2_NAMES, &MLP, names::EXPERTS, &[SELECTION_BIAS]],
    aliases: &[
        NORMS[0],
        NORMS[1],
        NORMS[2],
        NORMS[3],
        O_PROJ,
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.experts.{}.gate_proj", "feed_forward.experts.{}.w1"),
        ("mlp.experts.{}.up_proj", "feed_forward.experts.{}.w3"),
        ("mlp.experts.{}.down_proj", "feed_forward.experts.{}.w2"),
        ("mlp.experts", "feed_forward.experts"),
        ("mlp.switch_mlp", "feed_forward.switch_mlp"),
        (SELECTION_BIAS.0, "feed_forward.expert_bias"),
        ("mlp.gate", "feed_forward.gate"),
    ],
    biases: &[],
    conversion: Conversion {
        mlx_aliases: &[
            ("mlp.gate_proj", "feed_forward.gate_proj"),
            ("mlp.up_proj", "feed_forward.up_proj"),
            ("mlp.down_proj", "feed_forward.down_proj"),
        ],
        mlx_lm: MlxLm::UNSCALED,
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TIED,
    describe,
};

/// The number that transformers and mlx-lm add to the sum of weights.
const SUM_EPS: f32 = 1e-6;

const KEYS: &[Key] = &[
    // Of the layers without experts.
    Key::size("intermediate_size", 7168),
    Key::size("moe_intermediate_size", 1792),
    Key::size("num_dense_layers", 2),
    Key::size("num_experts", 32),
    Key::size("num_experts_per_tok", 4),
    Key::flag("norm_topk_prob", true),
    Key::flag("use_expert_bias", true),
    Key::or("routed_scaling_factor", Float(1.0)),
    Key::optional("layer_types"),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("feed_forward_length"),
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_feed_forward_length"),
    Key::optional("leading_dense_block_count"),
    Key::only("expert_gating_func", &[Int(2)]),
    // llama.cpp always divides by the sum, and does not scale, whatever the file says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(true)]),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let hybrid = Hybrid::new(config, weights)?;
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    let dense = config.optional_size("num_dense_layers", "leading_dense_block_count")?.unwrap_or(0);
    let count = config.size("num_experts", "expert_count")?;
    let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
    let moe = MoeConfig::of(config, count, inner)?.with_sigmoids(config, SUM_EPS)?;
    let selection_bias = config.is_gguf() || config.flag("use_expert_bias", true)?;
    let moe = MoeConfig { selection_bias, ..moe };
    hybrid.decoder(|index| match index < dense {
        true => FeedforwardSpec::Dense(mlp),
        false => FeedforwardSpec::Sparse(moe.clone()),
    })
}
