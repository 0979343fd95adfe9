//! Rows times a Hadamard matrix.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};

const CHECK: Check = Check("hadamard_transform");

/// `y[.., b B + i] = B^-0.5 sum_j (-1)^popcount(i & j) x[.., b B + j]`, i and j below B: each block
/// of B elements times the orthonormal Hadamard matrix in Sylvester's order. B is the greatest
/// power of two that divides D.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]`, D up to 1024 | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// The matrix is its own inverse, and dot products of two rows stay as they are. It spreads an
/// element that is greater than the others over its whole block: what is then rounded with a scale
/// for a few neighbours loses less. Sums are f32, rounded once to x's dtype. A number that is not
/// finite makes its block NaN or infinite.
///
/// Source: mlx 0.32 `hadamard_transform` (rows of one block); QuaRot (Ashkboos et al. 2024) rotates
/// queries and keys by it before keys are rounded.
///
/// # Errors
/// [`KernelError::DType`] and [`KernelError::Value`] for other dtypes, [`KernelError::Shape`] for
/// no dimension or longer rows, [`KernelError::Gpu`] without memory for y.
pub fn hadamard_transform(x: &Tensor) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let width = x.shape().last().copied().unwrap_or(0);
    if !(1..=LONGEST).contains(&width) {
        let want = format!("rows of 1 to {LONGEST} elements are wanted");
        return Err(CHECK.shape_error("x", x, want));
    }
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(CHECK, gpu, x, dtype),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::hadamard_transform(cpu, &CHECK.widened("x", x)?)?.cast(dtype.dtype()),
    }
}

/// The longest rows: a GPU's plane keeps one in registers.
const LONGEST: usize = 1024;

/// Elements of a block of rows of `width`.
pub(crate) fn block(width: usize) -> usize {
    1 << width.trailing_zeros()
}
