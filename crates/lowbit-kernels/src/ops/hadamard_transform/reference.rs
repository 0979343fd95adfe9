use super::block;

/// Roundings to a result: of its sum of pairs of pairs, and of the factor and the product with it.
pub(crate) fn roundings(width: usize) -> usize {
    block(width).ilog2() as usize + 3
}

/// The transform of each row of `width`, and the sums of its terms' magnitudes.
pub(crate) fn hadamard_transform(x: &[f64], width: usize) -> Vec<(f64, f64)> {
    let size = block(width);
    let factor = (size as f64).sqrt().recip();
    let element = |x: &[f64], i: usize| {
        let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { factor } else { -factor };
        let sum = |f: &dyn Fn(f64) -> f64| x.iter().enumerate().map(|(j, &x)| f(sign(j) * x)).sum();
        (sum(&|x| x), sum(&f64::abs))
    };
    x.chunks_exact(size).flat_map(|x| (0..size).map(move |i| element(x, i))).collect()
}
