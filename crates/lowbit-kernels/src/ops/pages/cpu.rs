//! Copies to and from pages on the CPU.

use super::PAGE_TOKENS;
use crate::{Cpu, Tensor};

/// Copies rows of `x`, `[T, Hkv, D]`, to the rows of the pool that [`PoolShape::places`] gives.
///
/// [`PoolShape::places`]: super::PoolShape::places
pub(in crate::ops) fn append(pool: &mut Tensor, x: &Tensor, places: &[usize]) {
    let heads = x.dim(1);
    let row = x.dim(2) * x.dtype().size();
    let pool = pool.bytes_mut();
    for (i, x) in x.bytes().chunks_exact(row).enumerate() {
        let at = places[i / heads] + i % heads * PAGE_TOKENS;
        pool[at * row..][..row].copy_from_slice(x);
    }
}

/// See [`super::gather_pages`]; y is not empty.
pub(super) fn gather(cpu: &Cpu, pages: &Tensor, table: &[u32], y: &mut Tensor) {
    let heads = pages.dim(1);
    let page = PAGE_TOKENS * pages.dim(3) * pages.dtype().size();
    let pool = pages.bytes();
    cpu.for_each_rows(y.bytes_mut(), page, page / 8, |first, y| {
        for (i, y) in (first..).zip(y.chunks_exact_mut(page)) {
            let (head, column) = (i / table.len(), i % table.len());
            let at = table[column] as usize * heads + head;
            y.copy_from_slice(&pool[at * page..][..page]);
        }
    });
}
