//! The product with few rows of x, on any GPU: a cube takes some rows of the weight and some of x, and its units cut
//! them into runs.

use super::super::{CHECK, Input, policy};
use super::integers::ONES;
use super::{mma_rows, mma_vec, padded};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::decode::{INTEGERS, bias, code, factor, load, scale, unshift};
use crate::gpu::float::{narrow, widen, with_storage};
use crate::gpu::layout::{Layout, RUN, with_planes};
use crate::gpu::{CUBES, Dispatch, Gpu};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
#[cfg(test)]
use lowbit_formats::Format;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x.
    pub dtype: FloatType,
    /// The type of y.
    pub result: FloatType,
    /// Rows of the weight that a cube takes.
    pub rows: usize,
    /// Rows of x that a cube takes.
    pub columns: usize,
    /// Units of a cube.
    pub units: usize,
    /// Units that run in step, or 0 where that differs from launch to launch.
    pub plane: usize,
}

/// `y[t, n] = sum over k of x[t, k] * weight[t / rows_a_batch, n, k]`, or, where there are `experts`, of
/// `x[pair / share, k]` and `weight[p * experts + ids[pair], n, k]` with `t = p * pairs + pair`, and NaN for an id that is
/// none of them.
#[cube(launch_unchecked)]
fn mat_vec<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    ids: &[u32],
    y: &mut [Y],
    n: u32,
    runs: u32,
    batches: u32,
    rows_a_batch: u32,
    experts: u32,
    pairs: u32,
    share: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let (rows, columns) = comptime!((shape.rows, shape.columns));
    let groups = comptime!(RUN / layout.group());
    let row0 = CUBE_POS_X as usize * rows;
    let place = place(ids, (batches, rows_a_batch), (experts, pairs, share), columns);
    let (n, runs) = (n as usize, runs as usize);
    let mut run = UNIT_POS_X as usize;
    if !place.known {
        run = runs;
    }
    let mut sums = Array::<f32>::new(comptime!(rows * columns));
    #[unroll]
    for i in 0..comptime!(rows * columns) {
        sums[i] = place.initial;
    }
    while run < runs {
        let mut values = Array::<f32>::new(comptime!(rows * RUN));
        let mut factors = Array::<f32>::new(comptime!(rows * groups));
        let mut added = Array::<f32>::new(comptime!(rows * groups));
        let mut words = Array::<u32>::new(comptime!(rows * layout.bits));
        #[unroll]
        for r in 0..rows {
            // Rows past the last are computed and not stored.
            let at = (place.batch * n + min(row0 + r, n - 1)) * runs + run;
            load::<V>(codes, at, &mut words, comptime!(r * layout.bits), layout);
            #[unroll]
            for group in 0..groups {
                factors[r * groups + group] = scale::<S, B>(scales, biases, at, group, layout);
                added[r * groups + group] = bias::<S, B>(scales, biases, at, group, layout);
            }
        }
        #[unroll]
        for r in 0..rows {
            #[unroll]
            for i in 0..RUN {
                values[r * RUN + i] = code(&words, comptime!(r * layout.bits), integers, i, layout);
            }
        }
        #[unroll]
        for c in 0..columns {
            let row = place.x_row + min(c, place.count - 1);
            let mut xs = Array::<f32>::new(RUN);
            let mut x_sums = Array::<f32>::new(groups);
            load_x(x, row * runs + run, &mut xs, &mut x_sums, shape);
            #[unroll]
            for r in 0..rows {
                let mut sum = sums[c * rows + r];
                #[unroll]
                for group in 0..groups {
                    let mut dot = 0.0f32;
                    #[unroll]
                    for i in 0..comptime!(layout.group()) {
                        let i = comptime!(group * layout.group() + i);
                        dot = fma(values[r * RUN + i], xs[i], dot);
                    }
                    if comptime!(factor(layout) != 1.0) {
                        dot *= comptime!(factor(layout));
                    }
                    sum = fma(factors[r * groups + group], dot, sum);
                    if comptime!(layout.biased()) {
                        sum = fma(added[r * groups + group], x_sums[group], sum);
                    }
                }
                sums[c * rows + r] = sum;
            }
        }
        run += comptime!(shape.units);
    }
    store::<Y>(&sums, y, &place, n, row0, shape);
}

/// What a cube of few rows of x works on.
#[derive(CubeType)]
pub(super) struct Place {
    /// The first row of y, and how many.
    pub t0: usize,
    pub count: usize,
    /// The row of x for the first.
    pub x_row: usize,
    /// The batch of the weight that they take, if it is known.
    pub batch: usize,
    pub known: bool,
    /// What sums begin with.
    pub initial: f32,
}

/// The place of this cube, of at most `columns` rows of y, or of one where there are experts: of `rows` `(batches,
/// rows_a_batch)`, or `chosen` by `(experts, pairs, share)`.
#[cube]
pub(super) fn place(
    ids: &[u32],
    rows: (u32, u32),
    chosen: (u32, u32, u32),
    #[comptime] columns: usize,
) -> Place {
    let (batches, rows_a_batch) = rows;
    let (experts, pairs, share) = chosen;
    let rows_a_batch = rows_a_batch as usize;
    let tile = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let tiles = (rows_a_batch + comptime!(columns - 1)) / columns;
    let mut batch = tile / tiles;
    let column0 = tile % tiles * columns;
    let t0 = batch * rows_a_batch + column0;
    // Cubes past the last row of x have nothing to read and to write.
    let mut known = batch < batches as usize;
    let count = select(known, min(rows_a_batch - column0, columns), 0usize);
    let mut initial = 0.0f32;
    let mut x_row = t0;
    if known && experts > 0 {
        let pair = t0 as u32 % pairs;
        let expert = ids[pair as usize];
        batch = (t0 as u32 / pairs * experts + expert) as usize;
        x_row = (pair / share) as usize;
        if expert >= experts {
            known = false;
            initial = f32::reinterpret(0x7fc0_0000u32);
        }
    }
    Place { t0, count, x_row, batch, known, initial }
}

/// A run of x, each value scaled as the weight's code at its place needs it, and the sums of its groups.
#[cube]
fn load_x(
    x: &[Vector<u32, Const<4>>],
    run: usize,
    xs: &mut Array<f32>,
    x_sums: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let size = comptime!(shape.dtype.size());
    let a_word = comptime!(4 / size);
    #[unroll]
    for group in 0..comptime!(RUN / shape.layout.group()) {
        x_sums[group] = 0.0;
    }
    #[unroll]
    for v in 0..comptime!(2 * size) {
        let vector = x[run * comptime!(2 * size) + v];
        #[unroll]
        for j in 0..4usize {
            let word = vector.extract(j);
            #[unroll]
            for h in 0..a_word {
                let i = comptime!((v * 4 + j) * a_word + h);
                let bits = if comptime!(h == 0) {
                    if comptime!(size == 4) { word } else { word & 0xffffu32 }
                } else {
                    word >> 16u32
                };
                let value = widen(bits, shape.dtype);
                let group = comptime!(i / shape.layout.group());
                x_sums[group] += value;
                xs[i] = value * comptime!(unshift(shape.layout, i));
            }
        }
    }
}

/// Adds up what the units have of each sum, and stores those that there are rows for.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn store<Y: Int>(
    sums: &Array<f32>,
    y: &mut [Y],
    place: &Place,
    n: usize,
    row0: usize,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let all = comptime!(shape.rows * shape.columns);
    let unit = UNIT_POS_X as usize;
    if comptime!(shape.units == shape.plane) {
        #[unroll]
        for i in 0..all {
            let sum = plane_sum(sums[i]);
            let (c, r) = comptime!((i / rows, i % rows));
            if unit == 0 && c < place.count && row0 + r < n {
                y[(place.t0 + c) * n + row0 + r] = Y::cast_from(narrow(sum, shape.result));
            }
        }
    } else {
        let plane = plane_size(shape.plane);
        let mut partial = Shared::<[f32]>::new_slice(comptime!(all * shape.units / FEWEST));
        #[unroll]
        for i in 0..all {
            let sum = plane_sum(sums[i]);
            if unit % plane == 0 {
                partial[unit / plane * all + i] = sum;
            }
        }
        sync_cube();
        let (c, r) = (unit / rows, unit % rows);
        if unit < all && c < place.count && row0 + r < n {
            let mut sum = 0.0f32;
            let mut at = unit;
            while at < comptime!(shape.units) / plane * all {
                sum += partial[at];
                at += all;
            }
            y[(place.t0 + c) * n + row0 + r] = Y::cast_from(narrow(sum, shape.result));
        }
    }
}

/// The smallest planes that there are.
const FEWEST: usize = 4;

#[cube]
fn plane_size(#[comptime] fixed: usize) -> usize {
    if comptime!(fixed == 0) { PLANE_DIM as usize } else { fixed.runtime() }
}

/// The kernel for `shape`, its types chosen by what the layout stores.
fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.units as u32);
    let [codes, scales, biases] = [buffer(), buffer(), buffer()];
    let [x, ids, y] = [buffer(), buffer(), buffer()];
    with_planes!(shape.layout, S, B => with_storage!(shape.result, Y => Box::new(mat_vec::MatVec::<S, B, Y>::new(
        settings, properties, registers, codes, scales, biases, x, ids, y, (), (), (), (), (), (), (), (),
        shape.layout.vector(), shape,
    ))))
}

/// The kernel of this file for `m` rows of x a batch.
fn portable(
    target: &Target,
    layout: Layout,
    [dtype, result]: [FloatType; 2],
    (m, n, runs): (usize, usize, usize),
) -> Shape {
    let plane = target.plane();
    let (rows, columns, units) = policy::gpu(layout.bits, (m, n, runs), plane);
    Shape { layout, dtype, result, rows, columns, units, plane: plane.unwrap_or(0) }
}

/// The kernel for a product, and what it is launched with.
struct Plan {
    kernel: Box<dyn CubeKernel>,
    /// Rows of the weight and of x that a cube takes.
    rows: usize,
    columns: usize,
    /// The kernel's last argument.
    constant: u32,
    /// Whether it has an operand for what x is made of.
    makes: bool,
}

/// The kernel for `m` rows of x to each of `batches` batches of the weight; a row has `made` vectors where they are made
/// of others, which [`makes`] has allowed.
fn plan(
    target: &Target,
    layout: Layout,
    types: [FloatType; 2],
    (batches, made): (usize, usize),
    (m, n, runs): (usize, usize, usize),
) -> Plan {
    let [dtype, result] = types;
    let overlaps = target.overlaps();
    if m >= policy::SEVERAL && mma_rows::supports(target, layout, dtype) {
        let policy::Cut { columns, tiles, strips, splits, chunk } =
            policy::mma_rows(batches, (m, n, (runs * RUN).div_ceil(mma_rows::STEP)));
        let whole = (runs * RUN).is_multiple_of(mma_rows::STEP);
        let shape = mma_rows::Shape {
            layout,
            dtype,
            result,
            columns,
            tiles,
            strips,
            splits,
            chunk,
            whole,
            ids: 0,
            overlaps,
        };
        let shape = shape.fitting(target.shared_memory());
        let kernel = mma_rows::kernel(target, shape);
        Plan { kernel, rows: shape.rows(), columns, constant: ONES, makes: false }
    } else if mma_vec::supports(target, layout, dtype) {
        let (columns, tiles, planes, chunk) = policy::mma_vec(batches, (m, n, runs));
        let scaled = chunk;
        let shape =
            mma_vec::Shape { layout, dtype, result, columns, tiles, planes, chunk, scaled, made, overlaps };
        let kernel = mma_vec::kernel(target, shape);
        Plan { kernel, rows: 16 * tiles, columns, constant: ONES, makes: true }
    } else {
        let shape = portable(target, layout, types, (m, n, runs));
        let (rows, columns, kernel) = (shape.rows, shape.columns, kernel(target, shape));
        Plan { kernel, rows, columns, constant: INTEGERS, makes: false }
    }
}

/// Values of a row that are made at the most: every cube makes all of them.
const MOST_MADE: usize = 4096;

/// Whether the kernel for one row of x makes it of `gate` and `up` itself.
fn makes(target: &Target, weight: &QuantizedTensor, [gate, up]: [&Tensor; 2]) -> Result<bool, KernelError> {
    let (k, dtype) = (weight.k(), CHECK.float("x", gate)?);
    Ok(mma_vec::supports(target, Layout::of(weight.format()), dtype)
        && gate.dtype() == up.dtype()
        && k.is_multiple_of(RUN)
        && (1..=MOST_MADE).contains(&k)
        && [gate, up].iter().all(|x| x.is_aligned(16)))
}

/// One of each format and type of x, at sizes of layers, and with a result of another type. With several rows of x the
/// types differ in nothing new.
#[cfg(test)]
pub(super) fn kernels(target: &Target, formats: &[Format], dtypes: &[FloatType]) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for &format in formats {
        let layout = Layout::of(format);
        let one = dtypes.iter().map(|&dtype| (1, [dtype; 2]));
        for (m, types) in one.chain([(1, [FloatType::F16, FloatType::F32]), (8, [FloatType::F32; 2])]) {
            kernels.push(kernel(target, portable(target, layout, types, (m, 4096, 4096 / RUN))));
        }
    }
    kernels
}

/// Which rows of a weight `[.., N, K]` rows of x are multiplied with.
pub(crate) enum Batches<'a> {
    /// As many rows of x for each batch, in order.
    Even,
    /// Of each of some products of `experts` batches, batch `ids[pair]` with row `pair / share` of x gives the next row of
    /// y.
    Chosen { ids: &'a Tensor, share: usize, experts: usize },
}

/// `x` times `weight` into `y`, of any float type, which is not empty.
pub(crate) fn multiply(
    gpu: &Gpu,
    x: &Input<'_>,
    weight: &QuantizedTensor,
    batches: &Batches,
    y: &Tensor,
) -> Result<(), KernelError> {
    let one_each = matches!(batches, Batches::Chosen { .. });
    let (x, up) = match *x {
        Input::SiluMul { gate, up } if one_each && makes(gpu.target(), weight, [gate, up])? => {
            (gate.clone(), Some(up))
        }
        _ => (padded(gpu, &x.tensor()?.0)?, None),
    };
    let (dtype, result) = (CHECK.float("x", &x)?, CHECK.float("y", y)?);
    let (n, runs) = (weight.n(), weight.k().div_ceil(RUN));
    let m = y.len() / n;
    let (count, experts, share, ids) = match *batches {
        Batches::Even => (weight.rows() / n, 0, 1, &x),
        Batches::Chosen { ids, share, experts } => (m, experts, share, ids),
    };
    let made = if up.is_some() { weight.k() / 8 } else { 0 };
    let layout = Layout::of(weight.format());
    let sizes = (m / count, n, runs);
    let Plan { kernel, rows, columns, constant, makes } =
        plan(gpu.target(), layout, [dtype, result], (count, made), sizes);
    let index = |value: usize| CHECK.index(value);
    // The planes of scales have two elements a run at most, and codes no less.
    index(weight.rows() * runs * (layout.bits / layout.vector()).max(2))?;
    index(m * runs * RUN)?;
    index(y.len())?;
    let tiles = count * (m / count).div_ceil(columns);
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    let mut buffers =
        vec![component(0)?, component(1)?, component(2)?, x.memory()?, ids.memory()?, y.memory()?];
    if makes {
        buffers.push(up.unwrap_or(&x).memory()?);
    }
    // The weight's planes may be read while the launch before runs.
    gpu.launch_early(
        3,
        Dispatch {
            kernel,
            cubes: [index(n.div_ceil(rows))?, index(tiles.min(CUBES))?, index(tiles.div_ceil(CUBES))?],
            buffers,
            scalars: vec![
                index(n)?,
                index(runs)?,
                index(count)?,
                index(m / count)?,
                index(experts)?,
                index(ids.len())?,
                index(share)?,
                constant,
            ],
        },
    )
}
