//! A few rows of x: lanes run along K, and each sum is a vector until the end of the row.

use super::rows::{KC, Rows, STEP};
use crate::simd::{Isa, Kernel, Simd};

/// Weight rows of a tile.
const NR: usize = 4;
/// The most rows of x that come here: one fewer than the widest vector has lanes.
const MAX_M: usize = 15;

/// `y[m][n] = sum over k of x[m, k] * weight[row + n, k]`, `x [m, padded k]`.
pub(super) fn run(isa: Isa, weight: &dyn Rows, row: usize, x: &[f32], y: &mut [&mut [f32]]) {
    isa.dispatch(Inner { isa, weight, row, x, y });
}

struct Inner<'a, 'y> {
    isa: Isa,
    weight: &'a dyn Rows,
    row: usize,
    x: &'a [f32],
    y: &'a mut [&'y mut [f32]],
}

impl Kernel for Inner<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let n = self.y[0].len();
        let k = self.x.len() / self.y.len();
        let mut panel = [[0.0; KC]; NR];
        for first in (0..n).step_by(NR) {
            let width = NR.min(n - first);
            let mut sums = [[simd.splat(0.0); NR]; MAX_M];
            for start in (0..k).step_by(KC) {
                self.weight.decode(self.isa, self.row + first, start, &mut panel[..width]);
                let len = KC.min(k - start);
                let x = |m: usize| &self.x[m * k + start..][..len];
                // As many rows as leave registers for the weight's vectors and one of x.
                if S::REGISTERS >= 32 {
                    each_tile::<S, 4>(simd, self.y.len(), x, &panel, &mut sums);
                } else {
                    each_tile::<S, 2>(simd, self.y.len(), x, &panel, &mut sums);
                }
            }
            for (y, sums) in self.y.iter_mut().zip(sums) {
                for (y, sum) in y[first..][..width].iter_mut().zip(sums) {
                    *y = simd.sum(sum);
                }
            }
        }
    }
}

#[inline(always)]
fn each_tile<'x, S: Simd, const MR: usize>(
    simd: S,
    m: usize,
    x: impl Fn(usize) -> &'x [f32],
    panel: &[[f32; KC]; NR],
    sums: &mut [[S::V; NR]; MAX_M],
) {
    let mut first = 0;
    while first + MR <= m {
        tile::<S, MR>(simd, std::array::from_fn(|i| x(first + i)), panel, &mut sums[first..]);
        first += MR;
    }
    match m - first {
        3 => tile::<S, 3>(simd, std::array::from_fn(|i| x(first + i)), panel, &mut sums[first..]),
        2 => tile::<S, 2>(simd, std::array::from_fn(|i| x(first + i)), panel, &mut sums[first..]),
        1 => tile::<S, 1>(simd, std::array::from_fn(|i| x(first + i)), panel, &mut sums[first..]),
        _ => {}
    }
}

/// `sums[m][n] += x[m] * panel[n]`, lane by lane.
#[inline(always)]
fn tile<S: Simd, const MR: usize>(
    simd: S,
    x: [&[f32]; MR],
    panel: &[[f32; KC]; NR],
    sums: &mut [[S::V; NR]],
) {
    let sums: &mut [[S::V; NR]; MR] = sums.first_chunk_mut().expect("a sum for every row");
    let mut local = *sums;
    let len = x[0].len();
    assert!(len <= KC && len.is_multiple_of(STEP) && x.iter().all(|x| x.len() == len));
    let mut at = 0;
    while at + S::LANES <= len {
        let w: [S::V; NR] = std::array::from_fn(|n| simd.load(&panel[n][at..]));
        for m in 0..MR {
            let x = simd.load(&x[m][at..]);
            for n in 0..NR {
                local[m][n] = simd.mul_add(w[n], x, local[m][n]);
            }
        }
        at += S::LANES;
    }
    *sums = local;
}
