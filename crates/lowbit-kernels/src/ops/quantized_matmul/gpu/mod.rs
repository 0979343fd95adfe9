//! The product on a GPU.

mod fragment;
mod integers;
#[cfg(feature = "cuda")]
pub(super) mod library;
mod mat_vec;
pub(crate) mod mma_rows;
mod mma_vec;
mod pack;
mod ptx;
mod share;
pub(crate) mod tensor_core;
mod tile;

pub(crate) use mat_vec::{Batches, multiply};

use super::{CHECK, Input, policy};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::with_storage;
use crate::gpu::layout::{Layout, RUN};
use crate::gpu::{Dispatch, Gpu};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType, Format};

/// Every kernel of the op for `target`.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let (formats, dtypes) = (super::tests::gpu_formats(), crate::ops::testing::FLOATS);
    let pads = dtypes.iter().map(|&dtype| pad_kernel(target, dtype));
    let kernels = pads.chain(mat_vec::kernels(target, &formats, &dtypes)).chain(tile::kernels(target));
    let kernels =
        kernels.chain(mma_vec::kernels(target, &formats)).chain(mma_rows::kernels(target, &formats));
    let kernels =
        kernels.chain(mma_vec::stream::kernels(target, &formats)).chain(tensor_core::kernels(target));
    #[cfg(feature = "cuda")]
    let kernels = kernels.chain(library::kernels(target));
    kernels.collect()
}

/// See [`super::quantized_matmul`]; everything was checked.
pub(super) fn quantized_matmul(
    gpu: &Gpu,
    x: &Input<'_>,
    weight: &QuantizedTensor,
    shape: &[usize],
    result: FloatType,
) -> Result<(Tensor, Option<Tensor>), KernelError> {
    if let Some(product) = mma_vec::stream::multiply(gpu, x, weight, shape, result)? {
        return Ok(product);
    }
    if let Input::Tensor(x) = x {
        return Ok((product(gpu, x, weight, shape, result)?, None));
    }
    // The stream may take what it cannot make.
    let (x, sum) = x.tensor()?;
    Ok((quantized_matmul(gpu, &Input::Tensor(&x), weight, shape, result)?.0, sum))
}

/// As [`quantized_matmul`], of an x that is there.
fn product(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    shape: &[usize],
    result: FloatType,
) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let y = Tensor::allocate(shape, result.dtype(), &Device::Gpu(gpu.clone()))?;
    if y.is_empty() {
        return Ok(y);
    }
    let (n, batches) = (weight.n(), weight.rows() / weight.n());
    let (x, m) = (padded(gpu, x)?, y.len() / n / batches);
    let tensor_cores = tensor_core::supports(gpu.target(), weight, dtype);
    let tensor_cores = tensor_cores.then(|| rounded_from(gpu, weight.format(), dtype));
    #[cfg(feature = "cuda")]
    let library = library::work(gpu, &x, weight, dtype);
    #[cfg(not(feature = "cuda"))]
    let library = None;
    match policy::kernel((m, n), batches, tensor_cores, library) {
        // Widening is exact, and f32 is what is computed in.
        kernel if kernel != policy::Kernel::MatVec && dtype != result => {
            let x = x.cast(DType::F32)?;
            return product(gpu, &x, weight, shape, FloatType::F32)?.cast(result.dtype());
        }
        policy::Kernel::MatVec => multiply(gpu, &Input::Tensor(&x), weight, &Batches::Even, &y)?,
        policy::Kernel::Tile => tile::multiply(gpu, &x, weight, m, &y)?,
        policy::Kernel::TensorCore => {
            let rows = policy::tensor_core(m, batches, n);
            let count = batches * m.div_ceil(rows);
            let tiles = tensor_core::Tiles { rows, count, m, list: None };
            tensor_core::multiply(gpu, &x, weight, &y, &tiles)?;
        }
        #[cfg(feature = "cuda")]
        policy::Kernel::Library(work) => library::multiply(gpu, &x, weight, &y, work)?,
        #[cfg(not(feature = "cuda"))]
        policy::Kernel::Library(_) => unreachable!("only CUDA's devices have a library"),
    }
    Ok(y)
}

/// Rows of x from which on tensor cores take weights rounded to x's type.
pub(super) fn rounded_from(gpu: &Gpu, format: Format, dtype: FloatType) -> usize {
    policy::many_on_tensor_cores(mma_rows::supports(gpu.target(), Layout::of(format), dtype))
}

/// `x`, `[.., K]`, with zeros up to a whole number of runs: x itself where that is what it has.
pub(crate) fn padded(gpu: &Gpu, x: &Tensor) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("x", x)?;
    let k = x.dim(-1);
    if k.is_multiple_of(RUN) {
        return Ok(x.clone());
    }
    let row = k.next_multiple_of(RUN);
    let y = Tensor::allocate(&[x.len() / k, row], dtype.dtype(), x.device())?;
    let len = CHECK.index(y.len())?;
    gpu.launch(Dispatch {
        kernel: pad_kernel(gpu.target(), dtype),
        cubes: [len.div_ceil(PAD_UNITS), 1, 1],
        buffers: vec![x.memory()?, y.memory()?],
        scalars: vec![CHECK.index(k)?, CHECK.index(row)?, len],
    })?;
    Ok(y)
}

/// Copies rows of `k` elements to rows of `padded`, zeros added.
#[cube(launch_unchecked)]
fn pad<Y: Int>(x: &[Y], y: &mut [Y], k: u32, padded: u32, len: u32) {
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

fn pad_kernel(target: &Target, dtype: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(PAD_UNITS);
    with_storage!(dtype, Y => Box::new(pad::Pad::<Y>::new(
        settings, properties, registers, buffer(), buffer(), (), (), (),
    )))
}

const PAD_UNITS: u32 = 256;
