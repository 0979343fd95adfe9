//! Products with the state on a unit that multiplies tiles of bf16 ([`tiles`](crate::simd::tiles)):
//! keys and queries, which are two tiles of rows, times two tiles of columns of the state. They and
//! the state are rounded to bf16 for that, to nearest even; sums are f32, and the state that is
//! kept is f32, too.

use super::reads::Reads;
use super::{CHUNK, Chunked, State};
use crate::gemm::{DEPTH, Packed};
use crate::simd::Simd;
use crate::simd::tiles::{Ahead, Block, Pairs, STEP, Start, TILE, TileKernel, Tiles};
use bytemuck::Zeroable;

impl TileKernel for Chunked<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, T: Tiles>(self, simd: S, unit: &mut T) {
        let key_dim = self.problem.dims.key_dim;
        self.reading(simd, InTiles::new(unit, key_dim));
    }
}

struct InTiles<'t, T> {
    unit: &'t mut T,
    /// `[keys, then queries][step of Dk]`
    keys: Vec<Pairs>,
    /// Of the strip: `[keys, then queries][16 columns]`.
    sums: Block,
}

impl<'t, T: Tiles> InTiles<'t, T> {
    fn new(unit: &'t mut T, key_dim: usize) -> Self {
        let keys = vec![Pairs::zeroed(); 2 * key_dim.div_ceil(STEP)];
        Self { unit, keys, sums: Block::zeroed() }
    }

    /// Of `Dk`.
    fn steps(&self) -> usize {
        self.keys.len() / 2
    }
}

impl<T: Tiles> Reads for InTiles<'_, T> {
    /// `[16 columns][step of Dk]`
    type Tile = Pairs;

    fn tiles(&self) -> usize {
        2 * self.steps()
    }

    #[inline(always)]
    fn take<S: Simd>(&mut self, simd: S, keys: &Packed) {
        const { assert!(CHUNK == TILE && DEPTH.is_multiple_of(STEP)) };
        let steps = self.steps();
        for (row, tiles) in self.keys.chunks_exact_mut(steps).enumerate() {
            for (step, tile) in tiles.iter_mut().enumerate() {
                let (block, column) = (keys.block(step * STEP / DEPTH), step * STEP % DEPTH);
                for (x, out) in block[row * TILE..].iter().zip(&mut tile.0) {
                    let (x, out) = (&x[column..][..STEP], out.as_flattened_mut());
                    for at in (0..STEP).step_by(S::LANES) {
                        simd.store_bf16(simd.load(&x[at..]), &mut out[at..]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn take_state<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        rows: &[[S::V; V]; M],
        first: usize,
        tiles: &mut [Pairs],
    ) {
        for (pair, [even, odd]) in rows.as_chunks::<2>().0.iter().enumerate() {
            let row = first + 2 * pair;
            for (n, (&even, &odd)) in even.iter().zip(odd).enumerate() {
                let column = n * S::LANES;
                let tile = &mut tiles[column / TILE * self.steps() + row / STEP];
                simd.store_bf16_pairs(even, odd, &mut tile.0[row % STEP / 2][column % TILE..]);
            }
        }
    }

    #[inline(always)]
    fn begin(&mut self, width: usize, tiles: &[Pairs]) {
        let (keys, queries) = self.keys.split_at(self.steps());
        let (first, second) = tiles.split_at(self.steps());
        let sums = &mut self.sums;
        if width > TILE {
            self.unit.multiply([keys, queries], [first, second], sums, Start::Zero, Ahead::default());
        } else {
            self.unit.multiply([keys, queries], [first], sums, Start::Zero, Ahead::default());
        }
    }

    #[inline(always)]
    fn read<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        _: &Packed,
        first: usize,
        _: &State<'_, Pairs>,
    ) -> [[S::V; V]; M] {
        let mut sums = [[simd.splat(0.0); V]; M];
        for (row, sums) in (first..).zip(&mut sums) {
            for (n, sum) in sums.iter_mut().enumerate() {
                let column = n * S::LANES;
                let tile = &self.sums[row / TILE][column / TILE];
                *sum = simd.load(&tile.0[row % TILE][column % TILE..]);
            }
        }
        sums
    }
}
