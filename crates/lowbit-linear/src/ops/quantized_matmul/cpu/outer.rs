//! Many rows of x: lanes run along M. x is packed so that the rows of a vector lie side by side; a
//! panel of decoded weights gives one value to all lanes. Sums are kept transposed, tile by tile,
//! until all of K has passed.

use super::{
    policy,
    rows::{KC, Rows},
};
use crate::{
    Cpu,
    simd::{Isa, Kernel, Simd},
};
use std::ops::Range;

/// x, cut into panels of [`Packed::width`] rows (the last one may be a single vector wide):
/// `[panel][k][row]`, zeros in the rows past the end.
pub(super) struct Packed {
    values: Vec<f32>,
    m: usize,
    k: usize,
    lanes: usize,
}

/// Vectors of x that a tile is wide.
const MV: usize = 2;

/// Columns of x that are packed at a time.
const COLUMNS: usize = 16;

impl Packed {
    pub(super) fn new(cpu: &Cpu, x: &[f32], m: usize, k: usize) -> Self {
        let lanes = cpu.isa().lanes();
        let mut packed = Self { values: Vec::new(), m, k, lanes };
        packed.values.resize(m.next_multiple_of(lanes) * k, 0.0);
        if k == 0 {
            return packed;
        }
        let width = MV * lanes;
        let panels: Vec<_> = packed.values.chunks_mut(width * k).enumerate().collect();
        cpu.for_each(panels, |(panel, values)| {
            let width = values.len() / k;
            let rows = &x[panel * MV * lanes * k..];
            // A few columns at a time, so that the lines written stay in the first-level cache.
            for (block, values) in values.chunks_mut(COLUMNS * width).enumerate() {
                for (row, x) in rows.chunks_exact(k).take(width).enumerate() {
                    for (values, x) in values.chunks_exact_mut(width).zip(&x[block * COLUMNS..]) {
                        values[row] = *x;
                    }
                }
            }
        });
        packed
    }

    /// Columns `k..k + len` of the panel that starts with row `m`: its width and its values.
    #[inline(always)]
    fn panel(&self, m: usize, k: usize, len: usize) -> (usize, &[f32]) {
        let width = (MV * self.lanes).min(self.m.next_multiple_of(self.lanes) - m);
        (width, &self.values[m * self.k + k * width..][..len * width])
    }
}

/// `y[m][n] = sum over k of x[first_m + m, k] * weight[row + n, k]`.
pub(super) fn run(
    isa: Isa,
    weight: &dyn Rows,
    row: usize,
    (x, first_m): (&Packed, usize),
    y: &mut [&mut [f32]],
) {
    isa.dispatch(Outer { isa, weight, row, x, first_m, y });
}

struct Outer<'a, 'y> {
    isa: Isa,
    weight: &'a dyn Rows,
    row: usize,
    x: &'a Packed,
    first_m: usize,
    y: &'a mut [&'y mut [f32]],
}

impl Kernel for Outer<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // A tile's sums, the vectors of x and one weight must fit the registers.
        match S::REGISTERS {
            32.. => self.product::<S, 12>(simd),
            16.. => self.product::<S, 6>(simd),
            _ => self.product::<S, 2>(simd),
        }
    }
}

impl Outer<'_, '_> {
    #[inline(always)]
    fn product<S: Simd, const NR: usize>(self, simd: S) {
        let (m, n) = (self.y.len(), self.y[0].len());
        let padded_m = m.next_multiple_of(S::LANES);
        let mut panel = [[0.0; KC]; NR];
        let mut sums = vec![0.0; n.next_multiple_of(NR) * padded_m];
        // Long stretches of a row at a time, as memory likes them, while x's part of them stays in
        // the cache.
        let stretch = policy::stretch(padded_m).next_multiple_of(KC);
        for begin in (0..self.x.k).step_by(stretch) {
            let end = self.x.k.min(begin + stretch);
            for (first, sums) in (0..n).step_by(NR).zip(sums.chunks_exact_mut(NR * padded_m)) {
                let width = NR.min(n - first);
                for start in (begin..end).step_by(KC) {
                    self.weight.decode(self.isa, self.row + first, start, &mut panel[..width]);
                    self.tiles(simd, start..end.min(start + KC), &panel, sums);
                }
            }
        }
        for (first, sums) in (0..n).step_by(NR).zip(sums.chunks_exact(NR * padded_m)) {
            let mut at = 0;
            while at < padded_m {
                let width = (MV * S::LANES).min(padded_m - at);
                let sums = &sums[NR * at..][..NR * width];
                for (i, y) in self.y[at..].iter_mut().take(width).enumerate() {
                    for (y, sums) in y[first..].iter_mut().zip(sums.chunks_exact(width)) {
                        *y = sums[i];
                    }
                }
                at += width;
            }
        }
    }
}

impl Outer<'_, '_> {
    /// Adds the products of a decoded panel and every panel of x.
    #[inline(always)]
    fn tiles<S: Simd, const NR: usize>(
        &self,
        simd: S,
        k: Range<usize>,
        panel: &[[f32; KC]; NR],
        mut sums: &mut [f32],
    ) {
        let mut m = 0;
        while m < self.y.len() {
            let (width, x) = self.x.panel(self.first_m + m, k.start, k.len());
            let (tile_sums, rest) = sums.split_at_mut(NR * width);
            match width == S::LANES {
                true => tile::<S, 1, NR>(simd, x, panel, tile_sums),
                false => tile::<S, MV, NR>(simd, x, panel, tile_sums),
            }
            sums = rest;
            m += width;
        }
    }
}

/// `sums[n][m] += sum over k of panel[n][k] * x[k][m]`; `x` is `[k][WIDTH vectors]`.
#[inline(always)]
fn tile<S: Simd, const WIDTH: usize, const NR: usize>(
    simd: S,
    x: &[f32],
    panel: &[[f32; KC]; NR],
    sums: &mut [f32],
) {
    let width = WIDTH * S::LANES;
    assert!(x.len() <= KC * width && sums.len() == NR * width);
    let mut local = [[simd.splat(0.0); WIDTH]; NR];
    for (n, row) in local.iter_mut().enumerate() {
        for (v, sum) in row.iter_mut().enumerate() {
            *sum = simd.load(&sums[n * width + v * S::LANES..]);
        }
    }
    for (k, x) in x.chunks_exact(width).take(KC).enumerate() {
        let x: [S::V; WIDTH] = std::array::from_fn(|v| simd.load(&x[v * S::LANES..]));
        for n in 0..NR {
            let w = simd.splat(panel[n][k]);
            for v in 0..WIDTH {
                local[n][v] = simd.mul_add(w, x[v], local[n][v]);
            }
        }
    }
    for (n, row) in local.iter().enumerate() {
        for (v, sum) in row.iter().enumerate() {
            simd.store(*sum, &mut sums[n * width + v * S::LANES..]);
        }
    }
}
