//! Products in integers, for weights in [panels](crate::panels): x is rounded to 8 bits per group ([`activations`]), a
//! chunk of a few panels is unpacked to bytes in the first-level cache, and all rows of x pass over it, a few at a time
//! ([`tile`]). A single row multiplies what is unpacked at once ([`row`]). These are the kernels for all formats.

mod activations;
mod row;
mod tile;

use super::panels::{Method, Piece, WIDTH};
use crate::Cpu;
use crate::panels::{CHUNK, Chunk, Layout, PanelScales, ROWS};
use crate::simd::{Kernel, Simd};
use activations::Activations;
use row::Row;
use std::sync::Arc;
pub(super) use tile::{TALLEST, heights, tallest};

/// By dot products of bytes.
pub(super) struct Int8;

impl Method for Int8 {
    type X = Activations;
    const MAX_M: usize = 256;
    const HEIGHT: usize = tile::TALLEST;
    const GRAIN: usize = 1 << 19;
    const UNPACK: usize = 4;
    const RATE: usize = 320;

    fn round(&self, cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Activations {
        Activations::new(cpu, x, m, layout)
    }

    type Key = (i32, usize, bool);
    fn key(layout: &Layout) -> Self::Key {
        (layout.zero(), layout.group(), layout.narrow())
    }

    fn multiply(&self, cpu: &Arc<Cpu>, piece: Piece<'_, '_, Activations>) {
        cpu.isa().dispatch(Product(piece));
    }
}

/// A row of x times the rows of [`PANELS`] panels.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([f32; WIDTH]);

struct Product<'a, 'y>(Piece<'a, 'y, Activations>);

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { weight, x, m: first_m, panel: first_panel, y } = self.0;
        let (m, n, k) = (y.len(), y[0].len(), weight.layout.k());
        if let [y] = y {
            return Row { weight, panel: first_panel, x: x.row(first_m) }.multiply(simd, y);
        }
        let mut chunk = Chunk::new();
        let mut sums = vec![Sums([0.0; WIDTH]); m];
        for first in (0..n).step_by(WIDTH) {
            let width = WIDTH.min(n - first);
            let panels = width.div_ceil(ROWS);
            sums.fill(Sums([0.0; WIDTH]));
            let panel = first_panel + first / ROWS;
            for start in (0..k).step_by(CHUNK) {
                weight.unpack(simd, panel, panels, start, &mut chunk);
                if weight.layout.long_scales() {
                    chunk.panels.iter_mut().for_each(PanelScales::cut);
                }
                for tile in x.tiles(simd, first_m..first_m + m, start) {
                    let at = tile.row - first_m;
                    tile::multiply(simd, &weight.layout, &chunk, panels, tile, &mut sums[at..]);
                }
            }
            for (y, sums) in y.iter_mut().zip(&sums) {
                let y = &mut y[first..][..width];
                for (y, sums) in y.chunks_mut(S::LANES).zip(sums.0.chunks_exact(S::LANES)) {
                    simd.store_partial(simd.load(sums), y);
                }
            }
        }
    }
}
