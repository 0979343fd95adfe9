//! DeepSeek V2 (Lite too) and V3 (R1 and Kimi K2 too), and GLM-4.7-Flash: multi-head latent
//! attention, and experts behind some dense layers, with shared experts without a gate. The layers
//! that predict further tokens are left in the file. Source: transformers 5.24
//! `models/{deepseek_v2,deepseek_v3,glm4_moe_lite}`; mlx-lm 0.32
//! `models/{deepseek_v2,deepseek_v3,glm4_moe_lite}.py`; llama.cpp `src/models/deepseek2.cpp`.

use super::biases::{Biases, Promise};
use super::{Architecture, Conversion, Latents, MlxLm, ModelType, TiedByDefault, decoder, glm4_moe};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_SIGMOIDS, Key, Role};
use crate::layers::{
    DecoderConfig, DecoderSpec, FeedforwardSpec, LatentAttentionConfig, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, MoeConfig,
};
use crate::names::{self, FFN_NORM, INPUT_NORM, LATENT_ATTENTION, MLP, SELECTION_BIAS, SHARED_EXPERT, TOP};
use crate::{Config, ModelError, Weights};

const V3: Latents = Latents { mlx_per_head: true, mlx_has_eps: false, mlx_wants_yarn: false };

pub const DEEPSEEK_V3: Architecture = Architecture {
    model_types: &[
        ModelType { name: "deepseek_v3", tables: &[OF_V3, LATENT, EXPERTS, DECODER, BASE], wraps: false },
        // Those of the same classes under another name, which mlx-lm knows.
        ModelType { name: "kimi_k2", tables: &[OF_V3, LATENT, EXPERTS, DECODER, BASE], wraps: false },
    ],
    gguf: "deepseek2",
    gguf_keys: &[GGUF_OF_V3, GGUF_LATENT, GGUF_SIGMOIDS, GGUF],
    offset_norms: None,
    names: &[TOP, LATENT_ATTENTION, &MLP, names::EXPERTS, &SHARED_EXPERT, &[SELECTION_BIAS, FFN_NORM]],
    aliases: ALIASES,
    biases: BIASES,
    conversion: Conversion {
        predicts_in_layers: true,
        mlx_lm: MlxLm { never_ties: true, ..MlxLm::ALL },
        latents: Some(V3),
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe: by_sigmoids,
};

pub const GLM4_MOE_LITE: Architecture = Architecture {
    model_types: &[ModelType {
        name: "glm4_moe_lite",
        tables: &[OF_GLM, LATENT, EXPERTS, DECODER, BASE],
        wraps: false,
    }],
    conversion: Conversion { latents: Some(Latents { mlx_has_eps: true, ..V3 }), ..DEEPSEEK_V3.conversion },
    ..DEEPSEEK_V3
};

pub const DEEPSEEK_V2: Architecture = Architecture {
    model_types: &[ModelType {
        name: "deepseek_v2",
        tables: &[OF_V2, LATENT, EXPERTS, DECODER, BASE],
        wraps: false,
    }],
    gguf_keys: &[GGUF_OF_V2, GGUF_LATENT, GGUF],
    names: &[TOP, LATENT_ATTENTION, &MLP, names::EXPERTS, &SHARED_EXPERT, &[FFN_NORM]],
    conversion: Conversion {
        mlx_lm: MlxLm { rope_types: Some(&["yarn"]), never_ties: true, ..MlxLm::ALL },
        latents: Some(Latents { mlx_per_head: false, mlx_wants_yarn: true, ..V3 }),
        ..DEEPSEEK_V3.conversion
    },
    describe: by_softmax,
    ..DEEPSEEK_V3
};

const ALIASES: &[super::Alias] = &[("mlp.shared_expert", "mlp.shared_experts")];

const BIASES: &[Biases] = &[Biases {
    promise: Promise::Flag("attention_bias"),
    modules: &["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"],
}];

/// Of all three.
const LATENT: &[Key] = &[
    // Of the layers without experts.
    Key::required("intermediate_size"),
    Key::required("num_key_value_heads"),
    Key::required("kv_lora_rank"),
    Key::required("qk_rope_head_dim"),
    Key::required("qk_nope_head_dim"),
    Key::required("v_head_dim"),
    Key::flag("attention_bias", false),
    Key::required("n_routed_experts"),
    Key::required("num_experts_per_tok"),
    Key::required("moe_intermediate_size"),
    Key::required("n_shared_experts"),
    // Both follow from other sizes.
    Key::no_effect("qk_head_dim"),
    Key::no_effect("head_dim"),
    // Experts in every layer behind the dense ones.
    Key::only("moe_layer_freq", &[Int(1)]),
    Key::no_effect("ep_size"),
    Key::no_effect("pretraining_tp"),
    // Of training.
    Key::no_effect("aux_loss_alpha"),
    Key::no_effect("seq_aux"),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    // Multi-token prediction: `Predictor` looks for its tensors.
    Key::no_effect("num_nextn_predict_layers"),
    Key::no_effect("num_mtp_layers"),
    Key::no_effect("auto_map"),
];

const OF_V3: &[Key] = &[
    Key::no_effect("partial_rotary_factor"),
    Key::size("q_lora_rank", 1536),
    Key::disputed("max_position_embeddings", Int(4096)),
    Key { name: "num_local_experts", role: Role::Alias("n_routed_experts") },
    Key::disputed("first_k_dense_replace", Int(3)),
    Key::flag("norm_topk_prob", true),
    Key::disputed("routed_scaling_factor", Float(2.5)),
    Key::disputed("n_group", Int(8)),
    Key::disputed("topk_group", Int(4)),
    Key::flag("rope_interleave", true),
    Key::only("scoring_func", &[Text("sigmoid")]),
    Key::only("topk_method", &[Text("noaux_tc")]),
];

const OF_GLM: &[Key] = &[
    Key::size("q_lora_rank", 768),
    Key::or("rms_norm_eps", Float(1e-5)),
    Key::size("max_position_embeddings", 202_752),
    Key { name: "num_local_experts", role: Role::Alias("n_routed_experts") },
    // transformers reads the list alone, mlx-lm and llama.cpp's converter the number alone.
    Key::optional("mlp_layer_types"),
    Key::optional("first_k_dense_replace"),
    Key::flag("norm_topk_prob", true),
    Key::or("routed_scaling_factor", Float(1.8)),
    Key::size("n_group", 1),
    Key::size("topk_group", 1),
    Key::flag("rope_interleave", true),
    Key::only("partial_rotary_factor", &[Float(1.0)]),
    Key::only("scoring_func", &[Text("sigmoid")]),
    Key::only("topk_method", &[Text("noaux_tc")]),
];

const OF_V2: &[Key] = &[
    Key::no_effect("partial_rotary_factor"),
    Key::size("q_lora_rank", 1536),
    Key::size("max_position_embeddings", 2048),
    Key { name: "num_experts", role: Role::Alias("n_routed_experts") },
    Key::size("first_k_dense_replace", 0),
    // Weights are never divided by their sum.
    Key::no_effect("norm_topk_prob"),
    Key::or("routed_scaling_factor", Float(1.0)),
    Key::or("topk_method", Text("greedy")),
    Key::optional("n_group"),
    Key::optional("topk_group"),
    Key::only("scoring_func", &[Text("softmax")]),
];

const GGUF_OF_V3: &[Key] = &[Key::only("expert_gating_func", &[Int(2), Int(0)])];

/// Of all three.
const GGUF_LATENT: &[Key] = &[
    Key::required("feed_forward_length"),
    Key::required("expert_shared_count"),
    Key::optional("attention.q_lora_rank"),
    Key::required("attention.kv_lora_rank"),
    Key::optional("attention.key_length_mla"),
    Key::optional("attention.value_length_mla"),
    Key::optional("rope.scaling.yarn_log_multiplier"),
    Key::only("attention.temperature_scale", &[Float(0.0)]),
];

const GGUF_OF_V2: &[Key] = &[
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_feed_forward_length"),
    Key::optional("leading_dense_block_count"),
    Key::optional("expert_weights_scale"),
    Key::only("expert_gating_func", &[Int(1), Int(0)]),
    // llama.cpp takes the groups with the two best experts, transformers those with the best one.
    Key::only("expert_group_count", &[Int(0), Int(1)]),
    Key::only("expert_group_used_count", &[Int(0), Int(1)]),
    Key::only("expert_weights_norm", &[Flag(false)]),
];

fn by_sigmoids(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let mut moe = glm4_moe::experts(config, weights)?;
    let dense = leading_dense(config, weights)?;
    if config.is_gguf() {
        let first = weights.layer(dense.iter().take_while(|dense| **dense).count());
        moe.selection_bias = first.has(SELECTION_BIAS.0, SELECTION_BIAS.1);
    }
    layers(config, weights, moe, &dense)
}

fn by_softmax(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    let method = if config.is_gguf() { None } else { config.text("topk_method", "")? };
    let grouped = match method.as_deref() {
        None | Some("greedy") => false,
        Some("group_limited_greedy") => true,
        Some(other) => {
            let want = "greedy and group_limited_greedy are supported";
            return Err(config.refuse("topk_method", other, want));
        }
    };
    let moe = glm4_moe::with_shared(config, weights)?.with_scaled_softmax(config, grouped)?;
    let dense = leading_dense(config, weights)?;
    layers(config, weights, moe, &dense)
}

/// For each layer whether it has an MLP instead of experts.
fn leading_dense(config: &Config<'_>, weights: &Weights<'_>) -> Result<Vec<bool>, ModelError> {
    let layers = DecoderConfig::new(config, weights)?.num_hidden_layers;
    let count = config.optional_size("first_k_dense_replace", "leading_dense_block_count")?;
    let first = |count: usize| (0..layers).map(|layer| layer < count).collect::<Vec<_>>();
    if config.is_gguf() || !config.computes("mlp_layer_types") {
        return Ok(first(count.unwrap_or(0)));
    }
    let dense = match config.kinds("mlp_layer_types", layers, &["dense", "sparse"])? {
        None => first(if config.is_mlx() { count.unwrap_or(1) } else { 1 }),
        Some(listed) => listed.into_iter().map(|kind| kind == "dense").collect(),
    };
    match count {
        Some(count) if first(count) != dense => {
            let want = "mlp_layer_types says otherwise, and the peers disagree which of them holds";
            Err(config.refuse("first_k_dense_replace", &count.to_string(), want))
        }
        _ => Ok(dense),
    }
}

fn layers(
    config: &Config<'_>,
    weights: &Weights<'_>,
    moe: MoeConfig,
    dense: &[bool],
) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let attention = LatentAttentionConfig::new(config, weights, sizes.hidden_size)?;
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: MixerSpec::LatentAttention(attention.clone()),
            feedforward: match dense[index] {
                true => FeedforwardSpec::Dense(mlp),
                false => FeedforwardSpec::Sparse(moe.clone()),
            },
        })
    })
}
