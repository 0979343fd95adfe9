//! Products in f32, for weights in [panels](crate::panels) whose codes are e4m3: shifts make the bits of an f32 of a code, 2^-120 of
//! its value ([`Simd::e4m3`]), so that no table and no branch stands between memory and a fused operation. x is not rounded. One row
//! multiplies what it reads at once ([`row`]); for more a chunk of two panels is decoded to the first-level cache, and all rows of
//! x pass over it, a few at a time ([`tile`]).

mod activations;
mod row;
#[cfg(test)]
mod tests;
mod tile;

use super::panels::{Method, Piece, WIDTH};
use crate::Cpu;
use crate::panels::{CHUNK, Layout, ROWS};
use crate::simd::{Kernel, Simd};
use activations::Activations;
use row::Row;
use std::sync::Arc;
use tile::Values;
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) use tile::of_quad;

/// What a code's value is times [`Simd::e4m3`]; 2 besides, because the scales of panels are halves.
const TWICE_UNIT: f32 = f32::from_bits((127 + 121) << 23);

/// By fused operations.
pub(super) struct Minifloat;

impl Method for Minifloat {
    type X = Activations;
    const MAX_M: usize = 256;
    const HEIGHT: usize = tile::TALLEST;
    const GRAIN: usize = 1 << 18;
    const UNPACK: usize = 4;
    const RATE: usize = 130;

    fn round(&self, cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Activations {
        Activations::new(cpu, x, m, layout.k())
    }

    type Key = ();
    fn key(_: &Layout) {}

    fn multiply(&self, cpu: &Arc<Cpu>, piece: Piece<'_, '_, Activations>) {
        cpu.isa().dispatch(Product(piece));
    }
}

/// A row of x times the rows of two panels.
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
        if let Some(x) = x.scaled() {
            return simd.call(Row { weight, panel: first_panel, x, y: y[0] });
        }
        let mut values = Values::new();
        let mut sums = vec![Sums([0.0; WIDTH]); m];
        for first in (0..n).step_by(WIDTH) {
            let width = WIDTH.min(n - first);
            let panel = first_panel + first / ROWS;
            sums.fill(Sums([0.0; WIDTH]));
            for start in (0..k).step_by(CHUNK) {
                values.decode(simd, &weight, panel..panel + width.div_ceil(ROWS), start);
                for tile in x.tiles(simd, first_m..first_m + m, start) {
                    values.multiply(simd, tile, &mut sums[tile.row - first_m..]);
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
