//! Rows of a table on a GPU: a unit a run.

#![allow(unsafe_code)] // Launches.

use super::CHECK;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, decode_run};
use crate::gpu::float::{pack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::{Layout, RUN, with_components};
use crate::gpu::{Gpu, rows};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GatherConfig {
    layout: Layout,
    dtype: FloatType,
    /// Elements that are written at once.
    vector: usize,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Runs of y.
    len: u32,
    /// Rows of the table.
    rows: u32,
    /// Runs of a row.
    runs: u32,
    /// Vectors of a row of y.
    width: u32,
}

/// `y[t] = table[ids[t]]`; NaN for an id that is none of the table's.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn dequant_gather_rows<S: Int, B: Int, Y: Int, V: Size, W: Size>(
    table: &Components<S, B, V>,
    ids: &[u32],
    y: &mut [Vector<Y, W>],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: GatherConfig,
) {
    let vector = comptime!(config.vector);
    let (runs, width) = (sizes.runs as usize, sizes.width as usize);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let (token, run) = (i / runs, i % runs);
        let id = ids[token];
        let mut values = Array::<f32>::new(comptime!(RUN));
        if id < sizes.rows {
            let run = id as usize * runs + run;
            decode_run::<S, B, V>(table, run, integers, &mut values, config.layout);
        } else {
            #[unroll]
            for j in 0..comptime!(RUN) {
                values[j] = f32::reinterpret(0x7fc0_0000u32);
            }
        }
        #[unroll]
        for v in 0..comptime!(RUN / vector) {
            let column = run * comptime!(RUN / vector) + v;
            if column < width {
                y[token * width + column] =
                    pack::<Y, W>(&values, comptime!(v * vector), vector, config.dtype);
            }
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, config: GatherConfig) -> Kernel<DequantGatherRows<'static>> {
    with_components!(config.layout, S, B => with_storage!(config.dtype, Y => {
        DequantGatherRows::kernel::<S, B, Y>(target, UNITS, config.layout.vector(), config.vector, config)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every format once, the types of the result in turn; and floats whose rows end within a run.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let dtypes = crate::ops::testing::FLOATS;
    let formats = crate::ops::quantized_matmul::tests::gpu_formats();
    let vector = rows::LONGEST.min(target.vector());
    let config = |(i, &format)| GatherConfig { layout: Layout::of(format), dtype: dtypes[i % 3], vector };
    let ragged = dtypes.map(|dtype| GatherConfig {
        layout: Layout::of(lowbit_formats::Format::Float(dtype)),
        dtype,
        vector: 1,
    });
    formats
        .iter()
        .enumerate()
        .map(config)
        .chain(ragged)
        .map(|config| compiled(target, config).code())
        .collect()
}

/// See [`super::dequant_gather`]; everything was checked.
pub(super) fn dequant_gather(
    gpu: &Gpu,
    table: &QuantizedTensor,
    ids: &Tensor,
    shape: &[usize],
    dtype: FloatType,
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(shape, dtype.dtype(), ids.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let (k, runs) = (table.k(), table.k().div_ceil(RUN));
    let layout = Layout::of(table.format());
    let vector = rows::vector(gpu.target(), rows::LONGEST, k, &[&y]);
    // Every index into the planes is below the codes' words.
    CHECK.index(table.rows() * runs * layout.bits)?;
    CHECK.index(y.len())?;
    let len = ids.len() * runs;
    let sizes = Sizes {
        len: CHECK.index(len)?,
        rows: CHECK.index(table.rows())?,
        runs: CHECK.index(runs)?,
        width: CHECK.index(k / vector)?,
    };
    let arguments = DequantGatherRows {
        table: table.buffers()?,
        ids: ids.buffer()?,
        y: y.buffer()?,
        sizes,
        integers: INTEGERS,
    };
    // SAFETY: the sizes are the tensors', and ids that are none of the table's are not read.
    unsafe {
        gpu.launch(compiled(gpu.target(), GatherConfig { layout, dtype, vector }), cubes(len), arguments)?
    };
    Ok(y)
}
