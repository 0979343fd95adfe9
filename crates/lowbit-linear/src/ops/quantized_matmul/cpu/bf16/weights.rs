//! A stretch of a weight's panels, decoded to tiles of bf16.

use super::super::minifloat::of_quad;
use super::{DEPTH, STEPS};
use crate::panels::{CHUNK, PANELS, PanelScales, ROWS, SPAN, Unpack, with_bits};
use crate::simd::tiles::{Pairs, STEP};
use crate::simd::{Kernel, Simd};
use half::bf16;
use std::ops::Range;

const _: () = assert!(SPAN == STEP && ROWS == 16 && DEPTH.is_multiple_of(CHUNK));
/// Steps of a chunk.
const CHUNK_STEPS: usize = CHUNK / STEP;

/// Up to [`DEPTH`] values of the rows of up to [`PANELS`] panels.
pub(super) struct Stretch {
    /// Of the chunk that is being decoded.
    scales: Box<[PanelScales; PANELS]>,
    /// `[panel][step]`
    tiles: Box<[[Pairs; STEPS]; PANELS]>,
    panels: usize,
    steps: usize,
}

impl Stretch {
    pub fn new() -> Self {
        let scales = Box::new([const { PanelScales::new() }; PANELS]);
        Self { scales, tiles: bytemuck::allocation::zeroed_box(), panels: 0, steps: 0 }
    }

    /// The number of panels.
    pub fn panels(&self) -> usize {
        self.panels
    }

    /// The tiles of a panel, one per step.
    #[inline(always)]
    pub fn tiles(&self, panel: usize) -> &[Pairs] {
        &self.tiles[panel][..self.steps]
    }

    /// Decodes the values from `k` on of these panels.
    #[inline(always)]
    pub fn decode<S: Simd>(&mut self, simd: S, weight: &Unpack<'_>, panels: Range<usize>, k: usize) {
        self.panels = panels.len();
        self.steps = weight.layout.spans().saturating_sub(k / SPAN).min(STEPS);
        simd.call(Decode { stretch: self, weight, first: panels.start, k });
    }
}

/// [`Stretch::decode`], from panel `first` on.
struct Decode<'s, 'a> {
    stretch: &'s mut Stretch,
    weight: &'s Unpack<'a>,
    first: usize,
    k: usize,
}

impl Kernel for Decode<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        with_bits!(self.weight.layout, BITS => self.decode::<S, BITS>(simd));
    }
}

impl Decode<'_, '_> {
    #[inline(always)]
    fn decode<S: Simd, const BITS: usize>(self, simd: S) {
        let Self { stretch: Stretch { scales, tiles, panels, steps }, weight, first, k } = self;
        let (layout, group) = (&weight.layout, weight.layout.group());
        let (zero, minifloat, narrow) = (layout.zero(), layout.minifloat(), layout.narrow());
        // Of a step: 1 or 2.
        let groups = STEP / group;
        for start in (0..*steps).step_by(CHUNK_STEPS) {
            let (k, chunk) = (k + start * STEP, start..(*steps).min(start + CHUNK_STEPS));
            for (panel, scales) in scales[..*panels].iter_mut().enumerate() {
                weight.unpack_scales(simd, first + panel, k, scales);
                // A row of nvfp4 may end in the middle of a span, where the scales' place was not
                // written.
                let len = layout.k() - k;
                if len < chunk.len() * STEP {
                    scales.scales[len.div_ceil(group)..].fill([0.0; ROWS]);
                }
            }
            // Panels take turns: memory is read faster from several places than from one.
            for (at, step) in chunk.enumerate() {
                for (panel, (scales, tiles)) in scales[..*panels].iter().zip(tiles.iter_mut()).enumerate() {
                    let groups = at * groups..(at + 1) * groups;
                    let scales = (&scales.scales[groups.clone()], &scales.biases[groups]);
                    let tile = &mut tiles[step];
                    for row in (0..ROWS).step_by(S::LANES) {
                        let codes = weight.span::<S, BITS>(simd, (first + panel, row), k / SPAN + at);
                        let codes = Rows { row, codes: &codes };
                        match (minifloat, narrow, scales.0) {
                            (true, ..) => codes.floats_to_bf16(simd, &scales.0[0], tile),
                            (_, true, [_]) => codes.to_bf16::<8, true>(simd, zero, scales, tile),
                            (_, true, _) => codes.to_bf16::<4, true>(simd, zero, scales, tile),
                            (_, _, [_]) => codes.to_bf16::<8, false>(simd, zero, scales, tile),
                            _ => codes.to_bf16::<4, false>(simd, zero, scales, tile),
                        }
                    }
                }
            }
        }
    }
}

/// The codes of a span, quad by quad, of the rows from `row` on.
struct Rows<'a, S: Simd> {
    row: usize,
    codes: &'a [S::I; 8],
}

impl<S: Simd> Rows<'_, S> {
    /// These rows of a tile: e4m3 codes times one group's scales.
    #[inline(always)]
    fn floats_to_bf16(&self, simd: S, scales: &[f32; ROWS], tile: &mut Pairs) {
        let half = simd.load(&scales[self.row..]);
        let scale = simd.add(half, half);
        for (&codes, pairs) in self.codes.iter().zip(tile.0.as_chunks_mut::<2>().0) {
            let [a, b, c, d] = of_quad(simd, codes).map(|code| simd.mul(code, scale));
            simd.store_bf16_pairs(a, b, &mut pairs[0][self.row..]);
            simd.store_bf16_pairs(c, d, &mut pairs[1][self.row..]);
        }
    }

    /// These rows of a tile: `(code - zero) * scale + bias`; the scales and biases are of groups of
    /// `QUADS` quads, which the tile has one or two of. `NARROW` codes come as
    /// `(128 + code) / 256`: what is then subtracted, `(128 + zero) * scale`, is exact where
    /// nothing is added and scales have at most 16 bits; else the result is off by at most 2^-16
    /// scales, where rounding to bf16 loses 2^-9 of one.
    #[inline(always)]
    fn to_bf16<const QUADS: usize, const NARROW: bool>(
        &self,
        simd: S,
        zero: i32,
        (scales, biases): (&[[f32; ROWS]], &[[f32; ROWS]]),
        tile: &mut Pairs,
    ) {
        let row = self.row;
        let (factor, zero) = if NARROW { (256.0, zero + 128) } else { (1.0, zero) };
        let (factor, minus_zero) = (simd.splat(factor), simd.splat(-zero as f32));
        let groups = scales.iter().zip(biases).zip(self.codes.as_chunks::<QUADS>().0);
        let tiles = tile.0.as_chunks_mut::<2>().0.as_chunks_mut::<QUADS>().0;
        for (((scale, bias), codes), tile) in groups.zip(tiles) {
            let scale = simd.load(&scale[row..]);
            let offset = simd.twice(simd.mul_add(minus_zero, scale, simd.load(&bias[row..])));
            let scale = simd.twice(simd.mul(factor, scale));
            let decode = |codes: [S::V; 2], pairs: &mut [[bf16; 2]]| {
                let values = std::array::from_fn(|i| simd.mul_add(codes[i], scale[i], offset[i]));
                simd.store_two_bf16(values, pairs.as_flattened_mut());
            };
            for (&codes, pairs) in codes.iter().zip(tile) {
                let [first, second] = if NARROW {
                    [simd.byte_fractions::<0>(codes), simd.byte_fractions::<2>(codes)]
                } else {
                    [simd.byte_pairs::<0>(codes), simd.byte_pairs::<2>(codes)]
                };
                decode(first, &mut pairs[0][row..]);
                decode(second, &mut pairs[1][row..]);
            }
        }
    }
}
