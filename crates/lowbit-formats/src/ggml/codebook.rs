//! The codebook of IQ4_NL and IQ4_XS.

/// The codes' values (ggml `kvalues_iq4nl`): denser near zero, as weights are.
pub(super) const CODEBOOK: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// `scale` times the codes' values; byte j holds code j (low nibble) and code j + 16 (high).
#[inline(always)]
pub(super) fn decode(scale: f32, codes: &[u8; 16]) -> [f32; 32] {
    let mut values = [0.0; 32];
    for i in 0..16 {
        values[i] = scale * CODEBOOK[usize::from(codes[i] & 15)];
        values[i + 16] = scale * CODEBOOK[usize::from(codes[i] >> 4)];
    }
    values
}

/// The code of the nearest of the codebook's values, of two as near the larger.
pub(super) fn nearest(value: f32) -> u8 {
    let above = CODEBOOK.partition_point(|&entry| entry <= value).clamp(1, 15);
    let (low, high) = (CODEBOOK[above - 1], CODEBOOK[above]);
    if value - low < high - value { above as u8 - 1 } else { above as u8 }
}

/// Codes the values on each grid, whose scale is `1 / inverse`, solves for the scale of least squares with weights
/// x^2, and returns the solution that takes away most of the error; 0 for no grid.
pub(super) fn fit(values: &[f32; 32], inverses: impl IntoIterator<Item = f32>) -> f32 {
    let (mut scale, mut best) = (0.0, 0.0);
    for (grid, inverse) in inverses.into_iter().enumerate() {
        let (mut xq, mut qq) = (0.0, 0.0);
        for &value in values {
            let (weight, q) = (value * value, CODEBOOK[usize::from(nearest(inverse * value))]);
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
