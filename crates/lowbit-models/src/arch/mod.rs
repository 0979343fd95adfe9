//! The architectures, one file each. To add one: its file, with a table of its configuration's keys
//! and what lowbit does about each, and its line in [`ARCHITECTURES`]. Everything that is special
//! about a model's checkpoints stands here.

mod bailing_hybrid;
mod biases;
mod deepseek;
pub use biases::{Biases, Promise};
mod conversion;
pub use conversion::{Alias, Conversion, LONG_ROPE, Latents, Mamba2Keys, MlxLm, WindowKeys, Windows};
mod exaone4;
mod extra;
pub use extra::Extra;
pub(crate) use extra::gguf_layer;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod hunyuan;
mod kimi_linear;
mod lfm2;
mod lfm2_moe;
mod llama;
mod minimax_m2;
mod mistral3;
mod mixtral;
mod nemotron_h;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod seed_oss;
mod smollm3;

use crate::keys::Tables;
use crate::layers::{
    AttentionConfig, Decoder, DecoderConfig, DecoderSpec, FeedforwardSpec, LayerNorms, LayerSpec, MixerSpec,
    MlpConfig, Multipliers,
};
use crate::names::{NORM, Names, ROUTER, SELECTION_BIAS};
use crate::{Config, ModelError, Weights};
use lowbit_files::{Layout, shown};
use lowbit_kernels::ops::RopeLayout;
use std::borrow::Cow;
use std::collections::HashSet;

/// A description, and the decoder that it describes.
pub type Loaded = Result<(DecoderSpec, Decoder), ModelError>;

/// A family of checkpoints: its names, and the function that describes its layers.
pub struct Architecture {
    /// Its `model_type`s in `config.json`.
    pub model_types: &'static [ModelType],
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// The keys below that name.
    pub gguf_keys: Tables,
    /// Norms that some checkpoints store as `w - 1`.
    pub offset_norms: Option<OffsetNorms>,
    /// The names of its tensors, but for what its file says.
    pub names: &'static [Names],
    /// Modules of a layer that its checkpoints, but for GGUF, call otherwise than
    /// [`names`](crate::names) does.
    pub aliases: &'static [Alias],
    /// The modules that may have biases.
    pub biases: &'static [Biases],
    /// Facts for conversions.
    pub conversion: Conversion,
    /// The prefix of all tensor names in mlx-lm's checkpoints, where mlx-lm wraps the text model in
    /// a multimodal one.
    pub mlx_prefix: &'static str,
    /// The meaning of a missing `tie_word_embeddings`.
    pub tied_by_default: TiedByDefault,
    /// The layers, of a configuration and the names and shapes of weights.
    pub describe: fn(&Config<'_>, &Weights<'_>) -> Result<DecoderSpec, ModelError>,
}

impl Architecture {
    /// The name of the tensor that layers call `name`, below its layer, in a checkpoint of this
    /// layout.
    pub fn stored_name<'n>(&self, name: &'n str, layout: Layout) -> Cow<'n, str> {
        let renamed = |(ours, theirs): &Alias| renamed(name, ours, theirs);
        let mlx = if layout == Layout::Mlx { self.conversion.mlx_aliases } else { &[] };
        mlx.iter().chain(self.aliases).find_map(renamed).map_or(Cow::Borrowed(name), Cow::Owned)
    }

    /// The inverse of [`Self::stored_name`].
    pub fn known_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
        let renamed = |(ours, theirs): &Alias| renamed(name, theirs, ours);
        let mut all = self.aliases.iter().chain(self.conversion.mlx_aliases);
        all.find_map(renamed).map_or(Cow::Borrowed(name), Cow::Owned)
    }

    /// The name in a layer of latent attention of the tensor that is `name` in others.
    pub fn latent_name(&self, name: &str) -> Option<String> {
        self.conversion.latent_names.iter().find_map(|(ours, theirs)| renamed(name, ours, theirs))
    }

    /// GGUF's name of the tensor that MLX's checkpoints of this architecture call `name`, without
    /// what stands before `embed_tokens` or the name in a layer.
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

    /// The inverse of [`Self::gguf_name`]: what MLX's checkpoints call the tensor that GGUF calls
    /// `name`, without `blk.N.`
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

/// `name` with `to` for `from`, which it is or is below; `{}` is the same number in both.
fn renamed(name: &str, from: &str, to: &str) -> Option<String> {
    let (number, rest) = match from.split_once("{}") {
        None => ("", name.strip_prefix(from)?),
        Some((before, after)) => {
            let rest = name.strip_prefix(before)?;
            let digits = rest.find(|c: char| !c.is_ascii_digit()).filter(|&digits| digits > 0)?;
            let (number, rest) = rest.split_at(digits);
            (number, rest.strip_prefix(after)?)
        }
    };
    (rest.is_empty() || rest.starts_with('.')).then(|| format!("{}{rest}", to.replacen("{}", number, 1)))
}

/// Norms that a checkpoint stores as `w - 1`, where the model computes with `1 + (w - 1)`. In other
/// checkpoints of the same model the converter has added the 1. This is the one rule for both: by
/// the checkpoint's layout and the norm's name.
#[derive(Clone, Copy, Debug)]
pub struct OffsetNorms {
    /// The layouts of checkpoints that store them so.
    pub layouts: &'static [Layout],
    /// The ends of their modules' full names, in Hugging Face's spelling.
    pub names: &'static [&'static str],
}

impl OffsetNorms {
    /// True if `module` is such a norm in checkpoints of this layout.
    pub fn contain(&self, layout: Layout, module: &str) -> bool {
        // Without the prefix of the text model, its last norm is `norm`.
        let module = format!("model.{module}");
        self.layouts.contains(&layout) && self.names.iter().any(|name| module.ends_with(name))
    }
}

/// The peers' defaults of `tie_word_embeddings`: true if the output layer is the embedding.
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

impl Architecture {
    /// True if `name` is the `model_type` of one of its text models.
    pub fn has_text_type(&self, name: Option<&str>) -> bool {
        self.model_types.iter().any(|model_type| !model_type.wraps && Some(model_type.name) == name)
    }

    /// The `model_type` of its text models that is `name`, or the first one.
    pub fn text_type(&self, name: Option<&str>) -> &'static ModelType {
        let mut types = self.model_types.iter().filter(|model_type| !model_type.wraps);
        let first = types.clone().next().unwrap_or(&self.model_types[0]);
        types.find(|model_type| Some(model_type.name) == name).unwrap_or(first)
    }
}

/// The one list.
pub const ARCHITECTURES: &[Architecture] = &[
    llama::LLAMA,
    // Called llama in GGUF, too.
    mixtral::MIXTRAL,
    mistral3::MISTRAL3,
    qwen2::QWEN2,
    qwen2_moe::QWEN2_MOE,
    qwen3::QWEN3,
    qwen3_moe::QWEN3_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen3_5::QWEN3_5,
    qwen3_5::QWEN3_5_MOE,
    qwen3_vl::QWEN3_VL,
    gemma2::GEMMA2,
    gemma3::GEMMA3,
    gemma3::GEMMA_EMBEDDING,
    gemma4::GEMMA4,
    gpt_oss::GPT_OSS,
    granite::GRANITE,
    granite_hybrid::GRANITE_HYBRID,
    granite_hybrid::GRANITE_HYBRID_MOE,
    lfm2::LFM2,
    lfm2_moe::LFM2_MOE,
    phi3::PHI3,
    glm4::GLM4,
    glm4_moe::GLM4_MOE,
    smollm3::SMOLLM3,
    seed_oss::SEED_OSS,
    olmo2::OLMO2,
    // Called olmo2 in GGUF, too.
    olmo3::OLMO3,
    exaone4::EXAONE4,
    hunyuan::HUNYUAN,
    minimax_m2::MINIMAX_M2,
    // All three are called deepseek2 in GGUF.
    deepseek::DEEPSEEK_V2,
    deepseek::DEEPSEEK_V3,
    deepseek::GLM4_MOE_LITE,
    kimi_linear::KIMI_LINEAR,
    bailing_hybrid::BAILING_HYBRID,
    nemotron_h::NEMOTRON_H,
    nemotron_h::NEMOTRON_H_MOE,
];

/// The facts of a GGUF file by which architectures with the same name are told apart.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct GgufFacts {
    pub experts: bool,
    /// Some layers have windows.
    pub windows: bool,
    /// Experts are chosen by sigmoids.
    pub sigmoids: bool,
    /// The norms' eps is not 1e-6.
    pub other_eps: bool,
}

/// The architecture that GGUF calls `name`: Mixtral has Llama's name, Olmo 3 that of Olmo 2, and
/// DeepSeek V3 and GLM-4.7-Flash have that of DeepSeek V2.
pub fn gguf(name: &str, facts: GgufFacts) -> Option<&'static Architecture> {
    let lacks = |architecture: &&'static Architecture| {
        let no_windows = architecture.conversion.windows.is_none();
        let no_sigmoids = architecture.gguf_name(SELECTION_BIAS.0).is_none();
        let latents = architecture.conversion.latents;
        // MLX's checkpoints of DeepSeek V3 cannot say another eps.
        let no_eps = latents.is_some_and(|latents| !latents.mlx_has_eps);
        (
            facts.experts && architecture.gguf_name(ROUTER.0).is_none(),
            facts.windows && no_windows,
            latents.is_some() && facts.sigmoids == no_sigmoids,
            facts.other_eps && no_eps,
        )
    };
    ARCHITECTURES.iter().filter(|architecture| architecture.gguf == name).min_by_key(lacks)
}

/// The facts of a `config.json` by which architectures with the same name are told apart.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct JsonFacts {
    pub experts: bool,
    /// Tokens see those after them.
    pub sees_later: bool,
}

/// The architecture whose `model_type` is `name`, and that type. `inner` is the type of the
/// `text_config` in it: a wrapper of several architectures is the one of the type that it wraps. Of
/// two with one name that which `facts` are of is taken.
pub fn model_type(
    name: &str,
    inner: Option<&str>,
    facts: JsonFacts,
) -> Option<(&'static Architecture, &'static ModelType)> {
    let named = |architecture: &'static Architecture| {
        let found = architecture.model_types.iter().find(|model_type| model_type.name == name)?;
        Some((architecture, found))
    };
    let all = ARCHITECTURES.iter().filter_map(named);
    all.min_by_key(|(architecture, _)| {
        let has_experts = architecture.gguf_name(ROUTER.0).is_some();
        let sees_later = architecture.conversion.sees_later;
        (!architecture.has_text_type(inner), facts.experts != has_experts, facts.sees_later != sees_later)
    })
}

/// The entry for what `config` says it is.
///
/// # Errors
/// [`ModelError::Architecture`] names what was found and what is supported.
pub fn find(config: &Config<'_>) -> Result<&'static Architecture, ModelError> {
    let name = config.architecture()?;
    config.found().ok_or_else(|| {
        let mut names: Vec<&str> = match config.is_gguf() {
            true => ARCHITECTURES.iter().map(|architecture| architecture.gguf).collect(),
            false => {
                let types = ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types);
                types.map(|model_type| model_type.name).collect()
            }
        };
        // Two architectures may have one name.
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(*name));
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
    let weights = weights.of(architecture);
    let spec = (architecture.describe)(config, &weights)?;
    let decoder = Decoder::load(&weights, &text_model(&weights), &spec)?;
    let layers = spec.config.num_hidden_layers;
    weights.finish(|name| architecture.is_extra(name, layers))?;
    biases::check(config, &weights, architecture, layers)?;
    Ok((spec, decoder))
}

/// The layout of rotated pairs where [`Conversion::like_llama`]: GGUF's converter permutes q's and
/// k's rows so that pairs are neighbours.
pub(crate) fn permuted(config: &Config<'_>) -> RopeLayout {
    if config.is_gguf() { RopeLayout::Interleaved } else { RopeLayout::HalfSplit }
}

/// Refuses heads that do not make up the hidden size, where `peers` take that for granted.
pub(crate) fn check_heads_make_up_hidden(
    config: &Config<'_>,
    weights: &Weights<'_>,
    attention: &AttentionConfig,
    peers: &str,
) -> Result<(), ModelError> {
    let AttentionConfig { num_attention_heads: heads, head_dim, hidden_size: hidden, .. } = *attention;
    match weights.product(["num_attention_heads", "head_dim"], [heads, head_dim])? {
        queries if queries == hidden => Ok(()),
        queries => {
            let want = format!("{peers} have heads that make up the hidden size, {hidden}");
            Err(config.refuse("num_attention_heads * head_dim", &queries.to_string(), &want))
        }
    }
}

/// The decoder of these sizes whose layer `i` has the attention `attention(i)` and a SwiGLU MLP.
pub(crate) fn dense(
    config: &Config<'_>,
    sizes: DecoderConfig,
    norms: LayerNorms,
    attention: impl Fn(usize) -> Result<AttentionConfig, ModelError>,
) -> Result<DecoderSpec, ModelError> {
    let mlp = MlpConfig::new(config.size("intermediate_size", "feed_forward_length")?);
    decoder(sizes, |index| {
        let mixer = MixerSpec::Attention(attention(index)?);
        Ok(LayerSpec { norms, mixer, feedforward: FeedforwardSpec::Dense(mlp) })
    })
}

/// The decoder of these sizes whose layer `i` is `layer(i)`.
pub(crate) fn decoder(
    config: DecoderConfig,
    layer: impl Fn(usize) -> Result<LayerSpec, ModelError>,
) -> Result<DecoderSpec, ModelError> {
    let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?;
    Ok(DecoderSpec { config, layers, norm: NORM, multipliers: Multipliers::NONE, layer_embedding: None })
}

/// `config.json`'s `sliding_window`, if there is one.
pub(crate) fn window(config: &Config<'_>) -> Result<Option<usize>, ModelError> {
    match config.optional_size("sliding_window", "")? {
        Some(0) => Err(config.refuse("sliding_window", "0", "a token sees itself at least")),
        window => Ok(window),
    }
}

/// The window of layer `index` of a model whose windows are switched on by `use_sliding_window`,
/// where `layer_types` says that it has one, or `by_default` where that is missing.
pub(crate) fn switched_window(
    config: &Config<'_>,
    layers: usize,
    index: usize,
    by_default: impl FnOnce() -> Result<bool, ModelError>,
) -> Result<Option<usize>, ModelError> {
    if config.is_gguf() {
        return Ok(None);
    }
    let window = match config.flag("use_sliding_window", false)? {
        true => window(config)?,
        false => None,
    };
    let kinds = &["full_attention", "sliding_attention"];
    let sliding = match config.layer_type(index, layers, kinds)? {
        Some(kind) => kind == "sliding_attention",
        None => window.is_some() && by_default()?,
    };
    match (sliding, window) {
        (true, None) => {
            let key = format!("layer_types[{index}]");
            let want = "use_sliding_window is false, or sliding_window null";
            Err(config.refuse(&key, "sliding_attention", want))
        }
        (true, window) => Ok(window),
        (false, _) => Ok(None),
    }
}

/// Prefixes of the layers' names: text models have `model.`, multimodal ones more, and models saved
/// without their output layer less.
const TEXT_PREFIXES: [&str; 6] =
    ["model.language_model.", "language_model.model.", "model.", "backbone.", "language_model.", ""];

/// The names of the embedding.
const EMBEDDINGS: [&str; 3] = ["embed_tokens", "embeddings", "word_embeddings"];

/// The prefix of the text model in a checkpoint that is not GGUF, as `has` finds a tensor.
pub fn text_prefix(has: impl Fn(&str) -> bool) -> &'static str {
    let embedding = |prefix: &&str| EMBEDDINGS.iter().any(|name| has(&format!("{prefix}{name}.weight")));
    TEXT_PREFIXES.into_iter().find(embedding).unwrap_or("model.")
}

/// The part of a checkpoint that holds the layers.
pub(crate) fn text_model<'a>(weights: &Weights<'a>) -> Weights<'a> {
    weights.below(text_prefix(|name| weights.has(name, "")), "")
}
