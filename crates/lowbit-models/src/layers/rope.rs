use crate::{Config, ModelError, Weights};
use lowbit_kernels::ops::{Llama3, RopeLayout, RopeParams, RopeScaling, Yarn};

/// What transformers and llama.cpp take where a checkpoint names none.
const DEFAULT_THETA: f64 = 10000.0;

/// The rotary embedding that a configuration describes, for heads of `head_dim`. Hugging Face has it in
/// `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`.
///
/// # Errors
/// [`ModelError::Config`] for an unknown kind of scaling and for more rotated elements than a head has,
/// [`ModelError::ConfigMissing`] for a key that it needs.
pub fn rope_params(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    layout: RopeLayout,
) -> Result<RopeParams, ModelError> {
    if config.is_gguf() {
        from_gguf(config, weights, head_dim, layout)
    } else {
        from_json(config, head_dim, layout)
    }
}

/// Before any table of frequencies is made.
fn check_rotary_dim(
    config: &Config<'_>,
    key: &str,
    got: impl ToString,
    (rotary_dim, head_dim): (usize, usize),
) -> Result<(), ModelError> {
    match rotary_dim <= head_dim {
        true => Ok(()),
        false => Err(config.refuse(key, &got.to_string(), &format!("heads have {head_dim} elements"))),
    }
}

fn from_json(config: &Config<'_>, head_dim: usize, layout: RopeLayout) -> Result<RopeParams, ModelError> {
    let scaling = config.section("rope_parameters").or_else(|| config.section("rope_scaling"));
    let section = scaling.as_ref().unwrap_or(config);
    let either = |key: &str| -> Result<Option<f64>, ModelError> {
        Ok(section.optional_float(key, "")?.or(config.optional_float(key, "")?))
    };
    let theta = either("rope_theta")?.unwrap_or(DEFAULT_THETA);
    let fraction = either("partial_rotary_factor")?.unwrap_or(1.0);
    let kind = section.json("rope_type").or_else(|| section.json("type")).and_then(serde_json::Value::as_str);
    let original = || {
        let original = section.optional_size("original_max_position_embeddings", "")?;
        original.map_or_else(|| config.size("max_position_embeddings", ""), Ok)
    };
    let factor = || section.float("factor", "");
    let or =
        |key: &str, default: f64| Ok::<_, ModelError>(section.optional_float(key, "")?.unwrap_or(default));
    let scaling = match kind.unwrap_or("default") {
        "default" | "mrope" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? as f32 },
        "llama3" => RopeScaling::Llama3(Llama3 {
            factor: factor()? as f32,
            low_freq_factor: section.float("low_freq_factor", "")? as f32,
            high_freq_factor: section.float("high_freq_factor", "")? as f32,
            original_max_position_embeddings: original()?,
        }),
        "yarn" => RopeScaling::Yarn(Yarn {
            factor: factor()?,
            original_max_position_embeddings: original()?,
            beta_fast: or("beta_fast", 32.0)?,
            beta_slow: or("beta_slow", 1.0)?,
            attention_factor: section.optional_float("attention_factor", "")?,
            mscale: section.optional_float("mscale", "")?,
            mscale_all_dim: section.optional_float("mscale_all_dim", "")?,
            truncate: section.flag("truncate", true)?,
        }),
        other => {
            return Err(config.refuse("rope_type", other, "default, linear, llama3 and yarn are supported"));
        }
    };
    let rotary_dim = (head_dim as f64 * fraction) as usize;
    check_rotary_dim(config, "partial_rotary_factor", fraction, (rotary_dim, head_dim))?;
    Ok(RopeParams { theta, rotary_dim, layout, scaling, freq_factors: None })
}

fn from_gguf(
    config: &Config<'_>,
    weights: &Weights<'_>,
    head_dim: usize,
    layout: RopeLayout,
) -> Result<RopeParams, ModelError> {
    let theta = config.optional_float("", "rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    let rotary_dim = config.optional_size("", "rope.dimension_count")?.unwrap_or(head_dim);
    check_rotary_dim(config, "rope.dimension_count", rotary_dim, (rotary_dim, head_dim))?;
    let factor = || config.float("", "rope.scaling.factor");
    let optional = |key: &str| config.optional_float("", &format!("rope.scaling.{key}"));
    let scaling = match config.gguf_string("rope.scaling.type")?.unwrap_or("none") {
        "none" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor()? as f32 },
        "yarn" => RopeScaling::Yarn(Yarn {
            factor: factor()?,
            original_max_position_embeddings: config.size("", "rope.scaling.original_context_length")?,
            beta_fast: optional("yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: optional("yarn_beta_slow")?.unwrap_or(1.0),
            attention_factor: optional("attn_factor")?.or(optional("yarn_attn_factor")?),
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }),
        other => {
            return Err(config.refuse("rope.scaling.type", other, "none, linear and yarn are supported"));
        }
    };
    // Llama 3's scaling comes as a tensor of divisors.
    let divisors =
        weights.has("", "rope_freqs.weight").then(|| weights.values("", "rope_freqs.weight", rotary_dim / 2));
    Ok(RopeParams { theta, rotary_dim, layout, scaling, freq_factors: divisors.transpose()? })
}
