//! The product on a GPU by its maker's library of dense products: the weight is decoded first, to
//! x's type.

#![allow(unsafe_code)] // Launches.

use super::super::input::CHECK;
use super::super::problem::{Operands, Problem};
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::narrow;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::{Codes, Layout, RUN, with_components};
use crate::gpu::{Dense, Form, Gpu, Memory};
use crate::{KernelError, QuantizedTensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Bytes that a decoded weight takes at the most: an output layer for 248,320 tokens of 5,120
/// values is 2.5 GB.
const SCRATCH: usize = 3 << 30;

/// Units that run in step.
const PLANE: usize = 32;
/// Vectors of a decoded run.
const VECTORS: usize = RUN / 8;

/// Each unit decodes runs to 16-bit floats. The units of `planes` of 32 exchange theirs, so that
/// neighbours write neighbouring vectors.
#[kernel]
fn quantized_matmul_decode<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
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
        load::<V>(&weight.codes, run, &mut words, 0usize, layout);
        let mut vectors = Array::<Vector<u32, Const<4>>>::new(VECTORS);
        #[unroll]
        for v in 0..VECTORS {
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for j in 0..4usize {
                let first = comptime!(v * 8 + j * 2);
                let low = value::<S, B, V>(weight, &words, integers, run, first, layout);
                let high = value::<S, B, V>(weight, &words, integers, run, comptime!(first + 1), layout);
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
    let mut shared = Shared::<[Vector<u32, Const<4>>]>::new_slice(comptime!(UNITS * VECTORS));
    let lane = UNIT_POS_X as usize % PLANE;
    let plane = UNIT_POS_X as usize / PLANE * comptime!(PLANE * VECTORS);
    #[unroll]
    for v in 0..VECTORS {
        shared[plane + swizzled(lane, v.runtime())] = vectors[v];
    }
    sync_plane();
    #[unroll]
    for i in 0..VECTORS {
        let at = lane + comptime!(i * PLANE);
        if first + at / VECTORS < runs {
            values[first * VECTORS + at] = shared[plane + swizzled(at / VECTORS, at % VECTORS)];
        }
    }
    sync_plane();
}

/// The place in which a plane's units share vector `v` of a run: eight neighbours have different
/// banks, writing and reading.
#[cube]
fn swizzled(run: usize, v: usize) -> usize {
    run * VECTORS + (v ^ (run / 2 % VECTORS))
}

/// Value `i` of run `run`.
#[cube]
fn value<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
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
    let times =
        scale::<S, B>(&weight.scales, &weight.biases, run, group, layout) * comptime!(unshift(layout, i));
    if comptime!(layout.biased()) {
        fma(value, times, bias::<S, B>(&weight.scales, &weight.biases, run, group, layout))
    } else {
        value * times
    }
}

fn compiled(target: &Target, layout: Layout, dtype: FloatType) -> Kernel<QuantizedMatmulDecode<'static>> {
    let planes = target.plane() == Some(PLANE);
    with_components!(layout, S, B => {
        QuantizedMatmulDecode::kernel::<S, B>(target, UNITS, layout.vector(), planes, layout, dtype)
    })
}

/// Every format in f16, and bf16.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use lowbit_formats::Format;
    let formats =
        super::super::tests::gpu_formats().into_iter().filter(|format| !matches!(format, Format::Float(_)));
    let of_format = formats.map(|format| (format, FloatType::F16));
    let kernels = of_format.chain([(Format::Q4_0, FloatType::BF16)]);
    kernels.map(|(format, dtype)| compiled(target, Layout::of(format), dtype).code()).collect()
}

/// The weight that the vendor BLAS multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// The weight, which is dense and of x's type.
    Dense,
    /// The weight, decoded to memory and rounded to x's type first.
    Decoded,
}

/// The weight for the vendor BLAS, where it takes the product.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Weight> {
    let Problem { n, k, x_type, .. } = *problem;
    let fits = caps.vendor_blas
        && problem.source.is_none()
        && problem.routing.is_none()
        && problem.batches == 1
        && n.is_multiple_of(8)
        && k > 0
        && problem.whole_runs()
        && problem.vectors;
    match problem.layout.codes {
        _ if !fits => None,
        Codes::Float(float) => (float == x_type && problem.aligned_weight).then_some(Weight::Dense),
        _ => (x_type != FloatType::F32 && n * k * x_type.size() <= SCRATCH).then_some(Weight::Decoded),
    }
}

/// True if a product of 16-bit floats is stored in f32 as it was summed.
pub(in super::super) fn stores_sums(caps: &Caps, problem: &Problem) -> bool {
    problem.y_type == FloatType::F32 && fit(caps, problem).is_some()
}

/// The values of `weight` rounded to `dtype`, of 16 bits, row after row.
pub(in crate::ops) fn decoded(
    gpu: &Gpu,
    weight: &QuantizedTensor,
    dtype: FloatType,
) -> Result<Memory, KernelError> {
    let index = |value: usize| CHECK.index(value);
    let layout = Layout::of(weight.format());
    let runs = weight.rows() * weight.k() / RUN;
    let values = gpu.allocate(runs * RUN * dtype.size())?;
    index(runs * layout.bits)?;
    let arguments = QuantizedMatmulDecode {
        weight: weight.buffers()?,
        values: (&values).into(),
        runs: index(runs)?,
        integers: INTEGERS,
    };
    // SAFETY: weight and values have as many runs.
    unsafe { gpu.launch(compiled(gpu.target(), layout, dtype), cubes(runs), arguments)? };
    Ok(values)
}

/// Computes the product.
pub(in super::super) fn launch(
    gpu: &Gpu,
    weight: Weight,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let decoded = match weight {
        Weight::Dense => None,
        Weight::Decoded => Some(decoded(gpu, operands.weight, problem.x_type)?),
    };
    let weight = match &decoded {
        Some(decoded) => (decoded, 0),
        None => operands.weight.components()[0].memory()?,
    };
    let sizes = [problem.m, problem.n, problem.k];
    gpu.multiply(Dense {
        form: Form::Rows,
        count: 1,
        x: operands.x.x.memory()?,
        weight,
        y: operands.y.memory()?,
        sizes,
        dtypes: [problem.x_type, problem.y_type],
    })
}
