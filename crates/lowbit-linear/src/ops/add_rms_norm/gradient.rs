//! The gradients of [`add_rms_norm()`](super::add_rms_norm()).

use crate::ops::Check;
use crate::ops::{add, rms_norm_backward};
use crate::{KernelError, Tensor};

/// The gradients of [`add_rms_norm()`](super::add_rms_norm()).
#[derive(Clone, Debug)]
pub struct AddRmsNormGradient {
    /// Of h and of x, which are added: both have this one.
    pub dsum: Tensor,
    /// Of the norm's weight.
    pub dweight: Tensor,
}

/// The gradients of `sum = h + x` and `y = rms_norm(sum, weight, eps)`, from those of both results:
/// `dh = dx = dsum +` the dx of [`rms_norm_backward`] at sum, and its dweight.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | sum, dsum, dy | `[.., D]` | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | dsum of the result | sum's | dsum's |
/// | dweight | `[D]` | f32 |
///
/// # Errors
/// As [`rms_norm_backward`]; [`KernelError::Shape`] for a dsum of another shape than sum.
pub fn add_rms_norm_backward(
    sum: &Tensor,
    weight: &Tensor,
    eps: f32,
    [dsum, dy]: [&Tensor; 2],
) -> Result<AddRmsNormGradient, KernelError> {
    let check = Check("add_rms_norm_backward");
    check.shape("dsum", dsum, sum.shape(), || "sum".into())?;
    check.float("dsum", dsum)?;
    check.same_device("dsum", dsum.device(), sum.device())?;
    let norm = rms_norm_backward(sum, weight, eps, dy)?;
    Ok(AddRmsNormGradient { dsum: add(dsum, &norm.dx)?, dweight: norm.dweight })
}

#[cfg(test)]
mod tests {
    use super::super::reference;
    use super::*;
    use crate::Device;
    use crate::ops::rms_norm::gradient::reference::rms_norm_backward as norm_reference;
    #[cfg(feature = "gpu")]
    use crate::ops::testing::gpu;
    use crate::ops::testing::{FLOATS, assert_close, assert_derivatives, coarse, devices, dot, normal};
    use numcheck::{Random, gamma};

    const EPS: f32 = 1e-2;

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let [h, x, dsum, dy] = [(); 4].map(|()| coarse(&mut random, 2 * 5));
        let weight = coarse(&mut random, 5);
        let loss = |h: &[f32], weight: &[f32]| {
            let [sum, y] = reference::add_rms_norm(h, &x, weight, EPS)
                .map(|y| y.iter().map(|y| y.0).collect::<Vec<_>>());
            dot(&sum, &dsum) + dot(&y, &dy)
        };
        let sum: Vec<f32> = h.iter().zip(&x).map(|(h, x)| h + x).collect();
        let [dx, _, dweight] = norm_reference(&sum, None, (&weight, EPS), &dy);
        let want: Vec<f64> = dx.0.iter().zip(&dsum).map(|(dx, &dsum)| dx + f64::from(dsum)).collect();
        assert_derivatives("dsum", &h, &want, |h| loss(h, &weight));
        assert_derivatives("dweight", &weight, &dweight.0, |weight| loss(&h, weight));
    }

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&devices());
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn gpu_agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    fn agrees_with_f64_on(devices: &[Device]) {
        let mut random = Random::new(2);
        for device in devices {
            let shape = [3, 2, 37];
            let [sum, dsum, dy] = [(); 3].map(|()| normal(&mut random, &shape, FLOATS[0], device));
            let (weight, weights) = normal(&mut random, &[37], FLOATS[0], device);
            let got = add_rms_norm_backward(&sum.0, &weight, EPS, [&dsum.0, &dy.0]).unwrap();
            let [dx, _, dweight] = norm_reference(&sum.1, None, (&weights, EPS), &dy.1);
            let want: Vec<f64> = dx.0.iter().zip(&dsum.1).map(|(dx, &dsum)| dx + f64::from(dsum)).collect();
            assert_close(&got.dsum, &shape, FLOATS[0], &want, |i| {
                dx.1[i] + gamma(1) * (want[i].abs() + dx.1[i])
            });
            assert_close(&got.dweight, &[37], FLOATS[0], &dweight.0, |i| dweight.1[i]);
            let short = dsum.0.rows(0, 2).unwrap();
            let error = add_rms_norm_backward(&sum.0, &weight, EPS, [&short, &dy.0]).unwrap_err();
            assert_eq!(
                error.to_string(),
                "add_rms_norm_backward: dsum is [2, 2, 37], but sum wants [3, 2, 37]"
            );
        }
    }
}
