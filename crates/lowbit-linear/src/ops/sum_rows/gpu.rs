//! Sums over rows on a GPU: a unit sums one column of [`ROWS`] rows, and what there is then is
//! summed in the same way until one row is left. Neighbouring units have neighbouring columns.

#![allow(unsafe_code)] // Launches.

use super::ROWS;
use crate::gpu::compile::Target;
use crate::gpu::copy::UNITS;
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The summing of blocks of [`ROWS`] rows.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops) struct BlockSizes {
    pub rows: u32,
    pub width: u32,
    /// Units in all: a block's columns for every block.
    pub len: u32,
}

impl BlockSizes {
    /// For rows of which all indices fit.
    pub(in crate::ops) fn new(check: Check, rows: usize, width: usize) -> Result<Self, KernelError> {
        check.index(rows * width)?;
        let len = check.index(rows.div_ceil(ROWS) * width)?;
        Ok(Self { rows: check.index(rows)?, width: check.index(width)?, len })
    }

    /// Cubes of [`UNITS`].
    pub(in crate::ops) fn cubes(&self) -> [u32; 3] {
        rows::cubes((self.len as usize).div_ceil(UNITS))
    }
}

#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn sum_rows<X: Int>(x: &[X], y: &mut [f32], sizes: BlockSizes, #[comptime] dtype: FloatType) {
    let (i, width) = (ABSOLUTE_POS, sizes.width as usize);
    if i < sizes.len as usize {
        let column = i % width;
        let mut row = i / width * ROWS;
        let end = min(row + ROWS, sizes.rows as usize);
        let mut sum = 0.0f32;
        while row < end {
            sum += read(x, row * width + column, dtype);
            row += 1;
        }
        y[i] = sum;
    }
}

fn compiled(target: &Target, dtype: FloatType) -> Kernel<SumRows<'static>> {
    with_storage!(dtype, X => SumRows::kernel::<X>(target, UNITS, dtype))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    crate::ops::testing::FLOATS.map(|dtype| compiled(target, dtype).code()).into()
}

/// See [`super::sum_rows`]; x is not empty.
pub(super) fn launch(check: Check, gpu: &Gpu, x: &Tensor, width: usize) -> Result<Tensor, KernelError> {
    let mut x = x.clone();
    loop {
        let rows = x.len() / width;
        let y = Tensor::allocate(&[rows.div_ceil(ROWS), width], DType::F32, x.device())?;
        let sizes = BlockSizes::new(check, rows, width)?;
        let arguments = SumRows { x: x.buffer()?, y: y.buffer()?, sizes };
        // SAFETY: x is `rows` rows of `width` elements, and y one for each block of them.
        unsafe { gpu.launch(compiled(gpu.target(), check.float("x", &x)?), sizes.cubes(), arguments)? };
        if rows <= ROWS {
            return y.reshape(&[width]);
        }
        x = y;
    }
}
