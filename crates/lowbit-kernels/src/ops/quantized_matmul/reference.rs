//! The product in f64, as its formula says.

use crate::{KernelError, QuantizedTensor, bench::Expected, inputs};
use lowbit_formats::FloatType;

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]`, rounded to `dtype`.
///
/// Any order of an f32 sum of K products stays within `gamma(K) * sum |x w|`; the rounding to `dtype` comes on top.
#[cfg(test)]
pub(crate) fn matmul(x: &[f32], weight: &[f32], k: usize, dtype: FloatType) -> Vec<Expected> {
    matmul_bounded(x, weight, k, dtype, false)
}

/// As [`matmul`], where `rounded` says that weights may be rounded to `dtype` first.
pub(crate) fn matmul_bounded(
    x: &[f32],
    weight: &[f32],
    k: usize,
    dtype: FloatType,
    rounded: bool,
) -> Vec<Expected> {
    let mut y: Vec<Expected> = Vec::new();
    for x in x.chunks_exact(k) {
        for weight in weight.chunks_exact(k) {
            let (mut value, mut magnitude, mut rounding) = (0.0, 0.0, 0.0);
            for (&x, &w) in x.iter().zip(weight) {
                let product = f64::from(x) * f64::from(w);
                value += product;
                magnitude += product.abs();
                if rounded {
                    rounding += f64::from(x).abs() * inputs::rounding(dtype, w.into());
                }
            }
            let bound = crate::gamma::gamma(k) * (magnitude + rounding) + rounding;
            let bound = bound + inputs::rounding(dtype, value.abs() + bound);
            y.push(Expected { index: y.len(), value, bound });
        }
    }
    y
}

/// The values of a weight's first `rows` rows, counted over all leading dimensions.
pub(crate) fn decoded(weight: &QuantizedTensor, rows: usize) -> Result<Vec<f32>, KernelError> {
    let k = weight.k();
    let mut values = vec![f32::NAN; rows * k];
    let mut parts = weight.parts();
    for (part, component) in parts.iter_mut().zip(weight.format().components(k)?) {
        *part = &part[..rows * component.row_bytes()];
    }
    weight.format().decode(&parts, rows, k, &mut values)?;
    Ok(values)
}
