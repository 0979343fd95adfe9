//! The codebook of IQ4_NL and IQ4_XS.

use super::fit::largest_above_zero;

/// The codes' values (ggml `kvalues_iq4nl`): denser near zero, as weights are.
pub const CODEBOOK: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// [`CODEBOOK`] in f32.
pub(super) const VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code] = CODEBOOK[code] as f32;
        code += 1;
    }
    values
};

/// The code of the codebook's nearest value; of two equally near, the larger.
pub(super) fn nearest(value: f32) -> u8 {
    let above = VALUES.partition_point(|&entry| entry <= value).clamp(1, 15);
    let (low, high) = (VALUES[above - 1], VALUES[above]);
    if value - low < high - value { above as u8 - 1 } else { above as u8 }
}

/// The scale of 32 values. Each of 16 grids codes them and solves for the scale of least squares
/// with weights x^2; the solution that takes away most of the error wins. The first grid has the
/// value of largest magnitude at the mirror image of the codebook's first, the other 15 are about
/// the one that has it at the first itself.
pub(super) fn fit(values: &[f32; 32]) -> f32 {
    let Some(largest) = largest_above_zero(values) else { return 0.0 };
    let mirrored = 1.0 / (-largest / VALUES[0]);
    let inverses = (-7i8..=7).map(|step| (f32::from(step) + VALUES[0]) / largest);
    let (mut scale, mut best) = (0.0, 0.0);
    for (grid, inverse) in std::iter::once(mirrored).chain(inverses).enumerate() {
        let (mut xq, mut qq) = (0.0, 0.0);
        for &value in values {
            let (weight, q) = (value * value, VALUES[usize::from(nearest(inverse * value))]);
            xq += weight * q * value;
            qq += weight * q * q;
        }
        // The first is taken even where the square of a small sum is no longer a number above 0.
        if qq > 0.0 && (grid == 0 || xq * xq > best * qq) {
            scale = xq / qq;
            best = scale * xq;
        }
    }
    scale
}
