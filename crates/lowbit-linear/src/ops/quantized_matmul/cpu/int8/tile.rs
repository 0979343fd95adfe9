//! The product of a chunk of [`PANELS`] panels and a few rows of x.
//!
//! Sums of a group are integers that start as the bits of [`MAGIC`], an f32 whose last place is 1:
//! adding an integer to the bits adds it to the number, so a sum needs no conversion. The rest of
//! the work per group is `(sum * scale - MAGIC * scale) * x_scale`, two fused operations.
//! `MAGIC * scale` is exact for scales of at most 22 significant bits, which all formats' have but
//! affine's in f32; those are cut.
//!
//! Floor: a group of 32 values takes 8 dot products and 2 fused operations per vector of rows and
//! row of x, 3 with biases.

use super::Sums;
use super::activations::Tile;
use crate::panels::{Chunk, Layout, PANELS, ROWS};
use crate::simd::Simd;

/// 1.5 * 2^23: integers of magnitudes below 2^22 can be added to its bits. The greatest is of 32
/// values, codes of up to 255 times 127, and before them 32 times 127 times a zero of 128: 1.6
/// million of 4.2.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// Vectors of weight rows in a tile.
const VECTORS: usize = 2;
/// Rows of x whose sums of f32 stay in registers, at most.
const KEPT: usize = 5;

/// Panels side by side in a tile.
const fn side_by_side<S: Simd>() -> usize {
    VECTORS * S::LANES / ROWS
}

/// Rows of x, of a tile of `m`, whose sums of f32 stay in registers beside the integer ones; those
/// of the others do not fit.
const fn kept<S: Simd>(m: usize) -> usize {
    match m {
        0..=2 => m,
        _ if S::REGISTERS < 32 => 0,
        3..=KEPT => m,
        _ => KEPT,
    }
}

/// Kinds of unpacked codes: any bytes.
const ANY: u8 = 0;
/// Below 64.
const NARROW: u8 = 1;
/// Below 16.
const SHORT: u8 = 2;

/// The place of vector `v` of rows of a tile that starts with `panel`: its panel in the chunk, and
/// its first row there.
#[inline(always)]
fn place<S: Simd>(panel: usize, v: usize) -> (usize, usize) {
    ((panel + v * S::LANES / ROWS) % PANELS, v * S::LANES % ROWS)
}

/// The scales of a group's rows.
pub(super) struct Scale<S: Simd> {
    scale: S::V,
    offset: S::V,
}

impl<S: Simd> Scale<S> {
    #[inline(always)]
    pub fn new(simd: S, scales: &[f32]) -> Self {
        let scale = simd.load(scales);
        Self { scale, offset: simd.mul(scale, simd.splat(-MAGIC)) }
    }

    /// `sum`, and an integer sum times the scales of the weight and of x.
    #[inline(always)]
    pub fn add(&self, simd: S, product: S::I, x_scale: f32, sum: S::V) -> S::V {
        let product = simd.mul_add(simd.f32_from_bits(product), self.scale, self.offset);
        simd.mul_add(product, simd.splat(x_scale), sum)
    }
}

/// A chunk of a weight's panels.
pub(super) struct Weight<'a> {
    layout: &'a Layout,
    chunk: &'a Chunk,
    /// Codes of each panel that are asked for meanwhile, line by line; of short ones there are
    /// none.
    ahead: [&'a [[u8; 64]]; PANELS],
    /// The first panel of a tile.
    panel: usize,
    /// Quads of a group.
    quads: usize,
}

impl<'a> Weight<'a> {
    pub fn new(layout: &'a Layout, chunk: &'a Chunk, ahead: [&'a [u8]; PANELS]) -> Self {
        let ahead = ahead.map(|codes| codes.as_chunks().0);
        Self { layout, chunk, ahead, panel: 0, quads: layout.group() / 4 }
    }

    /// `sums[m][n] += sum over k of x[m, k] * weight[n, k]` for the chunk's values k and its first
    /// `panels` panels.
    #[inline(always)]
    pub fn multiply<S: Simd>(mut self, simd: S, panels: usize, x: Tile<'_>, sums: &mut [Sums]) {
        for panel in (0..panels).step_by(side_by_side::<S>()) {
            self.panel = panel;
            if self.layout.biased() {
                self.codes::<S, true>(simd, &x, sums);
            } else {
                self.codes::<S, false>(simd, &x, sums);
            }
        }
    }

    #[inline(always)]
    fn codes<S: Simd, const BIASED: bool>(&self, simd: S, x: &Tile<'_>, sums: &mut [Sums]) {
        // If any bytes multiply as fast, one kernel is enough.
        if S::WIDE_DOT4 || !self.layout.narrow() {
            self.height::<S, ANY, BIASED>(simd, x, sums);
        } else if S::SHORT_SUMS && self.layout.greatest_code() < 16 {
            self.height::<S, SHORT, BIASED>(simd, x, sums);
        } else {
            self.height::<S, NARROW, BIASED>(simd, x, sums);
        }
    }

    #[inline(always)]
    fn height<S: Simd, const CODES: u8, const BIASED: bool>(&self, simd: S, x: &Tile<'_>, sums: &mut [Sums]) {
        match x.height {
            8 => self.tile::<S, 8, CODES, BIASED>(simd, x, sums),
            4 => self.tile::<S, 4, CODES, BIASED>(simd, x, sums),
            2 => self.tile::<S, 2, CODES, BIASED>(simd, x, sums),
            _ => self.tile::<S, 1, CODES, BIASED>(simd, x, sums),
        }
    }

    /// A tile of `M` rows of x and [`VECTORS`] vectors of weight rows.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const CODES: u8, const BIASED: bool>(
        &self,
        simd: S,
        x: &Tile<'_>,
        sums: &mut [Sums],
    ) {
        let (quads, starts) = (x.codes.as_chunks::<M>().0, x.starts.as_chunks::<M>().0);
        let (scales, x_sums) = (x.scales.as_chunks::<M>().0, x.sums.as_chunks::<M>().0);
        let sums = sums.first_chunk_mut::<M>().expect("sums for the tile's rows");
        let places: [(usize, usize); VECTORS] = [place::<S>(self.panel, 0), place::<S>(self.panel, 1)];
        // Stores to more than a few sums per group cost more than what they store takes to compute.
        let kept = const { kept::<S>(M) };
        let mut totals = [[simd.splat(0.0); VECTORS]; KEPT];
        for (totals, sums) in totals.iter_mut().zip(&sums[..kept]) {
            for (total, (panel, row)) in totals.iter_mut().zip(places) {
                *total = simd.load(&sums.0[panel * ROWS + row..]);
            }
        }
        let bytes: &[u8] = bytemuck::cast_slice(x.codes);
        let groups = (quads.len() / self.quads).max(1);
        let share = if CODES == SHORT { 0 } else { self.ahead[self.panel].len().div_ceil(groups) };
        for (group, quads) in quads.chunks_exact(self.quads).enumerate() {
            // The next tile comes from the second-level cache.
            for line in (0..size_of_val(quads)).step_by(64) {
                simd.prefetch(bytes, x.stride + group * size_of_val(quads) + line);
            }
            for lines in &self.ahead[self.panel..][..side_by_side::<S>()] {
                for line in group * share..((group + 1) * share).min(lines.len()) {
                    simd.prefetch(&lines[line], 0);
                }
            }
            let products = self.products::<S, M, CODES>(simd, (group, quads), &starts[group], places);
            for (v, (panel, row)) in places.into_iter().enumerate() {
                let scale = Scale::new(simd, &self.chunk.panels[panel].scales[group][row..]);
                let bias = simd.load(&self.chunk.panels[panel].biases[group][row..]);
                for m in 0..M {
                    let sums = &mut sums[m].0[panel * ROWS + row..];
                    let sum = if m < kept { totals[m % KEPT][v] } else { simd.load(sums) };
                    let mut sum = scale.add(simd, products[m][v], scales[group][m], sum);
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
            for (total, (panel, row)) in totals.iter().zip(places) {
                simd.store(*total, &mut sums.0[panel * ROWS + row..]);
            }
        }
    }

    /// A group's integer sums. The number of its quads is not known to the compiler, which would
    /// otherwise write them all out and sum one row after the other, each waiting for itself.
    #[inline(always)]
    fn products<S: Simd, const M: usize, const CODES: u8>(
        &self,
        simd: S,
        (group, quads): (usize, &[[u32; M]]),
        starts: &[i32; M],
        places: [(usize, usize); VECTORS],
    ) -> [[S::I; VECTORS]; M] {
        let start = |m: usize| simd.splat_i32(starts[m]);
        let mut products = [[simd.splat_i32(0); VECTORS]; M];
        for (m, products) in products.iter_mut().enumerate() {
            *products = [if CODES == SHORT { simd.begin_short_sum(start(m)) } else { start(m) }; VECTORS];
        }
        let [(first, first_row), (second, second_row)] = places;
        let weights = |panel: usize| &self.chunk.codes[panel][group * self.quads..][..quads.len()];
        let load = |first: &[u8; 4 * ROWS], second: &[u8; 4 * ROWS]| {
            [simd.load_bytes(&first[4 * first_row..]), simd.load_bytes(&second[4 * second_row..])]
        };
        let (first, second) = (weights(first), weights(second));
        if CODES == NARROW {
            let pairs = first.as_chunks::<2>().0.iter().zip(second.as_chunks::<2>().0);
            for (codes, (first, second)) in quads.as_chunks::<2>().0.iter().zip(pairs) {
                let weight = [load(&first[0], &second[0]), load(&first[1], &second[1])];
                for (m, products) in products.iter_mut().enumerate() {
                    let codes = [simd.splat_i32(codes[0][m] as i32), simd.splat_i32(codes[1][m] as i32)];
                    for (v, product) in products.iter_mut().enumerate() {
                        let sum = simd.short_dot4(simd.begin_short_sum(*product), weight[0][v], codes[0]);
                        *product = simd.end_short_sum(*product, simd.short_dot4(sum, weight[1][v], codes[1]));
                    }
                }
            }
            return products;
        }
        for ((codes, first), second) in quads.iter().zip(first).zip(second) {
            let weight = load(first, second);
            for (products, &codes) in products.iter_mut().zip(codes) {
                let codes = simd.splat_i32(codes as i32);
                for (product, &weight) in products.iter_mut().zip(&weight) {
                    *product = match CODES {
                        SHORT => simd.short_dot4(*product, weight, codes),
                        _ => simd.dot4::<false>(*product, weight, codes),
                    };
                }
            }
        }
        if CODES == SHORT {
            for (m, products) in products.iter_mut().enumerate() {
                for product in products {
                    *product = simd.end_short_sum(start(m), *product);
                }
            }
        }
        products
    }
}
