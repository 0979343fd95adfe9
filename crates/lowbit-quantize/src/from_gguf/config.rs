//! `config.json` of a GGUF file's metadata, with what lowbit, mlx-lm 0.32 and transformers 5 read.

use super::Source;
use crate::QuantizeError;
use crate::config_json::{TextConfig, wrapped};
use crate::rope_divisors::Llama3;
use lowbit_files::Tokenizer;
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{RopeParams, RopeScaling};
use lowbit_models::ModelError;
use lowbit_models::arch::{Biases, Promise};
use lowbit_models::names::{DT_BIAS, SELECTION_BIAS};
use serde_json::{Map, Value as Json, json};

/// The configuration; what it cannot say, but what is harmless, goes to `warnings`.
///
/// # Errors
/// [`QuantizeError::Model`] for what it cannot say.
pub(super) fn config(
    source: &Source<'_>,
    dtype: FloatType,
    warnings: &mut Vec<String>,
) -> Result<Json, QuantizeError> {
    let computed = &source.computed;
    let mut text = TextConfig { source: computed, json: Map::new() };
    text.put("model_type", computed.text_type().name);
    text.sizes()?;
    let mut builder = Builder { source, text };
    builder.biases()?;
    let rope = computed.rope()?;
    let scaling = builder.scaling(&rope, warnings)?;
    builder.text.rope(&rope, scaling)?;
    let mut root = wrapped(builder.text);
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
    text: TextConfig<'a>,
}

impl Builder<'_> {
    fn refuse(&self, key: &str, got: &str, want: &str) -> QuantizeError {
        self.source.computed.config.refuse(key, got, want).into()
    }

    /// The flags of biases. One stands for all of its modules, so that a file with some of them
    /// cannot be described.
    fn biases(&mut self) -> Result<(), QuantizeError> {
        let architecture = self.source.computed.architecture;
        let mut known = vec![DT_BIAS.1.to_string(), SELECTION_BIAS.1.to_string()];
        for Biases { promise, modules } in architecture.biases {
            let modules: Vec<_> =
                modules.iter().filter_map(|name| architecture.gguf_name(&format!("{name}.weight"))).collect();
            let (mut some, mut missing) = (None, None);
            for view in self.source.computed.checkpoint.tensors() {
                if modules.iter().any(|name| view.name.ends_with(&format!(".{name}"))) {
                    let bias = format!("{}.bias", view.name.trim_end_matches(".weight"));
                    match self.source.computed.checkpoint.tensors().get(&bias) {
                        Some(_) => some = Some(bias),
                        None => missing = Some(bias),
                    }
                }
            }
            let wanted = some.is_some() || matches!(promise, Promise::Always);
            if let Some(name) = missing.filter(|_| wanted) {
                let names = self.source.computed.checkpoint.tensors().names();
                let path = self.source.computed.config.path();
                return Err(ModelError::missing_tensor(path, &name, names).into());
            }
            let flag = match promise {
                Promise::Flag(key) if self.source.computed.computes(key) => Some(key),
                Promise::Flag(_) => continue,
                Promise::Always => None,
            };
            if wanted {
                known.extend(modules.iter().map(|name| name.replace(".weight", ".bias")));
            }
            if let Some(key) = flag {
                self.text.put(key, wanted);
            }
        }
        let is_surplus = |name: &&str| {
            name.ends_with(".bias") && !known.iter().any(|known| name.ends_with(&format!(".{known}")))
        };
        let layers = self.source.computed.decoder().num_hidden_layers;
        let names = self.source.computed.checkpoint.tensors().names();
        match names.filter(|name| !architecture.is_extra(name, layers)).find(is_surplus) {
            None => Ok(()),
            Some(name) => Err(self.refuse(
                &format!("tensor {name}"),
                "there",
                "MLX's layout of this model has no such bias",
            )),
        }
    }

    /// The section that says how frequencies are scaled.
    fn scaling(
        &self,
        rope: &RopeParams,
        warnings: &mut Vec<String>,
    ) -> Result<Map<String, Json>, QuantizeError> {
        if self.source.computed.has_two_sizes() {
            // The divisors are a fraction there: `TextConfig::rope`.
            return Ok(Map::new());
        }
        let factors = rope.freq_factors.as_deref().unwrap_or_default();
        let still = factors.iter().filter(|factor| factor.is_infinite()).count();
        if still > 0 {
            let path = self.source.computed.config.path().display();
            warnings.push(format!(
                "{path}: llama.cpp does not rotate {still} pairs of each head, which rope.dimension_sections does not cover; the \
                 new checkpoint rotates them, as transformers does"
            ));
        }
        let finite = |factor: &f32| if factor.is_infinite() { 1.0 } else { *factor };
        let divisors: Vec<f32> = factors.iter().map(finite).collect();
        match (&rope.scaling, divisors.iter().any(|&divisor| divisor != 1.0)) {
            (_, false) => self.text.scaling(rope),
            (RopeScaling::None, true) => {
                Ok(self.llama3(&divisors, rope.theta)?.as_object().cloned().unwrap_or_default())
            }
            (_, true) => {
                let want = "MLX's layout does not have both divisors and another scaling";
                Err(self.refuse("rope_freqs.weight", "there", want))
            }
        }
    }

    fn llama3(&self, divisors: &[f32], theta: f64) -> Result<Json, QuantizeError> {
        let llama3 = Llama3::from_divisors(divisors, theta).ok_or_else(|| {
            let got = format!("{} divisors of frequencies", divisors.len());
            let want = "no scaling of Llama 3's kind with low and high factors of 1 and 4 has these";
            self.refuse("rope_freqs.weight", &got, want)
        })?;
        Ok(json!({
            "rope_type": "llama3",
            "factor": self.text.number("rope_freqs.weight", llama3.factor.into())?,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_max_position_embeddings as u64,
        }))
    }
}
