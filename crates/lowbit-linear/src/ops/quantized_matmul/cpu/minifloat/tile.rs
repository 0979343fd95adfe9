//! The product of a chunk of two panels and a few rows of x. Floor: a fused operation per vector of
//! weight rows, value and row of x, and one per span.

use super::activations::Tile;
use super::{Sums, of_quad};
use crate::panels::{CHUNK, PANELS, PanelScales, ROWS, SPAN, Unpack, ask_ahead};
use crate::simd::Simd;
use std::ops::Range;

/// Vectors of weight rows in a tile.
const VECTORS: usize = 2;

/// The values of a span's codes, `[k][row]`.
type Span = [[f32; ROWS]; SPAN];

/// Up to [`CHUNK`] values of each row of [`PANELS`] panels, without their scales.
#[repr(C, align(64))]
pub(super) struct Values {
    /// `[panel][span]`
    codes: [[Span; CHUNK / SPAN]; PANELS],
    scales: [PanelScales; PANELS],
    panels: usize,
    /// Spans that there are.
    spans: usize,
    /// True if no values follow.
    is_last: bool,
    /// Pairs of values in a span. The compiler does not know it: it would write all of them out.
    pairs: usize,
}

impl Values {
    pub fn new() -> Box<Self> {
        let (codes, scales) =
            ([[[[0.0; ROWS]; SPAN]; CHUNK / SPAN]; PANELS], [const { PanelScales::new() }; PANELS]);
        Box::new(Self { codes, scales, panels: 0, spans: 0, is_last: false, pairs: 0 })
    }

    /// Decodes the values from `k` on of these panels.
    #[inline(always)]
    pub fn decode<S: Simd>(&mut self, simd: S, weight: &Unpack<'_>, panels: Range<usize>, k: usize) {
        let spans = weight.spans(k);
        (self.panels, self.spans) = (panels.len(), spans.len());
        (self.is_last, self.pairs) = (spans.end == weight.layout.spans(), weight.layout.group() / 2);
        for ((panel, codes), scales) in panels.zip(&mut self.codes).zip(&mut self.scales) {
            weight.unpack_scales(simd, panel, k, scales);
            for (packed, codes) in weight.packed::<8>(panel, spans.clone()).iter().zip(codes) {
                ask_ahead::<S, 8>(simd, packed, 0..8);
                decode(simd, packed, codes);
            }
        }
    }

    /// `sums[m][n] += sum over k of x[m, k] * weight[n, k]` for the chunk's values k, in the rows'
    /// scaling until the last ones.
    #[inline(always)]
    pub fn multiply<S: Simd>(&self, simd: S, x: Tile<'_>, sums: &mut [Sums]) {
        // Panels side by side in a tile.
        let step = VECTORS * S::LANES / ROWS;
        for panel in (0..self.panels).step_by(step) {
            match x.height {
                8 => self.tile::<S, 8>(simd, panel, x, sums),
                4 => self.tile::<S, 4>(simd, panel, x, sums),
                2 => self.tile::<S, 2>(simd, panel, x, sums),
                _ => self.tile::<S, 1>(simd, panel, x, sums),
            }
        }
    }

    /// A tile of `M` rows of x and [`VECTORS`] vectors of weight rows.
    #[inline(always)]
    fn tile<S: Simd, const M: usize>(&self, simd: S, panel: usize, x: Tile<'_>, sums: &mut [Sums]) {
        let sums = sums.first_chunk_mut::<M>().expect("sums for the tile's rows");
        let scalings = x.scalings;
        // The panel of each vector, and its first row there. A panel that is not there gives sums
        // that nobody reads.
        let place = |v: usize| ((panel + v * S::LANES / ROWS) % PANELS, v * S::LANES % ROWS);
        let places: [(usize, usize); VECTORS] = std::array::from_fn(place);
        let rows = places.map(|(_, row)| row);
        let codes = places.map(|(panel, _)| &self.codes[panel][..self.spans]);
        let scales = places.map(|(panel, _)| &self.scales[panel].scales[..self.spans]);
        let x = x.values.as_chunks::<M>().0.as_chunks::<SPAN>().0;
        for (span, x) in x[..self.spans].iter().enumerate() {
            let codes = [&codes[0][span], &codes[1][span]];
            let even = self.products::<S, M, 0>(simd, x, codes, rows);
            let odd = self.products::<S, M, 1>(simd, x, codes, rows);
            let scales = [simd.load(&scales[0][span][rows[0]..]), simd.load(&scales[1][span][rows[1]..])];
            for m in 0..M {
                for (v, (panel, row)) in places.into_iter().enumerate() {
                    let total = &mut sums[m].0[panel * ROWS + row..];
                    let sum = simd.mul_add(simd.add(even[m][v], odd[m][v]), scales[v], simd.load(total));
                    simd.store(sum, total);
                }
            }
        }
        if self.is_last {
            for (scaling, sums) in scalings.iter().zip(sums) {
                let [a, b] = scaling.back().map(|factor| simd.splat(factor));
                for (panel, row) in places {
                    let total = &mut sums.0[panel * ROWS + row..];
                    simd.store(simd.mul(simd.mul(simd.load(total), a), b), total);
                }
            }
        }
    }

    /// The sums of a span's products at every second place, from `FIRST` on.
    #[inline(always)]
    fn products<S: Simd, const M: usize, const FIRST: usize>(
        &self,
        simd: S,
        x: &[[f32; M]; SPAN],
        codes: [&Span; VECTORS],
        rows: [usize; VECTORS],
    ) -> [[S::V; VECTORS]; M] {
        let mut sums = [[simd.splat(0.0); VECTORS]; M];
        let [first, second] = [codes[0].as_chunks::<2>().0, codes[1].as_chunks::<2>().0];
        let codes = first[..self.pairs].iter().zip(&second[..self.pairs]);
        for (x, (first, second)) in x.as_chunks::<2>().0.iter().zip(codes) {
            let codes = [simd.load(&first[FIRST][rows[0]..]), simd.load(&second[FIRST][rows[1]..])];
            for (sums, &x) in sums.iter_mut().zip(&x[FIRST]) {
                let x = simd.splat(x);
                for (sum, code) in sums.iter_mut().zip(codes) {
                    *sum = simd.mul_add(code, x, *sum);
                }
            }
        }
        sums
    }
}

/// The values of a span's codes.
#[inline(always)]
fn decode<S: Simd>(simd: S, codes: &[[u8; 64]; 8], out: &mut Span) {
    for row in (0..ROWS).step_by(S::LANES) {
        for (codes, out) in codes.iter().zip(out.as_chunks_mut::<4>().0) {
            let values = of_quad(simd, simd.load_bytes(&codes[4 * row..]));
            for (v, out) in values.into_iter().zip(out) {
                simd.store(v, &mut out[row..]);
            }
        }
    }
}
