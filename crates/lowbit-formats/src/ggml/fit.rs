//! The choice of scales and codes by ggml's reference quantisers. Bit-exactness rests on the order
//! of these sums and products, all in f32, as the C code of `src/ggml-quants.c` (ggml 0.25) has
//! them without contraction to FMA.

/// Below this, K-quants and codebooks take a sub-block for zero.
pub(super) const ZERO: f32 = 1e-15;

/// The nearest integer, ties to even, found by adding 1.5 * 2^23; numbers of more than 22 bits
/// wrap.
pub(super) fn nearest_int(value: f32) -> i32 {
    ((value + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// `1 / scale`, or 0.
pub(super) fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The value of largest magnitude, of several the first.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, &value| if value.abs() > largest.abs() { value } else { largest })
}

/// [`largest`], unless the values count as zero.
pub(super) fn largest_above_zero(values: &[f32]) -> Option<f32> {
    Some(largest(values)).filter(|largest| largest.abs() >= ZERO)
}

/// The least and the largest value.
pub(super) fn extremes(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::MAX, f32::MIN), |(min, max), &value| {
        (if value < min { value } else { min }, if value > max { value } else { max })
    })
}

/// The integer part; 0 for what no integer holds, as x86 converts (blocks of subnormal values get
/// there: the reciprocal of their scale is infinite).
pub(super) fn truncate(value: f32) -> i32 {
    if value.abs() < 2_147_483_648.0 { value as i32 } else { 0 }
}

/// Codes about `half`: the value of largest magnitude becomes code 0. Returns the scale and the
/// codes.
pub(super) fn round_symmetric(values: &[f32; 32], half: u8) -> (f32, [u8; 32]) {
    let scale = largest(values) / -f32::from(half);
    let inverse = reciprocal(scale);
    let code = |value: f32| truncate(value * inverse + (f32::from(half) + 0.5)).min(i32::from(2 * half - 1));
    (scale, values.map(|value| code(value) as u8))
}

/// Codes from the least value, 0, to the largest, `max_code`. Returns the scale, the least value
/// and the codes.
pub(super) fn round_between_extremes(values: &[f32; 32], max_code: u8) -> (f32, f32, [u8; 32]) {
    let (min, max) = extremes(values);
    let scale = (max - min) / f32::from(max_code);
    let inverse = reciprocal(scale);
    let code = |value: f32| truncate((value - min) * inverse + 0.5).min(i32::from(max_code));
    (scale, min, values.map(|value| code(value) as u8))
}

/// Codes rounded away from zero at ties, the largest magnitude becoming `max_code`. Returns the
/// scale and the codes.
pub(super) fn round_to_signed(values: &[f32; 32], max_code: i8) -> (f32, [i8; 32]) {
    let scale = largest(values).abs() / f32::from(max_code);
    let inverse = reciprocal(scale);
    (scale, values.map(|value| truncate((value * inverse).round()) as i8))
}

/// The sums of least squares in which a value counts by its square: `sum x^3 c` and `sum x^2 c^2`.
fn products(value: f32, code: i32) -> (f32, f32) {
    let (weight, code) = (value * value, code as f32);
    (weight * value * code, weight * code * code)
}

/// Tries 19 scales about the one that maps the largest value to code 0, and keeps the one of least
/// squared error. Returns it with the codes, 0 to `2 * half - 1` (ggml `make_qx_quants`, weights
/// x^2).
pub(super) fn search_symmetric<const N: usize>(values: &[f32; N], half: i32) -> (f32, [u8; N]) {
    let Some(largest) = largest_above_zero(values) else { return (0.0, [0; N]) };
    let encode = |inverse: f32| values.map(|value| nearest_int(inverse * value).clamp(-half, half - 1));
    let sums = |codes: &[i32; N]| {
        let products = values.iter().zip(codes).map(|(&value, &code)| products(value, code));
        products.fold((0.0, 0.0), |(xc, cc), (x, c)| (xc + x, cc + c))
    };
    let mut codes = encode(-half as f32 / largest);
    let (xc, cc) = sums(&codes);
    let mut scale = if cc == 0.0 { 0.0 } else { xc / cc };
    let mut best = scale * xc;
    for step in (-9..=9).filter(|&step| step != 0) {
        let tried = encode(-(half as f32 + 0.1 * step as f32) / largest);
        let (xc, cc) = sums(&tried);
        if cc > 0.0 && xc * xc > best * cc {
            codes = tried;
            scale = xc / cc;
            best = scale * xc;
        }
    }
    (scale, codes.map(|code| (code + half) as u8))
}

/// Starts from the scale that maps the largest value to code 0, then, up to five times, moves
/// single codes where that lessens the squared error. Returns the scale and the codes, 0 to
/// `2 * half - 1` (ggml `make_q3_quants`).
pub(super) fn descend_symmetric<const N: usize>(values: &[f32; N], half: i32) -> (f32, [u8; N]) {
    let Some(largest) = largest_above_zero(values) else { return (0.0, [0; N]) };
    let inverse = -half as f32 / largest;
    let mut codes = values.map(|value| nearest_int(inverse * value).clamp(-half, half - 1));
    let sums = values.iter().zip(&codes).map(|(&value, &code)| products(value, code));
    let (mut xc, mut cc) = sums.fold((0.0, 0.0), |(xc, cc), (x, c)| (xc + x, cc + c));
    for _ in 0..5 {
        let mut moved = false;
        for (&value, code) in values.iter().zip(&mut codes) {
            let (x, c) = products(value, *code);
            let (other_xc, other_cc) = (xc - x, cc - c);
            if other_xc <= 0.0 {
                continue;
            }
            let better = nearest_int(value * other_cc / other_xc).clamp(-half, half - 1);
            let (x, c) = products(value, better);
            let (new_xc, new_cc) = (other_xc + x, other_cc + c);
            if better != *code && new_cc > 0.0 && new_xc * new_xc * cc > xc * xc * new_cc {
                (*code, xc, cc) = (better, new_xc, new_cc);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let scale = if cc > 0.0 { xc / cc } else { 0.0 };
    (scale, codes.map(|code| (code + half) as u8))
}

/// The result of [`MinSearch::fit`]: `value = scale * code - min`.
pub(super) struct MinFit<const N: usize> {
    pub scale: f32,
    /// At least 0.
    pub min: f32,
    pub codes: [u8; N],
}

/// A search for the scale and minimum of a sub-block (ggml `make_qkx2_quants`).
pub(super) struct MinSearch {
    /// The largest code.
    pub max_code: i32,
    /// The first grid tried has this many steps more than codes.
    pub first: f32,
    /// The number of grids that are tried, each 0.1 steps finer.
    pub grids: u8,
    /// The loss of an error: its magnitude or its square.
    pub loss: fn(f32) -> f32,
}

impl MinSearch {
    /// For each grid, rounds to it and solves for the scale and minimum of least weighted squares;
    /// keeps the solution of least loss.
    pub(super) fn fit<const N: usize>(&self, values: &[f32; N], weights: &[f32; N]) -> MinFit<N> {
        let (min, max) = extremes(values);
        let min = if min > 0.0 { 0.0 } else { min };
        if max == min {
            return MinFit { scale: 0.0, min: -min, codes: [0; N] };
        }
        let encode = |min: f32, steps: f32| {
            let inverse = steps / (max - min);
            (inverse, values.map(|value| nearest_int(inverse * (value - min)).clamp(0, self.max_code) as u8))
        };
        let loss = |scale: f32, min: f32, codes: &[u8; N]| {
            let errors = values.iter().zip(codes).map(|(value, &code)| scale * f32::from(code) + min - value);
            errors.zip(weights).fold(0.0, |sum, (error, weight)| sum + weight * (self.loss)(error))
        };
        let (inverse, codes) = encode(min, self.max_code as f32);
        let mut best = MinFit { scale: 1.0 / inverse, min, codes };
        let mut least = loss(best.scale, best.min, &best.codes);
        for grid in 0..self.grids {
            // From the best minimum so far to the largest value.
            let steps = self.first + 0.1 * f32::from(grid) + self.max_code as f32;
            let (_, codes) = encode(best.min, steps);
            let Some((scale, min)) = least_squares(values, weights, &codes) else { continue };
            let loss = loss(scale, min, &codes);
            if loss < least {
                least = loss;
                best = MinFit { scale, min, codes };
            }
        }
        MinFit { min: -best.min, ..best }
    }
}

/// The scale and the minimum, at most 0, that bring `scale * code + min` closest to the values.
fn least_squares<const N: usize>(
    values: &[f32; N],
    weights: &[f32; N],
    codes: &[u8; N],
) -> Option<(f32, f32)> {
    let (mut w, mut x, mut c, mut cc, mut xc) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for ((&value, &weight), &code) in values.iter().zip(weights).zip(codes) {
        let code = f32::from(code);
        w += weight;
        x += weight * value;
        c += weight * code;
        cc += weight * code * code;
        xc += weight * code * value;
    }
    let determinant = w * cc - c * c;
    if determinant <= 0.0 || determinant.is_nan() {
        return None;
    }
    let min = (cc * x - c * xc) / determinant;
    Some(if min > 0.0 { (xc / cc, 0.0) } else { ((w * xc - x * c) / determinant, min) })
}
