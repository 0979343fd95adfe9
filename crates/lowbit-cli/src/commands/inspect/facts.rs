//! Facts that people ask about a model before they run it: its sizes, templates, sampling, licence
//! and memory.

use crate::{Failure, sampling::recommended};
use lowbit::{ChatTemplate, Checkpoint, Device, Model, Target};
use lowbit_files::read::{limit, read};
use lowbit_files::shown;
use lowbit_formats::FloatType;
use lowbit_models::names::{MAMBA_IN, Name, SHORT_CONV};
use lowbit_models::{Config, arch, keys};
use serde::Serialize;
use serde_json::Value;

/// The facts that could be found; names are those of config.json.
#[derive(Serialize, Default)]
pub struct Facts {
    /// As its publisher calls it.
    pub name: Option<String>,
    num_hidden_layers: Option<usize>,
    /// Those with attention: the others have a state that does not grow.
    attention_layers: Option<usize>,
    /// The name of the others.
    #[serde(skip)]
    other_layers: &'static str,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    /// Of latent attention: the two parts of what a token keeps.
    kv_lora_rank: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    sliding_window: Option<usize>,
    max_position_embeddings: Option<usize>,
    vocab_size: Option<usize>,
    tie_word_embeddings: Option<bool>,
    rope: Rope,
    /// The names of its chat templates.
    chat_templates: Vec<String>,
    sampling: Option<Sampling>,
    licence: Option<Licence>,
    pub memory: Option<Memory>,
}

/// Rotary positions.
#[derive(Serialize, Default)]
struct Rope {
    theta: Option<f64>,
    /// The method that reaches positions beyond those of training.
    scaling: Option<String>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

/// The sampling that the publisher recommends.
#[derive(Serialize)]
struct Sampling {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    /// The effect of all of this on a run, as it says itself.
    #[serde(skip)]
    line: String,
}

#[derive(Serialize)]
struct Licence {
    name: String,
    /// The file or the key that names the licence.
    source: &'static str,
}

/// The memory that a model takes while it runs, in bytes.
#[derive(Serialize)]
pub struct Memory {
    /// Of keys and values, f16, per token of the context, in layers that keep all of them.
    cache_bytes_per_token: u64,
    /// Of those in layers that keep a window, which do not grow any more when it is full.
    window_bytes: u64,
    /// Of a sequence's states that do not grow.
    state_bytes: u64,
    pub at: Vec<AtContext>,
}

/// At a length of the context.
#[derive(Serialize)]
pub struct AtContext {
    pub tokens: usize,
    pub cache_bytes: u64,
    /// With the weights.
    pub total_bytes: u64,
}

/// The contexts that memory is told for, besides the model's own.
const CONTEXTS: [usize; 2] = [4096, 32768];

/// The layers beside those with attention, where an architecture has some.
fn other_layers(config: &Config<'_>) -> &'static str {
    let has = |name: Name<'_>| config.found().is_some_and(|found| found.gguf_name(name.0).is_some());
    match () {
        () if has(MAMBA_IN) => "Mamba-2",
        () if has(SHORT_CONV) => "short convolutions",
        () => "gated delta nets",
    }
}

impl Facts {
    /// Of a checkpoint whose tensors have `bytes` in memory. Facts that cannot be read are left
    /// out: that it cannot be run is a warning.
    pub fn new(checkpoint: &Checkpoint, config: &Config<'_>, bytes: u64) -> Self {
        let read = Reader { checkpoint, config };
        let memory = memory(checkpoint, bytes);
        let (memory, loaded) = memory.map_or((None, None), |(memory, loaded)| (Some(memory), Some(loaded)));
        let size = |json, gguf| read.number(json, gguf).map(|number| number as usize);
        let hidden_size = size("hidden_size", "embedding_length");
        let num_attention_heads = size("num_attention_heads", "attention.head_count");
        let latents = size("kv_lora_rank", "attention.kv_lora_rank");
        let per_head = || hidden_size?.checked_div(num_attention_heads?);
        Self {
            name: read.metadata("general.name"),
            num_hidden_layers: loaded
                .as_ref()
                .map(|of| of.layers)
                .or_else(|| size("num_hidden_layers", "block_count")),
            attention_layers: loaded.as_ref().map(|of| of.attention_layers),
            other_layers: other_layers(config),
            hidden_size,
            intermediate_size: size("moe_intermediate_size", "expert_feed_forward_length")
                .or_else(|| size("intermediate_size", "feed_forward_length")),
            num_experts: size("num_experts", "expert_count")
                .or_else(|| size("num_local_experts", "expert_count"))
                .or_else(|| size("n_routed_experts", "expert_count"))
                .filter(|&experts| experts > 0),
            num_experts_per_tok: size("num_experts_per_tok", "expert_used_count")
                .or_else(|| size("top_k_experts", "expert_used_count")),
            num_attention_heads,
            num_key_value_heads: size("num_key_value_heads", "attention.head_count_kv")
                // Some files list them by layer.
                .or_else(|| config.found().and_then(|_| config.key_heads().ok()?))
                .or(num_attention_heads),
            head_dim: size("head_dim", "attention.key_length")
                .or_else(per_head)
                .filter(|_| latents.is_none()),
            kv_lora_rank: latents,
            qk_rope_head_dim: latents.and_then(|_| size("qk_rope_head_dim", "rope.dimension_count")),
            sliding_window: read.window(),
            max_position_embeddings: size("max_position_embeddings", "context_length"),
            vocab_size: loaded.as_ref().map(|of| of.vocab_size).or_else(|| size("vocab_size", "vocab_size")),
            tie_word_embeddings: loaded.as_ref().map(|of| of.tied),
            rope: read.rope(),
            chat_templates: templates(checkpoint),
            sampling: sampling(checkpoint),
            licence: read.licence(),
            memory,
        }
    }

    /// The known facts, each with its label.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![];
        let mut add = |label, value: Option<String>| rows.extend(value.map(|value| (label, value)));
        add("layers", self.layers());
        add("heads", self.heads());
        add(
            "experts",
            self.num_experts.map(|experts| match self.num_experts_per_tok {
                Some(used) => format!("{experts}, of which {used} are used per token"),
                None => experts.to_string(),
            }),
        );
        add("context", self.max_position_embeddings.map(|tokens| format!("{tokens} tokens")));
        add(
            "vocabulary",
            self.vocab_size.map(|size| match self.tie_word_embeddings {
                Some(true) => format!("{size} tokens; the output layer is the embedding"),
                _ => format!("{size} tokens"),
            }),
        );
        add("rope", self.rope.line());
        add(
            "templates",
            Some(match self.chat_templates.is_empty() {
                true => "no chat template: it continues plain text".into(),
                false => shown(self.chat_templates.join(", ")).to_string(),
            }),
        );
        let none = || "no recommendation".to_string();
        add("sampling", Some(self.sampling.as_ref().map_or_else(none, |sampling| sampling.line.clone())));
        add(
            "licence",
            Some(match &self.licence {
                Some(Licence { name, source }) => format!("{} ({source})", shown(name)),
                None => "not stated".into(),
            }),
        );
        rows
    }

    fn layers(&self) -> Option<String> {
        let mut line = self.num_hidden_layers?.to_string();
        if let Some(attention) = self.attention_layers.filter(|&count| Some(count) != self.num_hidden_layers)
        {
            let others = self.other_layers;
            line += &format!(", {attention} of them attention and the others {others}");
        }
        if let Some(hidden) = self.hidden_size {
            line += &format!("; hidden size {hidden}");
        }
        if let Some(size) = self.intermediate_size {
            line += &format!(", feed-forward {size}");
        }
        Some(line)
    }

    fn heads(&self) -> Option<String> {
        let (heads, kv_heads) = (self.num_attention_heads?, self.num_key_value_heads?);
        if let (Some(rank), Some(rotated)) = (self.kv_lora_rank, self.qk_rope_head_dim) {
            return Some(format!("{heads}, which share one latent of {rank} and {rotated} values per token"));
        }
        let mut line = format!("{heads} of queries, {kv_heads} of keys and values");
        if let Some(dim) = self.head_dim {
            line += &format!(", {dim} wide");
        }
        if let Some(window) = self.sliding_window {
            line += &format!("; a window of {window} tokens");
        }
        Some(line)
    }
}

impl Rope {
    fn line(&self) -> Option<String> {
        let mut line = format!("theta {}", self.theta?);
        if let Some(scaling) = &self.scaling {
            line += &format!(", {}", shown(scaling));
            if let Some(factor) = self.factor {
                line += &format!(" scaling by {factor}");
            }
            if let Some(tokens) = self.original_max_position_embeddings {
                line += &format!(" from {tokens} tokens");
            }
        }
        Some(line)
    }
}

fn templates(checkpoint: &Checkpoint) -> Vec<String> {
    match ChatTemplate::from_checkpoint(checkpoint) {
        Ok(Some(template)) => template.names().map(str::to_string).collect(),
        _ => vec![],
    }
}

/// The sampling that the publisher recommends, if any.
fn sampling(checkpoint: &Checkpoint) -> Option<Sampling> {
    let config = checkpoint.generation_config().ok()?;
    let sampling = Sampling {
        do_sample: config.do_sample,
        temperature: config.temperature,
        top_k: config.top_k,
        top_p: config.top_p,
        min_p: config.min_p,
        repetition_penalty: config.repetition_penalty,
        line: recommended(&config),
    };
    let Sampling { do_sample, temperature, top_k, top_p, min_p, repetition_penalty, line: _ } = &sampling;
    let floats = [temperature, top_p, min_p, repetition_penalty];
    let is_any = do_sample.is_some() || top_k.is_some() || floats.iter().any(|value| value.is_some());
    is_any.then_some(sampling)
}

/// Facts that only a loaded model knows for sure.
struct Loaded {
    layers: usize,
    attention_layers: usize,
    vocab_size: usize,
    tied: bool,
}

/// Of a checkpoint that can be run, whose weights stay in its file meanwhile.
fn memory(checkpoint: &Checkpoint, bytes: u64) -> Option<(Memory, Loaded)> {
    let load = || -> Result<_, Failure> {
        let target = Target::new(&Device::cpu(Some(1))?, None)?.with_exact(true);
        // As it is by default, on the CPU and on GPUs with matrix units.
        let target = target.with_cache(FloatType::F16.into());
        let model = Model::load_for(checkpoint, target)?;
        let cache = model.cache_size()?;
        Ok((cache, model))
    };
    let (cache, model) = load().ok()?;
    let config = model.config();
    let most = config.max_position_embeddings;
    let contexts = CONTEXTS.into_iter().filter(|&tokens| tokens < most).chain([most]);
    let at = contexts.map(|tokens| {
        let cache_bytes = cache.bytes(tokens) as u64;
        AtContext { tokens, cache_bytes, total_bytes: bytes.saturating_add(cache_bytes) }
    });
    let memory = Memory {
        cache_bytes_per_token: cache.per_token as u64,
        window_bytes: cache.windowed.saturating_mul(cache.window) as u64,
        state_bytes: cache.fixed as u64,
        at: at.collect(),
    };
    let loaded = Loaded {
        layers: config.num_hidden_layers,
        attention_layers: cache.attention_layers,
        vocab_size: config.vocab_size,
        tied: config.tie_word_embeddings,
    };
    Some((memory, loaded))
}

/// Reads what a checkpoint says of itself, also of architectures that are not supported.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a Config<'a>,
}

impl Reader<'_> {
    /// A string of GGUF's metadata.
    fn metadata(&self, key: &str) -> Option<String> {
        let value = self.checkpoint.metadata()?.find::<&str>(key).ok()??;
        (!value.is_empty()).then(|| value.to_string())
    }

    /// A key of config.json, in the text model's part of it if it has one.
    fn json(&self, key: &str) -> Option<&Value> {
        let root = self.checkpoint.config().ok()?;
        let text = root.get("text_config").filter(|text| text.is_object());
        text.and_then(|text| text.get(key)).or_else(|| root.get(key)).filter(|value| !value.is_null())
    }

    /// A number, as the architecture reads it where lowbit knows that.
    fn number(&self, json: &str, gguf: &str) -> Option<f64> {
        if let Some(metadata) = self.checkpoint.metadata() {
            let key = format!("{}.{gguf}", self.config.architecture().ok()?);
            let whole = metadata.find::<usize>(&key).ok().flatten().map(|number| number as f64);
            return whole.or_else(|| metadata.find::<f64>(&key).ok()?);
        }
        match self.knows(json) {
            true => self.config.optional_float(json, gguf).ok()?,
            false => self.json(json)?.as_f64(),
        }
    }

    /// True if the architecture is supported and has this key of config.json.
    fn knows(&self, key: &str) -> bool {
        let name = self.config.architecture().unwrap_or_default();
        let tables = arch::model_type(&name, None, arch::JsonFacts::default()).map(|(_, found)| found.tables);
        tables.is_some_and(|tables| keys::role(tables, key).is_some())
    }

    /// The window of a directory's layers, where they have one.
    fn window(&self) -> Option<usize> {
        let switch = "use_sliding_window";
        let is_used = match self.knows(switch) {
            true => self.config.flag(switch, false).ok()?,
            false => self.json(switch).and_then(Value::as_bool).unwrap_or(true),
        };
        let is_gguf = self.checkpoint.metadata().is_some();
        let window =
            self.number("sliding_window", "attention.sliding_window").filter(|_| is_used && !is_gguf)?;
        Some(window as usize)
    }

    fn rope(&self) -> Rope {
        if self.checkpoint.metadata().is_some() {
            let number = |name: &str| self.number("", &format!("rope.{name}"));
            let name = self.config.architecture().unwrap_or_default();
            let scaling = self.metadata(&format!("{name}.rope.scaling.type"));
            return Rope {
                theta: number("freq_base").or(Some(10000.0)),
                scaling: scaling.filter(|kind| kind != "none"),
                factor: number("scaling.factor"),
                original_max_position_embeddings: number("scaling.original_context_length")
                    .map(|tokens| tokens as usize),
            };
        }
        // transformers 5 has all in one object, 4 had theta beside it.
        let of = self.json("rope_parameters").or_else(|| self.json("rope_scaling"));
        let get = |key: &str| of.and_then(|of| of.get(key)).filter(|value| !value.is_null());
        let theta = get("rope_theta").and_then(Value::as_f64).or_else(|| self.json("rope_theta")?.as_f64());
        let kind = get("rope_type").or_else(|| get("type")).and_then(Value::as_str);
        Rope {
            theta,
            scaling: kind.filter(|kind| *kind != "default").map(str::to_string),
            factor: get("factor").and_then(Value::as_f64),
            original_max_position_embeddings: get("original_max_position_embeddings")
                .and_then(Value::as_u64)
                .and_then(|tokens| usize::try_from(tokens).ok()),
        }
    }

    fn licence(&self) -> Option<Licence> {
        if self.checkpoint.metadata().is_some() {
            let name = self.metadata("general.license")?;
            return Some(Licence { name, source: "general.license" });
        }
        let readme = read(&self.checkpoint.path().join("README.md"), limit::TEMPLATE).ok();
        let readme = readme.and_then(|bytes| licence_of(&String::from_utf8(bytes).ok()?));
        if let Some(name) = readme {
            return Some(Licence { name, source: "README.md" });
        }
        let name = self.json("license")?.as_str()?.to_string();
        Some(Licence { name, source: "config.json" })
    }
}

/// The licence in the front matter of a model's card: its name, where it is none of the hub's list,
/// and where it stands.
fn licence_of(card: &str) -> Option<String> {
    let card = card.trim_start_matches('\u{feff}').strip_prefix("---")?;
    let lines: Vec<&str> = card.lines().skip(1).take_while(|line| line.trim_end() != "---").collect();
    let value = |key: &str| {
        let index =
            lines.iter().position(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':')))?;
        let own = lines[index][key.len() + 1..].trim();
        // A list has its items on lines of their own.
        let text = match own {
            "" => lines.get(index + 1)?.trim_start().strip_prefix('-')?.trim(),
            own => own.trim_start_matches('[').trim_end_matches(']').trim(),
        };
        let text = text.trim_matches(['"', '\'']);
        (!text.is_empty()).then(|| text.to_string())
    };
    let name = match value("license")? {
        name if name == "other" => value("license_name").unwrap_or(name),
        name => name,
    };
    Some(match value("license_link").filter(|link| link.contains("://")) {
        Some(link) => format!("{name}, {link}"),
        None => name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_of_cards() {
        let cards = [
            ("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Model\nlicense: mit\n", Some("apache-2.0")),
            ("---\nlanguage:\n- en\nlicense:\n- cc-by-4.0\n---\n", Some("cc-by-4.0")),
            ("---\r\nlicense: \"mit\"\r\n---\r\n", Some("mit")),
            (
                "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://a/LICENSE\n---\n",
                Some("qwen, https://a/LICENSE"),
            ),
            ("---\nlicense: other\nlicense_link: LICENSE\n---\n", Some("other")),
            ("---\nlicense_name: x\n---\n", None),
            ("# Model\nlicense: mit\n", None),
            ("---\nlicense:\n---\n", None),
            ("", None),
        ];
        for (card, want) in cards {
            assert_eq!(licence_of(card).as_deref(), want, "{card:?}");
        }
    }
}
