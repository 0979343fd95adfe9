use super::AttentionParams;
use crate::gamma::gamma;
use crate::simd::math::EXP2_ERROR;
use lowbit_formats::FloatType;

/// The operands in f32 and their sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    /// `[T, Hq, D]`.
    pub q: &'a [f32],
    /// `[Hkv, capacity, D]`.
    pub k: &'a [f32],
    /// `[Hkv, capacity, Dv]`.
    pub v: &'a [f32],
    /// `[T]`.
    pub positions: &'a [u32],
    /// `[Hq]`, or none.
    pub sinks: &'a [f32],
    /// Hq, Hkv, capacity, D and Dv.
    pub sizes: [usize; 5],
}

/// Attention in f64, and the bounds of its errors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    /// `[T, Hq, Dv]`.
    pub y: Vec<f64>,
    /// y with all values positive.
    magnitude: Vec<f64>,
    /// y with all values positive and all weights as great as the greatest.
    most: Vec<f64>,
    /// Each row's keys, and what bounds their scores' sums of magnitudes.
    rows: Vec<(usize, f64)>,
    /// D.
    width: usize,
    /// The cap of scores, or 0.
    cap: f64,
}

impl Answer {
    /// The bound of the error of `y[i]` in f32.
    pub(crate) fn bound(&self, i: usize) -> f64 {
        let (keys, products) = self.row(i);
        self.magnitude[i] * relative(keys, self.width, [products, self.cap], 0.0)
    }

    /// The bound of the error of `y[i]` on a CPU: where `rounded` is given, scaled queries, keys,
    /// weights and values are rounded to it.
    pub(crate) fn cpu_bound(&self, i: usize, rounded: Option<FloatType>) -> f64 {
        let Some(dtype) = rounded else { return self.bound(i) };
        let (keys, products) = self.row(i);
        let two = (1.0 + unit(dtype)).powi(2) - 1.0;
        let relative = relative(keys, self.width, [products, self.cap], two);
        // Weights stand above and below the line.
        let relative = (1.0 + relative) * (1.0 + EXP2_ERROR) / (1.0 - EXP2_ERROR) - 1.0;
        // AMX takes subnormal weights and products for zero.
        let least = f64::from(f32::MIN_POSITIVE) * (self.most[i] + keys as f64);
        self.magnitude[i] * (relative + two * (1.0 + relative)) + least
    }

    /// The bound of the error of `y[i]` on a GPU: where `rounded` is given, the weights are rounded
    /// to it once.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu_bound(&self, i: usize, rounded: Option<FloatType>) -> f64 {
        let (keys, products) = self.row(i);
        // Vulkan's exponential may be off by 3 + 2 |x| units in the last place, or roundings twice
        // that; x is at most twice the products. Sums shrink once in 2 keys, and are put together
        // from lanes, planes and cubes.
        let weight = gamma(self.width + 8 + 8) * products + gamma(CAPPING) * self.cap + gamma(6);
        let sums = gamma(keys + 8 * keys.div_ceil(2) + 64);
        let relative = (2.0 * weight).exp_m1() + 2.0 * sums;
        let rounding = rounded.map_or(0.0, unit);
        // Half the smallest f16.
        let least = if rounded == Some(FloatType::F16) { 2f64.powi(-25) } else { 0.0 };
        self.magnitude[i] * (relative + rounding * (1.0 + relative)) + self.most[i] * least
    }

    fn row(&self, i: usize) -> (usize, f64) {
        self.rows[i / (self.y.len() / self.rows.len())]
    }
}

/// The greatest relative error of rounding an f32 to this type: half a unit in the last place.
fn unit(dtype: FloatType) -> f64 {
    match dtype {
        FloatType::F32 => 0.0,
        FloatType::F16 => 2f64.powi(-11),
        FloatType::BF16 => 2f64.powi(-8),
    }
}

/// The relative error of `keys` weights' sum, where `products` bounds their scores' sums of
/// magnitudes, and `operands` is the relative error of a product's operands.
///
/// A score errs by its operands' roundings, its sum's `width` roundings, the scale's, its
/// difference with the greatest so far and those of the greatest ones in turn (together at most
/// twice the product, once a stretch and once at the end): absolutely, so its exponential does
/// relatively, and by an ulp of its own. That holds of the weights above and below the line; each
/// sum has as many terms, and shrinks (by an exponential and a product, 3 roundings) once in 16
/// keys at most.
pub(super) fn relative(keys: usize, width: usize, [products, cap]: [f64; 2], operands: f64) -> f64 {
    let weight = score([products, cap], width, operands) + gamma(2);
    (2.0 * weight).exp_m1() + 2.0 * gamma(keys + 3 * keys.div_ceil(16) + 8)
}

/// The error of a score: see [`relative`]. A soft cap, whose slope is at most 1, makes none of them
/// greater, and has an error of its own: absolute, since tensor cores' kernels take
/// `1 - 2 / (e^2x + 1)`.
pub(super) fn score([products, cap]: [f64; 2], width: usize, operands: f64) -> f64 {
    (operands + gamma(width + 8) * (1.0 + operands)) * products + gamma(CAPPING) * cap
}

/// Roundings of a soft cap, relative to the cap: those of the factor before tanh and of the one
/// behind it, of an exponential of up to 2 units and what joins them.
const CAPPING: usize = 24;

impl Operands<'_> {
    /// Attention as its formula says.
    pub(crate) fn attention(&self, params: &AttentionParams) -> Answer {
        let [query_heads, heads, capacity, width, value_width] = self.sizes;
        let scale = f64::from(params.scale);
        let cap = params.softcap.map(f64::from);
        let mut answer = Answer { width, cap: cap.unwrap_or(0.0), ..Answer::default() };
        for (t, &position) in self.positions.iter().enumerate() {
            for h in 0..query_heads {
                let q = &self.q[(t * query_heads + h) * width..][..width];
                let row = |j: usize| h / (query_heads / heads) * capacity + j;
                let visible = params.visible(position, capacity);
                let products = |j: usize| {
                    let k = &self.k[row(j) * width..][..width];
                    q.iter().zip(k).map(move |(&q, &k)| scale * f64::from(q) * f64::from(k))
                };
                let capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
                let scores: Vec<f64> = visible.clone().map(|j| capped(products(j).sum())).collect();
                let sink = self.sinks.get(h).map(|&sink| f64::from(sink));
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
                let sum = |f: fn(f64) -> f64, d: usize| {
                    let v = visible.clone().map(|j| f(f64::from(self.v[row(j) * value_width + d])));
                    v.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total
                };
                answer.y.extend((0..value_width).map(|d| sum(|v| v, d)));
                answer.magnitude.extend((0..value_width).map(|d| sum(f64::abs, d)));
                let greatest = visible.clone().map(|j| products(j).map(f64::abs).sum()).fold(0.0, f64::max);
                // A sink's weight is that of a score, which is exact.
                let sink = sink.filter(|sink| sink.is_finite()).map_or(0.0, f64::abs);
                answer.rows.push((visible.len() + self.sinks.len().min(1), greatest + sink));
                let v = |j: usize, d: usize| f64::from(self.v[row(j) * value_width + d]).abs();
                let most = |d| visible.clone().map(|j| v(j, d)).sum::<f64>() / total;
                answer.most.extend((0..value_width).map(most));
            }
        }
        answer
    }
}
