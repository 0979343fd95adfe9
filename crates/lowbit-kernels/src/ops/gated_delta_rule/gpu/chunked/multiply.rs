//! Products of matrices in shared memory, one matrix of sums at a time by each plane.

use crate::gpu::caps::Matrices;
use cubecl_core as cubecl;
use cubecl_core::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl_core::prelude::*;

/// The layout of an operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Side {
    /// Elements from a row to the next.
    pub pitch: usize,
    /// Elements of a vector.
    pub vector: usize,
    /// True if a row has the elements of one place of the depth. Else it has all that are
    /// multiplied with each other.
    pub by_depth: bool,
}

impl Side {
    pub fn new(pitch: usize, vector: usize) -> Self {
        Self { pitch, vector, by_depth: false }
    }

    pub fn by_depth(self) -> Self {
        Self { by_depth: true, ..self }
    }

    /// Vectors from one part of the depth, of `k`, to the next.
    fn part(self, k: usize) -> usize {
        (if self.by_depth { k * self.pitch } else { k }) / self.vector
    }
}

/// A product of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub matrices: Matrices,
    pub left: Side,
    pub right: Side,
    pub depth: usize,
}

/// The matrix of sums at `at`, whose rows are `pitch` apart.
#[cube]
pub(super) fn load(
    from: &Shared<[f32]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] matrices: Matrices,
) -> Matrix<f32> {
    Matrix::<f32>::from_slice(
        MatrixIdent::Accumulator,
        matrices.m,
        matrices.n,
        matrices.k,
        MatrixLayout::RowMajor,
        &from[at..at + comptime!(matrices.m * pitch)],
        comptime!(pitch as u32).runtime(),
    )
}

/// Stores it there.
#[cube]
pub(super) fn store(
    sum: &Matrix<f32>,
    to: &mut Shared<[f32]>,
    at: usize,
    #[comptime] pitch: usize,
    #[comptime] matrices: Matrices,
) {
    let to = &mut to[at..at + comptime!(matrices.m * pitch)];
    cmma::store(to, sum, comptime!(pitch as u32).runtime(), MatrixLayout::RowMajor);
}

/// Adds to `sum` the products of the left operand from vector `at.0` on and the right one from
/// vector `at.1` on, over the parts of the depth that begin before `end`.
#[cube]
pub(super) fn add_products<A: CubePrimitive, B: CubePrimitive>(
    left: &Shared<[A]>,
    right: &Shared<[B]>,
    sum: &Matrix<f32>,
    at: (usize, usize),
    end: usize,
    #[comptime] of: Product,
) {
    let (m, n, k) = comptime!((of.matrices.m, of.matrices.n, of.matrices.k));
    let (left_pitch, right_pitch) = comptime!((of.left.pitch as u32, of.right.pitch as u32));
    #[unroll]
    for part in 0..comptime!(of.depth / k) {
        if comptime!(part * k) < end {
            let left_at = at.0 + comptime!(part * of.left.part(k));
            let right_at = at.1 + comptime!(part * of.right.part(k));
            let left = Matrix::<A>::from_slice(
                MatrixIdent::A,
                m,
                n,
                k,
                MatrixLayout::RowMajor,
                &left[left_at..left_at + comptime!(m * of.left.pitch / of.left.vector)],
                left_pitch,
            );
            let right_rows = comptime!(if of.right.by_depth { k } else { n });
            let layout =
                comptime!(if of.right.by_depth { MatrixLayout::RowMajor } else { MatrixLayout::ColMajor });
            let right = Matrix::<B>::from_slice(
                MatrixIdent::B,
                m,
                n,
                k,
                layout,
                &right[right_at..right_at + comptime!(right_rows * of.right.pitch / of.right.vector)],
                right_pitch,
            );
            cmma::execute(&left, &right, sum, sum);
        }
    }
}
