//! `config.json` of a GGUF file's metadata, with what lowbit, mlx-lm 0.32 and transformers 5 read.

use super::Source;
use crate::QuantizeError;
use crate::rope_divisors::Llama3;
use lowbit_files::Tokenizer;
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{RopeLayout, RopeParams, RopeScaling};
use lowbit_models::layers::{DeltaNetConfig, MoeConfig, rope_params};
use lowbit_models::names::{A_LOG, ATTENTION, DT_BIAS, INPUT_NORM, MLP, Name, ROUTER};
use lowbit_models::{Config, ModelError, Weights, keys};
use serde_json::{Map, Value as Json, json};

/// The configuration; what it cannot say, but what is harmless, goes to `warnings`.
///
/// # Errors
/// [`QuantizeError::Model`] for what it cannot say.
pub(super) fn config(
    source: &Source<'_>,
    weights: &Weights<'_>,
    dtype: FloatType,
    warnings: &mut Vec<String>,
) -> Result<Json, QuantizeError> {
    let mut builder = Builder { source, config: &source.config, json: Map::new() };
    let wraps = source.architecture.model_types.iter().find(|model_type| model_type.wraps);
    builder.decoder()?;
    builder.biases()?;
    let has = |name: Name<'_>| source.architecture.gguf_name(name.0).is_some();
    if has(ROUTER) {
        builder.experts()?;
    }
    if has(A_LOG) {
        builder.delta_net()?;
    }
    builder.rope(weights, warnings)?;
    let mut root = builder.json;
    if let Some(wrapper) = wraps {
        // mlx-lm and transformers have these text models inside a multimodal one.
        let mut outer = Map::new();
        outer.insert("model_type".into(), wrapper.name.into());
        outer.insert("tie_word_embeddings".into(), source.decoder.tie_word_embeddings.into());
        outer.insert("text_config".into(), Json::Object(root));
        root = outer;
    }
    let dtype = match dtype {
        FloatType::F32 => "float32",
        FloatType::F16 => "float16",
        FloatType::BF16 => "bfloat16",
    };
    root.insert("dtype".into(), dtype.into());
    tokens(source, &mut root)?;
    if let Some(name) = source.metadata.find::<&str>("general.name")? {
        root.insert("_name_or_path".into(), name.into());
    }
    Ok(Json::Object(root))
}

/// The ids of special tokens, which transformers and mlx-lm look for at the top.
fn tokens(source: &Source<'_>, root: &mut Map<String, Json>) -> Result<(), QuantizeError> {
    let tokenizer = Tokenizer::from_gguf(source.metadata)?;
    match tokenizer.eos_ids() {
        [] => {}
        &[eos] => drop(root.insert("eos_token_id".into(), eos.into())),
        several => drop(root.insert("eos_token_id".into(), several.into())),
    }
    let padding = source.metadata.find::<u32>("tokenizer.ggml.padding_token_id")?;
    for (key, id) in [("bos_token_id", tokenizer.bos()), ("pad_token_id", padding)] {
        if let Some(id) = id {
            root.insert(key.into(), id.into());
        }
    }
    Ok(())
}

struct Builder<'a> {
    source: &'a Source<'a>,
    config: &'a Config<'a>,
    json: Map<String, Json>,
}

impl Builder<'_> {
    fn put(&mut self, key: &str, value: impl Into<Json>) {
        self.json.insert(key.into(), value.into());
    }

    fn refuse(&self, key: &str, got: &str, want: &str) -> QuantizeError {
        self.config.refuse(key, got, want).into()
    }

    /// `number` as JSON has it: a number that is an f32 in as few digits as say that one.
    fn number(&self, key: &str, number: f64) -> Result<Json, QuantizeError> {
        let narrow = number as f32;
        let short = if f64::from(narrow) == number { narrow.to_string().parse().ok() } else { None };
        let json = serde_json::Number::from_f64(short.unwrap_or(number));
        json.map(Json::Number).ok_or_else(|| self.refuse(key, &number.to_string(), "a number is wanted"))
    }

    fn heads(&self) -> Result<usize, QuantizeError> {
        Ok(self.config.size("", "attention.head_count")?)
    }

    fn head_dim(&self) -> Result<usize, QuantizeError> {
        let dim = self.config.optional_size("", "attention.key_length")?;
        Ok(dim.unwrap_or(self.source.decoder.hidden_size / self.heads()?))
    }

    /// What every model has.
    fn decoder(&mut self) -> Result<(), QuantizeError> {
        let decoder = &self.source.decoder;
        let model_type = self.source.architecture.model_types.iter().find(|model_type| !model_type.wraps);
        self.put("model_type", model_type.map_or("", |model_type| model_type.name));
        self.put("hidden_act", "silu");
        let heads = self.heads()?;
        for (key, size) in [
            ("vocab_size", decoder.vocab_size),
            ("hidden_size", decoder.hidden_size),
            ("num_hidden_layers", decoder.num_hidden_layers),
            ("max_position_embeddings", decoder.max_position_embeddings),
            ("num_attention_heads", heads),
            (
                "num_key_value_heads",
                self.config.optional_size("", "attention.head_count_kv")?.unwrap_or(heads),
            ),
            ("head_dim", self.head_dim()?),
        ] {
            self.put(key, size);
        }
        let key = "feed_forward_length";
        if let Some(size) = self.config.optional_size("intermediate_size", key)? {
            self.put("intermediate_size", size);
        }
        let eps = self.number("attention.layer_norm_rms_epsilon", decoder.rms_norm_eps.into())?;
        self.put("rms_norm_eps", eps);
        self.put("tie_word_embeddings", decoder.tie_word_embeddings);
        Ok(())
    }

    /// The flags of biases. One stands for all of a kind, so that a file with some of them cannot be described.
    fn biases(&mut self) -> Result<(), QuantizeError> {
        let attention: Vec<Name<'_>> = ATTENTION.iter().copied().filter(|name| *name != INPUT_NORM).collect();
        let tables = self.source.architecture.model_types[0].tables;
        let mut known = vec![DT_BIAS.1.to_string()];
        for (key, modules) in [("attention_bias", &attention[..]), ("mlp_bias", &MLP)] {
            let (mut some, mut missing) = (None, None);
            let ends: Vec<_> = modules.iter().map(|(_, gguf)| format!(".{gguf}.weight")).collect();
            for view in self.source.checkpoint.tensors() {
                let Some(module) = view.name.strip_suffix(".weight") else { continue };
                if ends.iter().any(|end| view.name.ends_with(end)) {
                    let bias = format!("{module}.bias");
                    match self.source.checkpoint.tensors().get(&bias) {
                        Some(_) => some = Some(bias),
                        None => missing = Some(bias),
                    }
                }
            }
            let computed = matches!(keys::role(tables, key), Some(keys::Role::Computed(_)));
            match (some, missing) {
                (Some(_), Some(name)) => {
                    let path = self.config.path().clone();
                    return Err(ModelError::Missing { path, name }.into());
                }
                (Some(_), None) if computed => {
                    known.extend(modules.iter().map(|(_, gguf)| format!("{gguf}.bias")));
                    self.put(key, true);
                }
                _ if computed => self.put(key, false),
                _ => {}
            }
        }
        let is_surplus = |name: &&str| {
            name.ends_with(".bias") && !known.iter().any(|known| name.ends_with(&format!(".{known}")))
        };
        let layers = self.source.decoder.num_hidden_layers;
        let names = self.source.checkpoint.tensors().names();
        match names.filter(|name| !lowbit_models::arch::is_extra(name, layers)).find(is_surplus) {
            None => Ok(()),
            Some(name) => Err(self.refuse(
                &format!("tensor {name}"),
                "there",
                "MLX's layout of this model has no such bias",
            )),
        }
    }

    fn experts(&mut self) -> Result<(), QuantizeError> {
        // llama.cpp divides by the sum in all of these models.
        let moe = MoeConfig::new(self.config, true)?;
        self.put("num_experts", moe.num_experts);
        self.put("num_experts_per_tok", moe.num_experts_per_tok);
        self.put("moe_intermediate_size", moe.moe_intermediate_size);
        if moe.shared_expert_intermediate_size > 0 {
            self.put("shared_expert_intermediate_size", moe.shared_expert_intermediate_size);
        }
        self.put("norm_topk_prob", true);
        self.put("decoder_sparse_step", 1);
        let layers = 0..self.source.decoder.num_hidden_layers;
        let tensors = self.source.checkpoint.tensors();
        let dense = |layer: &usize| tensors.get(&format!("blk.{layer}.{}.weight", ROUTER.1)).is_none();
        self.put("mlp_only_layers", layers.filter(dense).collect::<Vec<_>>());
        // mlx-lm wants it even where no layer is of that size.
        self.json.entry("intermediate_size").or_insert(moe.moe_intermediate_size.into());
        Ok(())
    }

    fn delta_net(&mut self) -> Result<(), QuantizeError> {
        let sizes = DeltaNetConfig::new(self.config, lowbit_kernels::ops::HeadMap::Grouped)?;
        for (key, size) in [
            ("linear_num_key_heads", sizes.linear_num_key_heads),
            ("linear_num_value_heads", sizes.linear_num_value_heads),
            ("linear_key_head_dim", sizes.linear_key_head_dim),
            ("linear_value_head_dim", sizes.linear_value_head_dim),
            ("linear_conv_kernel_dim", sizes.linear_conv_kernel_dim),
        ] {
            self.put(key, size);
        }
        let layers = self.source.decoder.num_hidden_layers;
        let stored = self.config.optional_size("", "full_attention_interval")?;
        let kinds = ["full_attention", "linear_attention"];
        let by_interval =
            |interval: usize, layer: usize| kinds[usize::from(!(layer + 1).is_multiple_of(interval))];
        let mut types = vec![];
        for layer in 0..layers {
            let kind = self.config.layer_type(layer, layers, &kinds)?;
            types.push(kind.unwrap_or_else(|| by_interval(stored.unwrap_or(4).max(1), layer)));
        }
        // mlx-lm reads the interval alone. The converter writes a wrong one where it has a list.
        let fits = |interval: &usize| (0..layers).all(|layer| types[layer] == by_interval(*interval, layer));
        let stored = stored.filter(|&interval| interval > 0);
        let interval = stored.into_iter().chain(1..=layers + 1).find(fits).ok_or_else(|| {
            let got = format!("layers of attention at {:?}", positions(&types, kinds[0]));
            self.refuse("attention.recurrent_layers", &got, "MLX's layout has one interval between them")
        })?;
        self.put("full_attention_interval", interval);
        self.put("layer_types", types);
        Ok(())
    }

    fn rope(&mut self, weights: &Weights<'_>, warnings: &mut Vec<String>) -> Result<(), QuantizeError> {
        let head_dim = self.head_dim()?;
        // Which elements make a pair changes nothing here: rows are in Hugging Face's order.
        let rope = rope_params(self.config, weights, head_dim, RopeLayout::HalfSplit)?;
        let theta = self.number("rope.freq_base", rope.theta)?;
        let fraction = self.rotary_fraction(rope.rotary_dim, head_dim)?;
        let mut section = self.scaling(&rope, warnings)?;
        if !self.source.architecture.mlx_prefix.is_empty() {
            let kind = section.remove("rope_type").unwrap_or_else(|| "default".into());
            section.insert("rope_type".into(), kind);
            section.insert("rope_theta".into(), theta);
            section.extend(fraction.map(|fraction| ("partial_rotary_factor".into(), fraction.into())));
            if let Some(mut sections) = self.config.gguf_sizes("rope.dimension_sections")? {
                sections.truncate(3);
                section.insert("mrope_section".into(), json!(sections));
                section.insert("mrope_interleaved".into(), true.into());
            }
            self.put("rope_parameters", section);
            return Ok(());
        }
        self.put("rope_theta", theta);
        if let Some(fraction) = fraction {
            self.put("partial_rotary_factor", fraction);
        }
        self.put("rope_scaling", if section.is_empty() { Json::Null } else { Json::Object(section) });
        Ok(())
    }

    /// How much of a head is rotated, where the architecture has a key for that.
    fn rotary_fraction(&self, rotary_dim: usize, head_dim: usize) -> Result<Option<f64>, QuantizeError> {
        let tables = self.source.architecture.model_types[0].tables;
        let key = "partial_rotary_factor";
        let fraction = rotary_dim as f64 / head_dim as f64;
        let want = match keys::role(tables, key) {
            Some(keys::Role::Computed(_)) if (head_dim as f64 * fraction) as usize == rotary_dim => {
                return Ok(Some(fraction));
            }
            Some(keys::Role::Computed(_)) => {
                format!("it is no fraction of the {head_dim} elements of a head in floating point")
            }
            _ if rotary_dim == head_dim => return Ok(None),
            _ => format!("MLX's layout of this model rotates whole heads, of {head_dim} elements"),
        };
        Err(self.refuse("rope.dimension_count", &rotary_dim.to_string(), &want))
    }

    /// The object that says how frequencies are scaled.
    fn scaling(
        &self,
        rope: &RopeParams,
        warnings: &mut Vec<String>,
    ) -> Result<Map<String, Json>, QuantizeError> {
        let divisors = match &rope.freq_factors {
            None => None,
            Some(factors) => {
                let still = factors.iter().filter(|factor| factor.is_infinite()).count();
                if still > 0 {
                    let path = self.config.path().display();
                    warnings.push(format!(
                        "{path}: llama.cpp does not rotate {still} pairs of each head, which rope.dimension_sections does not \
                         cover; the new checkpoint rotates them, as transformers does"
                    ));
                }
                let finite = |factor: &f32| if factor.is_infinite() { 1.0 } else { *factor };
                let factors: Vec<f32> = factors.iter().map(finite).collect();
                factors.iter().any(|&factor| factor != 1.0).then_some(factors)
            }
        };
        let json = match (&rope.scaling, divisors) {
            (RopeScaling::None, None) => json!({}),
            (RopeScaling::None, Some(divisors)) => self.llama3(&divisors, rope.theta)?,
            (_, Some(_)) => {
                let want = "MLX's layout does not have both divisors and another scaling";
                return Err(self.refuse("rope_freqs.weight", "there", want));
            }
            (RopeScaling::Linear { factor }, None) => {
                json!({ "rope_type": "linear", "factor": self.number("rope.scaling.factor", (*factor).into())? })
            }
            (RopeScaling::Yarn(yarn), None) => {
                if let Some(factor) = yarn.attention_factor {
                    let want = "mlx-lm computes YaRN's own alone";
                    return Err(self.refuse("rope.scaling.attn_factor", &factor.to_string(), want));
                }
                json!({
                    "rope_type": "yarn",
                    "factor": self.number("rope.scaling.factor", yarn.factor)?,
                    "original_max_position_embeddings": yarn.original_max_position_embeddings,
                })
            }
            (RopeScaling::Llama3(_), None) => json!({}),
        };
        Ok(json.as_object().cloned().unwrap_or_default())
    }

    fn llama3(&self, divisors: &[f32], theta: f64) -> Result<Json, QuantizeError> {
        let llama3 = Llama3::from_divisors(divisors, theta).ok_or_else(|| {
            let got = format!("{} divisors of frequencies", divisors.len());
            let want = "no scaling of Llama 3's kind with low and high factors of 1 and 4 has these";
            self.refuse("rope_freqs.weight", &got, want)
        })?;
        Ok(json!({
            "rope_type": "llama3",
            "factor": self.number("rope_freqs.weight", llama3.factor.into())?,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_max_position_embeddings as u64,
        }))
    }
}

/// The indices of `kind`.
fn positions(types: &[&str], kind: &str) -> Vec<usize> {
    (0..types.len()).filter(|&layer| types[layer] == kind).collect()
}
