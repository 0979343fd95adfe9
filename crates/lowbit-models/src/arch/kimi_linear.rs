//! Kimi-Linear: three layers of Kimi Delta Attention for each one of multi-head latent attention
//! without positions, and experts behind some dense layers, with shared experts without a gate.
//! Source: transformers 5.24 `models/kimi_linear`; mlx-lm 0.32 `models/kimi_linear.py`; llama.cpp
//! `src/models/kimi-linear.cpp`.

use super::{Alias, Architecture, Conversion, Latents, MlxLm, ModelType, TiedByDefault, decoder};
use crate::keys::Fixed::{Empty, Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_KIMI_DELTA, GGUF_SIGMOIDS, Key, Role};
use crate::layers::{
    DecoderConfig, DecoderSpec, FeedforwardSpec, KimiDeltaConfig, LatentAttentionConfig, LayerNorms,
    LayerSpec, MixerSpec, MlpConfig, MoeConfig,
};
use crate::names::{
    self, FFN_NORM, INPUT_NORM, KIMI_DELTA, LATENT_ATTENTION, MLP, SELECTION_BIAS, SHARED_EXPERT, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::ChannelDecay;

pub const KIMI_LINEAR: Architecture = Architecture {
    model_types: &[ModelType { name: "kimi_linear", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "kimi-linear",
    gguf_keys: &[GGUF_KIMI_DELTA, GGUF_SIGMOIDS, GGUF],
    offset_norms: None,
    names: &[
        TOP,
        LATENT_ATTENTION,
        KIMI_DELTA,
        &MLP,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SELECTION_BIAS, FFN_NORM],
    ],
    aliases: ALIASES,
    biases: &[],
    conversion: Conversion {
        gguf_never_ties: true,
        latents: Some(Latents { mlx_per_head: true, mlx_has_eps: true, mlx_wants_yarn: false }),
        mlx_keys: &[
            ("num_experts_per_tok", "num_experts_per_token"),
            ("norm_topk_prob", "moe_renormalize"),
            ("n_group", "num_expert_group"),
            ("n_shared_experts", "num_shared_experts"),
            ("max_position_embeddings", "model_max_length"),
        ],
        mlx_aliases: MLX_ALIASES,
        mlx_lm: MlxLm { never_ties: true, ..MlxLm::ALL },
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const ALIASES: &[Alias] = &[
    ("mlp.gate", "block_sparse_moe.gate"),
    ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
    ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
    ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
    ("mlp.shared_expert", "block_sparse_moe.shared_experts"),
];

const MLX_ALIASES: &[Alias] = &[
    ("self_attn.q_conv1d", "self_attn.q_conv.conv"),
    ("self_attn.k_conv1d", "self_attn.k_conv.conv"),
    ("self_attn.v_conv1d", "self_attn.v_conv.conv"),
    (SELECTION_BIAS.0, "mlp.e_score_correction_bias"),
    ("mlp.gate", "mlp.gate"),
    ("mlp.shared_expert", "mlp.shared_experts"),
];

const KEYS: &[Key] = &[
    Key::optional("linear_attn_config"),
    // In transformers' own files its sizes have these names.
    Key::optional("linear_num_heads"),
    Key::optional("linear_head_dim"),
    Key::size("linear_conv_kernel_dim", 4),
    Key::optional("layer_types"),
    // Of the layers without experts.
    Key::required("intermediate_size"),
    Key::required("num_key_value_heads"),
    Key::required("kv_lora_rank"),
    Key::required("qk_rope_head_dim"),
    Key::required("qk_nope_head_dim"),
    Key::required("v_head_dim"),
    // mlx-lm and llama.cpp do not compute compressed queries here, nor biases.
    Key::only("q_lora_rank", &[]),
    Key::only("attention_bias", &[Flag(false)]),
    Key::only("mla_use_nope", &[Flag(true)]),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 1_048_576),
    Key { name: "model_max_length", role: Role::Alias("max_position_embeddings") },
    Key::required("num_experts"),
    Key { name: "num_local_experts", role: Role::Alias("num_experts") },
    Key::disputed("num_experts_per_tok", Int(8)),
    Key { name: "num_experts_per_token", role: Role::Alias("num_experts_per_tok") },
    Key::required("moe_intermediate_size"),
    Key::disputed("n_shared_experts", Int(1)),
    Key { name: "num_shared_experts", role: Role::Alias("n_shared_experts") },
    // transformers prefers the list, mlx-lm and llama.cpp's converter read the number alone.
    Key::optional("mlp_layer_types"),
    Key::disputed("first_k_dense_replace", Int(1)),
    Key::flag("norm_topk_prob", true),
    Key { name: "moe_renormalize", role: Role::Alias("norm_topk_prob") },
    Key::disputed("routed_scaling_factor", Float(2.446)),
    Key::size("n_group", 1),
    Key { name: "num_expert_group", role: Role::Alias("n_group") },
    Key::size("topk_group", 1),
    Key::only("moe_router_activation_func", &[Text("sigmoid")]),
    // Experts in every layer behind the dense ones.
    Key::only("moe_layer_freq", &[Int(1)]),
    // Groups are always looked at.
    Key::no_effect("use_grouped_topk"),
    // Nothing is rotated.
    Key::or("rope_theta", Float(10000.0)),
    Key::only("rope_scaling", &[Empty]),
    Key::only("rope_parameters", &[Empty]),
    // Both follow from other sizes.
    Key::no_effect("qk_head_dim"),
    Key::no_effect("head_dim"),
    Key::no_effect("pretraining_tp"),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    // Multi-token prediction, which is not computed.
    Key::no_effect("num_nextn_predict_layers"),
    Key::no_effect("auto_map"),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    if sizes.tie_word_embeddings && !sizes.headless && !config.is_gguf() {
        let want = "the output layer is never the embedding here, in transformers and in llama.cpp";
        return Err(config.refuse("tie_word_embeddings", "true", want));
    }
    let latents = LatentAttentionConfig::without_positions(config, weights, sizes.hidden_size)?;
    let kimi = kimi_delta(config, &sizes)?;
    let attends = attends(config, sizes.num_hidden_layers)?;
    let moe = experts(config, weights)?;
    kimi_decoder(config, sizes, Mixers { latents, kimi, attends }, moe)
}

/// The two kinds of layers, and for each layer whether it is one of latent attention.
pub(super) struct Mixers {
    pub latents: LatentAttentionConfig,
    pub kimi: KimiDeltaConfig,
    pub attends: Vec<bool>,
}

/// The decoder whose first layers have an MLP, and the others these experts.
pub(super) fn kimi_decoder(
    config: &Config<'_>,
    sizes: DecoderConfig,
    mixers: Mixers,
    moe: MoeConfig,
) -> Result<DecoderSpec, ModelError> {
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    let dense = leading_dense(config, sizes.num_hidden_layers)?;
    decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: match mixers.attends[index] {
                true => MixerSpec::LatentAttention(mixers.latents.clone()),
                false => MixerSpec::KimiDelta(mixers.kimi),
            },
            feedforward: match dense[index] {
                true => FeedforwardSpec::Dense(mlp),
                false => FeedforwardSpec::Sparse(moe.clone()),
            },
        })
    })
}

/// The sizes of Kimi Delta Attention, in `linear_attn_config` or beside it.
fn kimi_delta(config: &Config<'_>, sizes: &DecoderConfig) -> Result<KimiDeltaConfig, ModelError> {
    let section = config.section("linear_attn_config")?;
    let [num_heads, head_dim, conv_kernel] = match section {
        Some(section) => {
            let [heads, dim, taps] = ["num_heads", "head_dim", "short_conv_kernel_size"];
            [section.size(heads, "")?, section.size(dim, "")?, section.size(taps, "")?]
        }
        None => [
            config.size("linear_num_heads", "attention.head_count")?,
            config.size("linear_head_dim", "kda.head_dim")?,
            config.size("linear_conv_kernel_dim", "ssm.conv_kernel")?,
        ],
    };
    Ok(KimiDeltaConfig {
        hidden_size: sizes.hidden_size,
        num_heads,
        head_dim,
        conv_kernel,
        rms_norm_eps: sizes.rms_norm_eps,
        decay: ChannelDecay::Softplus,
        low_rank: true,
    })
}

/// For each layer whether it is one of latent attention. `linear_attn_config` counts layers from 1.
fn attends(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        return config.gguf_attends(layers);
    }
    let kinds = ["full_attention", "linear_attention"];
    let mut typed = vec![];
    for layer in 0..layers {
        typed.extend(config.layer_type(layer, layers, &kinds)?.map(|kind| kind == kinds[0]));
    }
    let section = config.section("linear_attn_config")?;
    let [full, linear] = match &section {
        Some(section) => [section.sizes("full_attn_layers")?, section.sizes("kda_layers")?],
        None => [vec![], vec![]],
    };
    if full.is_empty() && linear.is_empty() {
        return match typed.is_empty() {
            false => Ok(typed),
            true => Err(config.missing("linear_attn_config.kda_layers")),
        };
    }
    let key = "linear_attn_config";
    let got = || format!("full_attn_layers {full:?} and kda_layers {linear:?}");
    let refuse = || config.refuse(key, &got(), &format!("each layer from 1 to {layers} is in one of them"));
    let mut listed = vec![None; layers];
    for (list, attends) in [(&full, true), (&linear, false)] {
        for layer in list {
            match layer.checked_sub(1).and_then(|index| listed.get_mut(index)) {
                Some(kind @ None) => *kind = Some(attends),
                _ => return Err(refuse()),
            }
        }
    }
    let listed: Vec<bool> = listed.into_iter().collect::<Option<_>>().ok_or_else(refuse)?;
    match typed.is_empty() || typed == listed {
        true => Ok(listed),
        false => Err(config.refuse(key, &got(), "layer_types says otherwise")),
    }
}

/// Experts that are chosen by sigmoids with a bias, and as the shared one all shared experts beside
/// each other.
pub(super) fn experts(config: &Config<'_>, weights: &Weights<'_>) -> Result<MoeConfig, ModelError> {
    let count = config.size("num_experts", "expert_count")?;
    let inner = config.size("moe_intermediate_size", "expert_feed_forward_length")?;
    let shared = config.size("n_shared_experts", "expert_shared_count")?;
    let moe = MoeConfig::of(config, count, inner)?.with_sigmoids(config, 1e-20)?;
    Ok(MoeConfig {
        selection_bias: true,
        shared_expert_intermediate_size: weights
            .product(["moe_intermediate_size", "n_shared_experts"], [inner, shared])?,
        shared_expert_gate: false,
        ..moe
    })
}

/// For each layer whether it has an MLP instead of experts.
fn leading_dense(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let key = "first_k_dense_replace";
    let count = config.optional_size(key, "leading_dense_block_count")?.unwrap_or(0);
    let first: Vec<bool> = (0..layers).map(|layer| layer < count).collect();
    if config.is_gguf() {
        return Ok(first);
    }
    match config.kinds("mlp_layer_types", layers, &["dense", "sparse"])? {
        None => Ok(first),
        Some(listed) => {
            let listed: Vec<bool> = listed.into_iter().map(|kind| kind == "dense").collect();
            if config.says(key) && listed != first {
                let want = "mlp_layer_types says otherwise, and the peers disagree which of them holds";
                return Err(config.refuse(key, &count.to_string(), want));
            }
            Ok(listed)
        }
    }
}
