//! The product of a chunk of two panels and a few rows of x. Floor: a fused operation per vector of
//! weight rows, value and row of x.

use super::activations::Tile;
use super::{Sums, TWICE_UNIT};
use crate::panels::{CHUNK, PANELS, PanelScales, ROWS, SPAN, Unpack, ask_ahead};
use crate::simd::Simd;
use std::ops::Range;

/// Vectors of weight rows in a tile.
const VECTORS: usize = 2;

/// Up to [`CHUNK`] values of each row of [`PANELS`] panels, decoded: `[panel][k][row]`, and how
/// many there are.
#[repr(C, align(64))]
pub(super) struct Values {
    values: [[[f32; ROWS]; CHUNK]; PANELS],
    scales: PanelScales,
    panels: usize,
    len: usize,
}

impl Values {
    pub fn new() -> Box<Self> {
        let values = [[[0.0; ROWS]; CHUNK]; PANELS];
        Box::new(Self { values, scales: PanelScales::new(), panels: 0, len: 0 })
    }

    /// Decodes the values from `k` on of these panels.
    #[inline(always)]
    pub fn decode<S: Simd>(&mut self, simd: S, weight: &Unpack<'_>, panels: Range<usize>, k: usize) {
        let spans = weight.spans(k);
        (self.panels, self.len) = (panels.len(), spans.len() * SPAN);
        for (panel, values) in panels.zip(&mut self.values) {
            weight.unpack_scales(simd, panel, k, &mut self.scales);
            let packed = weight.packed::<8>(panel, spans.clone()).iter().zip(&self.scales.scales);
            for ((packed, scales), values) in packed.zip(values.as_chunks_mut::<SPAN>().0) {
                ask_ahead::<S, 8>(simd, packed, 0..8);
                decode(simd, packed, scales, values);
            }
        }
    }

    /// `sums[m][n] += sum over k of x[m, k] * weight[n, k]` for the chunk's values k.
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
        // The panel of each vector, and its first row there. A panel that is not there gives sums
        // that nobody reads.
        let place = |v: usize| ((panel + v * S::LANES / ROWS) % PANELS, v * S::LANES % ROWS);
        let places: [(usize, usize); VECTORS] = std::array::from_fn(place);
        let mut totals = [[simd.splat(0.0); VECTORS]; M];
        for (totals, sums) in totals.iter_mut().zip(&*sums) {
            for (total, (panel, row)) in totals.iter_mut().zip(places) {
                *total = simd.load(&sums.0[panel * ROWS + row..]);
            }
        }
        let [first, second] = places.map(|(panel, row)| (&self.values[panel][..self.len], row));
        for ((x, a), b) in x.values.as_chunks::<M>().0.iter().zip(first.0).zip(second.0) {
            let weight = [simd.load(&a[first.1..]), simd.load(&b[second.1..])];
            for (totals, &x) in totals.iter_mut().zip(x) {
                let x = simd.splat(x);
                for (total, weight) in totals.iter_mut().zip(weight) {
                    *total = simd.mul_add(x, weight, *total);
                }
            }
        }
        for (totals, sums) in totals.iter().zip(sums) {
            for (total, (panel, row)) in totals.iter().zip(places) {
                simd.store(*total, &mut sums.0[panel * ROWS + row..]);
            }
        }
    }
}

/// The values of a span.
#[inline(always)]
fn decode<S: Simd>(simd: S, codes: &[[u8; 64]; 8], scales: &[f32; ROWS], out: &mut [[f32; ROWS]; SPAN]) {
    for row in (0..ROWS).step_by(S::LANES) {
        let scale = simd.load(&scales[row..]);
        for (codes, out) in codes.iter().zip(out.as_chunks_mut::<4>().0) {
            let values = of_quad(simd, simd.load_bytes(&codes[4 * row..]), scale);
            for (v, out) in values.into_iter().zip(out) {
                simd.store(v, &mut out[row..]);
            }
        }
    }
}

/// The four values of each lane, as the format decodes them; `scale` are halves of scales.
#[inline(always)]
pub(in super::super) fn of_quad<S: Simd>(simd: S, codes: S::I, scale: S::V) -> [S::V; 4] {
    let unit = simd.splat(TWICE_UNIT);
    [simd.e4m3::<0>(codes), simd.e4m3::<1>(codes), simd.e4m3::<2>(codes), simd.e4m3::<3>(codes)]
        .map(|code| simd.mul(simd.mul(code, unit), scale))
}
