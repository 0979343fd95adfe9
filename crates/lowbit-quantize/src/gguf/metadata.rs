//! A directory's configuration as GGUF metadata.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `set_gguf_parameters` of
//! `conversion/{base,llama,qwen}.py`, and `gguf-py/gguf/{metadata,utility}.py`. The converter's
//! values from a model card (README.md) are left out.

use super::Planned;
use super::title::{size_label, title};
use crate::QuantizeError;
use crate::computed::Computed;
use crate::config_json::own_attention_factor;
use lowbit_files::gguf::{Array, Metadata, Value};
use lowbit_files::{Checkpoint, DenseModule};
use lowbit_kernels::ops::{ChannelDecay, Rope, RopeScaling, Yarn};
use lowbit_models::Config;
use lowbit_models::arch::{Architecture, Mamba2Keys, WindowKeys, Windows};
use lowbit_models::keys::{self, Role};
use lowbit_models::layers::{
    AttentionConfig, FeedforwardSpec, LatentAttentionConfig, LayerSpec, MixerSpec, sections_cover,
};
use lowbit_models::names::{A_LOG, KDA_A_LOG, MAMBA_IN, ROUTER, SELECTION_BIAS, SHARED_EXPERT_GATE};
use serde_json::Value as Json;

/// Keys of `config.json` and the keys below the architecture's name that they become, in the
/// converter's order.
const BEFORE_HEADS: &[(&str, &str)] =
    &[("max_position_embeddings", "context_length"), ("hidden_size", "embedding_length")];
const MLP: &[(&str, &str)] = &[("intermediate_size", "feed_forward_length")];
const EXPERTS_PER_TOKEN: [(&str, &str); 2] =
    [("num_experts_per_tok", "expert_used_count"), ("top_k_experts", "expert_used_count")];
const EXPERTS: &[(&str, &str)] = &[("moe_intermediate_size", "expert_feed_forward_length")];
const SHARED: &[(&str, &str)] = &[("shared_expert_intermediate_size", "expert_shared_feed_forward_length")];
/// Of experts that are chosen by sigmoids.
const SIGMOIDS: &[(&str, &str)] = &[
    ("n_shared_experts", "expert_shared_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("num_dense_layers", "leading_dense_block_count"),
];
/// llama.cpp's numbers for the functions.
const SIGMOID: u32 = 2;
const SOFTMAX: u32 = 1;
const DELTA_NET: &[(&str, &str)] = &[
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
];
/// Inside the object for the rotary embedding, for YaRN. llama.cpp does not read them for these
/// architectures, so that readers refuse all values but its own.
const YARN: &[(&str, &str)] =
    &[("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")];

/// The sources of metadata, and the entries so far.
struct Builder<'a> {
    computed: &'a Computed<'a>,
    config: &'a Config<'a>,
    /// `config.json`, and the `text_config` in it.
    json: [&'a Json; 2],
    architecture: &'a Architecture,
    metadata: Metadata,
}

/// The metadata of a directory but for the tokenizer's, with `tensors` as the file will have them,
/// and so many layers of multi-token prediction among them.
///
/// # Errors
/// [`QuantizeError`] for values that are missing or malformed.
pub(super) fn metadata(
    computed: &Computed<'_>,
    predictors: usize,
    tensors: &[Planned],
) -> Result<Metadata, QuantizeError> {
    let Computed { checkpoint, config, architecture, .. } = computed;
    let root = checkpoint.config()?;
    let json = [root.get("text_config").unwrap_or(&Json::Null), root];
    let metadata = Metadata::new(checkpoint.path().join("config.json").into());
    let mut builder = Builder { computed, config, json, architecture, metadata };
    builder.put("general.architecture", Value::String(architecture.gguf.into()))?;
    builder.put("general.type", Value::String("model".into()))?;
    builder.sampling(checkpoint)?;
    if let Some(name) =
        checkpoint.path().canonicalize().ok().and_then(|path| Some(title(path.file_name()?.to_str()?)))
    {
        builder.put("general.name", Value::String(name))?;
    }
    builder.put("general.size_label", Value::String(size_label(tensors)))?;
    let layers = computed.decoder().num_hidden_layers + predictors;
    builder.put_own("block_count", u32_value(config, "num_hidden_layers", layers)?)?;
    builder.sizes(BEFORE_HEADS)?;
    builder.mlp()?;
    builder.put_own("attention.head_count", u32_value(config, "num_attention_heads", computed.heads()?)?)?;
    builder.key_heads()?;
    builder.rope()?;
    if let Some(windows) = architecture.conversion.windows {
        builder.windows(windows)?;
    }
    builder.multipliers()?;
    builder.put_own("attention.layer_norm_rms_epsilon", Value::F32(computed.decoder().rms_norm_eps))?;
    let by_layer = config.computes("hybrid_override_pattern");
    let has_experts = computed.experts().is_some() || !computed.computes("enable_moe_block");
    if has_experts {
        if !by_layer || architecture.gguf_name(ROUTER.0).is_some() {
            builder.sizes(&[(computed.experts_key(), "expert_count")])?;
        }
        let [usual, other] = EXPERTS_PER_TOKEN;
        builder.sizes(&[if computed.computes(other.0) { other } else { usual }])?;
    }
    let dim = builder.head_sizes()?;
    if has_experts && architecture.gguf_name(ROUTER.0).is_some() {
        builder.sizes(EXPERTS)?;
        let (own, key) = EXPERTS[0];
        if !computed.computes(own) && keys::role(architecture.gguf_keys, key).is_some() {
            builder.sizes(&[("intermediate_size", key)])?;
        }
    }
    // Without its gate an architecture has no shared expert, whatever its configuration says.
    if architecture.gguf_name(SHARED_EXPERT_GATE.0).is_some() {
        builder.sizes(SHARED)?;
    }
    if architecture.gguf_name(SELECTION_BIAS.0).is_some() || computed.latents().is_some() {
        builder.routers()?;
    }
    if let Some(keys) = architecture.conversion.mamba {
        builder.mamba(&keys)?;
    }
    if architecture.gguf_name(A_LOG.0).is_some() {
        builder.delta_net(tensors.len(), predictors)?;
    }
    if architecture.gguf_name(KDA_A_LOG.0).is_some() {
        builder.kimi_delta()?;
    }
    if computed.config.computes("conv_L_cache") {
        builder.sizes(&[("vocab_size", "vocab_size")])?;
    }
    if architecture.conversion.like_llama {
        builder.sizes(&[("vocab_size", "vocab_size")])?;
        builder.put_own("rope.dimension_count", dim)?;
    } else if architecture.conversion.rotary_dimension {
        let rotary = u32_value(config, "partial_rotary_factor", computed.rope()?.rotary_dim)?;
        builder.put_own("rope.dimension_count", rotary)?;
    }
    let embedding = checkpoint.embedding_config()?;
    if let Some(pooling) = embedding.pooling {
        builder.put_own("pooling_type", Value::U32(pooling.ggml()))?;
    }
    for (name, module) in DenseModule::GGUF.iter().zip(&embedding.dense) {
        for (key, size) in [("feat_in", module.in_features), ("feat_out", module.out_features)] {
            builder.put_own(&format!("{name}_{key}"), u32_value(config, key, size)?)?;
        }
    }
    if predictors > 0 {
        builder.put_own("nextn_predict_layers", u32_value(config, "mtp_num_hidden_layers", predictors)?)?;
    }
    Ok(builder.metadata)
}

impl Builder<'_> {
    fn put(&mut self, key: &str, value: Value) -> Result<(), QuantizeError> {
        Ok(self.metadata.insert(key.into(), value)?)
    }

    /// Below the architecture's name.
    fn put_own(&mut self, key: &str, value: Value) -> Result<(), QuantizeError> {
        self.put(&format!("{}.{key}", self.architecture.gguf), value)
    }

    /// The value of `key` in `config.json`, in `text_config` first.
    fn stored(&self, key: &str) -> Option<&Json> {
        self.json.iter().find_map(|json| json.get(key)).filter(|value| !value.is_null())
    }

    /// The sizes that are there, or that the architecture has a default for.
    fn sizes(&mut self, keys: &[(&str, &str)]) -> Result<(), QuantizeError> {
        for (json, gguf) in keys {
            let size = match self.config.computes(json) {
                true => self.config.optional_size(json, "")?,
                false => self.stored(json).and_then(Json::as_u64).and_then(|size| usize::try_from(size).ok()),
            };
            if let Some(size) = size {
                self.put_own(gguf, u32_value(self.config, json, size)?)?;
            }
        }
        Ok(())
    }

    /// The object for the rotary embedding, under either of its names.
    fn rope_parameter(&self, key: &str) -> Option<&Json> {
        let section = self.stored("rope_parameters").or_else(|| self.stored("rope_scaling"));
        section
            .and_then(|section| section.get(key))
            .or_else(|| self.stored(key))
            .filter(|value| !value.is_null())
    }

    fn rope(&mut self) -> Result<(), QuantizeError> {
        let rope = self.computed.rope()?;
        let scaling = match &rope.scaling {
            RopeScaling::Linear { factor } => Some(("linear", *factor)),
            RopeScaling::Yarn(yarn) => Some(("yarn", yarn.factor as f32)),
            // The first is the default, the others are tensors.
            RopeScaling::None | RopeScaling::Llama3(_) | RopeScaling::LongRope(_) => None,
        };
        if let Some((kind, factor)) = scaling {
            self.put_own("rope.scaling.type", Value::String(kind.into()))?;
            self.put_own("rope.scaling.factor", Value::F32(factor))?;
        }
        match &rope.scaling {
            RopeScaling::Yarn(yarn) => self.yarn(yarn, Rope::new(&rope)?.attention_factor())?,
            RopeScaling::LongRope(long) => {
                let (key, original) =
                    ("original_max_position_embeddings", long.original_max_position_embeddings);
                let original = u32_value(self.config, key, original)?;
                // For Phi-3 llama.cpp goes by the tensors alone.
                if self.architecture.conversion.like_llama {
                    self.put_own("rope.scaling.type", Value::String("longrope".into()))?;
                }
                self.put_own("rope.scaling.original_context_length", original)?;
                self.put_own("rope.scaling.attn_factor", Value::F32(long.attention_factor as f32))?;
            }
            _ => {}
        }
        let sections = self.rope_parameter("mrope_section").and_then(Json::as_array).cloned();
        if self.architecture.conversion.sections
            || sections.is_some()
                && keys::role(self.architecture.gguf_keys, "rope.dimension_sections").is_some()
        {
            let sections = self.sections(sections.as_deref(), rope.rotary_dim / 2)?;
            self.put_own("rope.dimension_sections", Value::Array(Array::I32(sections)))?;
        }
        if self.architecture.conversion.query_scale
            && let Some(beta) = self.rope_parameter("llama_4_scaling_beta").and_then(Json::as_f64)
        {
            self.put_own("attention.temperature_scale", Value::F32(beta as f32))?;
        }
        self.put_own("rope.freq_base", Value::F32(rope.theta as f32))
    }

    /// The factors and soft caps of a decoder that has keys for them.
    fn multipliers(&mut self) -> Result<(), QuantizeError> {
        for (json, gguf) in [
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ] {
            if self.config.computes(json) {
                let factor = self.config.float(json, "")? as f32;
                self.put_own(gguf, Value::F32(factor))?;
            }
        }
        for (key, cap) in self.computed.softcaps().filter_map(|(key, cap)| Some((key, cap?))) {
            self.put_own(key, Value::F32(cap))?;
        }
        Ok(())
    }

    /// The rows of the MLP: of each layer, where they differ in Gemma 4.
    fn mlp(&mut self) -> Result<(), QuantizeError> {
        if self.config.computes("hybrid_override_pattern") {
            return self.feedforward_lengths();
        }
        let (computed, (json, gguf)) = (self.computed, MLP[0]);
        let rows = computed.mlp_rows();
        let differ = computed.has_two_sizes() && rows.iter().any(|other| *other != rows[0]);
        let keys = ["block_auto_adjust_ff_dim", "shared_intermediate_size"];
        let adjusted = computed.mlp().filter(|_| keys.iter().any(|key| self.config.computes(key)));
        match adjusted {
            Some(mlp) => self.put_own(gguf, u32_value(self.config, json, mlp.intermediate_size)?),
            None if differ => {
                let listed = self.listed(json, &rows)?;
                self.put_own(gguf, listed)
            }
            None => self.sizes(MLP),
        }
    }

    /// The size of a head, which it returns; of layers without a window where kinds of layers
    /// differ.
    fn head_sizes(&mut self) -> Result<Value, QuantizeError> {
        let dim = u32_value(self.config, "head_dim", self.computed.full_head_dim()?)?;
        match self.computed.latents() {
            Some(latents) => self.latents(latents)?,
            None => {
                self.put_own("attention.key_length", dim.clone())?;
                self.put_own("attention.value_length", dim.clone())?;
            }
        }
        if self.computed.has_two_sizes() {
            self.sizes_by_kind(dim.clone())?;
        }
        Ok(dim)
    }

    /// Gemma 4's keys: the heads of layers with a window, and how much of a head is rotated, `dim`
    /// being the size of the others'.
    fn sizes_by_kind(&mut self, dim: Value) -> Result<(), QuantizeError> {
        let size = |key: &str, size: usize| u32_value(self.config, key, size);
        let local = size("head_dim", self.computed.head_dim()?)?;
        let own = self.computed.outline.spec().layer_embedding.unwrap_or(0);
        for (key, value) in [
            ("attention.key_length_swa", local.clone()),
            ("attention.value_length_swa", local.clone()),
            ("attention.shared_kv_layers", size("num_kv_shared_layers", self.computed.shared_layers())?),
            ("embedding_length_per_layer_input", size("hidden_size_per_layer_input", own)?),
            ("rope.dimension_count", dim),
            ("rope.dimension_count_swa", local),
        ] {
            self.put_own(key, value)?;
        }
        Ok(())
    }

    /// The window, and which layers have it where that is not what llama.cpp takes.
    fn windows(&mut self, Windows { interval, keys, .. }: Windows) -> Result<(), QuantizeError> {
        let like_gemma = [WindowKeys::Interval, WindowKeys::Sizes].contains(&keys);
        let later = self.architecture.conversion.sees_later;
        let (window, sliding) = self.computed.windows();
        let window = match window {
            None if ![WindowKeys::Types, WindowKeys::Sizes].contains(&keys) && !later => return Ok(()),
            // Readers want one even where no layer has it.
            None => self.config.optional_size("sliding_window", "")?.unwrap_or(1),
            Some(window) => window,
        };
        self.put_own("attention.sliding_window", u32_value(self.config, "sliding_window", window)?)?;
        let by_interval = |(layer, &sliding): (usize, &bool)| sliding != (layer + 1).is_multiple_of(interval);
        if keys == WindowKeys::Sizes || !sliding.iter().enumerate().all(by_interval) {
            self.put_own("attention.sliding_window_pattern", Value::Array(Array::Bool(sliding)))?;
        }
        if !like_gemma {
            return Ok(());
        }
        let theta = self.computed.local_theta()?;
        self.put_own("rope.freq_base_swa", Value::F32(theta as f32))
    }

    fn yarn(&mut self, yarn: &Yarn, attention_factor: f32) -> Result<(), QuantizeError> {
        let (key, original) = ("original_max_position_embeddings", yarn.original_max_position_embeddings);
        self.put_own("rope.scaling.original_context_length", u32_value(self.config, key, original)?)?;
        let own = own_attention_factor(yarn.factor) as f32;
        let multiplier = yarn.mscale_all_dim.filter(|_| self.architecture.conversion.query_scale);
        let of_latents = self.computed.latents().is_some();
        if let Some(all) = yarn.mscale_all_dim.filter(|&all| of_latents && all != 0.0) {
            // As the converter has it for these models; the rotary embedding then has no factor.
            self.put_own("rope.scaling.yarn_log_multiplier", Value::F32((0.1 * all) as f32))?;
        } else if let Some(multiplier) = multiplier {
            self.put_own("rope.scaling.yarn_log_multiplier", Value::F32(multiplier as f32))?;
        } else if attention_factor != own {
            // llama.cpp multiplies its own by this one.
            self.put_own("rope.scaling.attn_factor", Value::F32(attention_factor / own))?;
        } else if let Some(factor) = self.rope_parameter("attention_factor").and_then(Json::as_f64) {
            // As the converter has it; nobody reads it.
            self.put_own("rope.scaling.yarn_attn_factor", Value::F32(factor as f32))?;
        }
        for ((json, gguf), value) in YARN.iter().zip([yarn.beta_fast, yarn.beta_slow]) {
            if self.rope_parameter(json).is_some() {
                self.put_own(gguf, Value::F32(value as f32))?;
            }
        }
        Ok(())
    }

    /// The pairs of each kind of position in the multimodal embedding. In a text all positions are
    /// the same, but llama.cpp gives pairs beyond these sections position 0. So sections that do
    /// not cover all pairs, as the converter writes some, are replaced by ones that do.
    fn sections(&self, stored: Option<&[Json]>, pairs: usize) -> Result<Vec<i32>, QuantizeError> {
        // Transformers' default.
        let stored = stored.map_or(vec![11, 11, 10], |stored| {
            stored.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0)).collect()
        });
        let total = stored.iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
        let mut sections = match sections_cover(&stored, pairs) && total <= self.computed.head_dim()? {
            true => stored,
            false => (0..3).map(|kind| pairs.saturating_sub(kind).div_ceil(3)).collect(),
        };
        sections.resize(4, 0);
        let narrow = |&n: &usize| i32::try_from(n);
        let narrowed = sections.iter().map(narrow).collect::<Result<_, _>>();
        narrowed.map_err(|_| {
            self.config.refuse("mrope_section", &format!("{sections:?}"), "GGUF has 32 bits for each").into()
        })
    }

    /// The sizes of latent attention, which llama.cpp takes for attention with one key head.
    fn latents(&mut self, latents: &LatentAttentionConfig) -> Result<(), QuantizeError> {
        let LatentAttentionConfig { kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } =
            *latents;
        let kimi = self.architecture.gguf_name(KDA_A_LOG.0).is_some();
        for (gguf, json, size) in [
            ("vocab_size", "vocab_size", Some(self.computed.decoder().vocab_size)),
            ("attention.q_lora_rank", "q_lora_rank", latents.q_lora_rank),
            ("attention.kv_lora_rank", "kv_lora_rank", Some(kv_lora_rank)),
            ("attention.key_length", "kv_lora_rank + qk_rope_head_dim", Some(latents.width())),
            ("attention.value_length", "kv_lora_rank", Some(kv_lora_rank).filter(|_| !kimi)),
            ("attention.key_length_mla", "qk_head_dim", Some(qk_nope_head_dim + qk_rope_head_dim)),
            ("attention.value_length_mla", "v_head_dim", Some(v_head_dim)),
            ("rope.dimension_count", "qk_rope_head_dim", Some(qk_rope_head_dim)),
        ] {
            if let Some(size) = size {
                self.put_own(gguf, u32_value(self.config, json, size)?)?;
            }
        }
        Ok(())
    }

    /// The keys of experts that are chosen by sigmoids, or by the softmax of DeepSeek V2.
    fn routers(&mut self) -> Result<(), QuantizeError> {
        let config = self.config;
        let listed = self.computed.computes("mlp_layer_types");
        for key in SIGMOIDS.iter().filter(|(json, _)| config.computes(json)) {
            if !(listed && key.0 == "first_k_dense_replace") {
                self.sizes(&[*key])?;
            }
        }
        if listed {
            let layers = self.computed.outline.spec().layers.iter();
            let is_dense = |layer: &&LayerSpec| matches!(layer.feedforward, FeedforwardSpec::Dense(_));
            let dense = u32_value(config, "mlp_layer_types", layers.take_while(is_dense).count())?;
            self.put_own("leading_dense_block_count", dense)?;
        }
        let by_sigmoids = self.architecture.gguf_name(SELECTION_BIAS.0).is_some();
        self.put_own("expert_gating_func", Value::U32(if by_sigmoids { SIGMOID } else { SOFTMAX }))?;
        let Some(router) = self.computed.experts().map(|moe| moe.router) else { return Ok(()) };
        // Readers refuse all values but llama.cpp's own, for models in which it does not read them.
        let reads = |key| matches!(keys::role(self.architecture.gguf_keys, key), Some(Role::Computed(_)));
        let [scale, norm] = ["expert_weights_scale", "expert_weights_norm"];
        let (scaled, divided) = (reads(scale), reads(norm));
        if scaled || router.scale != 1.0 {
            self.put_own(scale, Value::F32(router.scale))?;
        }
        if divided || !router.normalize {
            self.put_own(norm, Value::Bool(router.normalize))?;
        }
        if router.n_group > 1 {
            for (json, gguf, size) in [
                ("n_group", "expert_group_count", router.n_group),
                ("topk_group", "expert_group_used_count", router.topk_group),
            ] {
                self.put_own(gguf, u32_value(config, json, size)?)?;
            }
        }
        Ok(())
    }

    fn delta_net(&mut self, tensors: usize, predictors: usize) -> Result<(), QuantizeError> {
        self.sizes(DELTA_NET)?;
        let values = self.config.size("linear_value_head_dim", "")?
            * self.config.size("linear_num_value_heads", "")?;
        self.put_own("ssm.inner_size", u32_value(self.config, "linear_value_head_dim", values)?)?;
        let layers = self.config.size("num_hidden_layers", "")?;
        if layers > tensors {
            let want = format!("the checkpoint has {tensors} tensors");
            return Err(self.config.refuse("num_hidden_layers", &layers.to_string(), &want).into());
        }
        let kinds = ["full_attention", "linear_attention"];
        let interval = self.config.size("full_attention_interval", "")?;
        let is_recurrent = |layer: usize| match self.config.layer_type(layer, layers, &kinds)? {
            Some(kind) => Ok(kind == "linear_attention"),
            None => Ok::<_, QuantizeError>(!(layer + 1).is_multiple_of(interval)),
        };
        let mut recurrent = (0..layers).map(is_recurrent).collect::<Result<Vec<_>, _>>()?;
        // Those predict by attention.
        recurrent.resize(layers + predictors, false);
        self.put_own("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)))?;
        self.sizes(&[("full_attention_interval", "full_attention_interval")])?;
        let rotary = u32_value(self.config, "partial_rotary_factor", self.computed.rope()?.rotary_dim)?;
        self.put_own("rope.dimension_count", rotary)
    }

    /// The sizes of Kimi Delta Attention.
    fn kimi_delta(&mut self) -> Result<(), QuantizeError> {
        let (dim, taps) = self.computed.kimi_delta().map_or((1, 4), |kimi| (kimi.head_dim, kimi.conv_kernel));
        self.put_own("ssm.conv_kernel", u32_value(self.config, "short_conv_kernel_size", taps)?)?;
        self.put_own("kda.head_dim", u32_value(self.config, "linear_attn_config.head_dim", dim)?)?;
        if !self.computed.computes("kda_lower_bound") {
            return Ok(());
        }
        let bound = match self.computed.kimi_delta().map(|kimi| kimi.decay) {
            None => -5.0,
            Some(ChannelDecay::Bounded(bound)) => bound,
            Some(ChannelDecay::Softplus) => {
                let want = "llama.cpp computes a decay with a bound alone";
                return Err(self.config.refuse("kda_safe_gate", "false", want).into());
            }
        };
        self.put_own("kda.safe_gate", Value::Bool(true))?;
        self.put_own("kda.gate_lower_bound", Value::F32(bound))?;
        let inner = self.config.size("moe_intermediate_size", "")?;
        let inner = u32_value(self.config, "moe_intermediate_size", inner)?;
        self.put_own("expert_shared_feed_forward_length", inner)
    }

    /// Mamba-2's sizes, and whether attention rotates beside it.
    fn mamba(&mut self, keys: &Mamba2Keys) -> Result<(), QuantizeError> {
        self.sizes(&[
            (keys.conv_kernel, "ssm.conv_kernel"),
            (keys.state_size, "ssm.state_size"),
            (keys.n_groups, "ssm.group_count"),
            (keys.num_heads, "ssm.time_step_rank"),
        ])?;
        let inner = match self.computed.mamba() {
            Some(mamba) => mamba.inner_size(),
            // Of no layer, but readers want it.
            None => self.config.size(keys.num_heads, "")?,
        };
        self.put_own("ssm.inner_size", u32_value(self.config, keys.head_dim, inner)?)?;
        let shared = self.computed.experts().map(|moe| moe.shared_expert_intermediate_size);
        if let Some(size) = shared {
            let gguf = "expert_shared_feed_forward_length";
            self.put_own(gguf, u32_value(self.config, "the shared expert's size", size)?)?;
        }
        if let Some(latent) = self.computed.experts().and_then(|moe| moe.latent_size) {
            self.put_own("moe_latent_size", u32_value(self.config, "moe_latent_size", latent)?)?;
        }
        if self.config.computes("layer_norm_epsilon") {
            // llama.cpp wants both.
            let eps = Value::F32(self.computed.decoder().rms_norm_eps);
            return self.put_own("attention.layer_norm_epsilon", eps);
        }
        let rotates = self.computed.attention().any(AttentionConfig::rotates);
        self.put_own("rope.scaling.finetuned", Value::Bool(rotates))
    }

    /// A size of each layer.
    fn listed(&self, json: &str, sizes: &[usize]) -> Result<Value, QuantizeError> {
        let narrow = |&size: &usize| i32::try_from(size);
        let listed = sizes.iter().map(narrow).collect::<Result<_, _>>();
        let refuse = |_| self.config.refuse(json, &format!("{sizes:?}"), "GGUF has 32 bits for each");
        Ok(Value::Array(Array::I32(listed.map_err(refuse)?)))
    }

    /// Rows of an MLP, or of an expert, in the layers that have one.
    fn feedforward_lengths(&mut self) -> Result<(), QuantizeError> {
        let rows = |layer: &LayerSpec| match &layer.feedforward {
            FeedforwardSpec::Dense(mlp) | FeedforwardSpec::Parallel(mlp, _) => mlp.intermediate_size,
            FeedforwardSpec::Sparse(moe) => moe.moe_intermediate_size,
            FeedforwardSpec::None => 0,
        };
        let rows: Vec<usize> = self.computed.outline.spec().layers.iter().map(rows).collect();
        let listed = self.listed(MLP[0].0, &rows)?;
        self.put_own(MLP[0].1, listed)
    }

    /// Key heads: of each layer, where layers without attention have none.
    fn key_heads(&mut self) -> Result<(), QuantizeError> {
        let (key, json) = ("attention.head_count_kv", "num_key_value_heads");
        let heads = if self.computed.latents().is_some() { 1 } else { self.computed.key_heads()? };
        if self.architecture.gguf_name(KDA_A_LOG.0).is_some() {
            let listed = self.computed.latent_layers().map(i32::from).collect();
            return self.put_own(key, Value::Array(Array::I32(listed)));
        }
        let each: Vec<usize> = self.computed.attention().map(|it| it.num_key_value_heads).collect();
        if each.iter().any(|&other| other != heads) {
            let listed = self.listed(json, &each)?;
            return self.put_own(key, listed);
        }
        let convolves = self.computed.computes("conv_L_cache");
        if !convolves && self.architecture.gguf_name(MAMBA_IN.0).is_none() {
            return self.put_own(key, u32_value(self.config, json, heads)?);
        }
        let heads = i32::try_from(heads)
            .map_err(|_| self.config.refuse(json, &heads.to_string(), "GGUF has 32 bits for it"))?;
        let layers = &self.computed.outline.spec().layers;
        let attends = |layer: &LayerSpec| matches!(layer.mixer, MixerSpec::Attention(_));
        let listed = layers.iter().map(|layer| if attends(layer) { heads } else { 0 }).collect();
        self.put_own(key, Value::Array(Array::I32(listed)))?;
        if !convolves {
            return Ok(());
        }
        let taps = self.config.size("conv_L_cache", "shortconv.l_cache")?;
        self.put_own("shortconv.l_cache", u32_value(self.config, "conv_L_cache", taps)?)
    }

    /// The sampling that the model's makers recommend.
    fn sampling(&mut self, checkpoint: &Checkpoint) -> Result<(), QuantizeError> {
        let generation = checkpoint.generation_config()?;
        if let Some(top_k) = generation.top_k.and_then(|top_k| i32::try_from(top_k).ok()) {
            self.put("general.sampling.top_k", Value::I32(top_k))?;
        }
        let floats = [
            ("top_p", generation.top_p),
            ("min_p", generation.min_p),
            // The temperature that lowbit runs with: llama.cpp has other defaults.
            ("temp", generation.recommended_temperature()),
            ("penalty_repeat", generation.repetition_penalty),
        ];
        for (key, value) in floats {
            if let Some(value) = value {
                self.put(&format!("general.sampling.{key}"), Value::F32(value))?;
            }
        }
        Ok(())
    }
}

fn u32_value(config: &Config<'_>, key: &str, size: usize) -> Result<Value, QuantizeError> {
    let value = u32::try_from(size).map(Value::U32);
    value.map_err(|_| config.refuse(key, &size.to_string(), "GGUF has 32 bits for it").into())
}
