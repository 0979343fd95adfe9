//! The inverse frequencies of a rotary embedding from the parameters of `config.json`, as
//! transformers computes them: in f32 and in its order of operations.

use super::{RopeParams, RopeScaling};
use crate::{KernelError, ops::Check};
use std::f64::consts::TAU;

/// Llama 3's scaling (transformers `_compute_llama3_parameters`); names as in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// Divides low frequencies.
    pub factor: f32,
    /// Frequencies whose wavelength exceeds `original_max_position_embeddings` over this are
    /// divided.
    pub low_freq_factor: f32,
    /// Frequencies whose wavelength is below `original_max_position_embeddings` over this are kept.
    pub high_freq_factor: f32,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
}

/// YaRN's scaling (transformers `_compute_yarn_parameters`); names as in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divides low frequencies.
    pub factor: f64,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
    /// Scales cosine and sine; if absent, `0.1 ln(factor) + 1`, or what `mscale` and
    /// `mscale_all_dim` give.
    pub attention_factor: Option<f64>,
    /// With `mscale_all_dim`: `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)`.
    pub mscale: Option<f64>,
    /// See `mscale`; used only if both are given, where 0 counts as absent.
    pub mscale_all_dim: Option<f64>,
    /// Frequencies with more rotations than this over the original context are kept; usually 32.
    pub beta_fast: f64,
    /// Frequencies with fewer rotations than this are divided by `factor`; usually 1.
    pub beta_slow: f64,
    /// True if the ends of the ramp between them are rounded outwards to whole dimensions; usually
    /// true.
    pub truncate: bool,
}

impl Yarn {
    /// The usual parameters.
    pub fn new(factor: f64, original_max_position_embeddings: usize) -> Self {
        Self {
            factor,
            original_max_position_embeddings,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
        }
    }
}

/// LongRoPE's scaling (transformers `_compute_longrope_parameters`); names as in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divisors for contexts up to `original_max_position_embeddings`, `[rotary_dim / 2]`.
    pub short_factor: Vec<f32>,
    /// Divisors for longer ones, `[rotary_dim / 2]`.
    pub long_factor: Vec<f32>,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
    /// Scales cosine and sine.
    pub attention_factor: f64,
    /// The context that is computed for: all positions of a sequence have the same divisors.
    pub context: usize,
}

const CHECK: Check = Check("rope");

/// The inverse frequencies and the attention factor.
pub(super) fn compute(params: &RopeParams) -> Result<(Vec<f32>, f32), KernelError> {
    let dim = params.rotary_dim;
    if dim % 2 == 1 {
        return Err(CHECK.value("rotary_dim", dim, "an even number is wanted, since pairs are rotated"));
    }
    positive("theta", params.theta)?;
    // f32 at every step, as in torch; the power itself is correctly rounded.
    let theta = f64::from(params.theta as f32);
    let power = |i: usize| theta.powf(f64::from((2 * i) as f32 / dim as f32)) as f32;
    let inv_freq: Vec<f32> = (0..dim / 2).map(|i| 1.0 / power(i)).collect();
    let (mut inv_freq, attention_factor) = match &params.scaling {
        RopeScaling::None => (inv_freq, 1.0),
        RopeScaling::Linear { factor } => {
            positive("factor", f64::from(*factor))?;
            (inv_freq.iter().map(|f| f / factor).collect(), 1.0)
        }
        RopeScaling::Llama3(llama3) => (llama3.stretch(inv_freq)?, 1.0),
        RopeScaling::Yarn(yarn) => {
            let powers: Vec<f32> = (0..dim / 2).map(power).collect();
            (yarn.stretch(&powers, params.theta)?, yarn.attention_factor()?)
        }
        RopeScaling::LongRope(long) => {
            let powers: Vec<f32> = (0..dim / 2).map(power).collect();
            positive("attention_factor", long.attention_factor)?;
            (long.stretch(&powers)?, long.attention_factor as f32)
        }
    };
    if let Some(factors) = &params.freq_factors {
        if factors.len() != inv_freq.len() {
            let want = format!("rotary_dim {dim} wants {}", inv_freq.len());
            return Err(CHECK.value("freq_factors", format!("{} numbers", factors.len()), want));
        }
        for (f, &factor) in inv_freq.iter_mut().zip(factors) {
            if factor.is_nan() || factor <= 0.0 {
                return Err(CHECK.value("freq_factors", factor, "a number above 0 is wanted"));
            }
            *f /= factor;
        }
    }
    Ok((inv_freq, attention_factor))
}

fn positive(name: &'static str, x: f64) -> Result<(), KernelError> {
    if x > 0.0 && x.is_finite() {
        return Ok(());
    }
    Err(CHECK.value(name, x, "a positive finite number is wanted"))
}

impl Llama3 {
    fn stretch(&self, inv_freq: Vec<f32>) -> Result<Vec<f32>, KernelError> {
        positive("factor", f64::from(self.factor))?;
        positive("low_freq_factor", f64::from(self.low_freq_factor))?;
        positive("original_max_position_embeddings", self.original_max_position_embeddings as f64)?;
        let ordered = self.high_freq_factor > self.low_freq_factor && self.high_freq_factor.is_finite();
        if !ordered {
            let want = format!("it must be more than low_freq_factor, {}", self.low_freq_factor);
            return Err(CHECK.value("high_freq_factor", self.high_freq_factor, want));
        }
        let context = self.original_max_position_embeddings as f32;
        let (longest, shortest) = (context / self.low_freq_factor, context / self.high_freq_factor);
        let stretch = |f: f32| {
            let wavelength = TAU as f32 / f;
            if wavelength < shortest {
                f
            } else if wavelength > longest {
                f / self.factor
            } else {
                let smooth = (context / wavelength - self.low_freq_factor)
                    / (self.high_freq_factor - self.low_freq_factor);
                (1.0 - smooth) * f / self.factor + smooth * f
            }
        };
        Ok(inv_freq.into_iter().map(stretch).collect())
    }
}

impl LongRope {
    /// `sqrt(1 + ln(factor) / ln(original))`, or 1 where the context is not longer.
    pub fn own_attention_factor(factor: f64, original_max_position_embeddings: usize) -> f64 {
        match factor <= 1.0 {
            true => 1.0,
            false => (1.0 + factor.ln() / (original_max_position_embeddings as f64).ln()).sqrt(),
        }
    }

    /// The divisors of its context, with their name.
    fn divisors(&self) -> (&'static str, &[f32]) {
        match self.context > self.original_max_position_embeddings {
            true => ("long_factor", &self.long_factor),
            false => ("short_factor", &self.short_factor),
        }
    }

    /// `powers` are `theta^(2 i / rotary_dim)`.
    fn stretch(&self, powers: &[f32]) -> Result<Vec<f32>, KernelError> {
        let (name, divisors) = self.divisors();
        if divisors.len() != powers.len() {
            let want = format!("rotary_dim {} wants {}", 2 * powers.len(), powers.len());
            return Err(CHECK.value(name, format!("{} numbers", divisors.len()), want));
        }
        let divided = |(&power, &divisor): (&f32, &f32)| {
            positive(name, f64::from(divisor))?;
            Ok(1.0 / (divisor * power))
        };
        powers.iter().zip(divisors).map(divided).collect()
    }
}

impl Yarn {
    fn attention_factor(&self) -> Result<f32, KernelError> {
        let mscale =
            |weight: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * weight * self.factor.ln() + 1.0 };
        let given = |x: Option<f64>| x.filter(|&x| x != 0.0);
        let factor = match (self.attention_factor, given(self.mscale), given(self.mscale_all_dim)) {
            (Some(factor), ..) => factor,
            (None, Some(one), Some(all)) => mscale(one) / mscale(all),
            (None, ..) => mscale(1.0),
        };
        positive("attention_factor", factor)?;
        Ok(factor as f32)
    }

    /// `powers` are `theta^(2 i / rotary_dim)`.
    fn stretch(&self, powers: &[f32], theta: f64) -> Result<Vec<f32>, KernelError> {
        positive("factor", self.factor)?;
        positive("original_max_position_embeddings", self.original_max_position_embeddings as f64)?;
        positive("beta_fast", self.beta_fast)?;
        positive("beta_slow", self.beta_slow)?;
        if theta <= 1.0 {
            return Err(CHECK.value("theta", theta, "YaRN wants more than 1"));
        }
        let dim = (powers.len() * 2) as f64;
        // The dimension whose pair rotates `turns` times over the original context.
        let dimension = |turns: f64| {
            dim * (self.original_max_position_embeddings as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let (low, width) = (low as f32, (high - low) as f32);
        let stretched = |(i, &power): (usize, &f32)| {
            let keep = 1.0 - ((i as f32 - low) / width).clamp(0.0, 1.0);
            1.0 / (self.factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
        };
        Ok(powers.iter().enumerate().map(stretched).collect())
    }
}
