//! The architectures, one file each. To add one: its file, with a table of its configuration's keys and what lowbit does
//! about each, and its line in [`ARCHITECTURES`]. Everything that is special about a model's checkpoints stands here.

mod biases;
mod llama;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;

use crate::keys::Tables;
use crate::layers::{Decoder, DecoderConfig};
use crate::names::Names;
use crate::{Config, ModelError, Weights};
use lowbit_files::{Layout, shown};

/// An architecture's sizes and its decoder.
pub type Loaded = Result<(DecoderConfig, Decoder), ModelError>;

/// How a family of checkpoints is recognised and loaded.
pub struct Architecture {
    /// What `config.json` calls it.
    pub model_types: &'static [ModelType],
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// The keys below that name.
    pub gguf_keys: Tables,
    /// Norms that some checkpoints store as `w - 1`.
    pub offset_norms: Option<OffsetNorms>,
    /// The names of its tensors, but for what its file says.
    pub names: &'static [Names],
    /// The prefix of all tensor names in mlx-lm's checkpoints, where mlx-lm wraps the text model in a multimodal one.
    pub mlx_prefix: &'static str,
    /// What a missing `tie_word_embeddings` means.
    pub tied_by_default: TiedByDefault,
    /// Builds the decoder from its configuration and its weights.
    pub load: fn(&Config<'_>, &Weights<'_>) -> Loaded,
}

impl Architecture {
    /// GGUF's name of the tensor that MLX's checkpoints of this architecture call `name`, without what stands before
    /// `embed_tokens` or the name in a layer.
    pub fn gguf_name(&self, name: &str) -> Option<String> {
        let find = |name: &str| {
            self.names.iter().copied().flatten().find(|(json, _)| *json == name).map(|(_, gguf)| *gguf)
        };
        if let Some(whole) = find(name) {
            return Some(whole.to_string());
        }
        let (module, parameter) = name.rsplit_once('.')?;
        ["weight", "bias"].contains(&parameter).then_some(())?;
        Some(format!("{}.{parameter}", find(module)?))
    }

    /// The inverse of [`Self::gguf_name`]: what MLX's checkpoints call the tensor that GGUF calls `name`, without `blk.N.`
    pub fn mlx_name(&self, name: &str) -> Option<String> {
        let find = |name: &str| {
            self.names.iter().copied().flatten().find(|(_, gguf)| *gguf == name).map(|(json, _)| *json)
        };
        if let Some(whole) = find(name) {
            return Some(whole.to_string());
        }
        let (module, parameter) = name.rsplit_once('.')?;
        ["weight", "bias"].contains(&parameter).then_some(())?;
        Some(format!("{}.{parameter}", find(module)?))
    }
}

/// Norms that a checkpoint stores as `w - 1`, where the model computes with `1 + (w - 1)`. In other checkpoints of the
/// same model the converter has added the 1. This is the one rule for both: by the checkpoint's layout and the norm's name.
#[derive(Clone, Copy, Debug)]
pub struct OffsetNorms {
    /// Whose checkpoints store them so.
    pub layouts: &'static [Layout],
    /// How the full names of their modules end, in Hugging Face's spelling.
    pub names: &'static [&'static str],
}

impl OffsetNorms {
    /// Whether `module` is such a norm in checkpoints of this layout.
    pub fn contain(&self, layout: Layout, module: &str) -> bool {
        // Without the prefix of the text model, its last norm is `norm`.
        let module = format!("model.{module}");
        self.layouts.contains(&layout) && self.names.iter().any(|name| module.ends_with(name))
    }
}

/// Whether the output layer is the embedding where the configuration does not say it.
#[derive(Clone, Copy, Debug)]
pub struct TiedByDefault {
    /// In transformers.
    pub transformers: bool,
    /// In mlx-lm.
    pub mlx_lm: bool,
}

impl TiedByDefault {
    /// Nowhere.
    pub const NO: Self = Self { transformers: false, mlx_lm: false };
}

/// A `model_type` and the keys that its configuration may have.
pub struct ModelType {
    /// As `config.json` spells it.
    pub name: &'static str,
    /// Its keys, and those of its `text_config` if it has one.
    pub tables: Tables,
    /// A multimodal model: its `text_config`, if there is one, describes the text model.
    pub wraps: bool,
}

/// The one list.
pub const ARCHITECTURES: &[Architecture] = &[
    llama::LLAMA,
    qwen3::QWEN3,
    qwen3_moe::QWEN3_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen3_5::QWEN3_5,
    qwen3_5::QWEN3_5_MOE,
];

/// The architecture that GGUF calls `name`.
pub fn gguf(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.gguf == name)
}

/// The architecture whose `model_type` is `name`, and that type.
pub fn model_type(name: &str) -> Option<(&'static Architecture, &'static ModelType)> {
    let of = |architecture: &'static Architecture| {
        let found = architecture.model_types.iter().find(|model_type| model_type.name == name)?;
        Some((architecture, found))
    };
    ARCHITECTURES.iter().find_map(of)
}

/// The entry for what `config` says it is.
///
/// # Errors
/// [`ModelError::Architecture`] names what was found and what is supported.
pub fn find(config: &Config<'_>) -> Result<&'static Architecture, ModelError> {
    let name = config.architecture()?;
    let found = match config.is_gguf() {
        true => gguf(&name),
        false => model_type(&name).map(|(architecture, _)| architecture),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = match config.is_gguf() {
            true => ARCHITECTURES.iter().map(|architecture| architecture.gguf).collect(),
            false => {
                let types = ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types);
                types.map(|model_type| model_type.name).collect()
            }
        };
        let (found, supported) = (shown(name).to_string(), names.join(", "));
        ModelError::Architecture { path: config.path().clone(), found, supported }
    })
}

/// Loads what `config` describes, after checking that lowbit computes all its values.
///
/// # Errors
/// [`ModelError`]: an unknown architecture, values and tensors that do not fit it.
pub fn load(config: &Config<'_>, weights: &Weights<'_>) -> Loaded {
    let architecture = find(config)?;
    config.check()?;
    let (decoder_config, decoder) = (architecture.load)(config, &weights.of(architecture))?;
    biases::check(config, weights, decoder_config.num_hidden_layers)?;
    Ok((decoder_config, decoder))
}

/// `config.json`'s `sliding_window`, if there is one.
pub(crate) fn window(config: &Config<'_>) -> Result<Option<usize>, ModelError> {
    match config.optional_size("sliding_window", "")? {
        Some(0) => Err(config.refuse("sliding_window", "0", "a token sees itself at least")),
        window => Ok(window),
    }
}

/// Prefixes of the layers' names: text models have `model.`, multimodal ones more, and models saved without their
/// output layer less.
const TEXT_PREFIXES: [&str; 5] =
    ["model.language_model.", "language_model.model.", "model.", "language_model.", ""];

/// The prefix of the text model in a checkpoint that is not GGUF, as `has` finds a tensor.
pub fn text_prefix(has: impl Fn(&str) -> bool) -> &'static str {
    let embedding = |prefix: &&str| has(&format!("{prefix}embed_tokens.weight"));
    TEXT_PREFIXES.into_iter().find(embedding).unwrap_or("model.")
}

/// The part of a checkpoint that holds the layers.
pub(crate) fn text_model<'a>(weights: &Weights<'a>) -> Weights<'a> {
    weights.below(text_prefix(|name| weights.has(name, "")), "")
}

/// Kinds of tensors that text generation does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// Of the layers that predict further tokens.
    Prediction,
    /// Of what sees images.
    Vision,
    /// A constant that the peers compute themselves.
    Constant,
}

/// Name endings of constants that exporters wrote: rotary tables, positions and causal masks.
const CONSTANTS: [&str; 6] = [
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "position_ids",
    "attn.bias",
    "attn.masked_bias",
];

/// The kind of the tensor `name`, if it is outside the text model: its `layers` layers and the tensors around them.
pub fn extra(name: &str, layers: usize) -> Option<Extra> {
    let below = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let predicts = || gguf_layer(name).is_some_and(|layer| layer >= layers);
    match name {
        _ if name.contains(".mtp.") || below(&["mtp."]) || predicts() => Some(Extra::Prediction),
        _ if below(&["model.visual.", "visual.", "vision_tower."]) => Some(Extra::Vision),
        _ if CONSTANTS.iter().any(|end| name.ends_with(end)) => Some(Extra::Constant),
        _ => None,
    }
}

/// The layer of GGUF's tensor `blk.N.`.
pub(crate) fn gguf_layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// True if text generation does not need the tensor: see [`extra`].
pub fn is_extra(name: &str, layers: usize) -> bool {
    extra(name, layers).is_some()
}
