//! The gradients of [`rms_norm_rope()`](super::rms_norm_rope()).

use super::RmsNormRope;
use crate::ops::check::Check;
use crate::ops::{RmsNormGradient, narrow, rms_norm_backward, rope_backward};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`rms_norm_rope()`](super::rms_norm_rope()).
#[derive(Clone, Debug)]
pub struct RmsNormRopeGradient {
    /// Of x; 0 in the columns that are not read.
    pub dx: Tensor,
    /// Of the norm's weight, where there is a norm.
    pub dweight: Option<Tensor>,
}

/// The gradients of `y = rope(rms_norm(x[.., ..D], weight, eps), positions)`: those of [`rms_norm_backward`], with
/// [`rope_backward`] of dy for its dy.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[T, H, S]`, `S >= D` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
/// | dy | `[T, H, D]` | f32, f16, bf16 |
/// | dx | `[T, H, S]` | dy's |
/// | dweight | `[D]` | f32 |
///
/// # Errors
/// As [`rms_norm_rope()`](super::rms_norm_rope()); [`KernelError::Shape`] for a dy that does not fit; [`KernelError::Unsupported`]
/// on a GPU.
pub fn rms_norm_rope_backward(
    x: &Tensor,
    positions: &Tensor,
    params: &RmsNormRope<'_>,
    dy: &Tensor,
) -> Result<RmsNormRopeGradient, KernelError> {
    let check = Check("rms_norm_rope_backward");
    params.check(check, x, positions)?;
    let (columns, width) = (x.dim(2), params.head_dim);
    check.shape("dy", dy, &[x.dim(0), x.dim(1), width], || format!("x {:?}", x.shape()))?;
    check.same_device("dy", dy.device(), x.device())?;
    let rotated = rope_backward(&check.widened("dy", dy)?, positions, params.rope)?;
    let (dheads, dweight) = match params.norm {
        None => (rotated, None),
        Some((weight, eps)) => {
            let RmsNormGradient { dx, dweight } =
                rms_norm_backward(&narrow(x, 0, width)?, weight, eps, &rotated)?;
            (dx, Some(dweight))
        }
    };
    let mut dx = Tensor::allocate_zeros(x.shape(), DType::F32, x.device())?;
    if width > 0 {
        let heads = dheads.as_slice::<f32>()?.chunks_exact(width);
        for (dx, dheads) in dx.as_mut_slice::<f32>()?.chunks_exact_mut(columns).zip(heads) {
            dx[..width].copy_from_slice(dheads);
        }
    }
    Ok(RmsNormRopeGradient { dx: dx.cast(dy.dtype())?, dweight })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{FLOATS, device, devices, normal, values};
    use crate::ops::{Rope, RopeLayout, RopeParams, RopeScaling};
    use numcheck::{Random, assert_bits};

    fn rope() -> Rope {
        let (layout, scaling) = (RopeLayout::HalfSplit, RopeScaling::None);
        Rope::new(&RopeParams { theta: 100.0, rotary_dim: 6, layout, scaling, freq_factors: None }).unwrap()
    }

    /// It is made of two gradients that are tested alone.
    #[test]
    fn is_the_rotation_back_and_then_the_norms_gradient() {
        let (mut random, rope) = (Random::new(1), rope());
        for device in devices() {
            let (x, xs) = normal(&mut random, &[5, 3, 11], FLOATS[0], &device);
            let (dy, _) = normal(&mut random, &[5, 3, 8], FLOATS[0], &device);
            let (weight, _) = normal(&mut random, &[8], FLOATS[0], &device);
            let at = Tensor::new(&[4u32, 0, 9, 2, 7], &[5], &device).unwrap();
            let heads: Vec<f32> = xs.chunks(11).flat_map(|row| &row[..8]).copied().collect();
            let heads = Tensor::new(&heads, &[5, 3, 8], &device).unwrap();
            let rotated = rope_backward(&dy, &at, &rope).unwrap();
            let norm = rms_norm_backward(&heads, &weight, 1e-3, &rotated).unwrap();
            for (norm, want, dweight) in
                [(None, &rotated, None), (Some((&weight, 1e-3)), &norm.dx, Some(&norm.dweight))]
            {
                let params = RmsNormRope { head_dim: 8, norm, rope: &rope };
                let got = rms_norm_rope_backward(&x, &at, &params, &dy).unwrap();
                let want: Vec<f32> =
                    values(want).chunks(8).flat_map(|row| [row, &[0.0; 3]].concat()).collect();
                assert_eq!(got.dx.shape(), x.shape());
                assert_bits("dx", &values(&got.dx), &want);
                assert_eq!(got.dweight.is_some(), dweight.is_some());
                if let (Some(got), Some(want)) = (got.dweight, dweight) {
                    assert_bits("dweight", &values(&got), &values(want));
                }
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let (device, rope) = (device(), rope());
        let x = Tensor::new(&[0f32; 22], &[2, 1, 11], &device).unwrap();
        let at = Tensor::new(&[0u32; 2], &[2], &device).unwrap();
        let params = RmsNormRope { head_dim: 8, norm: None, rope: &rope };
        let error = rms_norm_rope_backward(&x, &at, &params, &x).unwrap_err().to_string();
        assert_eq!(error, "rms_norm_rope_backward: dy is [2, 1, 11], but x [2, 1, 11] wants [2, 1, 8]");
    }
}
