//! Rotary embeddings of Gemma 4, whose kinds of layers have one each.

use super::{RopeKind, kind};
use crate::{Config, ModelError};
use lowbit_kernels::ops::RopeParams;

/// Gemma 4's: proportional in layers without a window, and plain in the others. `plain` is that of
/// whole heads. A proportional one rotates the first pairs of a head alone, as fast as if it
/// rotated all.
///
/// Source: transformers 5.24 `_compute_proportional_rope_parameters`; mlx-lm 0.32
/// `ProportionalRoPE`.
pub(super) fn of_a_kind(
    config: &Config<'_>,
    of: RopeKind,
    plain: RopeParams,
) -> Result<RopeParams, ModelError> {
    const DEFAULT: (f64, f64) = (1e6, 0.25);
    let head_dim = plain.rotary_dim;
    let proportional = |theta, fraction: f64, factor: f64| {
        let pairs = (head_dim as f64 * fraction / 2.0) as usize;
        let divisors = (0..head_dim / 2).map(|pair| if pair < pairs { factor as f32 } else { f32::INFINITY });
        RopeParams { theta, freq_factors: Some(divisors.collect()), ..plain.clone() }
    };
    let Some(both) = config.section("rope_parameters")? else {
        return Ok(match of {
            RopeKind::Full => proportional(DEFAULT.0, DEFAULT.1, 1.0),
            RopeKind::Sliding => plain,
        });
    };
    let section = both.section(of.name())?.ok_or_else(|| both.missing(of.name()))?;
    let theta = section.float("rope_theta", "")?;
    let known = if of == RopeKind::Full { &["proportional", "default"][..] } else { &["default"] };
    match kind(config, Some(&section))?.as_str() {
        "default" => Ok(RopeParams { theta, ..plain }),
        "proportional" if of == RopeKind::Full => {
            let key = "partial_rotary_factor";
            let fraction = section.optional_float(key, "")?.unwrap_or(1.0);
            let factor = section.optional_float("factor", "")?.unwrap_or(1.0);
            let rotated = (head_dim as f64 * fraction) as usize;
            if !(0.0..=1.0).contains(&fraction) || !rotated.is_multiple_of(2) {
                let want = format!("an even number of the {head_dim} elements of a head is rotated");
                return Err(section.refuse(key, &fraction.to_string(), &want));
            }
            if factor <= 0.0 {
                return Err(section.refuse("factor", &factor.to_string(), "a number above 0 is wanted"));
            }
            Ok(proportional(theta, fraction, factor))
        }
        other => {
            let want = format!("only {} is supported for {}", known.join(" or "), of.name());
            Err(section.refuse("rope_type", other, &want))
        }
    }
}

/// The plain embedding of layers with a window, whose base the file says.
pub(super) fn local_of_gguf(config: &Config<'_>, plain: RopeParams) -> Result<RopeParams, ModelError> {
    let key = "rope.dimension_count_swa";
    let rotated = config.optional_size("", key)?.filter(|&rotated| rotated != plain.rotary_dim);
    match rotated {
        None => Ok(plain),
        Some(rotated) => {
            let want = format!("whole heads, of {}, are rotated", plain.rotary_dim);
            Err(config.refuse(key, &rotated.to_string(), &want))
        }
    }
}
