//! Products in f32, for weights in [panels](crate::panels) whose codes are e4m3: shifts make the
//! bits of an f32 of a code, 2^-120 of its value ([`Simd::e4m3`]), so that no table and no branch
//! stands between memory and a fused operation. x is not rounded. One row multiplies what it reads
//! at once ([`row`]); for more a chunk of two panels is decoded to the first-level cache, and all
//! rows of x pass over it, a few at a time ([`tile`]).

mod activations;
mod row;
#[cfg(test)]
mod tests;
mod tile;

use super::panels::{Chunks, Method, Piece, Sums, TALLEST, by_chunks};
use crate::Cpu;
use crate::panels::{Layout, Unpack};
use crate::simd::{Kernel, Simd};
use activations::Activations;
use row::Row;
use std::ops::Range;
use std::sync::Arc;
use tile::Values;
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) use tile::of_quad;

/// The ratio of a code's value to [`Simd::e4m3`]; 2 besides, because the scales of panels are
/// halves.
const TWICE_UNIT: f32 = f32::from_bits((127 + 121) << 23);

/// By fused operations.
pub(super) struct Minifloat;

impl Method for Minifloat {
    type X = Activations;
    const MAX_M: usize = 256;
    const HEIGHT: usize = TALLEST;
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

struct Product<'a, 'y>(Piece<'a, 'y, Activations>);

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Piece { weight, epilogue, x, m, panel, y } = self.0;
        if let Some(x) = x.scaled() {
            return simd.call(Row { weight, epilogue, panel, x, y });
        }
        let k = weight.layout.k();
        by_chunks(simd, &mut Decoded { weight, x, values: Values::new() }, (m, panel), (k, epilogue), y);
    }
}

/// A chunk of a few panels, and what it multiplies.
struct Decoded<'a> {
    weight: Unpack<'a>,
    x: &'a Activations,
    values: Box<Values>,
}

impl Chunks for Decoded<'_> {
    #[inline(always)]
    fn unpack<S: Simd>(&mut self, simd: S, panels: Range<usize>, k: usize) {
        self.values.decode(simd, &self.weight, panels, k);
    }

    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, tile: (usize, usize), k: usize, sums: &mut [Sums]) {
        self.values.multiply(simd, self.x.tile(tile, k), sums);
    }
}
