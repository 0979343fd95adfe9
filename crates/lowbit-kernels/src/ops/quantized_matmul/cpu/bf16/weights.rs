//! A stretch of a weight's panels, decoded to tiles of bf16.

use super::super::minifloat::of_quad;
use super::{DEPTH, STEPS};
use crate::panels::{CHUNK, Chunk, PANELS, ROWS, SPAN, Unpack};
use crate::simd::Simd;
use crate::simd::tiles::{Pairs, STEP};
use std::ops::Range;

const _: () = assert!(SPAN == STEP && ROWS == 16 && DEPTH.is_multiple_of(CHUNK));
/// Steps of a chunk.
const CHUNK_STEPS: usize = CHUNK / STEP;

/// Up to [`DEPTH`] values of the rows of up to [`PANELS`] panels.
pub(super) struct Stretch {
    chunk: Box<Chunk>,
    /// `[panel][step]`
    tiles: Box<[[Pairs; STEPS]; PANELS]>,
    panels: usize,
    steps: usize,
}

impl Stretch {
    pub fn new() -> Self {
        let tiles = bytemuck::allocation::zeroed_box();
        Self { chunk: Chunk::new(), tiles, panels: 0, steps: 0 }
    }

    /// How many panels there are.
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
        let layout = &weight.layout;
        self.panels = panels.len();
        self.steps = layout.spans().saturating_sub(k / SPAN).min(STEPS);
        for first in (0..self.steps).step_by(CHUNK_STEPS) {
            let steps = CHUNK_STEPS.min(self.steps - first);
            let start = k + first * STEP;
            weight.unpack(simd, panels.start, panels.len(), start, &mut self.chunk);
            let (group, len) = (layout.group(), layout.k().saturating_sub(start));
            // Of a step: 1 or 2.
            let groups = STEP / group;
            for panel in 0..panels.len() {
                // A row of nvfp4 may end in the middle of a span, where the scales' place was not written.
                if len < steps * STEP {
                    self.chunk.panels[panel].scales[len.div_ceil(group)..].fill([0.0; ROWS]);
                }
                let codes = self.chunk.codes[panel].as_chunks::<8>().0;
                let tiles = self.tiles[panel][first..].iter_mut().zip(codes).take(steps).enumerate();
                for (step, (tile, codes)) in tiles {
                    let groups = step * groups..(step + 1) * groups;
                    let scales = &self.chunk.panels[panel].scales[groups.clone()];
                    let biases = &self.chunk.panels[panel].biases[groups];
                    match (layout.minifloat(), scales) {
                        (true, _) => floats_to_bf16(simd, codes, &scales[0], tile),
                        (_, [_]) => to_bf16::<S, 8>(simd, layout.zero(), codes, (scales, biases), tile),
                        _ => to_bf16::<S, 4>(simd, layout.zero(), codes, (scales, biases), tile),
                    }
                }
            }
        }
    }
}

/// A tile of e4m3 codes times one group's scales.
#[inline(always)]
fn floats_to_bf16<S: Simd>(simd: S, codes: &[[u8; 4 * ROWS]; 8], scales: &[f32; ROWS], tile: &mut Pairs) {
    for row in (0..ROWS).step_by(S::LANES) {
        let scale = simd.load(&scales[row..]);
        for (codes, pairs) in codes.iter().zip(tile.0.as_chunks_mut::<2>().0) {
            let [a, b, c, d] = of_quad(simd, simd.load_bytes(&codes[4 * row..]), scale);
            simd.store_bf16_pairs(a, b, &mut pairs[0][row..]);
            simd.store_bf16_pairs(c, d, &mut pairs[1][row..]);
        }
    }
}

/// A tile of `(code - zero) * scale + bias`; the scales and biases are of groups of `QUADS` quads, which the tile has one or two of.
/// `zero * scale` is exact where nothing is added, so that the sum is what the format decodes to.
#[inline(always)]
fn to_bf16<S: Simd, const QUADS: usize>(
    simd: S,
    zero: i32,
    codes: &[[u8; 4 * ROWS]; 8],
    (scales, biases): (&[[f32; ROWS]], &[[f32; ROWS]]),
    tile: &mut Pairs,
) {
    let minus_zero = simd.splat(-zero as f32);
    for row in (0..ROWS).step_by(S::LANES) {
        let groups = scales.iter().zip(biases).zip(codes.as_chunks::<QUADS>().0);
        let tiles = tile.0.as_chunks_mut::<2>().0.as_chunks_mut::<QUADS>().0;
        for (((scale, bias), codes), tile) in groups.zip(tiles) {
            let scale = simd.load(&scale[row..]);
            let offset = simd.mul_add(minus_zero, scale, simd.load(&bias[row..]));
            for (codes, pairs) in codes.iter().zip(tile) {
                let codes = simd.load_bytes(&codes[4 * row..]);
                let first = simd.mul_add(simd.byte::<0>(codes), scale, offset);
                let second = simd.mul_add(simd.byte::<1>(codes), scale, offset);
                simd.store_bf16_pairs(first, second, &mut pairs[0][row..]);
                let first = simd.mul_add(simd.byte::<2>(codes), scale, offset);
                let second = simd.mul_add(simd.byte::<3>(codes), scale, offset);
                simd.store_bf16_pairs(first, second, &mut pairs[1][row..]);
            }
        }
    }
}
