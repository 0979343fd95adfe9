//! Ling 3: layers of Kimi Delta Attention whose decay has a bound, and of multi-head latent
//! attention with a gate for each head's result; experts in groups behind some dense layers, with
//! shared experts without a gate. The layers that predict further tokens are left in the file.
//! (mlx-lm and published files call Ling 2.5 by the same name, which is another architecture.)
//! Source: transformers 5.24 `models/bailing_hybrid`; mlx-lm 0.32 `models/bailing_moe_v3.py`;
//! llama.cpp `src/models/bailingmoe3.cpp`.

use super::kimi_linear::{Mixers, kimi_decoder};
use super::{Alias, Architecture, Conversion, Latents, ModelType, TiedByDefault};
use crate::keys::Fixed::{Empty, Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_KIMI_DELTA, GGUF_SIGMOIDS, Key, Role};
use crate::layers::{DecoderConfig, DecoderSpec, KimiDeltaConfig, LatentAttentionConfig, MoeConfig};
use crate::names::{
    self, FFN_NORM, KIMI_DELTA, LATENT_ATTENTION, LATENT_DENSE, LATENT_GATE, MLP, SELECTION_BIAS,
    SHARED_EXPERT, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::ChannelDecay;

pub const BAILING_HYBRID: Architecture = Architecture {
    model_types: &[ModelType {
        name: "bailing_hybrid",
        tables: &[KEYS, EXPERTS, DECODER, BASE],
        wraps: false,
    }],
    gguf: "bailingmoe3",
    gguf_keys: &[GGUF_KEYS, GGUF_KIMI_DELTA, GGUF_SIGMOIDS, GGUF],
    offset_norms: None,
    names: &[
        TOP,
        LATENT_ATTENTION,
        KIMI_DELTA,
        &[LATENT_GATE, LATENT_DENSE],
        &MLP,
        names::EXPERTS,
        &SHARED_EXPERT,
        &[SELECTION_BIAS, FFN_NORM],
    ],
    aliases: ALIASES,
    biases: &[],
    conversion: Conversion {
        predicts_in_layers: true,
        latents: Some(Latents { mlx_per_head: true, mlx_has_eps: true, mlx_wants_yarn: false }),
        latent_names: &[("self_attn.g_a_proj", "self_attn.g_proj"), ("self_attn.o_proj", "self_attn.dense")],
        text_prefix: Some("model."),
        mlx_keys: &[("n_shared_experts", "num_shared_experts")],
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const ALIASES: &[Alias] = &[
    ("embed_tokens", "word_embeddings"),
    ("self_attn.f_a_proj", "attention.f_proj"),
    ("self_attn.g_a_proj", "attention.g_proj"),
    ("self_attn", "attention"),
    (SELECTION_BIAS.0, "mlp.gate.expert_bias"),
    ("mlp.shared_expert", "mlp.shared_experts"),
];

const KEYS: &[Key] = &[
    // Of Kimi Delta Attention, which has as many heads as latent attention; transformers writes
    // those that follow, and something else as the first one.
    Key::disputed("head_dim", Int(128)),
    Key::optional("linear_head_dim"),
    Key::optional("linear_num_heads"),
    Key::optional("linear_conv_kernel_dim"),
    Key::size("short_conv_kernel_size", 4),
    Key::flag("kda_safe_gate", true),
    Key::or("kda_lower_bound", Float(-5.0)),
    Key::only("no_kda_lora", &[Flag(true)]),
    Key::optional("layer_types"),
    Key::disputed("layer_group_size", Int(6)),
    // Of the layers without experts.
    Key::required("intermediate_size"),
    Key::required("num_key_value_heads"),
    // mlx-lm takes 256 for a missing one.
    Key::optional("q_lora_rank"),
    Key::required("kv_lora_rank"),
    Key::required("qk_rope_head_dim"),
    Key::required("qk_nope_head_dim"),
    Key::required("v_head_dim"),
    Key::only("gated_attention_proj_granularity_type", &[Text("head_wise")]),
    Key::only("attention_bias", &[Flag(false)]),
    Key::only("use_qkv_bias", &[Flag(false)]),
    Key::only("use_bias", &[Flag(false)]),
    Key::only("rope_interleave", &[Flag(true)]),
    Key::disputed("rope_theta", Float(6e6)),
    Key::no_effect("partial_rotary_factor"),
    Key::disputed("max_position_embeddings", Int(262_144)),
    Key { name: "model_max_length", role: Role::Alias("max_position_embeddings") },
    Key::required("num_experts"),
    Key { name: "num_local_experts", role: Role::Alias("num_experts") },
    Key::size("num_experts_per_tok", 8),
    Key { name: "num_experts_per_token", role: Role::Alias("num_experts_per_tok") },
    Key::required("moe_intermediate_size"),
    Key::optional("moe_shared_expert_intermediate_size"),
    Key::size("n_shared_experts", 1),
    Key { name: "num_shared_experts", role: Role::Alias("n_shared_experts") },
    Key::optional("mlp_layer_types"),
    Key::disputed("first_k_dense_replace", Int(2)),
    Key::flag("norm_topk_prob", true),
    Key { name: "moe_renormalize", role: Role::Alias("norm_topk_prob") },
    Key::or("routed_scaling_factor", Float(2.5)),
    Key::size("n_group", 8),
    Key { name: "num_expert_group", role: Role::Alias("n_group") },
    Key::size("topk_group", 4),
    Key::only("score_function", &[Text("sigmoid")]),
    Key::only("moe_router_enable_expert_bias", &[Flag(true)]),
    // Bounds of the experts' activations, which transformers and mlx-lm do not compute.
    Key::only("expert_swiglu_limit_list", &[Empty]),
    Key::only("share_expert_swiglu_limit_list", &[Empty]),
    // Ling 2.5's.
    Key::only("group_norm_size", &[]),
    Key::no_effect("use_qk_norm"),
    Key::no_effect("use_rmsnorm"),
    Key::no_effect("router_dtype"),
    Key::no_effect("qk_head_dim"),
    Key::no_effect("pretraining_tp"),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    // Multi-token prediction, whose layers are left in the file.
    Key::no_effect("num_nextn_predict_layers"),
    Key::no_effect("num_mtp_layers"),
    Key::no_effect("mtp_loss_scaling_factor"),
    Key::no_effect("auto_map"),
];

const GGUF_KEYS: &[Key] = &[
    Key::optional("expert_weights_norm"),
    Key::optional("expert_shared_feed_forward_length"),
    Key::only("kda.safe_gate", &[Flag(true)]),
    Key::required("kda.gate_lower_bound"),
    Key::optional("rope.scaling.yarn_log_multiplier"),
    Key::only("swiglu_clamp_exp", &[]),
    Key::only("swiglu_clamp_shexp", &[]),
];

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    if config.is_mlx() && !config.says("q_lora_rank") {
        let want = "mlx-lm then takes 256, and transformers whole queries";
        return Err(config.refuse("q_lora_rank", "missing", want));
    }
    if sizes.tie_word_embeddings && !sizes.headless && !config.is_gguf() && !config.is_mlx() {
        let want = "the output layer is never the embedding here, in transformers";
        return Err(config.refuse("tie_word_embeddings", "true", want));
    }
    let latents = LatentAttentionConfig {
        gate: Some(LATENT_GATE),
        o_proj: LATENT_DENSE,
        ..LatentAttentionConfig::new(config, weights, sizes.hidden_size)?
    };
    let kimi = kimi_delta(config, &sizes)?;
    let attends = attends(config, sizes.num_hidden_layers)?;
    let moe = experts(config, weights)?;
    kimi_decoder(config, sizes, Mixers { latents, kimi, attends }, moe)
}

/// The sizes of Kimi Delta Attention.
fn kimi_delta(config: &Config<'_>, sizes: &DecoderConfig) -> Result<KimiDeltaConfig, ModelError> {
    let heads = config.size("num_attention_heads", "attention.head_count")?;
    let mut found = [
        heads,
        config.size("head_dim", "kda.head_dim")?,
        config.size("short_conv_kernel_size", "ssm.conv_kernel")?,
    ];
    // transformers' own files have these, which prevail there.
    let own = ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"];
    for (key, size) in own.into_iter().zip(&mut found) {
        let stored = if config.is_gguf() { None } else { config.optional_size(key, "")? };
        let Some(other) = stored.filter(|other| other != size) else { continue };
        if key != own[1] || config.is_mlx() {
            let want = format!("other keys say {size}");
            return Err(config.refuse(key, &other.to_string(), &want));
        }
        *size = other;
    }
    let bound = config.optional_float("kda_lower_bound", "kda.gate_lower_bound")?.unwrap_or(-5.0) as f32;
    if bound.is_nan() || bound >= 0.0 {
        return Err(config.refuse("kda_lower_bound", &bound.to_string(), "a number below 0 is wanted"));
    }
    let [num_heads, head_dim, conv_kernel] = found;
    Ok(KimiDeltaConfig {
        hidden_size: sizes.hidden_size,
        num_heads,
        head_dim,
        conv_kernel,
        rms_norm_eps: sizes.rms_norm_eps,
        decay: match config.is_gguf() || config.flag("kda_safe_gate", true)? {
            true => ChannelDecay::Bounded(bound),
            false => ChannelDecay::Softplus,
        },
        low_rank: false,
    })
}

/// For each layer whether it is one of latent attention: the last one of each group. Of layers that
/// make no whole group, mlx-lm and llama.cpp's converter say so, and transformers does not.
fn attends(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        return config.gguf_attends(layers);
    }
    let key = "layer_group_size";
    let size = config.size(key, "")?;
    let last = |layer: usize| (layer + 1).is_multiple_of(size);
    let whole = layers / size * size;
    if config.is_mlx() {
        return Ok((0..layers).map(|layer| last(layer) || layer >= whole).collect());
    }
    let kinds = ["full_attention", "linear_attention"];
    let mut listed = vec![];
    for layer in 0..layers {
        listed.extend(config.layer_type(layer, layers, &kinds)?.map(|kind| kind == kinds[0]));
    }
    match listed.is_empty() {
        false => Ok(listed),
        true if whole == layers => Ok((0..layers).map(last).collect()),
        true => {
            let want =
                format!("it does not divide the {layers} layers, and the peers disagree about the last ones");
            Err(config.refuse(key, &size.to_string(), &want))
        }
    }
}

/// Experts that are chosen by sigmoids with a bias, and as the shared one all shared experts beside
/// each other.
fn experts(config: &Config<'_>, weights: &Weights<'_>) -> Result<MoeConfig, ModelError> {
    let moe = super::kimi_linear::experts(config, weights)?;
    let [json, gguf] = ["moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"];
    let inner = moe.moe_intermediate_size;
    match config.optional_size(json, gguf)? {
        Some(own) if own != inner => {
            let key = if config.is_gguf() { gguf } else { json };
            let want = format!("transformers takes that of the other experts, {inner}");
            Err(config.refuse(key, &own.to_string(), &want))
        }
        _ if config.is_mlx() && !moe.router.normalize => {
            let want = "mlx-lm always divides by the chosen experts' sum";
            Err(config.refuse("norm_topk_prob", "false", want))
        }
        _ => Ok(moe),
    }
}
