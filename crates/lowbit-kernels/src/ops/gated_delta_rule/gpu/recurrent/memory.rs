//! A unit's loads and stores of four elements at a time, and its part of the state.

use super::{FOUR, RecurrentConfig};
use crate::gpu::float::{narrow, widen};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Loads four elements from `at` on to `to[first]` and on; zeros for those past the first `count`.
#[cube]
pub(super) fn load<S: Int, N: Size>(
    from: &[Vector<S, N>],
    at: usize,
    count: usize,
    to: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] dtype: FloatType,
) {
    #[unroll]
    for j in 0..FOUR {
        to[first + j] = 0.0;
    }
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let vector = from[at / FOUR];
            #[unroll]
            for j in 0..FOUR {
                to[first + j] = widen(u32::cast_from(vector.extract(j)), dtype);
            }
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[first + j] = widen(u32::cast_from(from[at + j].extract(0usize)), dtype);
            }
        }
    }
}

/// The inverse of [`load`]: stores up to `count` elements.
#[cube]
pub(super) fn store<S: Int, N: Size>(
    to: &mut [Vector<S, N>],
    at: usize,
    count: usize,
    from: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] dtype: FloatType,
) {
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let mut vector = Vector::<S, N>::new(S::from_int(0));
            #[unroll]
            for j in 0..FOUR {
                vector.insert(j, S::cast_from(narrow(from[first + j], dtype)));
            }
            to[at / FOUR] = vector;
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[at + j] = Vector::<S, N>::new(S::cast_from(narrow(from[first + j], dtype)));
            }
        }
    }
}

/// The index of line `j` of a unit's block `i` of the matrix at `matrix`, and how many elements
/// from there on belong to the matrix. A line is four columns of a row.
#[cube]
fn line(
    matrix: usize,
    at: (usize, usize, usize),
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] config: RecurrentConfig,
) -> (usize, usize) {
    let (lane, column, columns) = at;
    let (key_dim, value_dim) = comptime!((config.key_dim, config.value_dim));
    let row = (i * comptime!(config.lanes) + lane) * FOUR;
    let rows = key_dim - min(row, key_dim.runtime());
    (matrix + (row + j) * value_dim + column, select(j < rows, columns, 0usize))
}

/// Loads the part of the matrix at `matrix` that the unit at `(lane, column, columns)` keeps: each
/// row's four columns, one row after the other.
#[cube]
pub(super) fn load_state<N: Size>(
    state: &[Vector<u32, N>],
    s: &mut Array<f32>,
    matrix: usize,
    at: (usize, usize, usize),
    #[comptime] config: RecurrentConfig,
) {
    #[unroll]
    for i in 0..comptime!(config.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (index, count) = line(matrix, at, i, j, config);
            load::<u32, N>(state, index, count, s, comptime!((i * FOUR + j) * FOUR), FloatType::F32);
        }
    }
}

/// The inverse of [`load_state`].
#[cube]
pub(super) fn store_state<N: Size>(
    state: &mut [Vector<u32, N>],
    s: &Array<f32>,
    matrix: usize,
    at: (usize, usize, usize),
    #[comptime] config: RecurrentConfig,
) {
    #[unroll]
    for i in 0..comptime!(config.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (index, count) = line(matrix, at, i, j, config);
            store::<u32, N>(state, index, count, s, comptime!((i * FOUR + j) * FOUR), FloatType::F32);
        }
    }
}
