//! Granite 4 H: Granite's factors around layers of Mamba-2 and of attention, which mostly does not
//! rotate; with experts and a shared one, or an MLP alone. One `model_type` is both: a checkpoint's
//! `num_local_experts` says which. Source: transformers 5.24 `models/granitemoehybrid`; mlx-lm 0.32
//! `models/granitemoehybrid.py`; llama.cpp `src/models/granite-hybrid.cpp`.

use super::biases::{Biases, Promise};
use super::granite::{GRANITE_GGUF_KEYS, factors};
use super::llama::ROPE_DIVISORS;
use super::{
    Alias, Architecture, Conversion, Mamba2Keys, MlxLm, ModelType, TiedByDefault, check_heads_make_up_hidden,
    decoder, permuted, text_model,
};
use crate::keys::Fixed::{Flag, Float, Int, Text};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_DENSE, GGUF_MAMBA, Key, Role, Tables};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, Mamba2Config,
    MixerSpec, MlpConfig, MoeConfig,
};
use crate::names::{
    self, ATTENTION, FFN_NORM, FUSED_MLP, FUSED_SHARED_EXPERT, INPUT_NORM, MAMBA, MLP, SHARED_EXPERT, TOP,
};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::StepLimits;

pub const GRANITE_HYBRID: Architecture = Architecture {
    model_types: &[ModelType { name: NAME, tables: TABLES, wraps: false }],
    gguf: GGUF_NAME,
    gguf_keys: &[GGUF_DENSE_KEYS, GGUF_KEYS, GRANITE_GGUF_KEYS, GGUF_MAMBA, GGUF_DENSE, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, MAMBA, &MLP, &[FFN_NORM]],
    aliases: &[FUSED, ("mlp.down_proj", "shared_mlp.output_linear")],
    biases: BIASES,
    conversion: Conversion { mlx_aliases: &[("mlp.down_proj", "mlp.down_proj")], ..CONVERSION },
    mlx_prefix: "",
    tied_by_default: TIED,
    describe: |config, weights| {
        let key = if config.is_mlx() { "intermediate_size" } else { "shared_intermediate_size" };
        let intermediate_size = config.size(key, "feed_forward_length")?;
        let is_fused = !config.is_gguf() && text_model(weights).layer(0).has_module(FUSED_MLP);
        let fused = is_fused.then_some(FUSED_MLP);
        let mlp = MlpConfig { fused, ..MlpConfig::new(intermediate_size) };
        describe(config, weights, &FeedforwardSpec::Dense(mlp))
    },
};

pub const GRANITE_HYBRID_MOE: Architecture = Architecture {
    gguf_keys: &[GGUF_MOE_KEYS, GGUF_KEYS, GRANITE_GGUF_KEYS, GGUF_MAMBA, GGUF_DENSE, GGUF],
    names: &[TOP, ATTENTION, MAMBA, names::EXPERTS, &SHARED_EXPERT, &[FUSED_SHARED_EXPERT, FFN_NORM]],
    aliases: &[
        ("mlp.gate", "block_sparse_moe.router.layer"),
        ("mlp.switch_mlp", "block_sparse_moe.switch_mlp"),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear"),
        (FUSED_SHARED_EXPERT.0, "shared_mlp.input_linear"),
        ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
    ],
    conversion: CONVERSION,
    describe: |config, weights| {
        let count = config.size("num_local_experts", "expert_count")?;
        let inner = config.size("intermediate_size", "feed_forward_length")?;
        let shared = config.size("shared_intermediate_size", "expert_shared_feed_forward_length")?;
        let moe = MoeConfig {
            shared_expert_intermediate_size: shared,
            shared_expert_gate: false,
            ..MoeConfig::of(config, count, inner)?
        };
        describe(config, weights, &FeedforwardSpec::Sparse(moe))
    },
    ..GRANITE_HYBRID
};

const NAME: &str = "granitemoehybrid";
const GGUF_NAME: &str = "granitehybrid";
const FUSED: Alias = (FUSED_MLP.0, "shared_mlp.input_linear");
const TABLES: Tables = &[KEYS, EXPERTS, DECODER, BASE];
const TIED: TiedByDefault = TiedByDefault { transformers: false, mlx_lm: true };

const BIASES: &[Biases] = &[
    Biases {
        promise: Promise::Flag("attention_bias"),
        modules: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    },
    Biases { promise: Promise::Flag("mamba_conv_bias"), modules: &["mamba.conv1d"] },
    Biases { promise: Promise::Flag("mamba_proj_bias"), modules: &["mamba.in_proj", "mamba.out_proj"] },
];

const CONVERSION: Conversion = Conversion {
    like_llama: true,
    mamba: Some(MAMBA_KEYS),
    rope_divisors: ROPE_DIVISORS,
    mlx_lm: MlxLm::UNSCALED,
    ..Conversion::PLAIN
};

const KEYS: &[Key] = &[
    // Of an expert; in MLX's layout, of the MLP of models without experts.
    Key::required("intermediate_size"),
    Key::size("shared_intermediate_size", 1024),
    Key::optional("num_key_value_heads"),
    Key::optional("head_dim"),
    Key::size("max_position_embeddings", 2048),
    Key::flag("attention_bias", false),
    Key::or("embedding_multiplier", Float(1.0)),
    Key::or("residual_multiplier", Float(1.0)),
    Key::or("attention_multiplier", Float(1.0)),
    Key::or("logits_scaling", Float(1.0)),
    Key::disputed("num_local_experts", Int(8)),
    Key { name: "num_experts", role: Role::Alias("num_local_experts") },
    Key::size("num_experts_per_tok", 2),
    Key::optional("position_embedding_type"),
    Key::optional("layer_types"),
    Key { name: "layers_block_type", role: Role::Alias("layer_types") },
    Key::size("mamba_n_heads", 128),
    Key::size("mamba_n_groups", 1),
    Key::size("mamba_d_state", 256),
    Key::or("mamba_d_head", Text("auto")),
    Key::size("mamba_d_conv", 4),
    Key::size("mamba_expand", 2),
    Key::flag("mamba_conv_bias", true),
    Key::flag("mamba_proj_bias", false),
    Key::optional("time_step_limit"),
    // The implementation: the result is the same.
    Key::no_effect("mamba_chunk_size"),
    // Masks are read from it in other models; here no layer has a window.
    Key::no_effect("sliding_window"),
    Key::no_effect("partial_rotary_factor"),
    // Published, but no peer reads them.
    Key::no_effect("init_method"),
    Key::no_effect("normalization_function"),
];

const MAMBA_KEYS: Mamba2Keys = Mamba2Keys {
    num_heads: "mamba_n_heads",
    head_dim: "mamba_d_head",
    state_size: "mamba_d_state",
    n_groups: "mamba_n_groups",
    conv_kernel: "mamba_d_conv",
    limits: "time_step_limit",
};

/// mlx-lm's, where a checkpoint does not say them.
const MLX_LIMITS: StepLimits = StepLimits { least: 0.001, most: 100.0 };

const GGUF_KEYS: &[Key] = &[
    // llama.cpp's switch for the rotary embedding.
    Key::optional("rope.scaling.finetuned"),
];

const GGUF_DENSE_KEYS: &[Key] = &[
    Key::only("expert_count", &[Int(0)]),
    Key::no_effect("expert_used_count"),
    Key::no_effect("expert_shared_feed_forward_length"),
];

const GGUF_MOE_KEYS: &[Key] = &[
    Key::required("expert_count"),
    Key::required("expert_used_count"),
    Key::required("expert_shared_feed_forward_length"),
    // llama.cpp computes softmax and norm for these models, whatever the file says.
    Key::only("expert_weights_scale", &[Float(0.0), Float(1.0)]),
    Key::only("expert_weights_norm", &[Flag(true)]),
    Key::only("expert_gating_func", &[Int(1)]),
];

fn describe(
    config: &Config<'_>,
    weights: &Weights<'_>,
    feedforward: &FeedforwardSpec,
) -> Result<DecoderSpec, ModelError> {
    let sizes = DecoderConfig::new(config, weights)?;
    let (hidden, layers) = (sizes.hidden_size, sizes.num_hidden_layers);
    let mut attention = AttentionConfig::new(config, weights, hidden, permuted(config))?;
    check_heads_make_up_hidden(config, weights, &attention, "mlx-lm and llama.cpp's converter")?;
    let multipliers = factors(config, &mut attention)?;
    if !rotates(config)? {
        attention = attention.without_rope()?;
    }
    let limits = if config.is_mlx() { MLX_LIMITS } else { StepLimits::NONE };
    let mamba = Mamba2Config::new(config, &MAMBA_KEYS, |heads| head_dim(config, hidden, heads), limits)?;
    check_expansion(config, &mamba, hidden)?;
    let attends = attends(config, layers)?;
    let spec = decoder(sizes, |index| {
        Ok(LayerSpec {
            norms: LayerNorms::before(INPUT_NORM, FFN_NORM),
            mixer: match attends[index] {
                true => MixerSpec::Attention(attention.clone()),
                false => MixerSpec::Mamba2(mamba),
            },
            feedforward: feedforward.clone(),
        })
    })?;
    Ok(DecoderSpec { multipliers, ..spec })
}

/// True if queries and keys have positions.
fn rotates(config: &Config<'_>) -> Result<bool, ModelError> {
    if config.is_gguf() {
        return config.gguf_flag("rope.scaling.finetuned", true);
    }
    let kind = config.text("position_embedding_type", "")?;
    // transformers wants the word, mlx-lm another one.
    Ok(match config.is_mlx() {
        true => kind.as_deref() != Some("nope"),
        false => kind.as_deref() == Some("rope"),
    })
}

/// The size of heads where `config.json` leaves it to the others.
fn head_dim(config: &Config<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let expand = config.size("mamba_expand", "")?;
    match hidden.checked_mul(expand).map(|inner| inner / heads) {
        Some(dim) if dim > 0 => Ok(dim),
        _ => {
            let want = format!("{hidden} * mamba_expand makes no {heads} heads");
            Err(config.refuse("mamba_d_head", "auto", &want))
        }
    }
}

/// transformers refuses heads that do not make up `mamba_expand` times the hidden size.
fn check_expansion(config: &Config<'_>, mamba: &Mamba2Config, hidden: usize) -> Result<(), ModelError> {
    if config.is_gguf() || config.is_mlx() {
        return Ok(());
    }
    let expand = config.size("mamba_expand", "")?;
    let inner = mamba.num_heads.checked_mul(mamba.head_dim);
    if inner.is_some() && inner == hidden.checked_mul(expand) {
        return Ok(());
    }
    let got = format!("{} * {}", mamba.num_heads, mamba.head_dim);
    let want = format!("mamba_expand * hidden_size is {expand} * {hidden}");
    Err(config.refuse("mamba_n_heads * mamba_d_head", &got, &want))
}

/// The layers with attention. GGUF has no key heads in the others.
fn attends(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if config.is_gguf() {
        return config.gguf_attends(layers);
    }
    let kinds = &["full_attention", "linear_attention"];
    let attends = (0..layers).map(|index| {
        let kind = config.layer_type(index, layers, kinds)?;
        Ok(kind.is_some_and(|kind| kind == "full_attention"))
    });
    attends.collect()
}
