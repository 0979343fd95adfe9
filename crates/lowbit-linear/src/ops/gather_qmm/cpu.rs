use super::policy;
use crate::{
    Cpu, KernelError, QuantizedTensor, Tensor,
    ops::quantized_matmul::{Group, Product, Weight, matmul_groups},
};
use std::sync::Arc;

/// The op on f32 operands that have been checked.
pub(super) fn gather_qmm(
    cpu: &Arc<Cpu>,
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    y: &mut [f32],
) -> Result<(), KernelError> {
    if y.is_empty() {
        return Ok(());
    }
    let (n, k, top_k) = (weight.n(), weight.k(), ids.dim(1));
    let experts = weight.shape()[weight.shape().len() - 3];
    let pairs = ids.len();
    // The number of pairs that read one row of x.
    let share = if x.dim(1) == 1 { top_k } else { 1 };
    let (x, ids) = (x.as_slice::<f32>()?, ids.as_slice::<u32>()?);
    let x_row = |pair: usize| &x[pair / share * k..][..k];
    // Of product `row / pairs`.
    let weight_row = |row: usize| (row / pairs * experts + ids[row % pairs] as usize) * n;
    if !policy::sort_by_expert(pairs, experts, top_k) {
        let rows = y.chunks_exact_mut(n).enumerate();
        let groups = rows.map(|(row, y)| Group { weight_row: weight_row(row), x: x_row(row % pairs), y });
        matmul_groups(cpu, vec![Product { weight: Weight::One(weight), groups: groups.collect() }]);
        return Ok(());
    }
    let mut order: Vec<usize> = (0..pairs).collect();
    order.sort_unstable_by_key(|&pair| (ids[pair], pair));
    let gathered = gathered(order.iter().map(|&pair| x_row(pair)), k);
    let mut sorted = vec![0.0; y.len()];
    let mut groups = Vec::new();
    for (product, sorted) in sorted.chunks_exact_mut(pairs * n).enumerate() {
        let (mut x_rest, mut y_rest) = (&gathered[..], sorted);
        for same in order.chunk_by(|&a, &b| ids[a] == ids[b]) {
            let (x, x_after) = x_rest.split_at(same.len() * k);
            let (y, y_after) = y_rest.split_at_mut(same.len() * n);
            groups.push(Group { weight_row: weight_row(product * pairs + same[0]), x, y });
            (x_rest, y_rest) = (x_after, y_after);
        }
    }
    matmul_groups(cpu, vec![Product { weight: Weight::One(weight), groups }]);
    for (y, sorted) in y.chunks_exact_mut(pairs * n).zip(sorted.chunks_exact(pairs * n)) {
        for (sorted, pair) in sorted.chunks_exact(n).zip(&order) {
            y[pair * n..][..n].copy_from_slice(sorted);
        }
    }
    Ok(())
}

/// Rows of `width` values after each other. Row by row, which is several times as fast as value by
/// value.
pub(super) fn gathered<'a>(rows: impl ExactSizeIterator<Item = &'a [f32]>, width: usize) -> Vec<f32> {
    let mut gathered = Vec::with_capacity(rows.len() * width);
    rows.for_each(|row| gathered.extend_from_slice(row));
    gathered
}
