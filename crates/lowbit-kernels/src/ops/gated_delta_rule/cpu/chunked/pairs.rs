//! The products of a chunk's keys and queries with its keys.

use super::CHUNK;
use crate::gemm::{DEPTH, Packed};
use crate::simd::{MAX_LANES, Simd};

/// `k[i] . k[j]`, then `q[i] . k[j]`; of use where `j <= i`.
pub(super) struct Pairs(pub [[f32; CHUNK]; 2 * CHUNK]);

impl Default for Pairs {
    fn default() -> Self {
        Self([[0.0; CHUNK]; 2 * CHUNK])
    }
}

impl Pairs {
    /// From `[2 CHUNK, Dk]`: the keys, of which so many are tokens', then the queries. `sides` are
    /// the first rows of those whose products are wanted.
    #[inline(always)]
    pub fn compute<S: Simd>(
        &mut self,
        simd: S,
        packed: &Packed,
        key_dim: usize,
        (sides, tokens): (&[usize], usize),
    ) {
        for &first in sides {
            for i in (0..tokens).step_by(4) {
                // Tiles that fit the registers and are whole vectors of sums.
                if S::REGISTERS >= 32 {
                    self.rows::<S, 4>(simd, packed, key_dim, (first + i, i + 4));
                } else {
                    self.rows::<S, 2>(simd, packed, key_dim, (first + i, i + 4));
                }
            }
        }
    }

    /// The products of 4 rows with keys `..keys`, `N` at a time: sums over lanes, which are put
    /// together at the end.
    #[inline(always)]
    fn rows<S: Simd, const N: usize>(
        &mut self,
        simd: S,
        packed: &Packed,
        key_dim: usize,
        (row, keys): (usize, usize),
    ) {
        for j in (0..keys).step_by(N) {
            let mut sums = [[simd.splat(0.0); N]; 4];
            for b in 0..key_dim.div_ceil(DEPTH) {
                let block = packed.block(b);
                let left: &[_; 4] = block[row..].first_chunk().expect("rows of a tile");
                let right: &[_; N] = block[j..].first_chunk().expect("rows of a tile");
                for p in (0..DEPTH).step_by(S::LANES) {
                    let mut keys = [simd.splat(0.0); N];
                    for (key, row) in keys.iter_mut().zip(right) {
                        *key = simd.load(&row[p..]);
                    }
                    for (sums, row) in sums.iter_mut().zip(left) {
                        let x = simd.load(&row[p..]);
                        for (sum, &key) in sums.iter_mut().zip(&keys) {
                            *sum = simd.mul_add(x, key, *sum);
                        }
                    }
                }
            }
            let mut products = [0.0; MAX_LANES];
            for (sums, products) in sums.as_flattened().chunks(S::LANES).zip(products.chunks_mut(S::LANES)) {
                simd.store(simd.sum_each(sums), products);
            }
            for (row, products) in self.0[row..][..4].iter_mut().zip(products.chunks(N)) {
                row[j..j + N].copy_from_slice(products);
            }
        }
    }
}
