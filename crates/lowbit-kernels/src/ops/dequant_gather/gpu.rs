//! Rows of a table on a GPU: a unit a run.

use super::CHECK;
use crate::gpu::compile::{Start, Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{pack, with_storage};
use crate::gpu::layout::{Layout, RUN};
use crate::gpu::{Dispatch, Gpu, rows};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    layout: Layout,
    dtype: FloatType,
    /// Elements that are written at once.
    vector: usize,
}

/// `y[t] = table[ids[t]]` for `len / runs` ids and a table of `rows` rows of `runs` runs; `width` is y's row in vectors.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn gather<S: Int, B: Int, Y: Int, V: Size, W: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    ids: &[u32],
    y: &mut [Vector<Y, W>],
    len: u32,
    rows: u32,
    runs: u32,
    width: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.vector);
    let (runs, width) = (runs as usize, width as usize);
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let (token, run) = (i / runs, i % runs);
        let id = ids[token];
        let mut values = Array::<f32>::new(comptime!(RUN));
        if id < rows {
            decode::<S, B, V>(codes, scales, biases, id as usize * runs + run, integers, &mut values, shape);
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
                y[token * width + column] = pack::<Y, W>(&values, comptime!(v * vector), vector, shape.dtype);
            }
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The values of run `run`, counted over all rows.
#[cube]
fn decode<S: Int, B: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    run: usize,
    integers: u32,
    values: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let mut words = Array::<u32>::new(comptime!(layout.bits));
    load::<V>(codes, run, &mut words, 0usize, layout);
    #[unroll]
    for group in 0..comptime!(RUN / layout.group()) {
        let scale = scale::<S, B>(scales, biases, run, group, layout);
        #[unroll]
        for i in 0..comptime!(layout.group()) {
            let i = comptime!(group * layout.group() + i);
            // Powers of two: exact.
            let value =
                code(&words, 0usize, integers, i, layout) * comptime!(unshift(layout, i) * factor(layout));
            values[i] = value * scale;
            if comptime!(layout.biased()) {
                values[i] += bias::<S, B>(scales, biases, run, group, layout);
            }
        }
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    macro_rules! typed {
        ($scales:ty, $biases:ty) => {{
            let (settings, properties, registers): Start = target.start(UNITS);
            with_storage!(shape.dtype, Y => Box::new(gather::Gather::<$scales, $biases, Y>::new(
                settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), (), (), (), (),
                (), shape.layout.vector(), shape.vector, shape,
            )))
        }};
    }
    match shape.layout.scale_sizes() {
        (1, 2) => typed!(u8, u16),
        (1, _) => typed!(u8, u32),
        (2, 2) => typed!(u16, u16),
        (2, _) => typed!(u16, u32),
        _ => typed!(u32, u32),
    }
}

/// Every format once, the types of the result in turn; and floats whose rows end within a run.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let dtypes = crate::ops::testing::FLOATS;
    let formats = crate::ops::quantized_matmul::tests::gpu_formats();
    let vector = rows::LONGEST.min(target.vector());
    let shape = |(i, &format)| Shape { layout: Layout::of(format), dtype: dtypes[i % 3], vector };
    let ragged = dtypes.map(|dtype| Shape {
        layout: Layout::of(lowbit_formats::Format::Float(dtype)),
        dtype,
        vector: 1,
    });
    formats.iter().enumerate().map(shape).chain(ragged).map(|shape| kernel(target, shape)).collect()
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
    let planes = table.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), Shape { layout, dtype, vector }),
        cubes: cubes(len),
        buffers: vec![component(0)?, component(1)?, component(2)?, ids.memory()?, y.memory()?],
        scalars: vec![
            CHECK.index(len)?,
            CHECK.index(table.rows())?,
            CHECK.index(runs)?,
            CHECK.index(k / vector)?,
            INTEGERS,
        ],
    })?;
    Ok(y)
}
