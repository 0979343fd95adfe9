//! gpt-oss: experts in every layer, with biases and a clamped gate; attention with sinks, and a
//! window in every other layer. Source: transformers 5.24 `models/gpt_oss`; mlx-lm 0.32
//! `models/gpt_oss.py`; llama.cpp `src/models/openai-moe.cpp`.

use super::{
    Architecture, Biases, Conversion, MlxLm, ModelType, Promise, TiedByDefault, WindowKeys, Windows, decoder,
    window,
};
use crate::keys::Fixed::{Float, Int};
use crate::keys::{BASE, DECODER, EXPERTS, GGUF, GGUF_EXPERTS, Key, Role};
use crate::layers::{
    AttentionConfig, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec, MoeConfig,
};
use crate::names::{self, ATTENTION, INPUT_NORM, POST_ATTENTION_NORM, SINKS, TOP};
use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Gate, RopeLayout};

pub const GPT_OSS: Architecture = Architecture {
    model_types: &[ModelType { name: "gpt_oss", tables: &[KEYS, EXPERTS, DECODER, BASE], wraps: false }],
    gguf: "gpt-oss",
    gguf_keys: &[GGUF_KEYS, GGUF_EXPERTS, GGUF],
    offset_norms: None,
    names: &[TOP, ATTENTION, names::EXPERTS, &[POST_ATTENTION_NORM, SINKS]],
    // Hugging Face's experts are read by MLX's names, too.
    aliases: &[("mlp.gate", "mlp.router"), ("mlp.switch_mlp", "mlp.experts")],
    biases: &[
        Biases { promise: Promise::Flag("attention_bias"), modules: PROJECTIONS },
        Biases { promise: Promise::Always, modules: MODULES },
    ],
    conversion: Conversion {
        windows: Some(WINDOWS),
        names_plain_rope: true,
        rounds_yarn: true,
        mlx_lm: MlxLm { never_ties: true, ..MlxLm::ALL },
        gguf_never_ties: true,
        ..Conversion::PLAIN
    },
    mlx_prefix: "",
    tied_by_default: TiedByDefault::NO,
    describe,
};

const PROJECTIONS: &[&str] =
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];

/// The router and the experts.
const MODULES: &[&str] =
    &["mlp.gate", "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj"];

const WINDOWS: Windows = Windows { interval: 2, ropes: false, keys: WindowKeys::Types };

const KEYS: &[Key] = &[
    // Of an expert.
    Key::size("intermediate_size", 2880),
    Key::disputed("num_attention_heads", Int(64)),
    Key::size("num_key_value_heads", 8),
    Key::size("head_dim", 64),
    Key::or("rms_norm_eps", Float(1e-5)),
    // The gate is always the clamped one.
    Key::no_effect("hidden_act"),
    Key::size("max_position_embeddings", 131_072),
    Key::flag("attention_bias", true),
    Key::size("sliding_window", 128),
    Key::optional("layer_types"),
    Key::or("rope_theta", Float(150_000.0)),
    Key::no_effect("partial_rotary_factor"),
    Key::size("num_local_experts", 128),
    Key { name: "num_experts", role: Role::Alias("num_local_experts") },
    Key::size("num_experts_per_tok", 4),
    // The original's name, which no peer reads.
    Key::no_effect("experts_per_token"),
    Key::no_effect("initial_context_length"),
    // mlx-lm and llama.cpp compute these, whatever the file says.
    Key::only("swiglu_alpha", &[Float(1.702)]),
    Key::only("swiglu_limit", &[Float(7.0)]),
];

const GGUF_KEYS: &[Key] = &[
    Key::required("attention.sliding_window"),
    Key::optional("attention.sliding_window_pattern"),
    Key::optional("rope.freq_base_swa"),
];

const NORMS: LayerNorms = LayerNorms::before(INPUT_NORM, POST_ATTENTION_NORM);

fn describe(config: &Config<'_>, weights: &Weights<'_>) -> Result<DecoderSpec, ModelError> {
    if !config.is_gguf() && !config.has("rope_scaling") && !config.has("rope_parameters") {
        // transformers then takes YaRN with numbers of its own, and mlx-lm none.
        return Err(config.missing("rope_scaling"));
    }
    let sizes = DecoderConfig::new(config, weights)?;
    let mut full = AttentionConfig::new(config, weights, sizes.hidden_size, RopeLayout::HalfSplit)?;
    full.sinks = true;
    let mut sliding = full.clone();
    sliding.sliding_window = match config.is_gguf() {
        true => Some(config.size("", "attention.sliding_window")?).filter(|&window| window > 0),
        false => window(config)?,
    };
    check_local_base(config)?;
    let moe = MoeConfig::of(
        config,
        config.size("num_local_experts", "expert_count")?,
        config.size("intermediate_size", "expert_feed_forward_length")?,
    )?;
    let moe = MoeConfig { gate: Gate::SwigluOai, biases: true, ..moe };
    let layers = sizes.num_hidden_layers;
    decoder(sizes, |index| {
        let attention = if is_sliding(config, layers, index)? { sliding.clone() } else { full.clone() };
        Ok(LayerSpec {
            norms: NORMS,
            mixer: MixerSpec::Attention(attention),
            feedforward: FeedforwardSpec::Sparse(moe.clone()),
        })
    })
}

/// True if layer `index` has a window: every other one does unless a list says otherwise.
pub(super) fn is_sliding(config: &Config<'_>, layers: usize, index: usize) -> Result<bool, ModelError> {
    if config.is_gguf() {
        let key = "attention.sliding_window_pattern";
        return Ok(config.gguf_pattern(key, WINDOWS.interval, layers)?[index]);
    }
    let kind = config.layer_type(index, layers, &["full_attention", "sliding_attention"])?;
    Ok(kind.map_or(index.is_multiple_of(WINDOWS.interval), |kind| kind == "sliding_attention"))
}

/// Refuses a GGUF file whose layers with windows have another rotary embedding.
pub(super) fn check_local_base(config: &Config<'_>) -> Result<(), ModelError> {
    if !config.is_gguf() {
        return Ok(());
    }
    let [local, base] = ["rope.freq_base_swa", "rope.freq_base"].map(|key| config.optional_float("", key));
    match (local?, base?) {
        (Some(local), Some(base)) if local != base => {
            let want = format!("rope.freq_base is {base}, and all layers have one");
            Err(config.refuse("rope.freq_base_swa", &local.to_string(), &want))
        }
        _ => Ok(()),
    }
}
