//! The product on a GPU by its maker's library of dense products: the weight is decoded first, to x's type.

use super::super::CHECK;
use super::super::policy::Work;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::narrow;
use crate::gpu::layout::{Codes, Layout, RUN, with_planes};
use crate::gpu::{Dense, Dispatch, Gpu, Memory};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Bytes that operands must be aligned to.
const ALIGNMENT: usize = 16;
/// Bytes that a decoded weight takes at the most.
const SCRATCH: usize = 1 << 30;

/// Units that run in step.
const PLANE: usize = 32;
/// Vectors of a decoded run.
const VECTORS: usize = RUN / 8;

/// Each unit decodes runs to 16-bit floats. The units of `planes` of 32 exchange theirs, so that neighbours write
/// neighbouring vectors.
#[cube(launch_unchecked)]
fn decode<S: Int, B: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    values: &mut [Vector<u32, Const<4>>],
    runs: u32,
    integers: u32,
    #[comptime] planes: bool,
    #[comptime] layout: Layout,
    #[comptime] dtype: FloatType,
) {
    let runs = runs as usize;
    let lane = UNIT_POS_X as usize % PLANE;
    let mut first = ABSOLUTE_POS - lane;
    // All of a plane's units or none.
    while first < runs {
        let run = min(first + lane, runs - 1);
        let mut words = Array::<u32>::new(comptime!(layout.bits));
        load::<V>(codes, run, &mut words, 0usize, layout);
        let mut vectors = Array::<Vector<u32, Const<4>>>::new(VECTORS);
        #[unroll]
        for v in 0..VECTORS {
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for j in 0..4usize {
                let first = comptime!(v * 8 + j * 2);
                let low = value::<S, B>(scales, biases, &words, integers, run, first, layout);
                let high = value::<S, B>(scales, biases, &words, integers, run, comptime!(first + 1), layout);
                vector.insert(j, narrow(low, dtype) | (narrow(high, dtype) << 16u32));
            }
            vectors[v] = vector;
        }
        if comptime!(planes) {
            exchange(&vectors, values, first, runs);
        } else if first + lane < runs {
            #[unroll]
            for v in 0..VECTORS {
                values[run * VECTORS + v] = vectors[v];
            }
        }
        first += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// Writes the runs of a plane's units, which begin with run `first`.
#[cube]
fn exchange(
    vectors: &Array<Vector<u32, Const<4>>>,
    values: &mut [Vector<u32, Const<4>>],
    first: usize,
    runs: usize,
) {
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(UNITS as usize * VECTORS));
    let lane = UNIT_POS_X as usize % PLANE;
    let plane = UNIT_POS_X as usize / PLANE * comptime!(PLANE * VECTORS);
    #[unroll]
    for v in 0..VECTORS {
        shared[plane + place(lane, v.runtime())] = vectors[v];
    }
    sync_plane();
    #[unroll]
    for i in 0..VECTORS {
        let at = lane + comptime!(i * PLANE);
        if first + at / VECTORS < runs {
            values[first * VECTORS + at] = shared[plane + place(at / VECTORS, at % VECTORS)];
        }
    }
    sync_plane();
}

/// Where a plane's units share vector `v` of a run: eight neighbours have different banks, writing and reading.
#[cube]
fn place(run: usize, v: usize) -> usize {
    run * VECTORS + (v ^ (run / 2 % VECTORS))
}

/// Value `i` of run `run`.
#[cube]
fn value<S: Int, B: Int>(
    scales: &[S],
    biases: &[B],
    words: &Array<u32>,
    integers: u32,
    run: usize,
    #[comptime] i: usize,
    #[comptime] layout: Layout,
) -> f32 {
    let group = comptime!(i / layout.group());
    let mut value = code(words, 0usize, integers, i, layout);
    if comptime!(factor(layout) != 1.0) {
        value *= comptime!(factor(layout));
    }
    let times = scale::<S, B>(scales, biases, run, group, layout) * comptime!(unshift(layout, i));
    if comptime!(layout.biased()) {
        fma(value, times, bias::<S, B>(scales, biases, run, group, layout))
    } else {
        value * times
    }
}

fn kernel(target: &Target, layout: Layout, dtype: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let planes = target.plane() == Some(PLANE);
    with_planes!(layout, S, B => Box::new(decode::Decode::<S, B>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), (), (), layout.vector(), planes,
        layout, dtype,
    )))
}

/// Every format in f16, and bf16.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use lowbit_formats::Format;
    let formats =
        super::super::tests::gpu_formats().into_iter().filter(|format| !matches!(format, Format::Float(_)));
    let of_format = formats.map(|format| (format, FloatType::F16));
    let kernels = of_format.chain([(Format::Q4_0, FloatType::BF16)]);
    kernels.map(|(format, dtype)| kernel(target, Layout::of(format), dtype)).collect()
}

/// What computing `x weight^T` takes where the library does it.
pub(super) fn work(gpu: &Gpu, x: &Tensor, weight: &QuantizedTensor, dtype: FloatType) -> Option<Work> {
    let aligned = |tensor: &Tensor| tensor.memory().is_ok_and(|(_, start)| start.is_multiple_of(ALIGNMENT));
    let (n, k) = (weight.n(), weight.k());
    let fits = gpu.library().is_some()
        && dtype != FloatType::F32
        && weight.rows() == n
        && n.is_multiple_of(8)
        && k > 0
        && k.is_multiple_of(RUN)
        && aligned(x);
    match Layout::of(weight.format()).codes {
        _ if !fits => None,
        Codes::Float(float) => (float == dtype && aligned(&weight.components()[0])).then_some(Work::Multiply),
        _ => (n * k * dtype.size() <= SCRATCH).then_some(Work::DecodeAndMultiply),
    }
}

/// The values of `weight` rounded to `dtype`, of 16 bits, row after row.
pub(in super::super) fn decoded(
    gpu: &Gpu,
    weight: &QuantizedTensor,
    dtype: FloatType,
) -> Result<Memory, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let layout = Layout::of(weight.format());
    let runs = weight.rows() * weight.k() / RUN;
    let values = gpu.allocate(runs * RUN * dtype.size())?;
    index(runs * layout.bits)?;
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), layout, dtype),
        cubes: cubes(runs),
        buffers: vec![component(0)?, component(1)?, component(2)?, (&values, 0)],
        scalars: vec![index(runs)?, INTEGERS],
    })?;
    Ok(values)
}

/// `x` times `weight` into `y`, where [`work`] says how.
pub(super) fn multiply(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    y: &Tensor,
    work: Work,
) -> Result<(), KernelError> {
    let (n, k) = (weight.n(), weight.k());
    let dtype = CHECK.float("x", x)?;
    let decoded = match work {
        Work::Multiply => None,
        Work::DecodeAndMultiply => Some(decoded(gpu, weight, dtype)?),
    };
    let weight = match &decoded {
        Some(decoded) => (decoded, 0),
        None => weight.components()[0].memory()?,
    };
    let sizes = [y.len() / n, n, k];
    gpu.multiply(Dense { x: x.memory()?, weight, y: y.memory()?, sizes, dtype })
}
