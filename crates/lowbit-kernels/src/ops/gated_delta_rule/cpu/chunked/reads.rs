//! Products of a chunk's keys and queries with the state: `S^T k` and `S^T q`.

use super::State;
use crate::gemm::{DEPTH, Left, Packed, Rows, accumulate};
use crate::simd::Simd;
use bytemuck::Zeroable;

/// A way to compute them. (Not closures: kernels' vectors may only pass through what is always
/// inlined.)
pub(super) trait Reads {
    /// A tile of the second layout that the state is kept in, besides its numbers.
    type Tile: Clone + Zeroable;

    /// Tiles of a strip of the state.
    fn tiles(&self) -> usize;

    /// Takes a chunk's keys and queries, `[2 CHUNK, Dk]`.
    fn take<S: Simd>(&mut self, simd: S, keys: &Packed);

    /// Takes `M` rows of a strip, from row `first` on, into its tiles.
    fn take_state<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        rows: &[[S::V; V]; M],
        first: usize,
        tiles: &mut [Self::Tile],
    );

    /// Begins with a strip of so many columns.
    fn begin(&mut self, width: usize, tiles: &[Self::Tile]);

    /// `S^T x` of `M` rows x of `keys`, from row `first` on, for the strip that was begun with.
    fn read<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        keys: &Packed,
        first: usize,
        state: &State<'_, Self::Tile>,
    ) -> [[S::V; V]; M];
}

/// In f32, by vectors.
pub(super) struct ByVectors {
    pub key_dim: usize,
}

impl Reads for ByVectors {
    type Tile = ();

    fn tiles(&self) -> usize {
        0
    }

    #[inline(always)]
    fn take<S: Simd>(&mut self, _: S, _: &Packed) {}

    #[inline(always)]
    fn take_state<S: Simd, const M: usize, const V: usize>(
        &self,
        _: S,
        _: &[[S::V; V]; M],
        _: usize,
        _: &mut [()],
    ) {
    }

    #[inline(always)]
    fn begin(&mut self, _: usize, _: &[()]) {}

    #[inline(always)]
    fn read<S: Simd, const M: usize, const V: usize>(
        &self,
        simd: S,
        keys: &Packed,
        first: usize,
        &State { ref rows, stride, .. }: &State<'_, ()>,
    ) -> [[S::V; V]; M] {
        let mut sums = [[simd.splat(0.0); V]; M];
        for start in (0..self.key_dim).step_by(DEPTH) {
            let left = keys.rows::<M>(first, start);
            let count = DEPTH.min(self.key_dim - start);
            let right = Rows { rows: &rows[start * stride..], stride, count };
            accumulate::<S, M, V, DEPTH>(simd, &mut sums, &left, right);
        }
        sums
    }
}
