//! The product on a GPU for many rows of x, by Hopper's tensor cores: four planes multiply 64 rows of the weight,
//! decoded in registers, with up to 256 rows of x in shared memory.
//!
//! A unit decodes whole runs, which are not what the tensor cores want of it. But K may go in any order that both
//! operands share: `pack.rs` lays x out in the order in which the units have their values, in pieces of [`BLOCK`]
//! values of all rows of a tile, so that one bulk copy moves a piece.

use super::super::CHECK;
use super::fragment::{self, Loaded, fetch};
use super::{pack, ptx};
use crate::gpu::compile::{Target, buffer, early};
use crate::gpu::decode::INTEGERS;
use crate::gpu::float::narrow;
use crate::gpu::layout::{Codes, Layout, RUN, with_planes};
use crate::gpu::ptx::{address, barrier, publish, register};
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
    /// Blocks of x in shared memory, for each part of K.
    pub stages: usize,
    /// Parts that K is cut into, each multiplied by its own units.
    pub parts: usize,
    /// Steps whose values are decoded before they are multiplied.
    pub steps: usize,
    /// Whether a list says which batch of the weight a tile takes, and where its rows go.
    pub listed: bool,
}

/// Values of a row of x that are copied at once: a run for each of the four units that share a row of the weight.
pub(crate) const BLOCK: usize = 4 * RUN;
/// Values that the tensor cores take at once.
const STEP: usize = 16;
/// Rows of the weight that a cube takes.
const COLUMNS: usize = 128;
/// Units that multiply a part of K: four planes for 64 rows of the weight.
const UNITS: usize = 2 * COLUMNS;

/// Instead of a tile's batch: there is no such batch, and its rows are NaN.
pub(crate) const WRONG: u32 = u32::MAX - 1;
/// Instead of a tile's batch: it has no rows.
pub(crate) const EMPTY: u32 = u32::MAX;

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]` for each tile of x. `x` is packed; `list` has the batch of the
/// weight of each tile, then the row of y of each of its rows.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
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
    // The weight's planes.
    early(3usize);
    let rows = comptime!(shape.rows);
    let stage_bytes = comptime!((shape.rows * BLOCK * 2) as u32);
    let tile = CUBE_POS_X;
    let mut batch = tile / tiles_a_batch;
    if comptime!(shape.listed) {
        batch = list[tile as usize];
    }
    let unit = UNIT_POS_X;
    let lane = unit % 32u32;
    // The rows that the tensor cores call g and g + 8 are neighbours, so that y is written in pairs.
    let column =
        CUBE_POS_Y * comptime!(COLUMNS as u32) + unit % UNITS as u32 / 32u32 * 16u32 + lane / 4u32 * 2u32;
    if comptime!(shape.listed) {
        if batch == WRONG {
            store(list, y, n, m, tile, tiles_a_batch, column, 0u32, true, shape);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let part = part_of(shape);
    let first_run = (batch * n + min(column, n - 2u32)) * blocks * 4u32 + lane % 4u32;
    let second_run = first_run + blocks * 4u32;

    let memory = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!(shape.parts * shape.stages * (shape.rows * BLOCK * 2 / 16 + 1)),
        128usize,
    );
    let memory = register(address(&memory));
    let pipe = Pipe {
        base: memory + part * comptime!(shape.stages as u32) * stage_bytes,
        barriers: memory
            + comptime!((shape.parts * shape.stages) as u32) * stage_bytes
            + part * comptime!(shape.stages as u32 * 8),
        from: tile * blocks * (stage_bytes / 16u32),
        blocks,
        leads: unit % UNITS as u32 == 0u32,
        point: part + 1u32,
    };
    begin_copies(&pipe, x, part, shape);

    let slots = comptime!(shape.ahead + 1);
    let parts = comptime!(shape.parts as u32);
    let last = blocks - 1u32;
    let mut loaded = fragment::none::<S, B>(slots, shape.layout);
    #[unroll]
    for slot in 0..comptime!(shape.ahead) {
        let run = min(part + comptime!((slot * shape.parts) as u32), last) * 4u32;
        fetch::<S, B, V>(
            codes,
            scales,
            biases,
            &mut loaded,
            first_run + run,
            comptime!(slot * 2),
            shape.layout,
        );
        fetch::<S, B, V>(
            codes,
            scales,
            biases,
            &mut loaded,
            second_run + run,
            comptime!(slot * 2 + 1),
            shape.layout,
        );
    }
    ptx::begin(rows);

    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut block = part;
    while block < blocks {
        #[unroll]
        for slot in 0..slots {
            if block < blocks {
                let run = min(block + comptime!((shape.ahead * shape.parts) as u32), last) * 4u32;
                let free = comptime!((slot + shape.ahead) % slots * 2);
                fetch::<S, B, V>(codes, scales, biases, &mut loaded, first_run + run, free, shape.layout);
                fetch::<S, B, V>(
                    codes,
                    scales,
                    biases,
                    &mut loaded,
                    second_run + run,
                    comptime!(free + 1),
                    shape.layout,
                );
                ptx::wait(pipe.barriers + stage * 8u32, register(phase));
                multiply_block::<S, B>(&loaded, x, &pipe, stage, block, integers, slot, shape);
                stage += 1u32;
                if stage == comptime!(shape.stages as u32) {
                    stage = 0u32;
                    phase ^= 1u32;
                }
                block += parts;
            }
        }
    }
    ptx::finish();
    let others = memory + unit % UNITS as u32 * 4u32;
    if comptime!(shape.parts == 2) {
        // No product reads x any more: the sums of the second part take its place.
        ptx::meet(register(0u32.runtime()), comptime!(2 * UNITS));
        if part == 1u32 {
            #[unroll]
            for i in 0..comptime!(rows / 2) {
                ptx::put(others + comptime!((i * UNITS * 4) as u32), i);
            }
        }
        ptx::meet(register(0u32.runtime()), comptime!(2 * UNITS));
    }
    if part == 0u32 {
        store(list, y, n, m, tile, tiles_a_batch, column, others, false, shape);
    }
}

/// The part of K that a unit multiplies.
#[cube]
fn part_of(#[comptime] shape: Shape) -> u32 {
    if comptime!(shape.parts == 1) { 0u32.runtime() } else { UNIT_POS_X / UNITS as u32 }
}

/// How blocks of x come to the units of a part.
#[derive(CubeType)]
struct Pipe {
    /// Where the stages and their barriers lie in shared memory.
    base: u32,
    barriers: u32,
    /// The tile's first vector of x.
    from: u32,
    blocks: u32,
    /// Whether this unit copies.
    leads: bool,
    /// Where the units meet.
    point: u32,
}

/// Begins to copy a part's first blocks.
#[cube]
fn begin_copies(pipe: &Pipe, x: &[Vector<u32, Const<4>>], part: u32, #[comptime] shape: Shape) {
    if pipe.leads {
        #[unroll]
        for stage in 0..comptime!(shape.stages) {
            barrier(pipe.barriers + comptime!(stage as u32 * 8), 1usize);
        }
        publish();
    }
    ptx::meet(pipe.point, UNITS);
    if pipe.leads {
        #[unroll]
        for stage in 0..comptime!(shape.stages) {
            let block = part + comptime!((stage * shape.parts) as u32);
            if block < pipe.blocks {
                copy(pipe, x, block, comptime!(stage as u32).runtime(), shape);
            }
        }
    }
}

#[cube]
fn copy(pipe: &Pipe, x: &[Vector<u32, Const<4>>], block: u32, stage: u32, #[comptime] shape: Shape) {
    let bytes = comptime!(shape.rows * BLOCK * 2);
    ptx::copy(
        x,
        pipe.from + block * comptime!(bytes as u32 / 16),
        pipe.base + stage * comptime!(bytes as u32),
        pipe.barriers + stage * 8u32,
        bytes,
    );
}

/// Multiplies the block of the weight in slot `slot` with the block of x in stage `stage`.
#[cube]
fn multiply_block<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    x: &[Vector<u32, Const<4>>],
    pipe: &Pipe,
    stage: u32,
    block: u32,
    integers: u32,
    #[comptime] slot: usize,
    #[comptime] shape: Shape,
) {
    let scaling = fragment::scaling::<S, B>(loaded, slot, shape);
    let stages = comptime!(shape.stages as u32);
    #[unroll]
    for group in 0..comptime!(BLOCK / STEP / shape.steps) {
        let mut pairs = Array::<u32>::new(comptime!(4 * shape.steps));
        #[unroll]
        for i in 0..comptime!(4 * shape.steps) {
            // Of a step: the first pair of both rows, then the second.
            let q = comptime!((group * shape.steps + i / 4) * 2 + i / 2 % 2);
            pairs[i] = fragment::pair::<S, B>(loaded, &scaling, integers, q, slot, comptime!(i % 2), shape);
        }
        let offset = comptime!((group * shape.steps * shape.rows * STEP * 2) as u32);
        let tile = pipe.base + stage * comptime!((shape.rows * BLOCK * 2) as u32) + offset;
        ptx::multiply(&pairs, tile, shape.steps, shape.rows, shape.dtype);
        // No product reads the block before any more: another may take its place. Not after the first group already:
        // with a branch there CUDA's assembler sees no pipeline, and makes each product wait for the one before.
        if comptime!(group == 1) {
            ptx::meet(pipe.point, UNITS);
            let next = block + comptime!((shape.stages - 1) as u32 * shape.parts as u32);
            if block >= comptime!(shape.parts as u32) && next < pipe.blocks && pipe.leads {
                copy(pipe, x, next, select(stage == 0u32, stages - 1u32, stage - 1u32), shape);
            }
        }
    }
}

/// Writes a unit's sums, with those of the other part at `others`: of two neighbouring rows of the weight, two rows of
/// x of every 8. `nan`: not sums, but NaN.
#[cube]
fn store(
    list: &[u32],
    y: &mut [u32],
    n: u32,
    m: u32,
    tile: u32,
    tiles_a_batch: u32,
    column: u32,
    others: u32,
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
            let low = sum(others, comptime!(i / 2 * 4 + i % 2), shape);
            let high = sum(others, comptime!(i / 2 * 4 + i % 2 + 2), shape);
            narrow(low, shape.dtype) | (narrow(high, shape.dtype) << 16u32)
        };
        if comptime!(shape.listed) {
            let to = list[(CUBE_COUNT_X + tile * rows as u32 + row) as usize];
            if to != u32::MAX && column < n {
                y[((to * n + column) / 2u32) as usize] = packed;
            }
        } else if tile_row + row < m && column < n {
            y[(((batch * m + tile_row + row) * n + column) / 2u32) as usize] = packed;
        }
    }
}

/// Sum `i` of this unit, of all parts.
#[cube]
fn sum(others: u32, #[comptime] i: usize, #[comptime] shape: Shape) -> f32 {
    let mut sum = ptx::sum(i);
    if comptime!(shape.parts == 2) {
        sum += ptx::get(others + comptime!((i * UNITS * 4) as u32));
    }
    sum
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start((UNITS * shape.parts) as u32);
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
    /// Rows of x a tile: 256, or another multiple of 8 up to 128.
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
        // The fastest of those tried on an H200; shared memory holds no more than three blocks of 256 rows.
        let (ahead, stages, parts, steps) = match rows {
            256 => (1, 3, 1, 1),
            // Alone on its processor.
            64 if !listed && layout.bits <= 8 => (1, 4, 2, 2),
            _ => (1, 4, 1, 2),
        };
        Self { layout, dtype, rows, ahead, stages, parts, steps, listed }
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
    let layout = Layout::of(weight.format());
    let dtype = CHECK.float("x", x)?;
    let packed = pack::pack_rows(gpu, x, k, fragment::apart(layout, dtype), tiles)?;
    let shape = Shape::new(layout, dtype, tiles.rows, tiles.list.is_some());
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    // Every index into the planes is below the codes' words.
    index(weight.rows() * (k / RUN) * shape.layout.bits)?;
    index(y.len().max(tiles.count * tiles.rows * k / 8))?;
    let list = tiles.list.map_or((&packed, 0), |(list, _)| (list, 0));
    let (count, columns) = (index(tiles.count)?, index(n.div_ceil(COLUMNS))?);
    gpu.launch_early(
        3,
        Dispatch {
            kernel: kernel(gpu.target(), shape),
            cubes: [count, columns, 1],
            buffers: vec![component(0)?, component(1)?, component(2)?, (&packed, 0), list, y.memory()?],
            scalars: vec![
                index(n)?,
                index(k / BLOCK)?,
                index(tiles.m)?,
                index(tiles.m.div_ceil(tiles.rows).max(1))?,
                INTEGERS,
            ],
        },
    )
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
    let affine = Format::affine(4, 64, FloatType::BF16).unwrap();
    let others = [(affine, 128, false), (Format::Q8_0, 256, false), (Format::Q4_K, 8, true)];
    let others = others.map(|(format, rows, listed)| (format, FloatType::BF16, rows, listed));
    let shapes = of_format.chain(others).filter(|shape| takes(Layout::of(shape.0), shape.1));
    let shapes =
        shapes.map(|(format, dtype, rows, listed)| Shape::new(Layout::of(format), dtype, rows, listed));
    shapes
        .map(|shape| kernel(target, shape))
        .chain([false, true].map(|listed| pack::kernel(target, 64, 4, listed)))
        .collect()
}
