mod gemma4;

use crate::arch::{WindowKeys, Windows};
use crate::{Config, ModelError, Weights};
use lowbit_files::shown;
use lowbit_kernels::ops::{Llama3, LongRope, Rope, RopeLayout, RopeParams, RopeScaling, Yarn};

/// The default of transformers and llama.cpp.
const DEFAULT_THETA: f64 = 10000.0;

/// The rotary embedding that a configuration describes, for heads of `head_dim`. Hugging Face has
/// it in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`.
///
/// # Errors
/// [`ModelError::Config`] for an unknown kind of scaling and for more rotated elements than a head
/// has, [`ModelError::ConfigMissing`] for a key that it needs.
pub fn rope_params(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    layout: RopeLayout,
) -> Result<RopeParams, ModelError> {
    if config.is_gguf() {
        from_gguf(config, weights, head_dim, layout)
    } else {
        from_json(config, weights, head_dim, layout)
    }
}

/// The layers that a rotary embedding is for, where there are two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeKind {
    /// Those that attend to all tokens before.
    Full,
    /// Those with a window.
    Sliding,
}

impl RopeKind {
    /// The name of such layers in `layer_types`.
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// The rotary embedding of the layers of one kind, for whole heads. Hugging Face has both in
/// `rope_parameters` (transformers 5), or that of full layers in `rope_theta` and `rope_scaling`,
/// and that of others in `rope_local_base_freq`.
///
/// # Errors
/// As [`rope_params`].
pub fn rope_params_of(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    kind: RopeKind,
) -> Result<RopeParams, ModelError> {
    let layout = RopeLayout::HalfSplit;
    let plain = |theta| RopeParams {
        theta,
        rotary_dim: head_dim,
        layout,
        scaling: RopeScaling::None,
        freq_factors: None,
    };
    if config.is_gguf() {
        return match kind {
            RopeKind::Full => from_gguf(config, weights, head_dim, layout),
            RopeKind::Sliding => {
                let windows = config.found().and_then(|architecture| architecture.conversion.windows);
                let of_others = || match windows {
                    Some(Windows { keys: WindowKeys::Interval, .. }) => Ok(None),
                    _ => config.optional_float("", "rope.freq_base"),
                };
                if windows.is_some_and(|windows| windows.keys == WindowKeys::Sizes) {
                    return gemma4::local_of_gguf(config, plain(config.float("", "rope.freq_base_swa")?));
                }
                let own = config.optional_float("", "rope.freq_base_swa")?;
                let theta = own.map_or_else(of_others, |theta| Ok(Some(theta)))?;
                Ok(plain(theta.unwrap_or(DEFAULT_THETA)))
            }
        };
    }
    if config
        .found()
        .and_then(|found| found.conversion.windows)
        .is_some_and(|it| it.keys == WindowKeys::Sizes)
    {
        return gemma4::of_a_kind(config, kind, plain(DEFAULT_THETA));
    }
    let beside = match kind {
        RopeKind::Full => "rope_theta",
        RopeKind::Sliding if config.computes("rope_local_base_freq") => "rope_local_base_freq",
        RopeKind::Sliding => "rope_theta",
    };
    let both = config.section("rope_parameters")?;
    let nested = match &both {
        Some(both) if both.first_object().is_some() => both.section(kind.name())?,
        Some(_) => {
            let want = "this architecture has one for each kind of layer";
            return Err(config.refuse("rope_parameters", "one rotary embedding", want));
        }
        None if kind == RopeKind::Full => config.section("rope_scaling")?,
        None => None,
    };
    let theta = match nested.as_ref().map_or(Ok(None), |section| section.optional_float("rope_theta", ""))? {
        Some(theta) => theta,
        None => config.float(beside, "")?,
    };
    let scaling = match &nested {
        Some(section) => scaling(config, section, &self::kind(config, Some(section))?)?,
        None => RopeScaling::None,
    };
    let scaling = match scaling {
        // transformers looks for this one key around the sections.
        RopeScaling::Yarn(yarn) => {
            let truncate = both.map_or(Ok(true), |both| both.flag("truncate", true))?;
            RopeScaling::Yarn(Yarn { truncate, ..yarn })
        }
        other => other,
    };
    Ok(RopeParams { scaling, ..plain(theta) })
}

/// The factor of scores of latent attention, whose keys have `width` elements: where the rotary
/// embedding is a scaled one, `mscale_all_dim` also sharpens the elements that are not rotated.
///
/// Source: transformers 5.24 `models/deepseek_v3` (`yarn_apply_mscale`); llama.cpp
/// `src/models/deepseek2.cpp`, where the rotary embedding's own factor takes part.
///
/// # Errors
/// As [`rope_params`].
pub(crate) fn latent_scale(config: &Config<'_>, rope: &RopeParams, width: usize) -> Result<f32, ModelError> {
    let mscale = match config.is_gguf() {
        true => gguf_mscale(config, rope)?,
        false => match section(config)? {
            Some(section) if kind(config, Some(&section))? != "default" => {
                match section.optional_float("mscale_all_dim", "")?.filter(|&all| all != 0.0) {
                    Some(all) => 1.0 + 0.1 * all * section.float("factor", "")?.max(1.0).ln(),
                    None => 1.0,
                }
            }
            _ => 1.0,
        },
    };
    Ok((mscale * mscale / (width as f64).sqrt()) as f32)
}

/// The same factor's root but for the width, as llama.cpp has it: it takes any scaling for YaRN's.
fn gguf_mscale(config: &Config<'_>, rope: &RopeParams) -> Result<f64, ModelError> {
    let (factor, own) = match &rope.scaling {
        RopeScaling::Yarn(yarn) => (yarn.factor, f64::from(Rope::new(rope)?.attention_factor())),
        RopeScaling::Linear { factor } => {
            let factor = f64::from(*factor);
            (factor, 1.0 + 0.1 * factor.ln())
        }
        _ => return Ok(1.0),
    };
    let all = config.optional_float("", LOG_MULTIPLIER)?.map_or(0.0, whole_multiplier);
    Ok(own * (1.0 + 0.1 * all * factor.ln()))
}

/// GGUF's key of YaRN's `mscale_all_dim`.
const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// `mscale_all_dim` of a model with latent attention: the converter writes a tenth of it.
fn whole_multiplier(tenth: f64) -> f64 {
    f64::from(tenth as f32 / 0.1)
}

fn from_json(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    layout: RopeLayout,
) -> Result<RopeParams, ModelError> {
    let section = section(config)?;
    let section = section.as_ref();
    let theta = either(config, section, "rope_theta")?.unwrap_or(DEFAULT_THETA);
    let (theta, kind) = match (stretch(config, section, head_dim)?, kind(config, section)?) {
        (Some(factor), _) => (theta * factor, "default".into()),
        (None, kind) => (theta, kind),
    };
    let scaling = match section {
        Some(section) if ["longrope", "su"].contains(&&*kind) => {
            RopeScaling::LongRope(long_rope(config, weights, section)?)
        }
        Some(section) => scaling(config, section, &kind)?,
        None => RopeScaling::None,
    };
    let rotary_dim = rotary_dim(config, section, head_dim, matches!(scaling, RopeScaling::None))?;
    Ok(RopeParams { theta, rotary_dim, layout, scaling, freq_factors: None })
}

/// `rope_parameters` or `rope_scaling`, whichever is there and not empty. Two that differ are
/// refused.
fn section<'a>(config: &Config<'a>) -> Result<Option<Config<'a>>, ModelError> {
    let [parameters, scaling] = ["rope_parameters", "rope_scaling"].map(|key| config.section(key));
    let section = match (parameters?, scaling?) {
        (Some(parameters), Some(scaling)) if !parameters.is_same(&scaling) => {
            let want = "rope_parameters is another one, and the peers disagree which of them holds";
            return Err(config.refuse("rope_scaling", "an object", want));
        }
        (parameters, scaling) => scaling.or(parameters),
    };
    // transformers nests them by kind of layer for other architectures.
    let nested = section.as_ref().and_then(Config::first_object);
    match nested {
        Some(key) => Err(config.refuse(key, "an object", "one rotary embedding for all layers is supported")),
        None => Ok(section),
    }
}

/// A number inside the section or beside it, where transformers takes it from if the section lacks
/// it.
fn either(config: &Config<'_>, section: Option<&Config<'_>>, key: &str) -> Result<Option<f64>, ModelError> {
    let inside = section.map_or(Ok(None), |section| section.optional_float(key, ""))?;
    let beside = match inside.is_none() || config.has(key) {
        true => config.optional_float(key, "")?,
        false => None,
    };
    match (inside, beside) {
        (Some(inside), Some(beside)) if inside != beside => {
            let want =
                format!("{beside} stands beside that section, and the peers disagree which of them holds");
            Err(config.refuse(&format!("{key} of the rotary embedding"), &inside.to_string(), &want))
        }
        (inside, beside) => Ok(inside.or(beside)),
    }
}

fn kind(config: &Config<'_>, section: Option<&Config<'_>>) -> Result<String, ModelError> {
    let Some(section) = section else { return Ok("default".into()) };
    match (section.text("rope_type", "")?, section.text("type", "")?) {
        (Some(kind), Some(old)) if kind != old => {
            let want = format!("type, its older name, is {}", shown(old));
            Err(config.refuse("rope_type", &kind, &want))
        }
        (kind, old) => Ok(kind.or(old).unwrap_or_else(|| "default".into())),
    }
}

/// The factor of the base of a `dynamic` embedding with `alpha`, for whole heads.
///
/// Source: transformers 5.24 `compute_ntk_alpha_rope_parameters`; mlx-lm 0.32
/// `DynamicNTKAlphaRoPE`.
fn stretch(
    config: &Config<'_>,
    section: Option<&Config<'_>>,
    head_dim: usize,
) -> Result<Option<f64>, ModelError> {
    let stretches = config.found().is_some_and(|architecture| architecture.conversion.alpha_rope);
    let Some(section) = section.filter(|_| stretches) else { return Ok(None) };
    // 0 counts as missing.
    let Some(alpha) = section.optional_float("alpha", "")?.filter(|&alpha| alpha != 0.0) else {
        return Ok(None);
    };
    let kind = kind(config, Some(section))?;
    let refuse = |want: &str| Err(section.refuse("alpha", &alpha.to_string(), want));
    match () {
        () if kind != "dynamic" => {
            refuse(&format!("rope_type is {}, with which the peers disagree about it", shown(&kind)))
        }
        () if alpha < 0.0 => refuse("a number above 0 is wanted"),
        () if head_dim <= 2 => refuse(&format!("heads have {head_dim} elements, and more than 2 are wanted")),
        () => Ok(Some(alpha.powf(head_dim as f64 / (head_dim as f64 - 2.0)))),
    }
}

/// The context of the original training. transformers prefers the key beside the section, which
/// some architectures have a default for.
fn original_context(config: &Config<'_>, section: &Config<'_>) -> Result<usize, ModelError> {
    let key = "original_max_position_embeddings";
    match (either(config, Some(section), key)?, config.optional_size(key, "")?) {
        (None, _) => config.size("max_position_embeddings", ""),
        (Some(_), Some(_)) => config.size(key, ""),
        (Some(_), None) => section.size(key, ""),
    }
}

/// LongRoPE as transformers computes it, for the context that sequences may have.
fn long_rope(
    config: &Config<'_>,
    weights: &Weights<'_>,
    section: &Config<'_>,
) -> Result<LongRope, ModelError> {
    let original = original_context(config, section)?;
    let longest = config.size("max_position_embeddings", "")?;
    let factor = match section.optional_float("factor", "")? {
        Some(factor) => factor,
        None => longest as f64 / original as f64,
    };
    let attention_factor = match section.optional_float("attention_factor", "")? {
        Some(factor) => factor,
        None => LongRope::own_attention_factor(factor, original),
    };
    let divisors = |key| match section.floats(key)? {
        list if list.is_empty() => Err(section.missing(key)),
        list => Ok(list),
    };
    Ok(LongRope {
        short_factor: divisors("short_factor")?,
        long_factor: divisors("long_factor")?,
        original_max_position_embeddings: original,
        attention_factor,
        context: weights.context().unwrap_or(longest).min(longest),
    })
}

fn scaling(config: &Config<'_>, section: &Config<'_>, kind: &str) -> Result<RopeScaling, ModelError> {
    let original = || original_context(config, section);
    let positive = |key: &str| match section.float(key, "")? {
        number if number > 0.0 => Ok(number),
        number => Err(section.refuse(key, &number.to_string(), "a number above 0 is wanted")),
    };
    // As in transformers, 0 counts as missing.
    let or = |key: &str, default: f64| {
        let given = section.optional_float(key, "")?.filter(|&number| number != 0.0);
        Ok::<_, ModelError>(given.unwrap_or(default))
    };
    Ok(match kind {
        "default" | "mrope" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive("factor")? as f32 },
        "llama3" => RopeScaling::Llama3(Llama3 {
            factor: positive("factor")? as f32,
            low_freq_factor: positive("low_freq_factor")? as f32,
            high_freq_factor: positive("high_freq_factor")? as f32,
            original_max_position_embeddings: original()?,
        }),
        "yarn" => RopeScaling::Yarn(Yarn {
            factor: positive("factor")?,
            original_max_position_embeddings: original()?,
            beta_fast: or("beta_fast", 32.0)?,
            beta_slow: or("beta_slow", 1.0)?,
            attention_factor: section.optional_float("attention_factor", "")?,
            mscale: section.optional_float("mscale", "")?,
            mscale_all_dim: section.optional_float("mscale_all_dim", "")?,
            truncate: section.flag("truncate", true)?,
        }),
        other => {
            return Err(config.refuse(
                "rope_type",
                other,
                "default, linear, llama3, longrope and yarn are supported",
            ));
        }
    })
}

/// The number of elements of a head that are rotated. Models that rotate whole heads ignore the
/// fraction; but scaled embeddings read it, and would then not fit these heads, so it is refused
/// there.
fn rotary_dim(
    config: &Config<'_>,
    section: Option<&Config<'_>>,
    head_dim: usize,
    plain: bool,
) -> Result<usize, ModelError> {
    let key = "partial_rotary_factor";
    if !config.computes(key) {
        if plain {
            return Ok(head_dim);
        }
        let inside = section.map_or(Ok(None), |section| section.optional_float(key, ""))?;
        return match inside.or(config.stored_float(key)?).filter(|&fraction| fraction != 1.0) {
            None => Ok(head_dim),
            Some(fraction) => {
                let want = "this architecture rotates whole heads";
                Err(config.refuse(key, &fraction.to_string(), want))
            }
        };
    }
    let given = either(config, section, key)?;
    // MiniMax's older key.
    let number = match config.computes("rotary_dim") {
        true => config.optional_size("rotary_dim", "")?,
        false => None,
    };
    let fraction = given.or(number.map(|number| number as f64 / head_dim as f64)).unwrap_or(1.0);
    let dim = (head_dim as f64 * fraction) as usize;
    if let Some(number) = number.filter(|&number| number != dim) {
        let want = format!("{key} makes {dim} of the {head_dim} elements of a head");
        return Err(config.refuse("rotary_dim", &number.to_string(), &want));
    }
    if fraction > 0.0 && fraction <= 1.0 && dim >= 2 && dim.is_multiple_of(2) {
        return Ok(dim);
    }
    let want = format!("an even number of the {head_dim} elements of a head is rotated");
    Err(config.refuse(key, &fraction.to_string(), &want))
}

fn from_gguf(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    layout: RopeLayout,
) -> Result<RopeParams, ModelError> {
    let theta = config.optional_float("", "rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    let rotary_dim = config.optional_size("", "rope.dimension_count")?.unwrap_or(head_dim);
    // Before any table of frequencies is made.
    if rotary_dim > head_dim {
        let want = format!("heads have {head_dim} elements");
        return Err(config.refuse("rope.dimension_count", &rotary_dim.to_string(), &want));
    }
    let factor = match config.optional_float("", "rope.scaling.factor")? {
        None => config.optional_float("", "rope.scale_linear")?.unwrap_or(1.0),
        Some(factor) => factor,
    };
    if factor <= 0.0 {
        let want = "a number above 0 is wanted";
        return Err(config.refuse("rope.scaling.factor", &factor.to_string(), want));
    }
    let attn_factor = config.optional_float("", "rope.scaling.attn_factor")?.unwrap_or(1.0);
    if weights.has("", LONG_FACTORS) {
        let long = long_rope_of_gguf(config, weights, rotary_dim / 2, attn_factor)?;
        let scaling = RopeScaling::LongRope(long);
        return Ok(RopeParams { theta, rotary_dim, layout, scaling, freq_factors: None });
    }
    // llama.cpp takes a missing type for linear.
    let kind = config.text("", "rope.scaling.type")?;
    let scaling = match kind.as_deref().unwrap_or("linear") {
        "none" => RopeScaling::None,
        "linear" if factor == 1.0 => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor as f32 },
        "yarn" => RopeScaling::Yarn(yarn_from_gguf(config, factor, attn_factor)?),
        other => {
            return Err(config.refuse("rope.scaling.type", other, "none, linear and yarn are supported"));
        }
    };
    if attn_factor != 1.0 && !matches!(scaling, RopeScaling::Yarn(_)) {
        let want = "it is supported for rope.scaling.type yarn";
        return Err(config.refuse("rope.scaling.attn_factor", &attn_factor.to_string(), want));
    }
    // Llama 3's scaling comes as a tensor of divisors.
    let divisors = weights
        .has("", "rope_freqs.weight")
        .then(|| weights.values(("", "rope_freqs.weight"), rotary_dim / 2));
    let still = still_pairs(config, rotary_dim / 2, head_dim)?;
    let freq_factors = match divisors.transpose()? {
        None if still.is_empty() => None,
        divisors => {
            let mut divisors = divisors.unwrap_or_else(|| vec![1.0; rotary_dim / 2]);
            // llama.cpp's converter's number for pairs that stay: no position of a text turns them.
            divisors.iter_mut().filter(|divisor| **divisor >= STILL).for_each(|it| *it = f32::INFINITY);
            still.into_iter().for_each(|pair| divisors[pair] = f32::INFINITY);
            Some(divisors)
        }
    };
    Ok(RopeParams { theta, rotary_dim, layout, scaling, freq_factors })
}

/// The divisor of pairs that are not rotated, in GGUF.
pub const STILL: f32 = 1e30;

/// LongRoPE's divisors in GGUF.
const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// LongRoPE as llama.cpp computes it, for the context that sequences may have.
fn long_rope_of_gguf(
    config: &Config<'_>,
    weights: &Weights<'_>,
    pairs: usize,
    attention_factor: f64,
) -> Result<LongRope, ModelError> {
    let longest = config.size("", "context_length")?;
    let original = config.optional_size("", "rope.scaling.original_context_length")?.unwrap_or(longest);
    if let Some(kind) = config.text("", "rope.scaling.type")?.filter(|kind| kind != "longrope") {
        let want = format!("{LONG_FACTORS} is there, which belongs to longrope");
        return Err(config.refuse("rope.scaling.type", &kind, &want));
    }
    Ok(LongRope {
        short_factor: weights.values(("", SHORT_FACTORS), pairs)?,
        long_factor: weights.values(("", LONG_FACTORS), pairs)?,
        original_max_position_embeddings: original,
        attention_factor,
        context: weights.context().unwrap_or(longest).min(longest),
    })
}

/// YaRN as llama.cpp computes it: the attention factor is YaRN's own times `attn_factor`.
fn yarn_from_gguf(config: &Config<'_>, factor: f64, attn_factor: f64) -> Result<Yarn, ModelError> {
    let original = match config.optional_size("", "rope.scaling.original_context_length")? {
        Some(original) => original,
        None => config.size("", "context_length")?,
    };
    let own = 1.0 + 0.1 * factor.max(1.0).ln();
    let key = "rope.scaling.yarn_attn_factor";
    let given = config.optional_float("", key)?;
    if let Some(given) = given.filter(|given| (given - own).abs() > 1e-6 * own) {
        let want =
            format!("llama.cpp ignores it and takes {own:.6}, which is not what the model was trained with");
        return Err(config.refuse(key, &given.to_string(), &want));
    }
    let mut attention_factor = (attn_factor != 1.0).then_some(attn_factor * own);
    let mut yarn = Yarn::new(factor, original);
    let key = LOG_MULTIPLIER;
    if config.found().is_some_and(|architecture| architecture.conversion.latents.is_some()) {
        // The converter of these models writes a tenth of it, and llama.cpp takes it for mscale,
        // too.
        if let Some(tenth) = config.optional_float("", key)?.filter(|&tenth| tenth != 0.0) {
            yarn.mscale_all_dim = Some(whole_multiplier(tenth));
            attention_factor = Some(attn_factor);
        }
        return Ok(Yarn { attention_factor, ..yarn });
    }
    if config.computes(key) {
        let multiplier = config.optional_float("", key)?.filter(|&multiplier| multiplier != 0.0);
        match multiplier {
            Some(multiplier) if attn_factor == 1.0 => {
                (yarn.mscale, yarn.mscale_all_dim) = (Some(1.0), Some(multiplier));
            }
            Some(multiplier) => {
                let all = 1.0 + 0.1 * multiplier * factor.max(1.0).ln();
                attention_factor = Some(attn_factor * own / all);
            }
            None => {}
        }
        for (key, beta) in [("yarn_beta_fast", &mut yarn.beta_fast), ("yarn_beta_slow", &mut yarn.beta_slow)]
        {
            let given = config.optional_float("", &format!("rope.scaling.{key}"))?;
            *beta = given.unwrap_or(*beta);
        }
    }
    Ok(Yarn { attention_factor, ..yarn })
}

/// True if a section of the interleaved multimodal embedding covers a rotated pair. llama.cpp
/// (`GGML_ROPE_TYPE_IMROPE`) rotates the others by a fourth position, which is 0 in text, while
/// transformers takes the first one.
fn is_covered(sections: &[usize], pair: usize) -> bool {
    let total = sections.iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
    let place = pair % total.max(1);
    sections.get(place % 3).is_some_and(|&n| place < n.saturating_mul(3))
}

/// True if these sections cover all of `pairs` rotated pairs, in llama.cpp's eyes.
pub fn sections_cover(sections: &[usize], pairs: usize) -> bool {
    // Places repeat after the sections' sum, and each section covers all of its places below its
    // last one.
    let total = sections.iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
    let pairs = pairs.min(total.max(1));
    (pairs.saturating_sub(3)..pairs).all(|pair| is_covered(sections, pair))
}

/// The pairs of a head that a GGUF file's sections leave where they are.
fn still_pairs(config: &Config<'_>, pairs: usize, head_dim: usize) -> Result<Vec<usize>, ModelError> {
    let key = "rope.dimension_sections";
    if !config.computes(key) {
        return Ok(vec![]);
    }
    let Some(sections) = config.gguf_sizes(key)? else { return Ok(vec![]) };
    let total = sections.iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
    if sections.iter().take(3).all(|&n| n == 0) || total > head_dim {
        let want = format!("up to {head_dim} pairs, of text's sections some, are wanted");
        return Err(config.refuse(key, &format!("{sections:?}"), &want));
    }
    Ok((0..pairs).filter(|&pair| !is_covered(&sections, pair)).collect())
}
