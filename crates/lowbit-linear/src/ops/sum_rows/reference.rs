use super::ROWS;

/// Roundings to a result: a block's sum, and that of the blocks.
pub(crate) fn roundings(rows: usize) -> usize {
    rows.min(ROWS) + rows.div_ceil(ROWS)
}

/// The sum of each column, and of its magnitudes.
pub(crate) fn sum_rows(x: &[f32], width: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut sums, mut magnitudes) = (vec![0.0; width], vec![0.0; width]);
    for (i, &x) in x.iter().enumerate() {
        sums[i % width] += f64::from(x);
        magnitudes[i % width] += f64::from(x.abs());
    }
    (sums, magnitudes)
}
