//! The product of panels and one row of x. It is bound by memory: what is read is multiplied at
//! once, from two strips of panels in turn, as in `int8/row.rs`.
//!
//! Floor: 64 codes are a vector that is read and take 11 shifts and masks and 4 fused operations,
//! and a span of 512 codes one more for the scales: two vector operations for each 8 bytes that a
//! core reads in a cycle.

use super::super::panels::{Epilogue, STRIPS, Strips, by_strips};
use super::activations;
use crate::panels::{CHUNK, PanelScales, ROWS, SPAN, Unpack, ask_ahead};
use crate::simd::{Kernel, Simd};

/// Sums of a span that do not wait for each other.
const SUMS: usize = 2;

/// `y[n] = sum over k of x[k] * weight[n, k]` of the panels from `panel` on.
pub(super) struct Row<'a, 'y> {
    pub weight: Unpack<'a>,
    pub epilogue: Epilogue,
    pub panel: usize,
    pub x: activations::Row<'a>,
    pub y: &'a mut [&'y mut [f32]],
}

impl Kernel for Row<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { weight, epilogue, panel, x, y } = self;
        let scales = Box::new([const { PanelScales::new() }; STRIPS]);
        by_strips(simd, Panels { weight, panel, x, scales }, epilogue, y);
    }
}

/// A [`Row`] without its result, and where its scales are unpacked.
struct Panels<'a> {
    weight: Unpack<'a>,
    panel: usize,
    x: activations::Row<'a>,
    scales: Box<[PanelScales; STRIPS]>,
}

impl Strips<1> for Panels<'_> {
    #[inline(always)]
    fn sums<S: Simd, const PARTS: usize>(
        &mut self,
        simd: S,
        panels: [usize; STRIPS],
    ) -> [[[S::V; 1]; PARTS]; STRIPS] {
        let mut totals = [[simd.splat(0.0); PARTS]; STRIPS];
        for k in (0..self.weight.layout.k()).step_by(CHUNK) {
            let spans = self.weight.spans(k);
            let count = spans.len();
            for (scales, panel) in self.scales.iter_mut().zip(panels) {
                self.weight.unpack_scales(simd, self.panel + panel, k, scales);
            }
            let packed = [
                &self.weight.packed::<8>(self.panel + panels[0], spans.clone())[..count],
                &self.weight.packed::<8>(self.panel + panels[1], spans)[..count],
            ];
            let x = &self.x.values[k..].as_chunks::<SPAN>().0[..count];
            for span in 0..count {
                // Written out: in a loop the sums would live in memory.
                let [first, second] = &mut totals;
                add(simd, &packed[0][span], &x[span], &self.scales[0].scales[span], first);
                add(simd, &packed[1][span], &x[span], &self.scales[1].scales[span], second);
            }
        }
        let [a, b] = self.x.scaling.back().map(|factor| simd.splat(factor));
        for total in totals.as_flattened_mut() {
            *total = simd.mul(simd.mul(*total, a), b);
        }
        totals.map(|parts| parts.map(|total| [total]))
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
    ask_ahead::<S, 8>(simd, packed, 0..8);
    for (codes, x) in packed.iter().zip(x.as_chunks::<4>().0) {
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
