//! Nemotron-H and Nemotron 3: each layer is one part, Mamba-2, attention without positions, an MLP
//! or experts; the last two square what is above 0, and have no gates. One `model_type` is both,
//! with experts and without: the list of layers says which. Source: transformers 5.24
//! `models/nemotron_h`; mlx-lm 0.32 `models/nemotron_h.py`; llama.cpp `src/models/nemotron-h.cpp`.

use super::biases::{Biases, Promise};
use super::{Alias, Architecture, Conversion, Mamba2Keys, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_MAMBA, GGUF_SIGMOIDS, Key, Role, Tables};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, Mamba2Config,
    MixerSpec, MlpConfig, MoeConfig,
};
use crate::names::{
    self, ATTENTION, INPUT_NORM, LATENT_DOWN, LATENT_UP, MAMBA, MLP, SELECTION_BIAS, SHARED_EXPERT, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Gate, RopeLayout, RopeParams, RopeScaling, StepLimits};

pub const NEMOTRON_H: Architecture = Architecture {
    model_types: &[ModelType { name: "nemotron_h", tables: TABLES, wraps: false }],
    gguf: "nemotron_h",
    gguf_keys: &[GGUF_DENSE_KEYS, GGUF_KEYS, GGUF_MAMBA, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, MAMBA, &MLP],
    aliases: ALIASES,
    biases: BIASES,
    conversion: Conversion {
        mamba: Some(MAMBA_KEYS),
        text_prefix: Some("backbone."),
        mlx_lm: MlxLm { never_ties: true, ..MlxLm::ALL },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

pub const NEMOTRON_H_MOE: Architecture = Architecture {
    gguf: "nemotron_h_moe",
    gguf_keys: &[GGUF_MOE_KEYS, GGUF_KEYS, GGUF_MAMBA, GGUF_SIGMOIDS, GGUF],
    names: &[
        TOP,
        ATTENTION,
        MAMBA,
        &MLP,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SELECTION_BIAS, LATENT_DOWN, LATENT_UP],
    ],
    ..NEMOTRON_H
};

const TABLES: Tables = &[KEYS, EXPERTS, DECODER, BASE];

const ALIASES: &[Alias] = &[
    ("embed_tokens", "embeddings"),
    ("norm", "norm_f"),
    (INPUT_NORM.0, "norm"),
    ("mamba.in_proj", "mixer.in_proj"),
    ("mamba.conv1d", "mixer.conv1d"),
    ("mamba.dt_bias", "mixer.dt_bias"),
    ("mamba.A_log", "mixer.A_log"),
    ("mamba.D", "mixer.D"),
    ("mamba.norm", "mixer.norm"),
    ("mamba.out_proj", "mixer.out_proj"),
    ("self_attn.q_proj", "mixer.q_proj"),
    ("self_attn.k_proj", "mixer.k_proj"),
    ("self_attn.v_proj", "mixer.v_proj"),
    ("self_attn.o_proj", "mixer.o_proj"),
    ("mlp.up_proj", "mixer.up_proj"),
    ("mlp.down_proj", "mixer.down_proj"),
    ("mlp.gate", "mixer.gate"),
    ("mlp.experts", "mixer.experts"),
    ("mlp.switch_mlp.up_proj", "mixer.switch_mlp.fc1"),
    ("mlp.switch_mlp.down_proj", "mixer.switch_mlp.fc2"),
    ("mlp.shared_expert", "mixer.shared_experts"),
    (LATENT_DOWN.0, "mixer.fc1_latent_proj"),
    (LATENT_UP.0, "mixer.fc2_latent_proj"),
];

const BIASES: &[Biases] = &[
    Biases { promise: Promise::Flag("use_conv_bias"), modules: &["mamba.conv1d"] },
    Biases { promise: Promise::Flag("use_bias"), modules: &["mamba.in_proj", "mamba.out_proj"] },
    Biases {
        promise: Promise::Flag("mlp_bias"),
        modules: &[
            "mlp.up_proj",
            "mlp.down_proj",
            "mlp.shared_expert.up_proj",
            "mlp.shared_expert.down_proj",
            "mlp.latent_down",
            "mlp.latent_up",
        ],
    },
];

const KEYS: &[Key] = &[
    // The list of layers says it, too.
    Key::optional("num_hidden_layers"),
    Key::optional("layers_block_type"),
    Key { name: "layer_types", role: Role::Alias("layers_block_type") },
    Key::optional("hybrid_override_pattern"),
    Key::size("intermediate_size", 21504),
    Key::size("num_attention_heads", 32),
    Key::size("num_key_value_heads", 8),
    Key::size("head_dim", 128),
    Key { name: "attention_head_dim", role: Role::Alias("head_dim") },
    Key::size("max_position_embeddings", 4096),
    Key::or("layer_norm_epsilon", Float(1e-5)),
    Key::only("mlp_hidden_act", &[Text("relu2")]),
    Key::only("mamba_hidden_act", &[Text("silu"), Text("swish")]),
    // transformers has none, whatever this says; mlx-lm has them.
    Key::only("attention_bias", &[Flag(false)]),
    Key::flag("mlp_bias", false),
    Key::flag("use_bias", false),
    Key::flag("use_conv_bias", true),
    Key { name: "mamba_conv_bias", role: Role::Alias("use_conv_bias") },
    Key::size("mamba_num_heads", 128),
    Key::size("mamba_head_dim", 64),
    Key::size("ssm_state_size", 128),
    Key::size("n_groups", 8),
    Key { name: "mamba_n_groups", role: Role::Alias("n_groups") },
    Key::size("conv_kernel", 4),
    Key { name: "mamba_d_conv", role: Role::Alias("conv_kernel") },
    Key::optional("time_step_limit"),
    Key { name: "mamba_dt_limit", role: Role::Alias("time_step_limit") },
    Key::size("n_routed_experts", 8),
    Key { name: "num_local_experts", role: Role::Alias("n_routed_experts") },
    Key::size("num_experts_per_tok", 2),
    Key::size("moe_intermediate_size", 7688),
    Key::size("moe_shared_expert_intermediate_size", 7688),
    Key::optional("moe_latent_size"),
    // One of that size, whatever their number.
    Key::size("n_shared_experts", 1),
    Key::or("routed_scaling_factor", Float(1.0)),
    Key::flag("norm_topk_prob", true),
    Key::size("n_group", 1),
    Key::size("topk_group", 1),
    Key::or("rope_theta", Float(10000.0)),
    Key::no_effect("partial_rotary_factor"),
    // Other architectures' names of what stands above, and numbers of other uses.
    Key::no_effect("rms_norm_eps"),
    Key::no_effect("hidden_act"),
    Key::no_effect("hidden_dropout"),
    Key::no_effect("expand"),
    Key::no_effect("mamba_expand"),
    Key::no_effect("mamba_proj_bias"),
    Key::no_effect("sliding_window"),
    Key::no_effect("moe_shared_expert_overlap"),
    Key::no_effect("residual_in_fp32"),
    Key::no_effect("rescale_prenorm_residual"),
    Key::no_effect("num_logits_to_keep"),
    // The implementation: the result is the same.
    Key::no_effect("chunk_size"),
    Key::no_effect("mamba_chunk_size"),
    Key::no_effect("use_mamba_kernels"),
    Key::only("mamba_ssm_cache_dtype", &[Text("float32")]),
    // Of initial values.
    Key::no_effect("time_step_min"),
    Key::no_effect("time_step_max"),
    Key::no_effect("time_step_floor"),
    Key::no_effect("mamba_dt_min"),
    Key::no_effect("mamba_dt_max"),
    Key::no_effect("mamba_dt_init_floor"),
    Key::no_effect("time_step_rank"),
    // Multi-token prediction, which is not computed.
    Key::no_effect("num_nextn_predict_layers"),
    Key::no_effect("mtp_layers_block_type"),
    Key::no_effect("mtp_hybrid_override_pattern"),
];

const MAMBA_KEYS: Mamba2Keys = Mamba2Keys {
    num_heads: "mamba_num_heads",
    head_dim: "mamba_head_dim",
    state_size: "ssm_state_size",
    n_groups: "n_groups",
    conv_kernel: "conv_kernel",
    limits: "time_step_limit",
};

const GGUF_KEYS: &[Key] = &[
    Key::required("feed_forward_length"),
    // llama.cpp takes the other eps where there is none of RMSNorms.
    Key::optional("attention.layer_norm_rms_epsilon"),
    Key::optional("attention.layer_norm_epsilon"),
];

const GGUF_DENSE_KEYS: &[Key] = &[Key::only("expert_count", &[Int(0)]), Key::no_effect("expert_used_count")];

const GGUF_MOE_KEYS: &[Key] = &[
    Key::required("expert_shared_feed_forward_length"),
    Key::optional("expert_shared_count"),
    Key::optional("moe_latent_size"),
    Key::only("expert_gating_func", &[Int(2), Int(0)]),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let hidden = sizes.hidden_size;
    if sizes.tie_word_embeddings && !sizes.headless && !config.is_gguf() {
        let want = "the output layer is never the embedding here, in transformers and in mlx-lm";
        return Err(config.refuse("tie_word_embeddings", "true", want));
    }
    let attention = AttentionConfig::with_rope(config, weights, hidden, |head_dim| Ok(still(head_dim)))?;
    let no_head_dim = |_| Err(config.missing(MAMBA_KEYS.head_dim));
    let mamba = Mamba2Config::new(config, &MAMBA_KEYS, no_head_dim, StepLimits::NONE)?;
    let letters = config.layer_letters()?.ok_or_else(|| config.missing("layers_block_type"))?;
    let has = |letter: char| letters.contains(&letter);
    let moe = if has('E') { Some(experts(config)?) } else { None };
    let mlp = if has('-') { Some(mlp(config)?) } else { None };
    decoder(sizes, |index| {
        let norms = |mixer, feedforward| LayerNorms { mixer, feedforward, ..LayerNorms::NONE };
        let mixer = |mixer| LayerSpec {
            norms: norms(Some(INPUT_NORM), None),
            mixer,
            feedforward: FeedforwardSpec::None,
        };
        let feedforward = |feedforward| LayerSpec {
            norms: norms(None, Some(INPUT_NORM)),
            mixer: MixerSpec::None,
            feedforward,
        };
        Ok(match (letters[index], mlp, &moe) {
            ('M', ..) => mixer(MixerSpec::Mamba2(mamba)),
            ('-', Some(mlp), _) => feedforward(FeedforwardSpec::Dense(mlp)),
            ('E', _, Some(moe)) => feedforward(FeedforwardSpec::Sparse(moe.clone())),
            _ => mixer(MixerSpec::Attention(attention.clone())),
        })
    })
}

/// Angles of zero.
fn still(head_dim: usize) -> RopeParams {
    RopeParams {
        theta: 1.0,
        rotary_dim: head_dim,
        layout: RopeLayout::HalfSplit,
        scaling: RopeScaling::None,
        freq_factors: Some(vec![f32::INFINITY; head_dim / 2]),
    }
}

fn mlp(config: &Config<'_>) -> Result<MlpConfig, ModelError> {
    let intermediate_size = match config.is_gguf() {
        true => config.gguf_largest("feed_forward_length")?,
        false => config.size("intermediate_size", "")?,
    };
    Ok(MlpConfig { gate: Gate::Relu, gated: false, ..MlpConfig::new(intermediate_size) })
}

fn experts(config: &Config<'_>) -> Result<MoeConfig, ModelError> {
    let count = config.size("n_routed_experts", "expert_count")?;
    let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
    let shared = config.size("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length")?;
    let moe = MoeConfig::of(config, count, inner)?.with_sigmoids(config, 1e-20)?;
    Ok(MoeConfig {
        selection_bias: true,
        shared_expert_intermediate_size: shared,
        shared_expert_gate: false,
        gate: Gate::Relu,
        gated: false,
        latent_size: config.optional_size("moe_latent_size", "moe_latent_size")?.filter(|&size| size > 0),
        ..moe
    })
}
