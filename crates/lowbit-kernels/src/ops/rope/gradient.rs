//! The gradient of [`rope()`](super::rope()).

use super::{Direction, Rope, rotate};
use crate::ops::Check;
use crate::{KernelError, Tensor};

/// The gradient of a rotation is the rotation back, by `-angle`: for the pair `(a, b)`
///
/// ```text
/// dx[a] = dy[a] cos + dy[b] sin
/// dx[b] = dy[b] cos - dy[a] sin
/// ```
/// with cos and sin as in [`rope()`](super::rope()), the attention factor included. Elements from
/// `rotary_dim` on are copied.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | dy | `[T, H, D]`, `D >= rotary_dim` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
/// | dx | `[T, H, D]` | dy's |
///
/// # Errors
/// As [`rope()`](super::rope()).
pub fn rope_backward(dy: &Tensor, positions: &Tensor, rope: &Rope) -> Result<Tensor, KernelError> {
    let check = Check("rope_backward");
    let [_, _, width] = check.dims("dy", dy, "[T, H, D]")?;
    rope.check(check, dy, positions, width)?;
    check.float("dy", dy)?;
    rotate(check, dy, positions, (rope, Direction::Back))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::rope::reference;
    #[cfg(feature = "gpu")]
    use crate::ops::testing::gpu;
    use crate::ops::testing::{
        FLOATS, assert_close, assert_derivatives, coarse, device, devices, dot, normal,
    };
    use crate::ops::{RopeLayout, RopeParams, RopeScaling, Yarn};
    use numcheck::{Random, gamma};

    /// Of a head, of which three elements are copied.
    const WIDTH: usize = 21;
    /// The other is made of whole vectors.
    const WIDTHS: [usize; 2] = [WIDTH, 24];

    /// Of both layouts; one has an attention factor.
    fn ropes(width: usize) -> [Rope; 2] {
        let yarn = RopeScaling::Yarn(Yarn { attention_factor: Some(1.3), ..Yarn::new(4.0, 512) });
        let both = [(RopeLayout::HalfSplit, RopeScaling::None), (RopeLayout::Interleaved, yarn)];
        both.map(|(layout, scaling)| {
            let rotary_dim = if width == WIDTH { 18 } else { 16 };
            let params = RopeParams { theta: 100.0, rotary_dim, layout, scaling, freq_factors: None };
            Rope::new(&params).unwrap()
        })
    }

    /// dx in f64, and the magnitude of its terms: the rotation is linear, so that its columns are
    /// the results of unit vectors.
    fn reference(dy: &[f32], width: usize, positions: &[u32], rope: &Rope) -> (Vec<f64>, Vec<f64>) {
        let heads = dy.len() / width / positions.len();
        let mut dx = (vec![], vec![]);
        for (row, dy) in dy.chunks(width).enumerate() {
            for i in 0..width {
                let mut unit = vec![0.0f64; width];
                unit[i] = 1.0;
                let column = reference::rope(&unit, width, &positions[row / heads..][..1], rope);
                let terms = || column.iter().zip(dy).map(|(c, &dy)| c * f64::from(dy));
                dx.0.push(terms().sum());
                dx.1.push(terms().map(f64::abs).sum());
            }
        }
        dx
    }

    #[test]
    fn columns_of_the_rotation_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let positions = [3, 0, 70];
        let [x, dy] = [(); 2].map(|()| coarse(&mut random, 3 * 2 * WIDTH));
        for rope in ropes(WIDTH) {
            let dx = reference(&dy, WIDTH, &positions, &rope).0;
            assert_derivatives("dx", &x, &dx, |x| dot(&reference::rope(x, WIDTH, &positions, &rope), &dy));
        }
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
        let positions: Vec<u32> = (0..150).map(|t| t * 7 % 151).collect();
        for device in devices {
            let at = Tensor::new(&positions, &[150], device).unwrap();
            let cases = WIDTHS.into_iter().flat_map(|width| ropes(width).map(|rope| (width, rope)));
            for ((width, rope), dtype) in cases.zip(FLOATS.into_iter().cycle()) {
                let shape = [150, 3, width];
                let (dy, dys) = normal(&mut random, &shape, dtype, device);
                let (want, magnitude) = reference(&dys, width, &positions, &rope);
                let dx = rope_backward(&dy, &at, &rope).unwrap();
                assert_close(&dx, &shape, dtype, &want, |i| gamma(reference::ROUNDINGS) * magnitude[i]);
            }
            let none = Tensor::new::<f32>(&[], &[0, 3, WIDTH], device).unwrap();
            let nowhere = at.rows(0, 0).unwrap();
            assert_eq!(rope_backward(&none, &nowhere, &ropes(WIDTH)[0]).unwrap().shape(), [0, 3, WIDTH]);
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let dy = Tensor::new(&[0f32; 2 * WIDTH], &[2, 1, WIDTH], &device).unwrap();
        let at = Tensor::new(&[0u32; 3], &[3], &device).unwrap();
        let error = rope_backward(&dy, &at, &ropes(WIDTH)[0]).unwrap_err().to_string();
        assert_eq!(error, "rope_backward: positions is [3], but x [2, 1, 21] wants [2]");
    }
}
