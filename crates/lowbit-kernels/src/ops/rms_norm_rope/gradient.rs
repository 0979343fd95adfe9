//! The gradients of [`rms_norm_rope()`](super::rms_norm_rope()).

use super::RmsNormRope;
#[cfg(feature = "gpu")]
use crate::gpu::copy::Columns;
use crate::ops::Check;
use crate::ops::{RmsNormGradient, narrow, rms_norm_backward, rope_backward};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`rms_norm_rope()`](super::rms_norm_rope()).
#[derive(Clone, Debug)]
pub struct RmsNormRopeGradient {
    /// Of x; 0 in the columns that are not read.
    pub dx: Tensor,
    /// Of the norm's weight, where there is a norm.
    pub dweight: Option<Tensor>,
}

/// The gradients of `y = rope(rms_norm(x[.., ..D], weight, eps), positions)`: those of
/// [`rms_norm_backward`], with [`rope_backward`] of dy for its dy.
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
/// As [`rms_norm_rope()`](super::rms_norm_rope()); [`KernelError::Shape`] for a dy that does not
/// fit.
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
    Ok(RmsNormRopeGradient { dx: with_zeros(&dheads, columns)?.cast(dy.dtype())?, dweight })
}

/// Rows of f32 as rows of `columns`, of which those past x's are zero.
fn with_zeros(x: &Tensor, columns: usize) -> Result<Tensor, KernelError> {
    let width = x.dim(-1);
    let shape = [x.dim(0), x.dim(1), columns];
    if x.is_empty() {
        return Tensor::allocate_zeros(&shape, DType::F32, x.device());
    }
    if width == columns {
        return Ok(x.clone());
    }
    let mut y = Tensor::allocate(&shape, DType::F32, x.device())?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let [of_x, of_y] = [width, columns].map(|columns| columns * DType::F32.size());
            let from = Columns { buffer: x.buffer()?, pitch: of_x, start: 0, len: of_x };
            let to = Columns { buffer: y.buffer()?, pitch: of_y, start: 0, len: of_y };
            gpu.copy_columns(from, to, x.len() / width)?;
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let rows = x.as_slice::<f32>()?.chunks_exact(width);
            for (y, x) in y.as_mut_slice::<f32>()?.chunks_exact_mut(columns).zip(rows) {
                y[..width].copy_from_slice(x);
                y[width..].fill(0.0);
            }
        }
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "gpu")]
    use crate::ops::testing::gpu;
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
        is_that_of_its_parts_on(&devices(), 11);
        is_that_of_its_parts_on(&devices(), 8);
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn gpu_is_the_rotation_back_and_then_the_norms_gradient() {
        for columns in [8, 11, 16] {
            is_that_of_its_parts_on(&[gpu()], columns);
        }
    }

    /// Of heads of 8 in as many columns.
    fn is_that_of_its_parts_on(devices: &[Device], columns: usize) {
        let (mut random, rope) = (Random::new(1), rope());
        for device in devices {
            let (x, xs) = normal(&mut random, &[5, 3, columns], FLOATS[0], device);
            let (dy, _) = normal(&mut random, &[5, 3, 8], FLOATS[0], device);
            let (weight, _) = normal(&mut random, &[8], FLOATS[0], device);
            let at = Tensor::new(&[4u32, 0, 9, 2, 7], &[5], device).unwrap();
            let heads: Vec<f32> = xs.chunks(columns).flat_map(|row| &row[..8]).copied().collect();
            let heads = Tensor::new(&heads, &[5, 3, 8], device).unwrap();
            let rotated = rope_backward(&dy, &at, &rope).unwrap();
            let norm = rms_norm_backward(&heads, &weight, 1e-3, &rotated).unwrap();
            for (norm, want, dweight) in
                [(None, &rotated, None), (Some((&weight, 1e-3)), &norm.dx, Some(&norm.dweight))]
            {
                let params = RmsNormRope { head_dim: 8, norm, rope: &rope };
                let got = rms_norm_rope_backward(&x, &at, &params, &dy).unwrap();
                let want: Vec<f32> =
                    values(want).chunks(8).flat_map(|row| [row, &vec![0.0; columns - 8]].concat()).collect();
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
