//! `config.json` of what a checkpoint computes, with all that lowbit, mlx-lm 0.32 and transformers
//! 5 read: each key with the value that was computed with, also where the source relies on a
//! default, which another reader may not share.

mod gemma;
mod kimi;
mod mamba;

use crate::QuantizeError;
use crate::computed::Computed;
use lowbit_kernels::ops::{HeadMap, LongRope, Rope, RopeParams, RopeScaling, Yarn};
use lowbit_models::arch::{WindowKeys, Windows};
use lowbit_models::keys::{self, Absent, Role};
use lowbit_models::layers::{
    AttentionConfig, DeltaNetConfig, FeedforwardSpec, LatentAttentionConfig, LayerSpec, MixerSpec, MoeConfig,
    Multipliers,
};
use lowbit_models::names::{A_LOG, KDA_A_LOG, Name, ROUTER, SHORT_CONV};
use serde_json::{Map, Value as Json, json};

const SHARED: &str = "shared_expert_intermediate_size";

/// The part of `config.json` that describes the text model.
pub struct TextConfig<'a> {
    pub source: &'a Computed<'a>,
    pub json: Map<String, Json>,
}

impl TextConfig<'_> {
    /// Sets a key, unless it says the same already.
    pub fn put(&mut self, key: &str, value: impl Into<Json>) {
        let value = value.into();
        if !self.json.get(key).is_some_and(|old| is_same(old, &value)) {
            self.json.insert(key.into(), value);
        }
    }

    fn refuse(&self, key: &str, got: &str, want: &str) -> QuantizeError {
        self.source.config.refuse(key, got, want).into()
    }

    /// `number` as JSON has it: a number that is an f32 in as few digits as say that one.
    ///
    /// # Errors
    /// [`QuantizeError::Model`] for none.
    pub fn number(&self, key: &str, number: f64) -> Result<Json, QuantizeError> {
        let narrow = number as f32;
        let short = if f64::from(narrow) == number { narrow.to_string().parse().ok() } else { None };
        let json = serde_json::Number::from_f64(short.unwrap_or(number));
        json.map(Json::Number).ok_or_else(|| self.refuse(key, &number.to_string(), "a number is wanted"))
    }

    fn has(&self, name: Name<'_>) -> bool {
        self.source.architecture.gguf_name(name.0).is_some()
    }

    /// The defaults of keys that the source leaves out.
    pub fn fill_in(&mut self) {
        for key in self.source.text_type().tables.iter().copied().flatten() {
            let Role::Computed(Absent::Is(default) | Absent::Disputed(default)) = key.role else { continue };
            // In the section for the rotary embedding.
            if !["rope_theta", "partial_rotary_factor"].contains(&key.name) {
                self.json.entry(key.name).or_insert_with(|| default.value());
            }
        }
    }

    /// Sizes, experts and delta nets.
    ///
    /// # Errors
    /// [`QuantizeError::Model`] for what cannot be said.
    pub fn sizes(&mut self) -> Result<(), QuantizeError> {
        let (source, decoder) = (self.source, self.source.decoder());
        for (key, size) in [
            ("vocab_size", decoder.vocab_size),
            ("hidden_size", decoder.hidden_size),
            ("num_hidden_layers", decoder.num_hidden_layers),
            ("max_position_embeddings", decoder.max_position_embeddings),
            ("num_attention_heads", source.heads()?),
            ("num_key_value_heads", source.key_heads()?),
        ] {
            self.put(key, size);
        }
        match source.latents() {
            Some(latents) => self.latents(latents),
            None => self.put("head_dim", source.head_dim()?),
        }
        match keys::role(source.text_type().tables, "hidden_activation") {
            Some(_) => self.put("hidden_activation", "gelu_pytorch_tanh"),
            None => self.put("hidden_act", "silu"),
        }
        match source.architecture.conversion.windows {
            None => {}
            Some(Windows { keys: WindowKeys::Types, .. }) => self.windows(),
            Some(Windows { keys: WindowKeys::Interval, .. }) => self.windows_of_gemma()?,
            Some(Windows { keys: WindowKeys::Letters, .. }) => self.windows_by_letters(),
            Some(Windows { keys: WindowKeys::Sizes, .. }) => {
                self.windows();
                self.sizes_by_kind()?;
            }
        }
        self.scale_and_caps()?;
        if source.computes("logits_scaling") {
            self.multipliers()?;
        }
        let key = "feed_forward_length";
        let listed = source.config.is_gguf() && source.config.gguf_layers(key)?.is_some();
        // GGUF may list them by layer, the first being the smallest.
        let first = source.mlp().filter(|_| source.has_two_sizes()).map(|mlp| mlp.intermediate_size);
        let size = match first {
            None if !listed => source.config.optional_size("intermediate_size", key)?,
            first => first,
        };
        if let Some(size) = size {
            self.put("intermediate_size", size);
        }
        // As exactly as the source has it: f32 is what is computed with.
        let named = ["norm_eps", "layer_norm_epsilon"].into_iter().find(|key| source.computes(key));
        let key = named.unwrap_or("rms_norm_eps");
        let eps = source.config.optional_float(key, "attention.layer_norm_rms_epsilon")?;
        let eps = self.number(key, eps.unwrap_or(decoder.rms_norm_eps.into()))?;
        self.put(key, eps);
        self.put("tie_word_embeddings", decoder.tie_word_embeddings);
        if let Some(keys) = source.architecture.conversion.mamba {
            self.mamba(&keys)?;
        }
        if self.has(ROUTER) && (source.experts().is_some() || !source.computes("enable_moe_block")) {
            self.experts()?;
        }
        if self.has(SHORT_CONV) {
            self.short_convolutions()?;
        }
        if self.has(KDA_A_LOG) {
            self.kimi_delta()?;
        }
        if self.has(A_LOG) { self.delta_net() } else { Ok(()) }
    }

    /// The sizes of latent attention.
    fn latents(&mut self, latents: &LatentAttentionConfig) {
        self.json.remove("head_dim");
        for (key, size) in [
            ("q_lora_rank", latents.q_lora_rank),
            ("kv_lora_rank", Some(latents.kv_lora_rank)),
            ("qk_nope_head_dim", Some(latents.qk_nope_head_dim)),
            ("qk_rope_head_dim", Some(latents.qk_rope_head_dim)),
            ("v_head_dim", Some(latents.v_head_dim)),
        ] {
            self.put(key, size);
        }
    }

    /// The layers that are short convolutions, and the MLP's size, which mlx-lm may adjust.
    fn short_convolutions(&mut self) -> Result<(), QuantizeError> {
        let source = self.source;
        let layers = source.outline.spec().layers.iter();
        let kind = |layer: &LayerSpec| match layer.mixer {
            MixerSpec::ShortConv(_) => "conv",
            _ => "full_attention",
        };
        self.put("layer_types", layers.map(kind).collect::<Vec<_>>());
        self.json.remove("full_attn_idxs");
        self.put("conv_L_cache", source.config.size("conv_L_cache", "shortconv.l_cache")?);
        self.put("conv_bias", false);
        if let Some(mlp) = source.mlp().filter(|_| source.computes("block_auto_adjust_ff_dim")) {
            self.put("block_dim", source.decoder().hidden_size);
            for key in ["intermediate_size", "block_ff_dim"] {
                self.put(key, mlp.intermediate_size);
            }
            self.put("block_auto_adjust_ff_dim", false);
            self.json.entry("block_multiple_of").or_insert(256.into());
            self.json.entry("block_ffn_dim_multiplier").or_insert(1.0.into());
        }
        Ok(())
    }

    /// The factors of a decoder that has keys for them.
    fn multipliers(&mut self) -> Result<(), QuantizeError> {
        let config = &self.source.config;
        let Multipliers { embedding, residual, .. } = self.source.outline.spec().multipliers;
        let scale = self.source.attention().next().map_or(1.0, |attention| attention.scale);
        let divisor = config.float("logits_scaling", "logit_scale")?;
        for (key, factor) in [
            ("embedding_multiplier", embedding.into()),
            ("residual_multiplier", residual.into()),
            ("attention_multiplier", scale.into()),
            ("logits_scaling", divisor),
        ] {
            let factor = self.number(key, factor)?;
            self.put(key, factor);
        }
        Ok(())
    }

    /// The layers that have windows.
    fn windows(&mut self) {
        let (window, sliding) = self.source.windows();
        let kind = |&sliding: &bool| if sliding { "sliding_attention" } else { "full_attention" };
        self.put("layer_types", sliding.iter().map(kind).collect::<Vec<_>>());
        match window {
            Some(window) => self.put("sliding_window", window),
            // Readers want one even where no layer has it.
            None => drop(self.json.entry("sliding_window").or_insert(4096.into())),
        }
    }

    /// The same, with a letter for each layer, which mlx-lm reads.
    fn windows_by_letters(&mut self) {
        self.windows();
        let (_, sliding) = self.source.windows();
        let is_repeated = |length: &usize| (0..sliding.len()).all(|i| sliding[i % length] == sliding[i]);
        // Layers without a window rotate where no layer has one, not even in name.
        if !sliding.contains(&true) && self.source.attention().any(AttentionConfig::rotates) {
            self.json.insert("sliding_window".into(), Json::Null);
            self.json.insert("sliding_window_pattern".into(), Json::Null);
            return;
        }
        let letter = |&sliding: &bool| if sliding { 'L' } else { 'G' };
        let length = (1..=sliding.len()).find(is_repeated).unwrap_or(sliding.len());
        self.put("sliding_window_pattern", sliding[..length].iter().map(letter).collect::<String>());
    }

    fn experts(&mut self) -> Result<(), QuantizeError> {
        let Computed { config, architecture, checkpoint, .. } = self.source;
        let computes = |key| self.source.computes(key);
        let count = self.source.experts_key();
        let own = computes("moe_intermediate_size");
        let size = if own { "moe_intermediate_size" } else { "intermediate_size" };
        let moe = match self.source.experts() {
            Some(moe) => moe.clone(),
            // If no layer has experts, the division of their weights has no effect.
            None if keys::role(self.source.text_type().tables, SHARED).is_some() => {
                MoeConfig::new(config, true)?
            }
            None => {
                let inner = config.size(size, "expert_feed_forward_length")?;
                MoeConfig::of(config, config.size(count, "expert_count")?, inner)?
            }
        };
        let names = ["num_experts", "num_local_experts", "n_routed_experts"];
        for other in names.into_iter().filter(|key| *key != count) {
            self.json.remove(other);
        }
        self.put(count, moe.num_experts);
        // If it has another name, that was put.
        if !computes("top_k_experts") {
            self.put("num_experts_per_tok", moe.router.top_k);
        }
        self.put(size, moe.moe_intermediate_size);
        if moe.shared_expert_intermediate_size > 0 && moe.shared_expert_gate {
            self.put(SHARED, moe.shared_expert_intermediate_size);
        }
        if self.source.computes("norm_topk_prob") {
            self.put("norm_topk_prob", moe.router.normalize);
        }
        if self.source.computes("routed_scaling_factor") {
            self.sigmoids(&moe)?;
        }
        if config.is_gguf() && self.source.computes("mlp_only_layers") {
            let layers = 0..self.source.decoder().num_hidden_layers;
            let tensors = checkpoint.tensors();
            let dense = |layer: &usize| tensors.get(&format!("blk.{layer}.{}.weight", ROUTER.1)).is_none();
            self.put("decoder_sparse_step", 1);
            self.put("mlp_only_layers", layers.filter(dense).collect::<Vec<_>>());
        } else if config.computes("mlp_only_layers") {
            self.put("decoder_sparse_step", config.size("decoder_sparse_step", "")?);
            self.put("mlp_only_layers", config.sizes("mlp_only_layers")?);
        }
        // mlx-lm wants these even where no layer is of that size.
        let key = "shared_intermediate_size";
        if keys::role(self.source.text_type().tables, key).is_some() {
            self.json.entry(key).or_insert(0.into());
        }
        if architecture.mlx_prefix.is_empty() {
            self.json.entry("intermediate_size").or_insert(moe.moe_intermediate_size.into());
        }
        Ok(())
    }

    /// The keys of experts that are chosen by sigmoids, those that the architecture has.
    fn sigmoids(&mut self, moe: &MoeConfig) -> Result<(), QuantizeError> {
        let scale = self.number("routed_scaling_factor", moe.router.scale.into())?;
        self.put("routed_scaling_factor", scale);
        let layers = &self.source.outline.spec().layers;
        let is_dense = |layer: &&LayerSpec| matches!(layer.feedforward, FeedforwardSpec::Dense(_));
        let dense = layers.iter().take_while(is_dense).count();
        if self.source.computes("mlp_layer_types") {
            let kind = |layer: &LayerSpec| if is_dense(&layer) { "dense" } else { "sparse" };
            self.put("mlp_layer_types", layers.iter().map(kind).collect::<Vec<_>>());
        }
        if self.source.computes("topk_method") {
            let grouped = moe.router.n_group > 1;
            self.put("topk_method", if grouped { "group_limited_greedy" } else { "greedy" });
        }
        let shared = moe.shared_expert_intermediate_size / moe.moe_intermediate_size;
        let normed = self.source.attention().any(|attention| attention.head_norm.is_some());
        for (key, value) in [
            ("n_group", moe.router.n_group.into()),
            ("topk_group", moe.router.topk_group.into()),
            ("n_shared_experts", shared.max(1).into()),
            ("first_k_dense_replace", dense.into()),
            ("num_dense_layers", dense.into()),
            ("use_expert_bias", moe.selection_bias.into()),
            ("use_qk_norm", Json::from(normed)),
        ] {
            if self.source.computes(key) {
                self.put(key, value);
            }
        }
        Ok(())
    }

    fn delta_net(&mut self) -> Result<(), QuantizeError> {
        let config = &self.source.config;
        let sizes = DeltaNetConfig::new(config, HeadMap::Grouped)?;
        for (key, size) in [
            ("linear_num_key_heads", sizes.linear_num_key_heads),
            ("linear_num_value_heads", sizes.linear_num_value_heads),
            ("linear_key_head_dim", sizes.linear_key_head_dim),
            ("linear_value_head_dim", sizes.linear_value_head_dim),
            ("linear_conv_kernel_dim", sizes.linear_conv_kernel_dim),
        ] {
            self.put(key, size);
        }
        let layers = self.source.decoder().num_hidden_layers;
        let key = "full_attention_interval";
        let stored = config.optional_size(key, key)?;
        let kinds = ["full_attention", "linear_attention"];
        let by_interval =
            |interval: usize, layer: usize| kinds[usize::from(!(layer + 1).is_multiple_of(interval))];
        let mut types = vec![];
        for layer in 0..layers {
            let kind = config.layer_type(layer, layers, &kinds)?;
            types.push(kind.unwrap_or_else(|| by_interval(stored.unwrap_or(4).max(1), layer)));
        }
        // mlx-lm reads the interval alone. llama.cpp's converter writes a wrong one where it has a
        // list.
        let fits = |interval: &usize| (0..layers).all(|layer| types[layer] == by_interval(*interval, layer));
        let stored = stored.filter(|&interval| interval > 0);
        let interval = stored.into_iter().chain(1..=layers + 1).find(fits).ok_or_else(|| {
            let key = if config.is_gguf() { "attention.recurrent_layers" } else { "layer_types" };
            let got = format!("layers of attention at {:?}", positions(&types, kinds[0]));
            self.refuse(key, &got, "MLX's layout has one interval between them")
        })?;
        self.put("full_attention_interval", interval);
        self.put("layer_types", types);
        Ok(())
    }

    /// The rotary embedding, `scaling` being the section for it as [`Self::scaling`] makes it.
    ///
    /// # Errors
    /// [`QuantizeError::Model`] for what cannot be said.
    pub fn rope(&mut self, rope: &RopeParams, mut scaling: Map<String, Json>) -> Result<(), QuantizeError> {
        let theta = self.number("rope.freq_base", rope.theta)?;
        if self.source.has_two_sizes() {
            return self.ropes_by_kind(rope, theta);
        }
        let fraction = self.rotary_fraction(rope.rotary_dim)?;
        let old = self.json.clone();
        let section = |key: &str| old.get(key).and_then(Json::as_object);
        let section = section("rope_parameters").or_else(|| section("rope_scaling"));
        for key in ["mrope_section", "mrope_interleaved"] {
            if let Some(value) = section.and_then(|section| section.get(key)) {
                scaling.insert(key.into(), value.clone());
            }
        }
        let key = "original_max_position_embeddings";
        match scaling.get(key).filter(|_| self.source.has_default(key)) {
            // transformers prefers it beside the section, where the architecture has a default for
            // it.
            Some(original) => self.put(key, original.clone()),
            None if self.source.has_default(key) => {}
            None => drop(self.json.remove(key)),
        }
        if !self.source.architecture.mlx_prefix.is_empty() {
            let kind = scaling.remove("rope_type").unwrap_or_else(|| "default".into());
            scaling.insert("rope_type".into(), kind);
            scaling.insert("rope_theta".into(), theta);
            if self.source.architecture.conversion.query_scale {
                let (key, beta) =
                    ("llama_4_scaling_beta", self.source.query_scale().map_or(0.0, |scale| scale.beta));
                scaling.insert(key.into(), self.number(key, beta.into())?);
            }
            scaling.extend(fraction.map(|fraction| ("partial_rotary_factor".into(), fraction.into())));
            let key = "rope.dimension_sections";
            let sections = match self.source.config.computes(key) {
                true => self.source.config.gguf_sizes(key)?,
                false => None,
            };
            if let Some(mut sections) = sections {
                sections.truncate(3);
                scaling.insert("mrope_section".into(), json!(sections));
                scaling.insert("mrope_interleaved".into(), true.into());
            }
            // Beside it the same may stand.
            for key in ["rope_theta", "partial_rotary_factor"] {
                if self.json.get(key).is_some_and(|beside| !is_same(beside, &scaling[key])) {
                    self.json.remove(key);
                }
            }
            self.json.remove("rope_scaling");
            self.put("rope_parameters", scaling);
            return Ok(());
        }
        let local = self.source.architecture.conversion.windows.filter(|windows| windows.ropes);
        self.json.remove("rope_parameters");
        if local.is_some_and(|windows| windows.keys == WindowKeys::Types) {
            // mlx-lm has one base for all layers, and reads what stands beside these.
            let local = self.number("rope_theta", self.source.local_theta()?)?;
            let mut full = scaling.clone();
            full.entry("rope_type").or_insert("default".into());
            full.insert("rope_theta".into(), theta.clone());
            let sliding = json!({ "rope_type": "default", "rope_theta": local });
            self.put("rope_parameters", json!({ "full_attention": full, "sliding_attention": sliding }));
        }
        self.put("rope_theta", theta);
        match fraction {
            Some(fraction) => {
                self.put("partial_rotary_factor", fraction);
                if self.source.computes("rotary_dim") {
                    self.put("rotary_dim", rope.rotary_dim);
                }
            }
            // Scaled embeddings of transformers read it also where whole heads are rotated.
            None => drop(self.json.remove("partial_rotary_factor")),
        }
        let named = self.source.architecture.conversion.names_plain_rope;
        if (named || !scaling.is_empty()) && !scaling.contains_key("rope_type") {
            scaling.insert("rope_type".into(), "default".into());
        }
        self.put("rope_scaling", if scaling.is_empty() { Json::Null } else { Json::Object(scaling) });
        Ok(())
    }

    /// The rotated fraction of a head, if the architecture has a key for it.
    fn rotary_fraction(&self, rotary_dim: usize) -> Result<Option<f64>, QuantizeError> {
        let head_dim = self.source.head_dim()?;
        let tables = self.source.text_type().tables;
        let fraction = rotary_dim as f64 / head_dim as f64;
        let want = match keys::role(tables, "partial_rotary_factor") {
            Some(Role::Computed(_)) if (head_dim as f64 * fraction) as usize == rotary_dim => {
                return Ok(Some(fraction));
            }
            Some(Role::Computed(_)) => {
                format!("it is no fraction of the {head_dim} elements of a head in floating point")
            }
            _ if rotary_dim == head_dim => return Ok(None),
            _ => format!("MLX's layout of this model rotates whole heads, of {head_dim} elements"),
        };
        Err(self.refuse("rope.dimension_count", &rotary_dim.to_string(), &want))
    }

    /// The section that says how frequencies are scaled.
    ///
    /// # Errors
    /// [`QuantizeError::Model`] for numbers that JSON does not have.
    pub fn scaling(&self, rope: &RopeParams) -> Result<Map<String, Json>, QuantizeError> {
        let number = |key: &str, number: f64| self.number(key, number);
        let json = match &rope.scaling {
            RopeScaling::None => json!({}),
            RopeScaling::Linear { factor } => {
                json!({ "rope_type": "linear", "factor": number("factor", (*factor).into())? })
            }
            RopeScaling::Llama3(llama3) => json!({
                "rope_type": "llama3",
                "factor": number("factor", llama3.factor.into())?,
                "low_freq_factor": number("low_freq_factor", llama3.low_freq_factor.into())?,
                "high_freq_factor": number("high_freq_factor", llama3.high_freq_factor.into())?,
                "original_max_position_embeddings": llama3.original_max_position_embeddings,
            }),
            RopeScaling::Yarn(yarn) => Json::Object(self.yarn(yarn, Rope::new(rope)?.attention_factor())?),
            RopeScaling::LongRope(long) => Json::Object(self.long_rope(long)?),
        };
        Ok(json.as_object().cloned().unwrap_or_default())
    }

    fn long_rope(&self, long: &LongRope) -> Result<Map<String, Json>, QuantizeError> {
        let (original, longest) =
            (long.original_max_position_embeddings, self.source.decoder().max_position_embeddings);
        let list = |key: &str, divisors: &[f32]| {
            let numbers = divisors.iter().map(|&divisor| self.number(key, divisor.into()));
            Ok::<_, QuantizeError>((key.to_string(), Json::Array(numbers.collect::<Result<_, _>>()?)))
        };
        let mut section = Map::new();
        // mlx-lm looks for the older name of the kind.
        section.insert("type".into(), "longrope".into());
        section.insert("rope_type".into(), "longrope".into());
        section.extend([list("short_factor", &long.short_factor)?, list("long_factor", &long.long_factor)?]);
        section.insert("original_max_position_embeddings".into(), original.into());
        let own = LongRope::own_attention_factor(longest as f64 / original as f64, original);
        if long.attention_factor as f32 != own as f32 {
            let factor = self.number("attention_factor", long.attention_factor)?;
            section.insert("attention_factor".into(), factor);
        }
        Ok(section)
    }

    fn yarn(&self, yarn: &Yarn, attention_factor: f32) -> Result<Map<String, Json>, QuantizeError> {
        let mut section = Map::new();
        section.insert("rope_type".into(), "yarn".into());
        section.insert("factor".into(), self.number("factor", yarn.factor)?);
        section
            .insert("original_max_position_embeddings".into(), yarn.original_max_position_embeddings.into());
        for (key, value, default) in [("beta_fast", yarn.beta_fast, 32.0), ("beta_slow", yarn.beta_slow, 1.0)]
        {
            if value != default {
                section.insert(key.into(), self.number(key, value)?);
            }
        }
        let given = |scale: Option<f64>| scale.filter(|&scale| scale != 0.0);
        let all = given(yarn.mscale_all_dim).filter(|_| self.source.latents().is_some());
        if let (Some(all), true) = (all, yarn.factor > 1.0) {
            // The factor of scores follows from it; mscale then says the rotated part's own.
            let mscale = |scale: f64| 0.1 * scale * yarn.factor.ln() + 1.0;
            let one = (f64::from(attention_factor) * mscale(all) - 1.0) / (0.1 * yarn.factor.ln());
            let one = given(yarn.mscale).filter(|_| yarn.attention_factor.is_none()).unwrap_or(one);
            section.insert("mscale".into(), self.number("mscale", one)?);
            section.insert("mscale_all_dim".into(), self.number("mscale_all_dim", all)?);
        } else if let (None, Some(one), Some(all)) =
            (yarn.attention_factor, given(yarn.mscale), given(yarn.mscale_all_dim))
        {
            section.insert("mscale".into(), self.number("mscale", one)?);
            section.insert("mscale_all_dim".into(), self.number("mscale_all_dim", all)?);
        } else if attention_factor != own_attention_factor(yarn.factor) as f32 {
            let factor = yarn.attention_factor.unwrap_or(attention_factor.into());
            // transformers reads this one alone, and mlx-lm the others alone: it computes
            // `0.1 mscale ln(factor) + 1`.
            section.insert("attention_factor".into(), self.number("attention_factor", factor)?);
            if yarn.factor > 1.0 {
                let mscale = (factor - 1.0) / (0.1 * yarn.factor.ln());
                section.insert("mscale".into(), self.number("mscale", mscale)?);
                section.insert("mscale_all_dim".into(), 0.into());
            }
        }
        if !yarn.truncate {
            section.insert("truncate".into(), false.into());
        }
        Ok(section)
    }
}

/// The attention factor of YaRN where none is given.
pub fn own_attention_factor(factor: f64) -> f64 {
    1.0 + 0.1 * factor.max(1.0).ln()
}

/// The whole `config.json` around a text model's: mlx-lm and transformers have some of them inside
/// a multimodal one.
pub fn wrapped(text: TextConfig<'_>) -> Map<String, Json> {
    let TextConfig { source, mut json } = text;
    for (ours, theirs) in source.architecture.conversion.mlx_keys {
        if let Some(value) = json.remove(*ours) {
            json.insert((*theirs).into(), value);
        }
    }
    // Llama's may be wrapped, too, but need not.
    let wraps = source.config.is_wrapped() && !source.architecture.conversion.mlx_is_text
        || !source.architecture.mlx_prefix.is_empty();
    let wrapper = source.architecture.model_types.iter().find(|model_type| model_type.wraps);
    let Some(wrapper) = wrapper.filter(|_| wraps) else { return json };
    let mut root = Map::new();
    root.insert("model_type".into(), wrapper.name.into());
    root.insert("tie_word_embeddings".into(), source.decoder().tie_word_embeddings.into());
    root.insert("text_config".into(), Json::Object(json));
    root
}

/// True if two values mean the same, however numbers are written.
fn is_same(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Object(one), Json::Object(other)) => {
            // The older name of a section's kind.
            let get = |map: &Map<String, Json>, key: &str| match map.get(key) {
                None if key == "rope_type" => map.get("type").cloned(),
                value => value.cloned(),
            };
            let within = |one: &Map<String, Json>, other: &Map<String, Json>| {
                let keys = one.iter().filter(|(key, value)| *key != "type" && !value.is_null());
                keys.into_iter()
                    .all(|(key, value)| get(other, key).is_some_and(|other| is_same(value, &other)))
            };
            within(one, other) && within(other, one)
        }
        _ => one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number)),
    }
}

/// The indices of `kind`.
fn positions(types: &[&str], kind: &str) -> Vec<usize> {
    (0..types.len()).filter(|&layer| types[layer] == kind).collect()
}
