//! The product of a chunk of [`PANELS`] panels and a few rows of x.
//!
//! Sums of a group are integers that start as the bits of [`MAGIC`], an f32 whose last place is 1: adding an integer to the
//! bits adds it to the number, so a sum needs no conversion. What is left to do per group is
//! `(sum * scale - MAGIC * scale) * x_scale`, two fused operations. `MAGIC * scale` is exact for scales of at most 22
//! significant bits, which all formats' have but affine's in f32; those are cut.
//!
//! Floor: a group of 32 values takes 8 dot products and 2 fused operations per vector of rows and row of x, 3 with biases.

use super::Sums;
use super::activations::Tile;
use crate::panels::{Chunk, Layout, PANELS, ROWS};
use crate::simd::Simd;
use std::ops::Range;

/// 1.5 * 2^23: integers of magnitudes below 2^22 can be added to its bits. The greatest is of 64 values, codes of up to 255
/// times 127, and before them 64 times 127 times a zero of 128: 3.1 million of 4.2.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// Vectors of weight rows in a tile.
const VECTORS: usize = 2;
/// Rows of x whose sums of f32 stay in registers; those of the others do not fit.
const KEPT: usize = 5;
/// Rows of x in the tallest tile of any instruction set.
pub(super) const TALLEST: usize = 8;

/// Rows of x in a tile: their sums, a few vectors of weights and one of x fit the registers.
pub(super) const fn tallest<S: Simd>() -> usize {
    if S::REGISTERS >= 32 { TALLEST } else { 4 }
}

/// The tiles that `rows` are cut into: first row and height.
pub(super) fn heights(rows: Range<usize>, tallest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let left = rows.end - row;
        let height = [8, 4, 2, 1].into_iter().find(|&height| height <= left.min(tallest))?;
        row += height;
        Some((row - height, height))
    })
}

/// `sums[m][n] += sum over k of x[m, k] * weight[n, k]` for the chunk's values k, `sums [height, WIDTH]`.
#[inline(always)]
pub(super) fn multiply<S: Simd>(
    simd: S,
    layout: &Layout,
    chunk: &Chunk,
    panels: usize,
    x: Tile<'_>,
    sums: &mut [Sums],
) {
    // Where any bytes multiply as fast, one kernel is enough.
    match (layout.group(), layout.narrow() && !S::WIDE_DOT4) {
        (16, false) => height::<S, 4, false>(simd, layout, chunk, panels, x, sums),
        (32, false) => height::<S, 8, false>(simd, layout, chunk, panels, x, sums),
        (64, false) => height::<S, 16, false>(simd, layout, chunk, panels, x, sums),
        (16, true) => height::<S, 4, true>(simd, layout, chunk, panels, x, sums),
        (32, true) => height::<S, 8, true>(simd, layout, chunk, panels, x, sums),
        _ => height::<S, 16, true>(simd, layout, chunk, panels, x, sums),
    }
}

#[inline(always)]
fn height<S: Simd, const QUADS: usize, const NARROW: bool>(
    simd: S,
    layout: &Layout,
    chunk: &Chunk,
    panels: usize,
    x: Tile<'_>,
    sums: &mut [Sums],
) {
    // Panels side by side in a tile.
    let step = VECTORS * S::LANES / ROWS;
    let biased = layout.biased();
    for panel in (0..panels).step_by(step) {
        let weight = Weight { chunk, panel };
        match x.height {
            8 => weight.either::<S, 8, QUADS, NARROW>(simd, biased, &x, sums),
            4 => weight.either::<S, 4, QUADS, NARROW>(simd, biased, &x, sums),
            2 => weight.either::<S, 2, QUADS, NARROW>(simd, biased, &x, sums),
            _ => weight.either::<S, 1, QUADS, NARROW>(simd, biased, &x, sums),
        }
    }
}

/// Panels of a chunk from `panel` on.
struct Weight<'a> {
    chunk: &'a Chunk,
    panel: usize,
}

impl Weight<'_> {
    /// Where vector `v` of rows lies: its panel, and its first row there.
    #[inline(always)]
    fn place<S: Simd>(&self, v: usize) -> (usize, usize) {
        ((self.panel + v * S::LANES / ROWS) % PANELS, v * S::LANES % ROWS)
    }

    #[inline(always)]
    fn either<S: Simd, const M: usize, const QUADS: usize, const NARROW: bool>(
        &self,
        simd: S,
        biased: bool,
        x: &Tile<'_>,
        sums: &mut [Sums],
    ) {
        match biased {
            true => self.tile::<S, M, QUADS, NARROW, true>(simd, x, sums),
            false => self.tile::<S, M, QUADS, NARROW, false>(simd, x, sums),
        }
    }

    /// A tile of `M` rows of x and [`VECTORS`] vectors of weight rows, in groups of `QUADS` quads.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const QUADS: usize, const NARROW: bool, const BIASED: bool>(
        &self,
        simd: S,
        x: &Tile<'_>,
        sums: &mut [Sums],
    ) {
        let (quads, starts) = (x.codes.as_chunks::<M>().0, x.starts.as_chunks::<M>().0);
        let (scales, x_sums) = (x.scales.as_chunks::<M>().0, x.sums.as_chunks::<M>().0);
        let sums = sums.first_chunk_mut::<M>().expect("sums for the tile's rows");
        // Stores to more than a few sums per group cost more than what they store takes to compute.
        let kept = if S::REGISTERS >= 32 { M.min(KEPT) } else { 0 };
        let mut totals = [[simd.splat(0.0); VECTORS]; KEPT];
        for (totals, sums) in totals.iter_mut().zip(&sums[..kept]) {
            for (v, total) in totals.iter_mut().enumerate() {
                let (panel, row) = self.place::<S>(v);
                *total = simd.load(&sums.0[panel * ROWS + row..]);
            }
        }
        for (group, quads) in quads.as_chunks::<QUADS>().0.iter().enumerate() {
            let mut products = [[simd.splat_i32(0); VECTORS]; M];
            for (products, &start) in products.iter_mut().zip(&starts[group]) {
                *products = [simd.splat_i32(start); VECTORS];
            }
            for (q, codes) in quads.iter().enumerate() {
                let mut weight = [simd.splat_i32(0); VECTORS];
                for (v, weight) in weight.iter_mut().enumerate() {
                    let (panel, row) = self.place::<S>(v);
                    *weight = simd.load_bytes(&self.chunk.codes[panel][group * QUADS + q][4 * row..]);
                }
                for (products, &codes) in products.iter_mut().zip(codes) {
                    let codes = simd.splat_i32(codes as i32);
                    for (product, &weight) in products.iter_mut().zip(&weight) {
                        *product = simd.dot4::<NARROW>(*product, weight, codes);
                    }
                }
            }
            for v in 0..VECTORS {
                let (panel, row) = self.place::<S>(v);
                let scale = simd.load(&self.chunk.scales[panel][group][row..]);
                let offset = simd.mul(scale, simd.splat(-MAGIC));
                let bias = simd.load(&self.chunk.biases[panel][group][row..]);
                for m in 0..M {
                    let product = simd.mul_add(simd.f32_from_bits(products[m][v]), scale, offset);
                    let sums = &mut sums[m].0[panel * ROWS + row..];
                    let sum = if m < kept { totals[m % KEPT][v] } else { simd.load(sums) };
                    let mut sum = simd.mul_add(product, simd.splat(scales[group][m]), sum);
                    if BIASED {
                        sum = simd.mul_add(bias, simd.splat(x_sums[group][m]), sum);
                    }
                    if m < kept {
                        totals[m % KEPT][v] = sum;
                    } else {
                        simd.store(sum, sums);
                    }
                }
            }
        }
        for (totals, sums) in totals.iter().zip(&mut sums[..kept]) {
            for (v, total) in totals.iter().enumerate() {
                let (panel, row) = self.place::<S>(v);
                simd.store(*total, &mut sums.0[panel * ROWS + row..]);
            }
        }
    }
}
