//! How a unit's registers come from memory and go there: whole vectors where all sizes have them.

use super::{FOUR, Shape};
use crate::gpu::float::{narrow, widen};
use crate::ops::gated_delta_rule::StateLayout;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Up to four of the first `count` elements from `at` on, to the places `(first, stride)` of `to`; zeros for the rest.
#[cube]
pub(super) fn load<S: Int, N: Size>(
    from: &[Vector<S, N>],
    at: usize,
    count: usize,
    to: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] stride: usize,
    #[comptime] dtype: FloatType,
) {
    #[unroll]
    for j in 0..FOUR {
        to[first + j * stride] = 0.0;
    }
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let vector = from[at / FOUR];
            #[unroll]
            for j in 0..FOUR {
                to[first + j * stride] = widen(u32::cast_from(vector.extract(j)), dtype);
            }
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[first + j * stride] = widen(u32::cast_from(from[at + j].extract(0usize)), dtype);
            }
        }
    }
}

/// The inverse of [`load`].
#[cube]
pub(super) fn store<S: Int, N: Size>(
    to: &mut [Vector<S, N>],
    at: usize,
    count: usize,
    from: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] stride: usize,
    #[comptime] dtype: FloatType,
) {
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let mut vector = Vector::<S, N>::new(S::from_int(0));
            #[unroll]
            for j in 0..FOUR {
                vector.insert(j, S::cast_from(narrow(from[first + j * stride], dtype)));
            }
            to[at / FOUR] = vector;
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[at + j] = Vector::<S, N>::new(S::cast_from(narrow(from[first + j * stride], dtype)));
            }
        }
    }
}

/// Where line `j` of block `i` of the unit's part of the matrix at `matrix` begins, and how much of it there is: four
/// columns of a row, or four rows of a column.
#[cube]
fn line(
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] shape: Shape,
) -> (usize, usize) {
    let (lane, column, columns) = place;
    let (key_dim, value_dim) = comptime!((shape.key_dim, shape.value_dim));
    let row = (i * comptime!(shape.lanes) + lane) * FOUR;
    let rows = key_dim - min(row, key_dim.runtime());
    if comptime!(shape.layout == StateLayout::KeyValue) {
        (matrix + (row + j) * value_dim + column, select(j < rows, columns, 0usize))
    } else {
        (matrix + (column + j) * key_dim + row, select(j < columns, rows, 0usize))
    }
}

/// The first place of that line in registers, which hold each row's four columns, and the step to the next.
fn registers(i: usize, j: usize, shape: Shape) -> (usize, usize) {
    let first = i * FOUR * FOUR;
    match shape.layout {
        StateLayout::KeyValue => (first + j * FOUR, 1),
        StateLayout::ValueKey => (first + j, FOUR),
    }
}

/// The part of the matrix at `matrix` that the unit at `(lane, column, columns)` has.
#[cube]
pub(super) fn load_state<N: Size>(
    state: &[Vector<u32, N>],
    s: &mut Array<f32>,
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] shape: Shape,
) {
    #[unroll]
    for i in 0..comptime!(shape.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (at, count) = line(matrix, place, i, j, shape);
            let (first, step) = comptime!(registers(i, j, shape));
            load::<u32, N>(state, at, count, s, first, step, FloatType::F32);
        }
    }
}

/// The inverse of [`load_state`].
#[cube]
pub(super) fn store_state<N: Size>(
    state: &mut [Vector<u32, N>],
    s: &Array<f32>,
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] shape: Shape,
) {
    #[unroll]
    for i in 0..comptime!(shape.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (at, count) = line(matrix, place, i, j, shape);
            let (first, step) = comptime!(registers(i, j, shape));
            store::<u32, N>(state, at, count, s, first, step, FloatType::F32);
        }
    }
}
