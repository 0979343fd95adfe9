//! The gradient of [`l2_norm()`](super::l2_norm()).

use super::{L2Norm, L2NormConvention};
use crate::ops::check::Check;
use crate::simd::{Kernel, Simd, slices};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// With `L` the length that a row is divided by, the gradient of `y = x / L`:
///
/// ```text
/// dx[.., d] = (dy[.., d] - x[.., d] / L^2 * sum over e of x[.., e] * dy[.., e]) / L
/// ```
/// Where [`L2NormConvention::Max`] divides by eps, that is a constant, and `dx = dy / eps`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | dx | `[.., D]` | dy's |
///
/// All arithmetic is f32, rounded once to dy's dtype.
///
/// # Errors
/// As [`l2_norm()`](super::l2_norm()); [`KernelError::Shape`] for a dy of another shape than x; [`KernelError::Unsupported`] on a
/// GPU.
pub fn l2_norm_backward(x: &Tensor, params: &L2Norm, dy: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("l2_norm_backward");
    let Some(&width) = x.shape().last() else {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    };
    check.eps(params.eps)?;
    check.float("x", x)?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let cpu = x.device().as_cpu(check.0)?;
    let (x, dy) = (check.widened("x", x)?, check.widened("dy", dy)?);
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let (x, dy) = (x.as_slice::<f32>()?, dy.as_slice::<f32>()?);
    cpu.for_each_rows(dx.as_mut_slice()?, width, 4 * width, |first, dx| {
        let range = first * width..first * width + dx.len();
        cpu.isa().dispatch(Rows { x: &x[range.clone()], dy: &dy[range], width, params, dx });
    });
    dx.cast(dtype)
}

/// Some whole rows.
struct Rows<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    width: usize,
    params: &'a L2Norm,
    dx: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.width).zip(self.dy.chunks_exact(self.width));
        for ((x, dy), dx) in rows.zip(self.dx.chunks_exact_mut(self.width)) {
            let length = self.params.length(slices::dot(simd, x, x), self.width);
            let scale = slices::reciprocal(length);
            let is_constant = self.params.convention == L2NormConvention::Max && length == self.params.eps;
            let along = if is_constant { 0.0 } else { slices::dot(simd, x, dy) * scale * scale };
            dx.iter_mut().zip(x.iter().zip(dy)).for_each(|(dx, (x, dy))| *dx = (dy - x * along) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::l2_norm::reference;
    use crate::ops::testing::{
        FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal,
    };
    use numcheck::{Random, gamma};

    const CONVENTIONS: [L2NormConvention; 3] =
        [L2NormConvention::Sum, L2NormConvention::Mean, L2NormConvention::Max];

    /// dx in f64, and the magnitude of its terms.
    fn reference(x: &[f32], width: usize, params: &L2Norm, dy: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let mut dx = (vec![], vec![]);
        for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
            let products = || x.iter().zip(dy).map(|(&x, &dy)| f64::from(x) * f64::from(dy));
            let sum: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            let (eps, moves) = (
                f64::from(params.eps),
                if params.convention == L2NormConvention::Max {
                    sum.sqrt() > f64::from(params.eps)
                } else {
                    true
                },
            );
            let length = match params.convention {
                L2NormConvention::Sum => (sum + eps).sqrt(),
                L2NormConvention::Mean => (sum + width as f64 * eps).sqrt(),
                L2NormConvention::Max => sum.sqrt().max(eps),
            };
            let factor = if moves { length.powi(-2) } else { 0.0 };
            let (along, most) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
            for (&x, &dy) in x.iter().zip(dy) {
                let (x, dy) = (f64::from(x), f64::from(dy));
                dx.0.push((dy - x * factor * along) / length);
                dx.1.push((dy.abs() + x.abs() * factor * most) / length);
            }
        }
        dx
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let (x, dy) = (coarse(&mut random, 2 * 5), coarse(&mut random, 2 * 5));
        for (convention, eps) in CONVENTIONS.into_iter().flat_map(|c| [(c, 0.01), (c, 10.0)]) {
            let params = L2Norm { eps, convention };
            let want = reference(&x, 5, &params, &dy).0;
            assert_derivatives("dx", &x, &want, |x| dot(&reference::l2_norm(x, 5, &params), &dy));
        }
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for (width, convention) in WIDTHS.into_iter().flat_map(|width| CONVENTIONS.map(|c| (width, c))) {
                let (shape, dtype) = ([3, width], FLOATS[width % 3]);
                let (x, xs) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], &device);
                let (dy, dys) = normal(&mut random, &shape, dtype, &device);
                for eps in [1e-6, 100.0] {
                    let params = L2Norm { eps, convention };
                    let (want, magnitude) = reference(&xs, width, &params, &dys);
                    // The length comes three times; the sum along dy once; and what joins the terms.
                    let gamma = gamma(3 * reference::roundings(width) + width + 6);
                    let dx = l2_norm_backward(&x, &params, &dy).unwrap();
                    assert_close(&dx, &shape, dtype, &want, |i| gamma * magnitude[i]);
                }
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let x = Tensor::new(&[1f32; 6], &[2, 3], &device).unwrap();
        let params = L2Norm { eps: 1e-6, convention: L2NormConvention::Sum };
        let error = l2_norm_backward(&x, &params, &x.reshape(&[3, 2]).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm_backward: dy is [3, 2], but x wants [2, 3]");
        let empty = x.rows(0, 0).unwrap();
        assert_eq!(l2_norm_backward(&empty, &params, &empty).unwrap().shape(), [0, 3]);
    }
}
