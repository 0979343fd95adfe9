//! Sums over rows, for the gradients of parameters. A unit takes a column of a block of rows, and the blocks' sums are rows again,
//! until one is left: no unit goes through all tokens, and the order of every sum follows from the sizes alone.

#![allow(unsafe_code)] // Launches.

use super::Gpu;
use super::copy::UNITS;
use super::launch::{LaunchArgs, kernel};
use super::rows;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// Rows that one unit adds up.
pub(crate) const BLOCK: usize = 64;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    rows: u32,
    width: u32,
    /// Sums of one column of a block.
    len: u32,
}

/// `y[block, c] = sum of x[r, c]` over the rows r of the block.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn sum_blocks(x: &[f32], y: &mut [f32], sizes: Sizes) {
    let (i, width) = (ABSOLUTE_POS, sizes.width as usize);
    if i < sizes.len as usize {
        let column = i % width;
        let mut row = i / width * BLOCK;
        let end = min(row + BLOCK, sizes.rows as usize);
        let mut sum = 0.0f32;
        while row < end {
            sum += x[row * width + column];
            row += 1;
        }
        y[i] = sum;
    }
}

impl Gpu {
    /// The sum `[D]` of the rows of x, `[R, D]` of f32.
    pub(crate) fn sum_rows(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        let width = x.dim(1);
        if x.is_empty() {
            return Tensor::allocate_zeros(&[width], DType::F32, x.device());
        }
        let mut x = x.clone();
        while x.dim(0) > 1 {
            let blocks = x.dim(0).div_ceil(BLOCK);
            let y = Tensor::allocate(&[blocks, width], DType::F32, x.device())?;
            index(x.len())?;
            let sizes = Sizes { rows: index(x.dim(0))?, width: index(width)?, len: index(y.len())? };
            let arguments = SumBlocks { x: x.buffer()?, y: y.buffer()?, sizes };
            let cubes = rows::cubes(y.len().div_ceil(UNITS));
            // SAFETY: the sizes are the tensors', and units past the last sum do nothing.
            unsafe { self.launch(SumBlocks::kernel(self.target(), UNITS), cubes, arguments)? };
            x = y;
        }
        x.reshape(&[width])
    }
}

fn index(len: usize) -> Result<u32, KernelError> {
    u32::try_from(len).map_err(|_| KernelError::Value {
        op: "sum_rows",
        operand: "size",
        got: len.to_string(),
        want: "kernels count up to 4294967295".into(),
    })
}

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(|target| vec![SumBlocks::kernel(target, UNITS).code()]));
