//! Products in f32, for weights in [panels](crate::panels) whose codes are e4m3: shifts make the
//! bits of an f32 of a code, 2^-120 of its value ([`Simd::e4m3`]), so that no table and no branch
//! stands between memory and a fused operation. x is not rounded. One row multiplies what it reads
//! at once ([`row`]); for more a chunk of two panels is decoded to the first-level cache, and all
//! rows of x pass over it, a few at a time ([`tile`]).
//!
//! Both add up alike, so that a row has the same bits alone and among others: of each span the
//! products of even and of odd places, whose sum, times the scale, is added to the total.

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

/// The ratio of a code's value to [`Simd::e4m3`].
const UNIT: f32 = f32::from_bits((127 + 120) << 23);

/// The codes' values, four in each lane.
#[inline(always)]
pub(super) fn of_quad<S: Simd>(simd: S, codes: S::I) -> [S::V; 4] {
    let unit = simd.splat(UNIT);
    [simd.e4m3::<0>(codes), simd.e4m3::<1>(codes), simd.e4m3::<2>(codes), simd.e4m3::<3>(codes)]
        .map(|code| simd.mul(code, unit))
}

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
        if let Some(x) = x.only_row() {
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
