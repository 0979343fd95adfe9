//! A unit decodes a run of a row.

use super::CHECK;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, with_storage};
use crate::gpu::layout::{Layout, RUN, with_planes};
use crate::gpu::{Dispatch, Gpu};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    layout: Layout,
    /// The type of the result.
    dtype: FloatType,
    /// Elements stored together: rows are a multiple of it.
    wide: usize,
}

#[cube(launch_unchecked)]
fn gather<S: Int, B: Int, Y: Int, V: Size, W: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    ids: &[u32],
    y: &mut [Vector<Y, W>],
    count: u32,
    rows: u32,
    k: u32,
    runs: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let wide = comptime!(shape.wide);
    let runs = runs as usize;
    let mut at = ABSOLUTE_POS;
    while at < count as usize {
        let id = ids[at / runs];
        let known = id < rows;
        // A row for which there is no id is read from the first one, and comes out as NaN.
        let run = select(known, id, 0u32) as usize * runs + at % runs;
        let mut words = Array::<u32>::new(comptime!(layout.bits));
        load::<V>(codes, run, &mut words, 0usize, layout);
        let left = k as usize - at % runs * comptime!(RUN);
        let first = at / runs * (k as usize / wide) + at % runs * comptime!(RUN / shape.wide);
        #[unroll]
        for part in 0..comptime!(RUN / shape.wide) {
            let mut vector = Vector::<Y, W>::empty();
            #[unroll]
            for j in 0..wide {
                let i = comptime!(part * shape.wide + j);
                let group = comptime!(i / layout.group());
                let value = code(&words, 0usize, integers, i, layout)
                    * comptime!(factor(layout) * unshift(layout, i))
                    * scale::<S, B>(scales, biases, run, group, layout);
                let value = if comptime!(layout.biased()) {
                    value + bias::<S, B>(scales, biases, run, group, layout)
                } else {
                    value
                };
                let value = select(known, value, f32::reinterpret(0x7fc0_0000u32));
                vector.insert(j, Y::cast_from(narrow(value, shape.dtype)));
            }
            if comptime!(part * shape.wide) < left {
                y[first + part] = vector;
            }
        }
        at += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let [codes, scales, biases, ids, y] = [buffer(), buffer(), buffer(), buffer(), buffer()];
    with_planes!(shape.layout, S, B => with_storage!(shape.dtype, Y => Box::new(gather::Gather::<S, B, Y>::new(
        settings, properties, registers, codes, scales, biases, ids, y, (), (), (), (), (),
        shape.layout.vector(), shape.wide, shape,
    ))))
}

/// Every format, and every type of result.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use lowbit_formats::Format;
    let formats = crate::ops::quantized_matmul::tests::gpu_formats();
    let of_format = formats.into_iter().map(|format| (format, FloatType::F32, 4));
    let of_dtype = [(FloatType::F16, 4), (FloatType::BF16, 1)];
    let others = of_dtype.map(|(dtype, wide)| (Format::Q4_0, dtype, wide));
    let shapes = of_format.chain(others);
    shapes
        .map(|(format, dtype, wide)| kernel(target, Shape { layout: Layout::of(format), dtype, wide }))
        .collect()
}

/// See [`super::dequant_gather`]; shapes were checked.
pub(super) fn dequant_gather(
    gpu: &Gpu,
    table: &QuantizedTensor,
    ids: &Tensor,
    (shape, dtype): (&[usize], FloatType),
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(shape, dtype.dtype(), &Device::Gpu(gpu.clone()))?;
    if y.is_empty() {
        return Ok(y);
    }
    let (k, runs) = (table.k(), table.k().div_ceil(RUN));
    let wide = if k.is_multiple_of(4) { 4 } else { 1 };
    let layout = Layout::of(table.format());
    let index = |value: usize| CHECK.index(value);
    // Every index is below these.
    index(table.rows() * runs * layout.bits)?;
    index(y.len())?;
    let count = ids.len() * runs;
    let planes = table.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), Shape { layout, dtype, wide }),
        cubes: cubes(count),
        buffers: vec![component(0)?, component(1)?, component(2)?, ids.memory()?, y.memory()?],
        scalars: vec![index(count)?, index(table.rows())?, index(k)?, index(runs)?, INTEGERS],
    })?;
    Ok(y)
}
