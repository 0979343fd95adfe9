use crate::{Cpu, Tensor};

/// Copies bytes: the types are the same.
pub(super) fn kv_append(cpu: &Cpu, cache: &mut Tensor, x: &Tensor, positions: &[u32]) {
    let row = cache.dim(2) * cache.dtype().size();
    let (heads, head) = (cache.dim(0), cache.dim(1) * row);
    let bytes = x.bytes();
    if bytes.is_empty() {
        return;
    }
    cpu.for_each_rows(cache.bytes_mut(), head, positions.len() * row / 8, |first, cache| {
        for (h, cache) in (first..).zip(cache.chunks_exact_mut(head)) {
            for (t, &position) in positions.iter().enumerate() {
                let x = &bytes[(t * heads + h) * row..][..row];
                cache[position as usize * row..][..row].copy_from_slice(x);
            }
        }
    });
}
