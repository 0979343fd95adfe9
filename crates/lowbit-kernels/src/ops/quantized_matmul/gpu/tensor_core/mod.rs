//! The product on a GPU for many rows of x, by Hopper's tensor cores: four planes multiply 64 rows of the weight,
//! decoded in registers, with up to 256 rows of x in shared memory.
//!
//! A unit decodes whole runs, which are not what the tensor cores want of it. But K may go in any order that both
//! operands share: `pack.rs` lays x out in the order in which the units have their values, in pieces of [`BLOCK`]
//! values of all rows of a tile, so that one bulk copy moves a piece (`pipe.rs`).

mod pipe;

use super::super::CHECK;
use super::fragment::{self, Loaded, fetch};
use super::share::Planes;
use super::{pack, ptx};
use crate::gpu::compile::{Target, buffer, early, overlap};
use crate::gpu::decode::INTEGERS;
use crate::gpu::float::narrow;
use crate::gpu::layout::{Codes, Layout, RUN, with_planes};
use crate::gpu::ptx::{address, register};
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use pipe::{Pipe, ring};

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
    if comptime!(shape.listed) {
        overlap();
    }
    let tile = CUBE_POS_X;
    let mut batch = tile / tiles_a_batch;
    if comptime!(shape.listed) {
        batch = list[tile as usize];
    }
    let unit = UNIT_POS_X % UNITS as u32;
    let part = UNIT_POS_X / UNITS as u32;
    // The rows that the tensor cores call g and g + 8 are neighbours, so that y is written in pairs.
    let column = CUBE_POS_Y * comptime!(COLUMNS as u32) + unit / 32u32 * 16u32 + unit % 32u32 / 4u32 * 2u32;
    if comptime!(shape.listed) {
        if batch == WRONG {
            store(list, y, n, m, tile, tiles_a_batch, column, true, shape);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let memory = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((shape.rings() + shape.others()) / 16),
        128usize,
    );
    let memory = register(address(&memory));
    let mut pipe = ring(memory, part, tile, blocks, shape);
    let run = (batch * n + min(column, n - 2u32)) * blocks * 4u32 + unit % 4u32;
    multiply_tile::<S, B, V>(
        &Planes::<S, B, V>::new(codes, scales, biases),
        x,
        run,
        &mut pipe,
        part,
        integers,
        shape,
    );
    add_parts(memory + comptime!(shape.rings() as u32) + unit * 4u32, part, shape);
    if part == 0u32 {
        store(list, y, n, m, tile, tiles_a_batch, column, false, shape);
    }
}

/// The sums of a tile, of a part of K each. `run` is the first of the first of two rows of the weight.
#[cube]
fn multiply_tile<S: Int, B: Int, V: Size>(
    planes: &Planes<'_, S, B, V>,
    x: &[Vector<u32, Const<4>>],
    run: u32,
    pipe: &mut Pipe,
    part: u32,
    integers: u32,
    #[comptime] shape: Shape,
) {
    let layout = comptime!(shape.layout);
    let slots = comptime!(shape.ahead + 1);
    let last = pipe.blocks - 1u32;
    let rows = (run, run + pipe.blocks * 4u32);
    let mut loaded = fragment::none::<S, B>(slots, layout);
    #[unroll]
    for slot in 0..comptime!(shape.ahead) {
        let block = min(part + comptime!((slot * shape.parts) as u32), last) * 4u32;
        fetch::<S, B, V>(planes, &mut loaded, (rows.0 + block, rows.1 + block), slot, layout);
    }
    if comptime!(!shape.listed) {
        overlap();
    }
    pipe.begin(x, part, shape);
    ptx::begin(shape.rows);
    let mut block = part;
    while block < pipe.blocks {
        #[unroll]
        for slot in 0..slots {
            if block < pipe.blocks {
                let next = min(block + comptime!((shape.ahead * shape.parts) as u32), last) * 4u32;
                let free = comptime!((slot + shape.ahead) % slots);
                let runs = (rows.0 + next, rows.1 + next);
                fetch::<S, B, V>(planes, &mut loaded, runs, free, layout);
                multiply_block::<S, B>(&loaded, x, pipe, block, integers, slot, shape);
                block += comptime!(shape.parts as u32);
            }
        }
    }
    ptx::finish();
}

/// Multiplies the block of the weight in slot `slot` with the next block of x, of number `block`.
#[cube]
fn multiply_block<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    x: &[Vector<u32, Const<4>>],
    pipe: &mut Pipe,
    block: u32,
    integers: u32,
    #[comptime] slot: usize,
    #[comptime] shape: Shape,
) {
    let scaling = fragment::scaling::<S, B>(loaded, slot, shape);
    let at = pipe.wait(shape);
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
        ptx::multiply(&pairs, at + offset, shape.steps, shape.rows, shape.dtype);
        // No product reads the block before any more. Not after the first group already: with a branch there CUDA's
        // assembler sees no pipeline, and makes each product wait for the one before.
        if comptime!(group == 1) {
            pipe.release(x, block, shape);
        }
    }
    pipe.advance(shape);
}

/// Adds the sums of the second part of K to those of the first.
#[cube]
fn add_parts(others: u32, part: u32, #[comptime] shape: Shape) {
    if comptime!(shape.parts == 2) {
        if part == 1u32 {
            #[unroll]
            for i in 0..comptime!(shape.rows / 2) {
                ptx::put(others + comptime!((i * UNITS * 4) as u32), i);
            }
        }
        sync_cube();
        if part == 0u32 {
            #[unroll]
            for i in 0..comptime!(shape.rows / 2) {
                ptx::take(others + comptime!((i * UNITS * 4) as u32), i);
            }
        }
    }
}

/// Writes a unit's sums: of two neighbouring rows of the weight, two rows of x of every 8. `nan`: not sums, but NaN.
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
        } else if tile_row + row < m && column < n {
            y[(((batch * m + tile_row + row) * n + column) / 2u32) as usize] = packed;
        }
    }
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
    /// Bytes of the sums of the second part of K.
    fn others(self) -> usize {
        if self.parts == 2 { self.rows / 2 * UNITS * size_of::<f32>() } else { 0 }
    }

    fn new(layout: Layout, dtype: FloatType, rows: usize, listed: bool) -> Self {
        // The fastest of those tried on an H200; shared memory holds no more than three blocks of 256 rows.
        let (ahead, stages, parts, steps) = match rows {
            256 => (1, 3, 1, 1),
            // Alone on its processor.
            64 if !listed && layout.bits <= 8 => (1, 4, 2, 2),
            _ if listed => (2, 4, 1, 2),
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
    let others =
        [(affine, 64, false), (affine, 256, false), (Format::Q8_0, 256, false), (Format::Q4_K, 8, true)];
    let others = others.map(|(format, rows, listed)| (format, FloatType::BF16, rows, listed));
    let shapes = of_format.chain(others).filter(|shape| takes(Layout::of(shape.0), shape.1));
    let shapes =
        shapes.map(|(format, dtype, rows, listed)| Shape::new(Layout::of(format), dtype, rows, listed));
    shapes
        .map(|shape| kernel(target, shape))
        .chain([false, true].map(|listed| pack::kernel(target, 64, 4, listed)))
        .collect()
}
