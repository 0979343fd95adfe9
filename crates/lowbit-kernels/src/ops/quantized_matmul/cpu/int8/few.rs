//! The product of a chunk of [`PANELS`] panels and one or two rows of x: what is read is multiplied at once, half a span after
//! half a span, so that memory never waits for a chunk to be multiplied.

use super::Sums;
use super::activations::Tile;
use super::tile::{self, VECTORS};
use crate::panels::{Chunk, ROWS, SPAN, Unpack, half_span, with_bits};
use crate::simd::Simd;

/// Rows of x, at most; with more, codes are unpacked once for several tiles.
pub(super) const FEW: usize = 2;

/// Quads of half a span.
const HALF: usize = SPAN / 8;

/// Panels of a weight from `panel` on, `panels` of them, and their values from `k` on, whose scales are in `chunk`.
pub(super) struct Few<'a> {
    pub weight: Unpack<'a>,
    pub panel: usize,
    pub panels: usize,
    pub k: usize,
    pub chunk: &'a Chunk,
}

impl Few<'_> {
    /// `sums[m][n] += sum over k of x[m, k] * weight[n, k]`.
    #[inline(always)]
    pub fn multiply<S: Simd>(&self, simd: S, x: &Tile<'_>, sums: &mut [Sums]) {
        // Where any bytes multiply as fast, one kernel is enough.
        let narrow = self.weight.layout.narrow() && !S::WIDE_DOT4;
        with_bits!(self.weight.layout, BITS => match (x.height, narrow) {
            (1, false) => self.rows::<S, BITS, 1, false>(simd, x, sums),
            (1, true) => self.rows::<S, BITS, 1, true>(simd, x, sums),
            (_, false) => self.rows::<S, BITS, 2, false>(simd, x, sums),
            (_, true) => self.rows::<S, BITS, 2, true>(simd, x, sums),
        })
    }

    /// `M` rows of x.
    #[inline(always)]
    fn rows<S: Simd, const BITS: usize, const M: usize, const NARROW: bool>(
        &self,
        simd: S,
        x: &Tile<'_>,
        sums: &mut [Sums],
    ) {
        let sums = sums.first_chunk_mut::<M>().expect("sums for the tile's rows");
        let (last, groups) = (self.panels - 1, SPAN / self.weight.layout.group());
        let biased = self.weight.layout.biased();
        for panel in (0..self.panels).step_by(VECTORS * S::LANES / ROWS) {
            let places = [tile::place::<S>(panel, 0), tile::place::<S>(panel, 1)];
            let mut totals = [[simd.splat(0.0); VECTORS]; M];
            for (totals, sums) in totals.iter_mut().zip(&*sums) {
                for (total, (panel, row)) in totals.iter_mut().zip(places) {
                    *total = simd.load(&sums.0[panel * ROWS + row..]);
                }
            }
            let halves = x.codes.as_chunks::<M>().0.as_chunks::<HALF>().0.as_chunks::<2>().0;
            for ((index, span), halves) in self.weight.spans(self.k).enumerate().zip(halves) {
                // Of an odd number of panels the last stands in for the one that is not there.
                let packed = [
                    self.weight.span::<S, BITS>(simd, self.panel + places[0].0.min(last), span),
                    self.weight.span::<S, BITS>(simd, self.panel + places[1].0.min(last), span),
                ];
                let mut group = Group { chunk: self.chunk, x, places, index: index * groups };
                let mut products = group.starts::<S, M>(simd);
                self.half::<S, BITS, M, NARROW, 0>(simd, packed, places, &halves[0], &mut products);
                if groups == 2 {
                    group.add::<S, M>(simd, &products, biased, &mut totals);
                    group.index += 1;
                    products = group.starts::<S, M>(simd);
                }
                self.half::<S, BITS, M, NARROW, 4>(simd, packed, places, &halves[1], &mut products);
                group.add::<S, M>(simd, &products, biased, &mut totals);
            }
            for (totals, sums) in totals.iter().zip(&mut *sums) {
                for (total, (panel, row)) in totals.iter().zip(places) {
                    simd.store(*total, &mut sums.0[panel * ROWS + row..]);
                }
            }
        }
    }

    /// Adds to `products` those of half a span, its quads from `FIRST` on.
    #[inline(always)]
    fn half<S: Simd, const BITS: usize, const M: usize, const NARROW: bool, const FIRST: usize>(
        &self,
        simd: S,
        packed: [&[[u8; 64]; BITS]; VECTORS],
        places: [(usize, usize); VECTORS],
        x: &[[u32; M]; HALF],
        products: &mut [[S::I; VECTORS]; M],
    ) {
        let mut first = half_span::<BITS, FIRST>(packed[0]);
        let mut second = half_span::<BITS, FIRST>(packed[1]);
        if let Some(table) = self.weight.layout.table() {
            for codes in first.iter_mut().chain(&mut second) {
                simd.lookup(table, codes);
            }
        }
        let [(_, first_row), (_, second_row)] = places;
        for ((first, second), x) in first.iter().zip(&second).zip(x) {
            let weights =
                [simd.load_bytes(&first[4 * first_row..]), simd.load_bytes(&second[4 * second_row..])];
            for (products, &codes) in products.iter_mut().zip(x) {
                let codes = simd.splat_i32(codes as i32);
                for (product, &weight) in products.iter_mut().zip(&weights) {
                    *product = simd.dot4::<NARROW>(*product, weight, codes);
                }
            }
        }
    }
}

/// A group of the chunk.
struct Group<'a> {
    chunk: &'a Chunk,
    x: &'a Tile<'a>,
    places: [(usize, usize); VECTORS],
    index: usize,
}

impl Group<'_> {
    /// What its integer sums start with.
    #[inline(always)]
    fn starts<S: Simd, const M: usize>(&self, simd: S) -> [[S::I; VECTORS]; M] {
        let mut products = [[simd.splat_i32(0); VECTORS]; M];
        for (products, &start) in products.iter_mut().zip(&self.x.starts.as_chunks::<M>().0[self.index]) {
            *products = [simd.splat_i32(start); VECTORS];
        }
        products
    }

    /// Adds its products, scaled.
    #[inline(always)]
    fn add<S: Simd, const M: usize>(
        &self,
        simd: S,
        products: &[[S::I; VECTORS]; M],
        biased: bool,
        totals: &mut [[S::V; VECTORS]; M],
    ) {
        let scales = &self.x.scales.as_chunks::<M>().0[self.index];
        let sums = &self.x.sums.as_chunks::<M>().0[self.index];
        for (v, (panel, row)) in self.places.into_iter().enumerate() {
            let scale = tile::Scale::new(simd, &self.chunk.scales[panel][self.index][row..]);
            for m in 0..M {
                totals[m][v] = scale.add(simd, products[m][v], scales[m], totals[m][v]);
            }
            if biased {
                let bias = simd.load(&self.chunk.biases[panel][self.index][row..]);
                for m in 0..M {
                    totals[m][v] = simd.mul_add(bias, simd.splat(sums[m]), totals[m][v]);
                }
            }
        }
    }
}
