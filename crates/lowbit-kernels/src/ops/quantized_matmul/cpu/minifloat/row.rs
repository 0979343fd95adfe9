//! The product of panels and one row of x. It is bound by memory: what is read is multiplied at once, from two strips of panels in
//! turn, as in `int8/row.rs`.
//!
//! Floor: 64 codes are a vector that is read and take 11 shifts and masks and 4 fused operations, and a span of 512 codes one more
//! for the scales: two vector operations for each 8 bytes that a core reads in a cycle.

use super::activations::Scaled;
use crate::panels::{CHUNK, PanelScales, ROWS, SPAN, Unpack, half_span};
use crate::simd::{Kernel, Simd};

/// Strips that are read side by side.
const STRIPS: usize = 2;
/// Sums of a span that do not wait for each other.
const SUMS: usize = 2;

/// `y[n] = sum over k of x[k] * weight[n, k]` of the panels from `panel` on.
pub(super) struct Row<'a, 'y> {
    pub weight: Unpack<'a>,
    pub panel: usize,
    pub x: Scaled<'a>,
    pub y: &'y mut [f32],
}

impl Kernel for Row<'_, '_> {
    type Output = ();

    /// Each panel's rows are in one vector or two.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if S::LANES == ROWS {
            self.strips::<S, 1>(simd);
        } else {
            self.strips::<S, 2>(simd);
        }
    }
}

impl Row<'_, '_> {
    #[inline(always)]
    fn strips<S: Simd, const PARTS: usize>(self, simd: S) {
        assert_eq!(PARTS * S::LANES, ROWS, "a panel's rows in whole vectors");
        let mut scales = Box::new([const { PanelScales::new() }; STRIPS]);
        let back = self.x.scaling.back().map(|factor| simd.splat(factor));
        let count = self.y.len().div_ceil(ROWS);
        let strip = count.div_ceil(STRIPS);
        for first in 0..strip {
            // Where strips are shorter the last panel stands in for the one that is not there.
            let panels: [usize; STRIPS] = std::array::from_fn(|i| (i * strip + first).min(count - 1));
            let sums = self.panels::<S, PARTS>(simd, panels, &mut scales);
            for (panel, sums) in panels.into_iter().zip(sums) {
                for (sum, y) in sums.into_iter().zip(self.y[panel * ROWS..].chunks_mut(S::LANES)) {
                    let sum = back.iter().fold(sum, |sum, &factor| simd.mul(sum, factor));
                    simd.store_partial(sum, y);
                }
            }
        }
    }

    #[inline(always)]
    fn panels<S: Simd, const PARTS: usize>(
        &self,
        simd: S,
        panels: [usize; STRIPS],
        scales: &mut [PanelScales; STRIPS],
    ) -> [[S::V; PARTS]; STRIPS] {
        let mut totals = [[simd.splat(0.0); PARTS]; STRIPS];
        for k in (0..self.weight.layout.k()).step_by(CHUNK) {
            let spans = self.weight.spans(k);
            let count = spans.len();
            for (scales, panel) in scales.iter_mut().zip(panels) {
                self.weight.unpack_scales(simd, self.panel + panel, k, scales);
            }
            let packed =
                panels.map(|panel| &self.weight.packed::<8>(self.panel + panel, spans.clone())[..count]);
            let x = &self.x.values[k..].as_chunks::<SPAN>().0[..count];
            for span in 0..count {
                // Written out: in a loop the sums would live in memory.
                let [first, second] = &mut totals;
                add(simd, &packed[0][span], &x[span], &scales[0].scales[span], first);
                add(simd, &packed[1][span], &x[span], &scales[1].scales[span], second);
            }
        }
        totals
    }
}

/// Adds to `totals` the products of one panel's span.
#[inline(always)]
fn add<S: Simd, const PARTS: usize>(
    simd: S,
    packed: &[[u8; 64]; 8],
    x: &[f32; SPAN],
    scales: &[f32; ROWS],
    totals: &mut [S::V; PARTS],
) {
    let mut sums = [[simd.splat(0.0); PARTS]; SUMS];
    let (first, second) = (half_span::<S, 8, 0>(simd, packed), half_span::<S, 8, 4>(simd, packed));
    for (codes, x) in first.iter().chain(&second).zip(x.as_chunks::<4>().0) {
        let x = x.map(|x| simd.splat(x));
        for part in 0..PARTS {
            let codes = simd.load_bytes(&codes[4 * part * S::LANES..]);
            sums[0][part] = simd.mul_add(simd.e4m3::<0>(codes), x[0], sums[0][part]);
            sums[1][part] = simd.mul_add(simd.e4m3::<1>(codes), x[1], sums[1][part]);
            sums[0][part] = simd.mul_add(simd.e4m3::<2>(codes), x[2], sums[0][part]);
            sums[1][part] = simd.mul_add(simd.e4m3::<3>(codes), x[3], sums[1][part]);
        }
    }
    for (part, total) in totals.iter_mut().enumerate() {
        let scale = simd.load(&scales[part * S::LANES..]);
        *total = simd.mul_add(simd.add(sums[0][part], sums[1][part]), scale, *total);
    }
}
