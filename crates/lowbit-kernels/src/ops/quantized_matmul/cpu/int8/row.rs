//! The product of a chunk of panels and one row of x. It is bound by memory: what is read is multiplied at once, half a span
//! after half a span, so that memory never waits for a chunk to be multiplied.

use super::Sums;
use super::activations::Tile;
use super::tile::{self, VECTORS};
use crate::panels::{Chunk, ROWS, SPAN, Unpack, half_span, with_bits};
use crate::simd::Simd;

/// Quads of half a span.
const HALF: usize = SPAN / 8;

/// Where the vectors of weight rows lie: panel of the chunk, and first row there.
type Places = [(usize, usize); VECTORS];

/// Panels of a weight from `panel` on, `panels` of them, and their values from `k` on, whose scales are in `chunk`.
pub(super) struct Row<'a> {
    pub weight: Unpack<'a>,
    pub panel: usize,
    pub panels: usize,
    pub k: usize,
    pub chunk: &'a Chunk,
}

impl Row<'_> {
    /// `sums[n] += sum over k of x[k] * weight[n, k]`.
    #[inline(always)]
    pub fn multiply<S: Simd>(&self, simd: S, x: &Tile<'_>, sums: &mut Sums) {
        // Where any bytes multiply as fast, one kernel is enough.
        let narrow = self.weight.layout.narrow() && !S::WIDE_DOT4;
        with_bits!(self.weight.layout, BITS => match narrow {
            false => self.spans::<S, BITS, false>(simd, x, sums),
            true => self.spans::<S, BITS, true>(simd, x, sums),
        })
    }

    #[inline(always)]
    fn spans<S: Simd, const BITS: usize, const NARROW: bool>(&self, simd: S, x: &Tile<'_>, sums: &mut Sums) {
        let (last, groups) = (self.panels - 1, SPAN / self.weight.layout.group());
        let halves = x.codes.as_chunks::<HALF>().0.as_chunks::<2>().0;
        // Panels side by side, or the halves of one.
        for panel in (0..self.panels).step_by(VECTORS * S::LANES / ROWS) {
            let places = [tile::place::<S>(panel, 0), tile::place::<S>(panel, 1)];
            let mut totals = [simd.splat(0.0); VECTORS];
            for (total, (panel, row)) in totals.iter_mut().zip(places) {
                *total = simd.load(&sums.0[panel * ROWS + row..]);
            }
            for ((index, span), halves) in self.weight.spans(self.k).enumerate().zip(halves) {
                // Of an odd number of panels the last stands in for the one that is not there.
                let packed = [
                    self.weight.span::<S, BITS>(simd, self.panel + places[0].0.min(last), span),
                    self.weight.span::<S, BITS>(simd, self.panel + places[1].0.min(last), span),
                ];
                let mut group = index * groups;
                let mut products = [simd.splat_i32(x.starts[group]); VECTORS];
                self.half::<S, BITS, NARROW, 0>(simd, packed, places, &halves[0], &mut products);
                if groups == 2 {
                    self.add(simd, x, group, products, places, &mut totals);
                    group += 1;
                    products = [simd.splat_i32(x.starts[group]); VECTORS];
                }
                self.half::<S, BITS, NARROW, HALF>(simd, packed, places, &halves[1], &mut products);
                self.add(simd, x, group, products, places, &mut totals);
            }
            for (total, (panel, row)) in totals.into_iter().zip(places) {
                simd.store(total, &mut sums.0[panel * ROWS + row..]);
            }
        }
    }

    /// Adds to `products` those of half a span, its quads from `FIRST` on.
    #[inline(always)]
    fn half<S: Simd, const BITS: usize, const NARROW: bool, const FIRST: usize>(
        &self,
        simd: S,
        packed: [&[[u8; 64]; BITS]; VECTORS],
        places: Places,
        x: &[u32; HALF],
        products: &mut [S::I; VECTORS],
    ) {
        let mut first = half_span::<BITS, FIRST>(packed[0]);
        let mut second = half_span::<BITS, FIRST>(packed[1]);
        if let Some(table) = self.weight.layout.table() {
            for (first, second) in first.iter_mut().zip(&mut second) {
                simd.lookup(table, first);
                simd.lookup(table, second);
            }
        }
        let [(_, first_row), (_, second_row)] = places;
        for ((first, second), &x) in first.iter().zip(&second).zip(x) {
            let x = simd.splat_i32(x as i32);
            products[0] = simd.dot4::<NARROW>(products[0], simd.load_bytes(&first[4 * first_row..]), x);
            products[1] = simd.dot4::<NARROW>(products[1], simd.load_bytes(&second[4 * second_row..]), x);
        }
    }

    /// Adds a group's products, scaled.
    #[inline(always)]
    fn add<S: Simd>(
        &self,
        simd: S,
        x: &Tile<'_>,
        group: usize,
        products: [S::I; VECTORS],
        places: Places,
        totals: &mut [S::V; VECTORS],
    ) {
        for ((total, product), (panel, row)) in totals.iter_mut().zip(products).zip(places) {
            let scale = tile::Scale::new(simd, &self.chunk.scales[panel][group][row..]);
            *total = scale.add(simd, product, x.scales[group], *total);
            if self.weight.layout.biased() {
                let bias = simd.load(&self.chunk.biases[panel][group][row..]);
                *total = simd.mul_add(bias, simd.splat(x.sums[group]), *total);
            }
        }
    }
}
