//! The product on a GPU for many rows of x, by Hopper's tensor cores: four planes multiply 64 rows
//! of the weight, decoded in registers, with up to 256 rows of x in shared memory. A bulk copy
//! moves a block of x (`pipe.rs`).

#![allow(unsafe_code)] // Launches.

mod config;
mod pipe;

pub(crate) use config::Wgmma;

use super::super::gpu::sorted::{self, Tiles, WRONG};
use super::super::problem::{Operands, Problem};
use super::tiles::fragment::{self, Loaded, fetch};
use super::tiles::{self, BLOCK, N_TILE, STEP, Sizes, narrow_pair, store_pair};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::{Target, early, overlap};
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::{address, register, wgmma};
use crate::gpu::decode::INTEGERS;
use crate::gpu::launch::{Kernel, kernel};
#[cfg(test)]
use crate::gpu::layout::Layout;
use crate::gpu::layout::with_components;
use config::UNITS;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
#[cfg(test)]
use lowbit_formats::FloatType;
use pipe::{Pipe, ring};

/// The configuration for the product, if Hopper's tensor cores take it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Wgmma> {
    (caps.warp_groups && tiles::fits(problem)).then(|| Wgmma::new(caps, problem))
}

/// The configuration for a product of routed experts, if there are enough pairs for sorting them by
/// expert to pay.
pub(in super::super) fn fit_experts(caps: &Caps, problem: &Problem) -> Option<Wgmma> {
    let routing = tiles::fits_experts(caps, problem).filter(|_| caps.warp_groups)?;
    Some(Wgmma::of_experts(problem, routing))
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]` for each tile of x. `x` is packed; `list` has
/// the batch of the weight of each tile, then the row of y of each of its rows.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel(waits)]
fn quantized_matmul_wgmma<S: Int, B: Int, V: Size>(
    #[early] weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [u32],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: Wgmma,
) {
    // The weight's components.
    early(3usize);
    if comptime!(config.listed) {
        overlap();
    }
    let tile = CUBE_POS_X;
    let (n, blocks) = (sizes.n, sizes.blocks);
    let mut batch = tile / sizes.m_tiles;
    if comptime!(config.listed) {
        batch = list[tile as usize];
    }
    let unit = UNIT_POS_X % UNITS as u32;
    let part = UNIT_POS_X / UNITS as u32;
    // The rows that the tensor cores call g and g + 8 are neighbours, so that y is written in
    // pairs.
    let column = CUBE_POS_Y * comptime!(N_TILE as u32) + unit / 32u32 * 16u32 + unit % 32u32 / 4u32 * 2u32;
    if comptime!(config.listed) {
        if batch == WRONG {
            store(list, y, &sizes, tile, column, true, config);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let memory = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(
        comptime!((config.rings() + config.others()) / 16),
        128usize,
    );
    let memory = register(address(&memory));
    let mut pipe = ring(memory, part, tile, blocks, config);
    let row = ((batch * n + min(column, n - 2u32)) * sizes.runs, sizes.runs);
    multiply_tile::<S, B, V>(weight, x, row, &mut pipe, part, integers, config);
    add_parts(memory + comptime!(config.rings() as u32) + unit * 4u32, part, config);
    if part == 0u32 {
        store(list, y, &sizes, tile, column, false, config);
    }
}

/// The sums of a tile, of a part of K each. `row` is the first run of the first of two rows of the
/// weight, and how many runs a row has.
#[cube]
fn multiply_tile<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    row: (u32, u32),
    pipe: &mut Pipe,
    part: u32,
    integers: u32,
    #[comptime] config: Wgmma,
) {
    let layout = comptime!(config.decoding.layout);
    let slots = comptime!(config.ahead + 1);
    let (lane, last) = (UNIT_POS_X % 4u32, row.1 - 1u32);
    let rows = (row.0, row.0 + row.1);
    let mut loaded = fragment::none::<S, B>(slots, layout);
    #[unroll]
    for slot in 0..comptime!(config.ahead) {
        let run = min((part + comptime!((slot * config.parts) as u32)) * 4u32 + lane, last);
        fetch::<S, B, V>(weight, &mut loaded, (rows.0 + run, rows.1 + run), slot, layout);
    }
    if comptime!(!config.listed) {
        overlap();
    }
    pipe.begin(x, part, config);
    wgmma::begin(config.m_tile);
    let mut block = part;
    while block < pipe.blocks {
        #[unroll]
        for slot in 0..slots {
            if block < pipe.blocks {
                let next = (block + comptime!((config.ahead * config.parts) as u32)) * 4u32 + lane;
                let next = min(next, last);
                let free = comptime!((slot + config.ahead) % slots);
                let runs = (rows.0 + next, rows.1 + next);
                fetch::<S, B, V>(weight, &mut loaded, runs, free, layout);
                multiply_block::<S, B>(&loaded, x, pipe, block, integers, slot, config);
                block += comptime!(config.parts as u32);
            }
        }
    }
    wgmma::finish();
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
    #[comptime] config: Wgmma,
) {
    let scaling = fragment::scaling::<S, B>(loaded, slot, config.decoding);
    let at = pipe.wait(config);
    #[unroll]
    for group in 0..comptime!(BLOCK / STEP / config.steps) {
        let mut pairs = Array::<u32>::new(comptime!(4 * config.steps));
        #[unroll]
        for i in 0..comptime!(4 * config.steps) {
            // Of a step: the first pair of both rows, then the second.
            let q = comptime!((group * config.steps + i / 4) * 2 + i / 2 % 2);
            let row = comptime!(i % 2);
            pairs[i] = fragment::pair::<S, B>(loaded, &scaling, integers, q, slot, row, config.decoding);
        }
        let offset = comptime!((group * config.steps * config.m_tile * STEP * 2) as u32);
        wgmma::multiply(&pairs, at + offset, config.steps, config.m_tile, config.decoding.dtype);
        // No product reads the block before any more. Not after the first group already: with a
        // branch there CUDA's assembler sees no pipeline, and makes each product wait for the one
        // before.
        if comptime!(group == 1) {
            pipe.release(x, block, config);
        }
    }
    pipe.advance(config);
}

/// Adds the sums of the second part of K to those of the first.
#[cube]
fn add_parts(others: u32, part: u32, #[comptime] config: Wgmma) {
    if comptime!(config.parts == 2) {
        if part == 1u32 {
            #[unroll]
            for i in 0..comptime!(config.m_tile / 2) {
                wgmma::put(others + comptime!((i * UNITS * 4) as u32), i);
            }
        }
        sync_cube();
        if part == 0u32 {
            #[unroll]
            for i in 0..comptime!(config.m_tile / 2) {
                wgmma::take(others + comptime!((i * UNITS * 4) as u32), i);
            }
        }
    }
}

/// Writes a unit's sums: of two neighbouring rows of the weight, two rows of x of every 8. `nan`:
/// not sums, but NaN.
#[cube]
fn store(
    list: &[u32],
    y: &mut [u32],
    sizes: &Sizes,
    tile: u32,
    column: u32,
    #[comptime] nan: bool,
    #[comptime] config: Wgmma,
) {
    #[unroll]
    for i in 0..comptime!(config.m_tile / 4) {
        let row = comptime!((i / 2 * 8 + i % 2) as u32) + UNIT_POS_X % 4u32 * 2u32;
        let pair = if comptime!(nan) {
            u32::MAX.runtime()
        } else {
            let low = wgmma::sum(comptime!(i / 2 * 4 + i % 2));
            let high = wgmma::sum(comptime!(i / 2 * 4 + i % 2 + 2));
            narrow_pair(low, high, config.decoding.dtype)
        };
        store_pair(list, y, sizes, (tile, row, column), pair, config.stored());
    }
}

fn compiled(target: &Target, config: Wgmma) -> Kernel<QuantizedMatmulWgmma<'static>> {
    with_components!(config.decoding.layout, S, B => {
        QuantizedMatmulWgmma::kernel::<S, B>(target, UNITS * config.parts, config.decoding.layout.vector(), config)
    })
}

/// Computes the product.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: Wgmma,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    multiply(gpu, config, &Tiles::of_rows(problem, config.m_tile), operands)
}

/// Computes the product of routed experts. One sort and one launch per product of the weight.
pub(in super::super) fn launch_experts(
    gpu: &Gpu,
    config: Wgmma,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    sorted::for_each_sorted(gpu, config.m_tile, problem, operands, |tiles, operands| {
        multiply(gpu, config, tiles, operands)
    })
}

/// `x` in `tiles` times `weight` into `y`.
fn multiply(gpu: &Gpu, config: Wgmma, tiles: &Tiles<'_>, operands: &Operands<'_>) -> Result<(), KernelError> {
    let prepared = tiles::prepare(gpu, config.m_tile, tiles, operands)?;
    let arguments = QuantizedMatmulWgmma {
        weight: operands.weight.buffers()?,
        x: (&prepared.packed).into(),
        list: tiles.list.map_or(&prepared.packed, |(list, _)| list).into(),
        y: operands.y.buffer()?,
        sizes: prepared.sizes,
        integers: INTEGERS,
    };
    // SAFETY: the sizes are the operands', and as many tiles were packed and sorted.
    unsafe { gpu.launch(compiled(gpu.target(), config), prepared.cubes, arguments) }
}

/// Every width and kind of code in f16, each tile, and bf16; and what packs and sorts rows of x.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use lowbit_formats::Format;
    if !target.caps().warp_groups {
        return Vec::new();
    }
    let of_format =
        super::super::tests::gpu_formats().into_iter().map(|format| (format, FloatType::F16, 64, false));
    let affine = Format::affine(4, 64, FloatType::BF16).unwrap();
    let others =
        [(affine, 64, false), (affine, 256, false), (Format::Q8_0, 256, false), (Format::Q4_K, 8, true)];
    let others = others.map(|(format, rows, listed)| (format, FloatType::BF16, rows, listed));
    let shapes = of_format.chain(others).filter(|shape| tiles::takes(Layout::of(shape.0), shape.1));
    let configs =
        shapes.map(|(format, dtype, rows, listed)| Wgmma::of_tiles(Layout::of(format), dtype, rows, listed));
    let products = configs.map(|config| compiled(target, config).code());
    products.collect()
}
