//! The gradients on a GPU. Where there is a [`library`], it multiplies. Else both products are
//! forward products of dense matrices, so that they take the kernels that
//! [`plan`](crate::ops::quantized_matmul::plan) chooses: what is new is how their operands get to
//! lie.
//!
//! ```text
//! dx      = dy W        = quantized_matmul(dy, W^T)       W^T decoded to dy's type: reads the weight, writes N K elements
//! dweight = dy^T x      = quantized_matmul(dy^T, x^T)     both transposed: reads and writes M (N + K) elements
//! dscales = sums of dweight times codes, by group         reads N K f32 and the codes
//! ```

#![allow(unsafe_code)] // Launches.

use super::library::{self, Rows};
use crate::gpu::compile::Target;
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::decode::{INTEGERS, code, code_factor, decode_run, load, unshift};
use crate::gpu::float::{with_storage, write};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::{Layout, RUN, with_components};
use crate::gpu::{Gpu, rows};
use crate::ops::quantized_matmul::gpu::multiply;
use crate::ops::{Check, Input, ScalesGradient, concat_rows};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

const CHECK: Check = Check("quantized_matmul_backward");

/// Of a weight `[.., n, k]`, and its transpose `[.., k, n]`.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct WeightSizes {
    /// Runs of all matrices, with rows up to `pitch`.
    len: u32,
    n: u32,
    k: u32,
    /// Runs of a row of the weight.
    runs: u32,
    /// Elements from a row of the transpose to the next.
    pitch: u32,
}

/// `y[.., k, n] = weight[.., n, k]`, with zeros up to `pitch`: a unit a run, neighbours
/// neighbouring rows of the weight, which are neighbours in y.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn quantized_matmul_decode_transposed<S: Int, B: Int, Y: Int, V: Size>(
    weight: &Components<S, B, V>,
    y: &mut [Y],
    sizes: WeightSizes,
    integers: u32,
    #[comptime] layout: Layout,
    #[comptime] dtype: FloatType,
) {
    let (n, k) = (sizes.n as usize, sizes.k as usize);
    let (runs, pitch) = (sizes.runs as usize, sizes.pitch as usize);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let (row, run, matrix) = (i % pitch, i / pitch % runs, i / pitch / runs);
        let mut values = Array::<f32>::new(comptime!(RUN));
        let decoded = (matrix * n + min(row, n - 1)) * runs + run;
        decode_run::<S, B, V>(weight, decoded, integers, &mut values, layout);
        #[unroll]
        for j in 0..comptime!(RUN) {
            let column = run * RUN + j;
            if column < k {
                let value = select(row < n, values[j], 0.0f32.runtime());
                write(y, (matrix * k + column) * pitch + row, value, dtype);
            }
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The sides of a square that a cube transposes: a line of the cache has a row of it.
const SQUARE: usize = 32;

/// Of matrices `[rows, columns]`.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct MatrixSizes {
    count: u32,
    rows: u32,
    columns: u32,
    /// Elements from a row of the transpose to the next.
    pitch: u32,
}

/// `y[.., column, row] = x[.., row, column]`, with zeros up to `pitch`: a cube a square. Neighbours
/// write neighbouring elements; what they read is in the same lines of the cache for all of the
/// square's rows. There is no shared memory: as CubeCL 0.11 declares it, lavapipe 22.3 crashes.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn quantized_matmul_transpose<Y: Int>(x: &[Y], y: &mut [Y], sizes: MatrixSizes) {
    let (rows, columns, pitch) = (sizes.rows as usize, sizes.columns as usize, sizes.pitch as usize);
    let across = (columns + comptime!(SQUARE - 1)) / SQUARE;
    let down = (pitch + comptime!(SQUARE - 1)) / SQUARE;
    let (matrix, square) = (CUBE_POS / (across * down), CUBE_POS % (across * down));
    let row = square / across * SQUARE + UNIT_POS_X as usize % SQUARE;
    let column0 = square % across * SQUARE + UNIT_POS_X as usize / SQUARE;
    #[unroll]
    for i in 0..comptime!(SQUARE * SQUARE / UNITS) {
        let column = column0 + comptime!(i * UNITS / SQUARE);
        if matrix < sizes.count as usize && column < columns && row < pitch {
            let mut value = Y::from_int(0);
            if row < rows {
                value = x[(matrix * rows + row) * columns + column];
            }
            y[(matrix * columns + column) * pitch + row] = value;
        }
    }
}

/// Values that a unit of [`quantized_matmul_group_sums`] sums: whole runs and whole groups.
fn span(layout: Layout) -> usize {
    layout.group_within(usize::MAX).max(RUN)
}

/// In spans of [`span`] values: all, and in a row; and values of a row.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct SpanSizes {
    len: u32,
    spans: u32,
    k: u32,
}

/// Units that run in step where values are [exchanged](exchanged), and vectors of a run then.
const PLANE: usize = 32;
const VECTORS: usize = RUN / 4;

/// `dscales[g] = sum of dweight[i] * value(code[i])` and `dbiases[g] = sum of dweight[i]` over the
/// i of group g: a unit a span. Where `vector` is 4, spans follow each other without gaps, and the
/// units of a plane load theirs together.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn quantized_matmul_group_sums<V: Size, D: Size>(
    codes: &[Vector<u32, V>],
    dweight: &[Vector<f32, D>],
    dscales: &mut [f32],
    dbiases: &mut [f32],
    sizes: SpanSizes,
    integers: u32,
    #[comptime] vector: usize,
    #[comptime] layout: Layout,
) {
    let (len, spans, k) = (sizes.len as usize, sizes.spans as usize, sizes.k as usize);
    let group = comptime!(layout.group_within(usize::MAX));
    let runs = (k + comptime!(RUN - 1)) / RUN;
    let lane = UNIT_POS_X as usize % PLANE;
    let mut first = ABSOLUTE_POS - lane;
    // All of a plane's units or none.
    while first < len {
        let at = min(first + lane, len - 1);
        let (row, column0) = (at / spans, at % spans * comptime!(span(layout)));
        let mut sums = Array::<f32>::new(comptime!(2 * RUN / layout.group()));
        #[unroll]
        for i in 0..comptime!(2 * RUN / layout.group()) {
            sums[i] = 0.0;
        }
        let mut values = Array::<f32>::new(comptime!(span(layout)));
        if comptime!(vector == 4) {
            exchanged(dweight, &mut values, first, len, layout);
        } else {
            #[unroll]
            for j in 0..comptime!(span(layout)) {
                // A row may end within a run.
                let value = dweight[row * k + min(column0 + j, k - 1)].extract(0usize);
                values[j] = select(column0 + j < k, value, 0.0f32.runtime());
            }
        }
        #[unroll]
        for part in 0..comptime!(span(layout) / RUN) {
            let mut words = Array::<u32>::new(comptime!(layout.bits));
            load::<V>(codes, row * runs + column0 / RUN + part, &mut words, 0usize, layout);
            #[unroll]
            for j in 0..RUN {
                let sum = comptime!(2 * (j / layout.group()));
                let value = code(&words, 0usize, integers, j, layout)
                    * comptime!(unshift(layout, j) * code_factor(layout));
                let dw = values[comptime!(part * RUN + j)];
                sums[sum] = fma(value, dw, sums[sum]);
                sums[comptime!(sum + 1)] += dw;
            }
        }
        #[unroll]
        for i in 0..comptime!(span(layout) / group) {
            if first + lane < len && column0 + i * group < k {
                let g = row * (k / group) + column0 / group + i;
                dscales[g] = sums[comptime!(2 * i)];
                if comptime!(layout.biased()) {
                    dbiases[g] = sums[comptime!(2 * i + 1)];
                }
            }
        }
        first += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The spans of a plane's units, the first of which is span `first`, a run of each at a time: eight
/// neighbours load a run, so that each load of a plane is of four lines, and each unit takes its
/// own from shared memory.
#[cube]
fn exchanged<D: Size>(
    dweight: &[Vector<f32, D>],
    values: &mut Array<f32>,
    first: usize,
    len: usize,
    #[comptime] layout: Layout,
) {
    let mut shared = Shared::<[Vector<f32, D>]>::new_slice(comptime!(UNITS * VECTORS));
    let lane = UNIT_POS_X as usize % PLANE;
    let plane = UNIT_POS_X as usize / PLANE * comptime!(PLANE * VECTORS);
    #[unroll]
    for part in 0..comptime!(span(layout) / RUN) {
        #[unroll]
        for i in 0..VECTORS {
            let (unit, v) = (lane / VECTORS + comptime!(i * PLANE / VECTORS), lane % VECTORS);
            let from =
                min(first + unit, len - 1) * comptime!(span(layout) / 4) + comptime!(part * VECTORS) + v;
            // Eight neighbours have different banks, writing and reading.
            shared[plane + unit * VECTORS + (v ^ (unit % VECTORS))] = dweight[from];
        }
        sync_plane();
        #[unroll]
        for v in 0..VECTORS {
            let vector = shared[plane + lane * VECTORS + (v ^ (lane % VECTORS))];
            #[unroll]
            for j in 0..4usize {
                values[comptime!(part * RUN + v * 4 + j)] = vector.extract(j);
            }
        }
        sync_plane();
    }
}

fn decode_kernel(
    target: &Target,
    layout: Layout,
    dtype: FloatType,
) -> Kernel<QuantizedMatmulDecodeTransposed<'static>> {
    with_components!(layout, S, B => with_storage!(dtype, Y => {
        QuantizedMatmulDecodeTransposed::kernel::<S, B, Y>(target, UNITS, layout.vector(), layout, dtype)
    }))
}

fn transpose_kernel(target: &Target, dtype: FloatType) -> Kernel<QuantizedMatmulTranspose<'static>> {
    with_storage!(dtype, Y => QuantizedMatmulTranspose::kernel::<Y>(target, UNITS))
}

fn sums_kernel(target: &Target, layout: Layout, vector: usize) -> Kernel<QuantizedMatmulGroupSums<'static>> {
    QuantizedMatmulGroupSums::kernel(target, UNITS, layout.vector(), vector, vector, layout)
}

/// Values of a gradient that a unit loads at once, from rows of k.
fn sums_vector(target: &Target, layout: Layout, k: usize, dweight: &Tensor) -> usize {
    let together = target.plane() == Some(PLANE) && k.is_multiple_of(span(layout)) && dweight.is_aligned(16);
    if together { 4 } else { 1 }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every format, the types of the results in turn.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let dtypes = crate::ops::testing::FLOATS;
    let formats = crate::ops::quantized_matmul::tests::gpu_formats();
    let decode = formats.iter().enumerate().map(|(i, &format)| (Layout::of(format), dtypes[i % 3]));
    let scaled = formats.iter().filter(|format| format.scheme().group_size().is_some());
    let decode = decode.map(|(layout, dtype)| decode_kernel(target, layout, dtype).code());
    let vectors: &[usize] = if target.plane() == Some(PLANE) { &[1, 4] } else { &[1] };
    let sums = scaled.flat_map(|&format| {
        vectors.iter().map(move |&vector| sums_kernel(target, Layout::of(format), vector).code())
    });
    decode.chain(sums).chain(dtypes.map(|dtype| transpose_kernel(target, dtype).code())).collect()
}

/// A weight `[.., N, K]` as a dense `[.., K, N]` of `dtype`.
pub(in crate::ops) fn transposed_weight(
    gpu: &Gpu,
    weight: &QuantizedTensor,
    dtype: FloatType,
) -> Result<QuantizedTensor, KernelError> {
    let (n, k, layout) = (weight.n(), weight.k(), Layout::of(weight.format()));
    let (matrices, runs, pitch) = (weight.rows() / n.max(1), k.div_ceil(RUN), n.next_multiple_of(RUN));
    let mut shape = weight.shape().to_vec();
    let last = shape.len() - 1;
    shape.swap(last - 1, last);
    let y = Tensor::allocate(&[matrices, k, pitch], dtype.dtype(), weight.device())?;
    let len = matrices * runs * pitch;
    if len > 0 {
        CHECK.index(y.len())?;
        CHECK.index(weight.rows() * runs * layout.bits)?;
        let sizes = WeightSizes {
            len: CHECK.index(len)?,
            n: CHECK.index(n)?,
            k: CHECK.index(k)?,
            runs: CHECK.index(runs)?,
            pitch: CHECK.index(pitch)?,
        };
        let arguments = QuantizedMatmulDecodeTransposed {
            weight: weight.buffers()?,
            y: y.buffer()?,
            sizes,
            integers: INTEGERS,
        };
        // SAFETY: the sizes are the tensors'.
        unsafe { gpu.launch(decode_kernel(gpu.target(), layout, dtype), cubes(len), arguments)? };
    }
    Ok(QuantizedTensor::of_runs(dtype, &shape, y))
}

/// Matrices `[count, rows, columns]` as `[count, columns, pitch]`, zeros from column `rows` on.
fn transposed(
    gpu: &Gpu,
    x: &Tensor,
    [count, rows, columns]: [usize; 3],
    pitch: usize,
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(&[count, columns, pitch], x.dtype(), x.device())?;
    CHECK.index(y.len().max(x.len()))?;
    let squares = count * columns.div_ceil(SQUARE) * pitch.div_ceil(SQUARE);
    let sizes = MatrixSizes {
        count: CHECK.index(count)?,
        rows: CHECK.index(rows)?,
        columns: CHECK.index(columns)?,
        pitch: CHECK.index(pitch)?,
    };
    let arguments = QuantizedMatmulTranspose { x: x.buffer()?, y: y.buffer()?, sizes };
    let kernel = transpose_kernel(gpu.target(), CHECK.float("x", x)?);
    // SAFETY: x has `count` matrices, y their transposes, and cubes past the last are left out.
    unsafe { gpu.launch(kernel, rows::cubes(squares), arguments)? };
    Ok(y)
}

/// `dx`, of `shape`.
pub(super) fn backward_x(
    gpu: &Gpu,
    dy: &Tensor,
    weight: &QuantizedTensor,
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let dtype = CHECK.float("dy", dy)?;
    if dy.is_empty() {
        return Tensor::allocate_zeros(shape, dtype.dtype(), dy.device());
    }
    if let Some(dx) = library::backward_x(gpu, dy, weight, (shape, dtype))? {
        return Ok(dx);
    }
    let weight = transposed_weight(gpu, weight, dtype)?;
    Ok(multiply(gpu, &Input::Tensor(dy), &weight, None, shape, dtype)?.0)
}

/// `dweight`, of `shape`, which is `[.., N, K]`; x and dy are of one type.
pub(super) fn backward_weight(
    gpu: &Gpu,
    [x, dy]: [&Tensor; 2],
    shape: &[usize],
) -> Result<Tensor, KernelError> {
    let (count, [n, k]) = (super::matrices(shape), [2, 1].map(|i| shape[shape.len() - i]));
    if x.is_empty() || dy.is_empty() {
        return Tensor::allocate_zeros(shape, DType::F32, x.device());
    }
    let m = x.len() / (count * k);
    let dtype = CHECK.float("x", x)?;
    if library::takes(gpu, &[x, dy], dtype, &[n, k]) {
        let dweight = Tensor::allocate(shape, DType::F32, x.device())?;
        let rows = Rows { x, dy, dtype, first: 0, each: m, matrices: count };
        library::backward_matrices(gpu, rows, 0..n, (&dweight, 0))?;
        return Ok(dweight);
    }
    let dy = transposed(gpu, dy, [count, m, n], m)?;
    let x_runs = transposed(gpu, x, [count, m, k], m.next_multiple_of(RUN))?;
    let x = QuantizedTensor::of_runs(dtype, &[count, k, m], x_runs);
    let dy = Input::Tensor(&dy);
    multiply(gpu, &dy, &x, None, &[count, n, k], FloatType::F32)?.0.reshape(shape)
}

/// Elements of the gradient of a weight's values that exist at a time where only the scales' are
/// wanted: 256 MB.
const SLAB: usize = 1 << 26;

/// The gradients of scales and biases; x and dy are of one type.
pub(super) fn backward_scales(
    gpu: &Gpu,
    [x, dy]: [&Tensor; 2],
    weight: &QuantizedTensor,
) -> Result<ScalesGradient, KernelError> {
    let (n, k, dtype) = (weight.n(), weight.k(), CHECK.float("x", x)?);
    // Rows of a slab begin with whole vectors in every component.
    let slab = (SLAB / k.max(1)).next_multiple_of(RUN);
    let whole = slab >= n || weight.shape().len() != 2 || x.is_empty();
    if whole || !library::takes(gpu, &[x, dy], dtype, &[n, k]) {
        return group_sums(gpu, weight, &backward_weight(gpu, [x, dy], weight.shape())?);
    }
    let dweight = Tensor::allocate(&[slab, k], DType::F32, x.device())?;
    let (mut dscales, mut dbiases) = (vec![], vec![]);
    for first in (0..n).step_by(slab) {
        let end = n.min(first + slab);
        let rows = Rows { x, dy, dtype, first: 0, each: x.len() / k, matrices: 1 };
        library::backward_matrices(gpu, rows, first..end, (&dweight, 0))?;
        let sums = group_sums(gpu, &weight.slice(first, end)?, &dweight.rows(0, end - first)?)?;
        dscales.push(sums.dscales);
        dbiases.extend(sums.dbiases);
    }
    let dbiases = if dbiases.is_empty() { None } else { Some(concat_rows(&dbiases)?) };
    Ok(ScalesGradient { dscales: concat_rows(&dscales)?, dbiases })
}

/// The gradients of scales and biases of a weight with codes, from that of its values.
pub(in crate::ops) fn group_sums(
    gpu: &Gpu,
    weight: &QuantizedTensor,
    dweight: &Tensor,
) -> Result<ScalesGradient, KernelError> {
    let (k, layout) = (weight.k(), Layout::of(weight.format()));
    let group = layout.group_within(usize::MAX);
    let mut shape = weight.shape().to_vec();
    *shape.last_mut().expect("a weight has dimensions") /= group;
    let new = || Tensor::allocate(&shape, DType::F32, weight.device());
    let (dscales, dbiases) = (new()?, layout.biased().then(new).transpose()?);
    if !dscales.is_empty() {
        let spans = k.div_ceil(span(layout));
        let len = weight.rows() * spans;
        CHECK.index(dweight.len())?;
        CHECK.index(weight.rows() * k.div_ceil(RUN) * layout.bits)?;
        let vector = sums_vector(gpu.target(), layout, k, dweight);
        let arguments = QuantizedMatmulGroupSums {
            codes: weight.components()[0].buffer()?,
            dweight: dweight.buffer()?,
            dscales: dscales.buffer()?,
            // Without biases, a placeholder.
            dbiases: dbiases.as_ref().unwrap_or(&dscales).buffer()?,
            sizes: SpanSizes { len: CHECK.index(len)?, spans: CHECK.index(spans)?, k: CHECK.index(k)? },
            integers: INTEGERS,
        };
        // SAFETY: dweight has the weight's elements, and the results one for each group.
        unsafe { gpu.launch(sums_kernel(gpu.target(), layout, vector), cubes(len), arguments)? };
    }
    Ok(ScalesGradient { dscales, dbiases })
}
