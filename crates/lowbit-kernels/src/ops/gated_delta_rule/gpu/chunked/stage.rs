//! Operands on their way to shared memory: loaded to registers, a chunk ahead in the pass, and
//! stored as elements.

use super::config::MatrixChunks;
use crate::gpu::matrices::{VECTOR, put};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// 16 bytes of a buffer.
pub(super) type Words = Vector<u32, Const<4>>;
/// A tile of an operand.
pub(super) type Tile<E> = Shared<[Vector<E, Const<4>>]>;

/// The tokens of a chunk, `first..last`, for one key head.
#[derive(Clone, Copy, CubeType)]
pub(super) struct Tokens {
    pub first: usize,
    pub last: usize,
    pub key_heads: usize,
    pub key_head: usize,
}

/// Loads the unit's part of the keys or queries of a chunk. For tokens past the last it loads the
/// last.
#[cube]
pub(super) fn fetch_tokens(
    from: &[Words],
    to: &mut Array<Words>,
    tokens: &Tokens,
    #[comptime] config: MatrixChunks,
) {
    let (all, of_key) = comptime!((config.chunk_vectors(), config.key_vectors()));
    #[unroll]
    for i in 0..comptime!(config.share(all)) {
        let at = min(UNIT_POS_X as usize + comptime!(i * config.units()), comptime!(all - 1).runtime());
        let token = min(tokens.first + at / of_key, tokens.last - 1);
        to[i] = from[(token * tokens.key_heads + tokens.key_head) * of_key + at % of_key];
    }
}

/// Puts what was loaded into a tile, and zeros for tokens past the last of `count`.
#[cube]
pub(super) fn stage_tokens<E: Float>(
    from: &Array<Words>,
    to: &mut Tile<E>,
    count: usize,
    #[comptime] config: MatrixChunks,
) {
    let (all, of_key) = comptime!((config.chunk_vectors(), config.key_vectors()));
    #[unroll]
    for i in 0..comptime!(config.share(all)) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        let row = at / of_key;
        if at < all {
            let to_vector = row * comptime!(config.key_pitch() / VECTOR) + at % of_key * 2;
            put::<E>(from[i], to, to_vector, row < count);
        }
    }
}

/// Loads the unit's part of the matrix `index` of a chunk.
#[cube]
pub(super) fn fetch_matrix(
    from: &[Words],
    to: &mut Array<Words>,
    index: usize,
    #[comptime] config: MatrixChunks,
) {
    let all = comptime!(config.transform_vectors());
    #[unroll]
    for i in 0..comptime!(config.share(all)) {
        let at = min(UNIT_POS_X as usize + comptime!(i * config.units()), comptime!(all - 1).runtime());
        to[i] = from[index * all + at];
    }
}

/// Puts what was loaded of a matrix into a tile.
#[cube]
pub(super) fn stage_matrix<E: Float>(
    from: &Array<Words>,
    to: &mut Tile<E>,
    #[comptime] config: MatrixChunks,
) {
    let (all, of_row) = comptime!((config.transform_vectors(), config.cut.tokens / 8));
    #[unroll]
    for i in 0..comptime!(config.share(all)) {
        let at = UNIT_POS_X as usize + comptime!(i * config.units());
        if at < all {
            let to_vector = at / of_row * comptime!(config.token_pitch() / VECTOR) + at % of_row * 2;
            put::<E>(from[i], to, to_vector, true.runtime());
        }
    }
}
