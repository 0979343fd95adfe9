//! Code that kernels on cooperative matrices share: operands of 16 bits come to shared memory in
//! vectors, and planes multiply them there.

use super::caps::Matrices;
use cubecl_core as cubecl;
use cubecl_core::cmma::{Matrix, MatrixIdent, MatrixLayout};
use cubecl_core::prelude::*;

/// Elements of a vector of shared memory.
pub const VECTOR: usize = 4;

/// A matrix of sums that are 0.
#[cube]
pub fn zeros(#[comptime] matrices: Matrices) -> Matrix<f32> {
    Matrix::<f32>::from_value(
        MatrixIdent::Accumulator,
        matrices.m,
        matrices.n,
        matrices.k,
        MatrixLayout::Undefined,
        0.0f32,
    )
}

/// So many of them.
#[cube]
pub fn all_zeros(#[comptime] count: usize, #[comptime] matrices: Matrices) -> Sequence<Matrix<f32>> {
    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..count {
        sums.push(zeros(matrices));
    }
    sums
}

/// Writes 16 bytes of a buffer, eight elements, to two vectors of shared memory from vector `at`
/// on: zeros, if they are not there.
#[cube]
pub fn put<E: Float>(
    words: Vector<u32, Const<4>>,
    to: &mut Shared<[Vector<E, Const<4>>]>,
    at: usize,
    there: bool,
) {
    #[unroll]
    for half in 0..2usize {
        let mut two = Vector::<u32, Const<2>>::new(0u32);
        #[unroll]
        for j in 0..2usize {
            two.insert(j, select(there, words.extract(comptime!(half * 2 + j)), 0u32));
        }
        to[at + half] = Vector::<E, Const<4>>::reinterpret(two);
    }
}
