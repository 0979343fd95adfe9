//! Rows of x with zeros up to whole runs, which all kernels read.

#![allow(unsafe_code)] // Launches.

use super::super::input::CHECK;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::with_storage;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::RUN;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

const UNITS: usize = 256;

/// Copies rows of `k` elements to rows of `padded`, zeros added.
#[kernel]
fn quantized_matmul_pad<Y: Int>(x: &[Y], y: &mut [Y], k: u32, padded: u32, len: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let column = at % padded;
        let mut value = Y::from_int(0);
        if column < k {
            value = x[(at / padded * k + column) as usize];
        }
        y[at as usize] = value;
    }
}

fn compiled(target: &Target, dtype: FloatType) -> Kernel<QuantizedMatmulPad<'static>> {
    with_storage!(dtype, Y => QuantizedMatmulPad::kernel::<Y>(target, UNITS))
}

/// Each type.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    crate::ops::testing::FLOATS.map(|dtype| compiled(target, dtype).code()).into()
}

/// `x`, `[.., K]`, with zeros up to a whole number of runs: x itself where that is what it has.
pub(in super::super) fn padded(gpu: &Gpu, x: &Tensor) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let k = x.dim(-1);
    if k.is_multiple_of(RUN) {
        return Ok(x.clone());
    }
    let row = k.next_multiple_of(RUN);
    let y = Tensor::allocate(&[x.len() / k, row], dtype.dtype(), x.device())?;
    let (k, padded, len) = (CHECK.index(k)?, CHECK.index(row)?, CHECK.index(y.len())?);
    let arguments = QuantizedMatmulPad { x: x.buffer()?, y: y.buffer()?, k, padded, len };
    let cubes = [len.div_ceil(UNITS as u32), 1, 1];
    // SAFETY: y has `len` elements, and x as many rows of `k`.
    unsafe { gpu.launch(compiled(gpu.target(), dtype), cubes, arguments)? };
    Ok(y)
}
