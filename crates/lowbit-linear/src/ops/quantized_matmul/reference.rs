//! The product in f64, as its formula says.

use super::policy;
use crate::{Device, KernelError, QuantizedTensor, bench::Expected, inputs};
use lowbit_formats::{Codes, FloatType};

/// The operand that a kernel may round before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rounded {
    /// Nothing.
    Nothing,
    /// The weight, to x's type: this one.
    Weight(FloatType),
    /// Each [`X_GROUP`](super::X_GROUP) values of x, to multiples of a 127th of the greatest
    /// magnitude among them.
    X,
    /// x and the weight, to bf16.
    Bf16,
    /// As [`Rounded::X`] or as [`Rounded::Bf16`].
    Either,
}

impl Rounded {
    /// The weight or nothing.
    #[cfg(all(test, feature = "gpu"))]
    pub fn weight_if(rounded: bool, x: FloatType) -> Self {
        if rounded { Self::Weight(x) } else { Self::Nothing }
    }

    /// The operand that products of x of `dtype` round on a GPU, or what `on_cpu` says.
    pub fn on(
        device: &Device,
        dtype: FloatType,
        on_cpu: impl FnOnce() -> Result<Self, KernelError>,
    ) -> Result<Self, KernelError> {
        match device {
            Device::Gpu(_) if dtype != FloatType::F32 => Ok(Self::Weight(dtype)),
            Device::Gpu(_) => Ok(Self::Nothing),
            Device::Cpu(_) => on_cpu(),
        }
    }

    /// The operand that products of `m` rows of x with each matrix of `weight` round on the CPU.
    pub fn on_cpu(weight: &QuantizedTensor, m: usize) -> Self {
        match weight.device() {
            _ if !weight.is_repacked() => Self::Nothing,
            Device::Cpu(cpu) if policy::in_tiles(cpu.isa(), m) => Self::Bf16,
            _ if weight.format().scheme().codes == Codes::E4M3 => Self::Nothing,
            _ => Self::X,
        }
    }

    /// The operand that they round with some number of rows.
    pub fn of_any_m(weight: &QuantizedTensor) -> Self {
        match [Self::on_cpu(weight, 1), Self::on_cpu(weight, usize::MAX)] {
            [few, many] if few == many => few,
            _ => Self::Either,
        }
    }

    /// Code times scale and the bias are summed apart in integer products, and fused in tiles: what
    /// their magnitudes come to at most. A bias is about the extreme value of its group.
    fn parts(self, weight: &[f32]) -> f64 {
        match self {
            Self::X | Self::Bf16 => {
                4.0 * f64::from(weight.iter().fold(0.0, |most: f32, w| most.max(w.abs())))
            }
            _ => 0.0,
        }
    }

    /// The most that each of a row's values can change.
    fn of_x(self, x: &[f32]) -> Vec<f64> {
        if self != Self::X {
            return vec![0.0; x.len()];
        }
        let step = |x: &[f32]| x.iter().fold(0.0, |most: f32, x| most.max(x.abs())) / 127.0;
        // Values below 1e-35 are lost; the scale and its reciprocal are rounded.
        let error = |x: &[f32]| f64::from(step(x)) * (0.5 + 127.0 * 2e-7) + 1e-35;
        x.chunks(super::X_GROUP).flat_map(|x| vec![error(x); x.len()]).collect()
    }

    /// The most that a product changes with both of its operands rounded, and in units that take
    /// subnormals for zero.
    fn of_both(self, x: f64, w: f64) -> f64 {
        if self != Self::Bf16 {
            return 0.0;
        }
        let relative = 2f64.powi(-7) + 2f64.powi(-16);
        relative * (x * w).abs() + 2f64.powi(-125) * (1.0 + x.abs() + w.abs())
    }
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]`, rounded to `dtype`.
///
/// Any order of an f32 sum of K products stays within `gamma(K) * sum |x w|`; the rounding to
/// `dtype` comes on top.
#[cfg(test)]
pub(crate) fn matmul(x: &[f32], weight: &[f32], k: usize, dtype: FloatType) -> Vec<Expected> {
    matmul_bounded(x, weight, k, dtype, Rounded::Nothing)
}

/// As [`matmul`], where `rounded` is rounded first.
pub(crate) fn matmul_bounded(
    x: &[f32],
    weight: &[f32],
    k: usize,
    dtype: FloatType,
    rounded: Rounded,
) -> Vec<Expected> {
    if rounded == Rounded::Either {
        let of = |rounded| matmul_bounded(x, weight, k, dtype, rounded);
        let wider = |(a, b): (Expected, Expected)| if a.bound > b.bound { a } else { b };
        return of(Rounded::X).into_iter().zip(of(Rounded::Bf16)).map(wider).collect();
    }
    let mut y: Vec<Expected> = Vec::new();
    for x in x.chunks_exact(k) {
        let errors = rounded.of_x(x);
        for weight in weight.chunks_exact(k) {
            let (mut value, mut magnitude, mut rounding) = (0.0, 0.0, 0.0);
            let parts = rounded.parts(weight);
            for ((&x, &w), error) in x.iter().zip(weight).zip(&errors) {
                let product = f64::from(x) * f64::from(w);
                value += product;
                magnitude += product.abs() + parts * (f64::from(x).abs() + error);
                rounding += f64::from(w).abs() * error + rounded.of_both(x.into(), w.into());
                if let Rounded::Weight(x_type) = rounded {
                    rounding += f64::from(x).abs() * inputs::rounding(x_type, w.into());
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
