//! Qwen3.5 (and 3.6), dense and with experts: Qwen3-Next's blocks, with separate projections.
//! Source: transformers 5 `models/{qwen3_5,qwen3_5_moe}`; llama.cpp
//! `src/models/{qwen35,qwen35moe}.cpp`.

use super::biases::BY_FLAGS;
use super::qwen3_next::{Hybrid, OFFSET_NORMS};
use super::{Architecture, Conversion, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::Int;
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_EXPERTS, GGUF_HYBRID, HYBRID, Key, Tables, WRAPPER};
use crate::layers::{
    DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MlpConfig, MoeConfig,
};
use crate::names::{
    self, ATTENTION, DELTA_NET, HEAD_NORMS, INPUT_NORM, MLP, NEXTN, POST_ATTENTION_NORM, SHARED_EXPERT,
    SHARED_EXPERT_GATE, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::HeadMap;

pub const QWEN3_5: Architecture = Architecture {
    model_types: &[
        ModelType { name: "qwen3_5", tables: DENSE_TABLES, wraps: true },
        ModelType { name: "qwen3_5_text", tables: DENSE_TABLES, wraps: false },
    ],
    gguf: "qwen35",
    gguf_keys: &[GGUF_KEYS, GGUF_HYBRID, GGUF],
    offset_norms: Some(OFFSET_NORMS),
    names: &[TOP, ATTENTION, HEAD_NORMS, DELTA_NET, &MLP, &[POST_ATTENTION_NORM], NEXTN],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: CONVERSION,
    mlx_prefix: "language_model.",
    tied_by_default: TiedByDefault::NO,
    describe: describe_dense,
};

pub const QWEN3_5_MOE: Architecture = Architecture {
    model_types: &[
        ModelType { name: "qwen3_5_moe", tables: MOE_TABLES, wraps: true },
        ModelType { name: "qwen3_5_moe_text", tables: MOE_TABLES, wraps: false },
    ],
    gguf: "qwen35moe",
    gguf_keys: &[GGUF_HYBRID, GGUF_EXPERTS, GGUF],
    offset_norms: Some(OFFSET_NORMS),
    names: &[
        TOP,
        ATTENTION,
        HEAD_NORMS,
        DELTA_NET,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SHARED_EXPERT_GATE, POST_ATTENTION_NORM],
        NEXTN,
    ],
    aliases: &[],
    biases: BY_FLAGS,
    conversion: CONVERSION,
    mlx_prefix: "language_model.",
    tied_by_default: TiedByDefault::NO,
    describe: describe_moe,
};

const CONVERSION: Conversion = Conversion { sections: true, tiled_value_heads: true, ..Conversion::PLAIN };

const DENSE_TABLES: Tables = &[DENSE_KEYS, HYBRID, DECODER, BASE, WRAPPER];
const MOE_TABLES: Tables = &[MOE_KEYS, HYBRID, EXPERTS, DECODER, BASE, WRAPPER];

const DENSE_KEYS: &[Key] = &[
    Key::required("intermediate_size"),
    Key::disputed("num_key_value_heads", Int(4)),
    Key::only("num_experts", &[Int(0)]),
    Key::no_effect("mlp_only_layers"),
];

const MOE_KEYS: &[Key] = &[
    Key::disputed("num_key_value_heads", Int(2)),
    Key::disputed("num_experts", Int(256)),
    Key::disputed("num_experts_per_tok", Int(8)),
    Key::disputed("moe_intermediate_size", Int(512)),
    Key::disputed("shared_expert_intermediate_size", Int(512)),
    // transformers always divides by the sum, mlx-lm does what this says.
    Key::flag("norm_topk_prob", true),
    // All layers have experts.
    Key::no_effect("intermediate_size"),
    Key::no_effect("decoder_sparse_step"),
    Key::no_effect("mlp_only_layers"),
];

const GGUF_KEYS: &[Key] = &[Key::required("feed_forward_length")];

fn describe_dense(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    describe(config, weights, &FeedforwardSpec::Dense(mlp))
}

fn describe_moe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let mut moe = MoeConfig::new(config, true)?;
    if config.is_mlx() && !moe.router.normalize {
        let want = "mlx-lm does not divide by the chosen experts' sum then, but transformers always does";
        return Err(config.refuse("norm_topk_prob", "false", want));
    }
    moe.router.normalize = true;
    describe(config, weights, &FeedforwardSpec::Sparse(moe))
}

fn describe(
    config: &Config<'_>,
    weights: &Weights<'_>,
    feedforward: &FeedforwardSpec,
) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    // The GGUF converter reorders value heads so that they tile the key heads.
    let head_map = if config.is_gguf() { HeadMap::Tiled } else { HeadMap::Grouped };
    let hybrid = Hybrid::new(config, weights, &sizes, head_map)?;
    decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, POST_ATTENTION_NORM),
            mixer: hybrid.mixer(config, index)?,
            feedforward: feedforward.clone(),
        })
    })
}
