//! The product on a GPU for many rows of x, by Hopper's tensor cores: four planes multiply 64 rows of the weight,
//! decoded in registers, with up to 256 rows of x in shared memory.
//!
//! A unit decodes whole runs, which are not what the tensor cores want of it. But K may go in any order that both
//! operands share: `pack.rs` lays x out in the order in which the units have their values, in pieces of [`BLOCK`]
//! values of all rows of a tile, so that one bulk copy moves a piece.

use super::super::CHECK;
use super::{pack, ptx};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::decode::{INTEGERS, bias_of, code, factor, load, scale_of, unshift};
use crate::gpu::float::narrow;
use crate::gpu::layout::{Codes, Layout, RUN, Scales, with_planes};
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub layout: Layout,
    /// The type of x and y, which weights are rounded to.
    pub dtype: FloatType,
    /// Rows of x a tile.
    pub rows: usize,
    /// Blocks of a weight's row that are loaded before they are needed.
    pub ahead: usize,
    /// Blocks of x in shared memory.
    pub stages: usize,
    /// Whether a list says which batch of the weight a tile takes, and where its rows go.
    pub listed: bool,
}

/// Values of a row of x that are copied at once: a run for each of the four units that share a row of the weight.
pub(crate) const BLOCK: usize = 4 * RUN;
/// Values that the tensor cores take at once.
const STEP: usize = 16;
/// Rows of the weight that a cube takes.
const COLUMNS: usize = 128;
/// Units of a cube: four planes for 64 rows of the weight.
const UNITS: usize = 2 * COLUMNS;

/// Instead of a tile's batch: there is no such batch, and its rows are NaN.
pub(crate) const WRONG: u32 = u32::MAX - 1;
/// Instead of a tile's batch: it has no rows.
pub(crate) const EMPTY: u32 = u32::MAX;

/// What is loaded of a run beside its codes: elements of the planes of scales and biases.
fn extras(layout: Layout) -> (usize, usize) {
    match layout.scales {
        Scales::One => (0, 0),
        Scales::Group { biased, .. } => (1, biased.into()),
        Scales::E8M0 { .. } => (1, 0),
        Scales::E4M3 => (2, 0),
        Scales::Super { .. } | Scales::SuperWithMinima { .. } => (1, 1),
    }
}

/// What a unit has loaded and not yet decoded, of `ahead + 1` blocks and two rows of the weight each.
#[derive(CubeType)]
struct Loaded<S: Int, B: Int> {
    words: Array<u32>,
    scales: Array<S>,
    biases: Array<B>,
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]` for each tile of x. `x` is packed; `list` has the batch of the
/// weight of each tile, then the row of y of each of its rows.
#[cube(launch_unchecked)]
fn tensor_core<S: Int, B: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [u32],
    n: u32,
    blocks: u32,
    m: u32,
    tiles_a_batch: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let stages = comptime!(shape.stages);
    let stage_bytes = comptime!((shape.rows * BLOCK * 2) as u32);
    let tile = CUBE_POS_X;
    let mut batch = tile / tiles_a_batch;
    if comptime!(shape.listed) {
        batch = list[tile as usize];
    }
    let unit = UNIT_POS_X;
    let lane = unit % 32u32;
    // The rows that the tensor cores call g and g + 8 are neighbours, so that y is written in pairs.
    let column = CUBE_POS_Y * comptime!(COLUMNS as u32) + unit / 32u32 * 16u32 + lane / 4u32 * 2u32;
    if comptime!(shape.listed) {
        if batch == WRONG {
            store(list, y, n, m, tile, tiles_a_batch, column, true, shape);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let first_run = (batch * n + min(column, n - 2u32)) * blocks * 4u32 + lane % 4u32;
    let second_run = first_run + blocks * 4u32;

    let memory = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(shape.stages * (shape.rows * BLOCK * 2 / 16) + shape.stages),
        128usize,
    );
    let base = ptx::register(ptx::address(&memory));
    let barriers = base + stages as u32 * stage_bytes;
    let x_tile = tile * blocks * (stage_bytes / 16u32);
    if unit == 0u32 {
        #[unroll]
        for stage in 0..stages {
            ptx::barrier(barriers + stage as u32 * 8u32);
        }
        ptx::publish();
    }
    ptx::meet();
    if unit == 0u32 {
        #[unroll]
        for stage in 0..stages {
            let stage = stage as u32;
            if stage < blocks {
                ptx::copy(
                    x,
                    x_tile + stage * (stage_bytes / 16u32),
                    base + stage * stage_bytes,
                    barriers + stage * 8u32,
                    comptime!(shape.rows * BLOCK * 2),
                );
            }
        }
    }

    let slots = comptime!(shape.ahead + 1);
    let mut loaded = Loaded::<S, B> {
        words: Array::new(comptime!(slots * 2 * shape.layout.bits)),
        scales: Array::new(comptime!(slots * 4)),
        biases: Array::new(comptime!(slots * 2)),
    };
    #[unroll]
    for slot in 0..comptime!(shape.ahead) {
        let block = min(slot as u32, blocks - 1u32);
        fetch::<S, B, V>(codes, scales, biases, &mut loaded, first_run + block * 4u32, slot, 0usize, shape);
        fetch::<S, B, V>(codes, scales, biases, &mut loaded, second_run + block * 4u32, slot, 1usize, shape);
    }
    ptx::begin(rows);

    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut block = 0u32;
    while block < blocks {
        #[unroll]
        for slot in 0..slots {
            if block < blocks {
                let next = min(block + comptime!(shape.ahead as u32), blocks - 1u32);
                let free = comptime!((slot + shape.ahead) % slots);
                fetch::<S, B, V>(
                    codes,
                    scales,
                    biases,
                    &mut loaded,
                    first_run + next * 4u32,
                    free,
                    0usize,
                    shape,
                );
                fetch::<S, B, V>(
                    codes,
                    scales,
                    biases,
                    &mut loaded,
                    second_run + next * 4u32,
                    free,
                    1usize,
                    shape,
                );
                ptx::wait(barriers + stage * 8u32, ptx::register(phase));
                multiply_block::<S, B>(&loaded, x, base, stage, block, blocks, x_tile, integers, slot, shape);
                stage += 1u32;
                if stage == stages as u32 {
                    stage = 0u32;
                    phase ^= 1u32;
                }
                block += 1u32;
            }
        }
    }
    ptx::finish();
    store(list, y, n, m, tile, tiles_a_batch, column, false, shape);
}

/// Loads run `run` into place `row` of slot `slot`.
#[cube]
fn fetch<S: Int, B: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    loaded: &mut Loaded<S, B>,
    run: u32,
    #[comptime] slot: usize,
    #[comptime] row: usize,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let place = comptime!(slot * 2 + row);
    let run = run as usize;
    load::<V>(codes, run, &mut loaded.words, comptime!(place * layout.bits), layout);
    let (of_scales, of_biases) = comptime!(extras(layout));
    let a_run = comptime!(match layout.scales {
        Scales::Group { size, .. } => size / RUN,
        _ => 1,
    });
    #[unroll]
    for i in 0..of_scales {
        loaded.scales[place * 2 + i] = scales[run / a_run * of_scales + i];
    }
    #[unroll]
    for i in 0..of_biases {
        let a_bias = comptime!(match layout.scales {
            Scales::Group { .. } => a_run,
            _ => 8,
        });
        loaded.biases[place + i] = biases[run / a_bias];
    }
}

/// Multiplies the block of the weight in slot `slot` with the block of x in stage `stage`.
#[cube]
fn multiply_block<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    x: &[Vector<u32, Const<4>>],
    base: u32,
    stage: u32,
    block: u32,
    blocks: u32,
    x_tile: u32,
    integers: u32,
    #[comptime] slot: usize,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let groups = comptime!(RUN / layout.group());
    let stages = comptime!(shape.stages as u32);
    let stage_bytes = comptime!((shape.rows * BLOCK * 2) as u32);
    let mut factors = Array::<f32>::new(comptime!(2 * groups));
    let mut offsets = Array::<f32>::new(comptime!(2 * groups));
    #[unroll]
    for row in 0..2usize {
        let place = comptime!(slot * 2 + row);
        let two = comptime!(matches!(layout.scales, Scales::E4M3));
        let of_bias = u32::cast_from(loaded.biases[place]);
        #[unroll]
        for group in 0..groups {
            let at = comptime!(place * 2 + if two { group } else { 0 });
            let of_scale = u32::cast_from(loaded.scales[at]);
            factors[row * groups + group] = scale_of(of_scale, of_bias, group, layout);
            if comptime!(layout.biased()) {
                offsets[row * groups + group] = bias_of(of_scale, of_bias, group, layout);
            }
        }
    }
    #[unroll]
    for step in 0..comptime!(BLOCK / STEP) {
        let first = comptime!(step * 4);
        let a0 = pair(&loaded.words, &factors, &offsets, integers, first, slot, 0usize, shape);
        let a1 = pair(&loaded.words, &factors, &offsets, integers, first, slot, 1usize, shape);
        let a2 = pair(&loaded.words, &factors, &offsets, integers, comptime!(first + 2), slot, 0usize, shape);
        let a3 = pair(&loaded.words, &factors, &offsets, integers, comptime!(first + 2), slot, 1usize, shape);
        let tile = base + stage * stage_bytes + comptime!((step * shape.rows * STEP * 2) as u32);
        ptx::multiply(a0, a1, a2, a3, tile, shape.rows, shape.dtype);
        // Two products later none reads the block before: another may take its place.
        if comptime!(step == 1) {
            ptx::meet();
            let next = block + stages - 1u32;
            if block > 0u32 && next < blocks && UNIT_POS_X == 0u32 {
                let free = select(stage == 0u32, stages - 1u32, stage - 1u32);
                ptx::copy(
                    x,
                    x_tile + next * (stage_bytes / 16u32),
                    base + free * stage_bytes,
                    base + stages * stage_bytes + free * 8u32,
                    comptime!(shape.rows * BLOCK * 2),
                );
            }
        }
    }
}

/// Values `i` and `i + 1` of a run.
#[cube]
fn pair(
    words: &Array<u32>,
    factors: &Array<f32>,
    offsets: &Array<f32>,
    integers: u32,
    #[comptime] i: usize,
    #[comptime] slot: usize,
    #[comptime] row: usize,
    #[comptime] shape: Shape,
) -> u32 {
    let layout = comptime!(shape.layout);
    let first = comptime!((slot * 2 + row) * layout.bits);
    if comptime!(matches!(layout.codes, Codes::Float(_))) {
        // Of the type already.
        ptx::register(words[comptime!(first + i / 2)])
    } else {
        let low = value(words, factors, offsets, integers, i, first, row, layout);
        let high = value(words, factors, offsets, integers, comptime!(i + 1), first, row, layout);
        ptx::register(ptx::pack(low, high, shape.dtype))
    }
}

#[cube]
fn value(
    words: &Array<u32>,
    factors: &Array<f32>,
    offsets: &Array<f32>,
    integers: u32,
    #[comptime] i: usize,
    #[comptime] first: usize,
    #[comptime] row: usize,
    #[comptime] layout: Layout,
) -> f32 {
    let group = comptime!(row * (RUN / layout.group()) + i / layout.group());
    let value = if comptime!(factor(layout) != 1.0) {
        code(words, first, integers, i, layout) * comptime!(factor(layout))
    } else {
        code(words, first, integers, i, layout)
    };
    // The same product for all values whose shift is the same.
    let factor = factors[group] * comptime!(unshift(layout, i));
    if comptime!(layout.biased()) { fma(value, factor, offsets[group]) } else { value * factor }
}

/// Writes a unit's sums: of two neighbouring rows of the weight, two rows of x of every 8.
#[cube]
fn store(
    list: &[u32],
    y: &mut [u32],
    n: u32,
    m: u32,
    tile: u32,
    tiles_a_batch: u32,
    column: u32,
    #[comptime] nan: bool,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let batch = tile / tiles_a_batch;
    let tile_row = tile % tiles_a_batch * rows as u32;
    #[unroll]
    for i in 0..comptime!(rows / 4) {
        let row = comptime!((i / 2 * 8 + i % 2) as u32) + UNIT_POS_X % 4u32 * 2u32;
        let packed = if comptime!(nan) {
            u32::MAX.runtime()
        } else {
            let low = ptx::sum(comptime!(i / 2 * 4 + i % 2));
            let high = ptx::sum(comptime!(i / 2 * 4 + i % 2 + 2));
            narrow(low, shape.dtype) | (narrow(high, shape.dtype) << 16u32)
        };
        if comptime!(shape.listed) {
            let to = list[(CUBE_COUNT_X + tile * rows as u32 + row) as usize];
            if to != u32::MAX && column < n {
                y[((to * n + column) / 2u32) as usize] = packed;
            }
        } else {
            if tile_row + row < m && column < n {
                y[(((batch * m + tile_row + row) * n + column) / 2u32) as usize] = packed;
            }
        }
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS as u32);
    with_planes!(shape.layout, S, B => Box::new(tensor_core::TensorCore::<S, B>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), buffer(), buffer(),
        (), (), (), (), (), shape.layout.vector(), shape,
    )))
}

/// Layouts whose values the tensor cores can have: floats of another type would not be rounded but misread.
fn takes(layout: Layout, dtype: FloatType) -> bool {
    dtype != FloatType::F32 && !matches!(layout.codes, Codes::Float(float) if float != dtype)
}

/// Whether this kernel computes products with `weight` for `x` of `dtype` on `target`.
pub(crate) fn supports(target: &Target, weight: &QuantizedTensor, dtype: FloatType) -> bool {
    target.warp_groups()
        && takes(Layout::of(weight.format()), dtype)
        && weight.k() > 0
        && weight.k().is_multiple_of(BLOCK)
        && weight.n().is_multiple_of(2)
}

/// How rows of x are cut into tiles.
pub(crate) struct Tiles<'a> {
    /// Rows of x a tile: 16, 32, 64, 128 or 256.
    pub rows: usize,
    /// All tiles.
    pub count: usize,
    /// Rows of x a batch of the weight.
    pub m: usize,
    /// The batch of the weight of each tile (or [`WRONG`], or [`EMPTY`]), then the row of y of each row of each
    /// tile (or `u32::MAX`), `share` of which have the same row of x.
    pub list: Option<(&'a Memory, usize)>,
}

impl Shape {
    fn new(layout: Layout, dtype: FloatType, rows: usize, listed: bool) -> Self {
        // Many rows compute long enough for one block's loads to arrive; shared memory holds three blocks of 256.
        let (ahead, stages) = match rows {
            256 => (1, 3),
            _ if layout.bits > 8 => (1, 4),
            _ => (2, 4),
        };
        Self { layout, dtype, rows, ahead, stages, listed }
    }
}

/// `x` times `weight` into `y`, where [`supports`] says so.
pub(crate) fn multiply(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    y: &Tensor,
    tiles: &Tiles<'_>,
) -> Result<(), KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (n, k) = (weight.n(), weight.k());
    let packed = pack::pack_rows(gpu, x, k, tiles)?;
    let shape =
        Shape::new(Layout::of(weight.format()), CHECK.float("x", x)?, tiles.rows, tiles.list.is_some());
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    // Every index into the planes is below the codes' words.
    index(weight.rows() * (k / RUN) * shape.layout.bits)?;
    index(y.len().max(tiles.count * tiles.rows * k / 8))?;
    let list = tiles.list.map_or((&packed, 0), |(list, _)| (list, 0));
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: [index(tiles.count)?, index(n.div_ceil(COLUMNS))?, 1],
        buffers: vec![component(0)?, component(1)?, component(2)?, (&packed, 0), list, y.memory()?],
        scalars: vec![
            index(n)?,
            index(k / BLOCK)?,
            index(tiles.m)?,
            index(tiles.m.div_ceil(tiles.rows).max(1))?,
            INTEGERS,
        ],
    })
}

/// Every width and kind of code in f16, each tile, and bf16.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use lowbit_formats::Format;
    if !target.warp_groups() {
        return Vec::new();
    }
    let of_format =
        super::super::tests::gpu_formats().into_iter().map(|format| (format, FloatType::F16, 64, false));
    let others = [(Format::Q4_0, 128, false), (Format::Q8_0, 256, false), (Format::Q4_K, 16, true)];
    let others = others.map(|(format, rows, listed)| (format, FloatType::BF16, rows, listed));
    let shapes = of_format.chain(others).filter(|shape| takes(Layout::of(shape.0), shape.1));
    let shapes =
        shapes.map(|(format, dtype, rows, listed)| Shape::new(Layout::of(format), dtype, rows, listed));
    shapes
        .map(|shape| kernel(target, shape))
        .chain([false, true].map(|listed| pack::kernel(target, 64, listed)))
        .collect()
}
