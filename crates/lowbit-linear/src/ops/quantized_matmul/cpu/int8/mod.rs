//! Products in integers, for weights in [panels](crate::panels): x is rounded to 8 bits per group
//! ([`activations`]), a chunk of a few panels is unpacked to bytes in the first-level cache, and
//! all rows of x pass over it, a few at a time ([`tile`]). A single row, or a few, multiply what is
//! unpacked at once ([`row`]). These are the kernels for all formats.

mod activations;
mod row;
mod tile;

use super::panels::{Chunks, Method, Piece, Sums, TALLEST, by_chunks};
use crate::Cpu;
use crate::panels::{Chunk, Layout, PANELS, PanelScales, Unpack};
use crate::simd::{Kernel, Simd};
use activations::Activations;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use tile::Weight;

/// By dot products of bytes.
pub(super) struct Int8;

impl Method for Int8 {
    type X = Activations;
    const MAX_M: usize = 256;
    const HEIGHT: usize = TALLEST;
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

struct Product<'a, 'y>(Piece<'a, 'y, Activations>);

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if let Some(tiles) = self.0.x.few() {
            return row::multiply(simd, self.0, tiles);
        }
        let Piece { weight, epilogue, x, m, panel, y } = self.0;
        let mut unpacked = Unpacked { weight, x, chunk: Chunk::new(), panels: 0, ahead: Cell::default() };
        by_chunks(simd, &mut unpacked, (m, panel), (weight.layout.k(), epilogue), y);
    }
}

/// A chunk of a few panels, and what it multiplies.
struct Unpacked<'a> {
    weight: Unpack<'a>,
    x: &'a Activations,
    chunk: Box<Chunk>,
    panels: usize,
    /// The codes of the panels' next chunk, which the first tile asks for while it multiplies.
    ahead: Cell<[&'a [u8]; PANELS]>,
}

impl Chunks for Unpacked<'_> {
    #[inline(always)]
    fn unpack<S: Simd>(&mut self, simd: S, panels: Range<usize>, k: usize) {
        self.panels = panels.len();
        // Requests that unpacking makes at once have to wait for each other; for wide codes there
        // are too many of them.
        if self.weight.layout.bits() > 4 {
            self.ahead.set(std::array::from_fn(|at| self.weight.next_codes(panels.start + at, k)));
        }
        self.weight.unpack(simd, panels.start, panels.len(), k, &mut self.chunk);
        if self.weight.layout.long_scales() {
            self.chunk.panels.iter_mut().for_each(PanelScales::cut);
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, tile: (usize, usize), k: usize, sums: &mut [Sums]) {
        let x = self.x.tile(tile).chunk(k, self.weight.layout.group());
        let weight = Weight::new(&self.weight.layout, &self.chunk, self.ahead.take());
        weight.multiply(simd, self.panels, x, sums);
    }
}
