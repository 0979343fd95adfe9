//! The product on a GPU for many rows of x, by the tensor cores of every NVIDIA device from Ampere
//! on (`mma.sync`), where there is no `wgmma`: each plane multiplies [`ROWS`] rows of the weight,
//! decoded in registers, with up to 128 rows of x in shared memory (`pipe.rs`). `tiles/` says the
//! layout of operands.

#![allow(unsafe_code)] // Launches.

mod config;
mod pipe;

pub(crate) use config::MmaTile;

use super::super::gpu::sorted::{self, Tiles, WRONG};
use super::super::problem::{Operands, Problem};
use super::tiles::fragment::{self, Loaded, Scaling, fetch};
use super::tiles::{self, N_TILE, STEP, Sizes, narrow_pair, store_pair};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::{Target, early, overlap};
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::{address, load_tiles, mma, register, shared, store_words, wait_copies};
use crate::gpu::decode::INTEGERS;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::layout::with_components;
use config::{PIECES, ROWS, STEPS, UNITS};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use pipe::{Pipe, ring};

/// Operands of 16 rows of the weight that a plane has.
const OPERANDS: usize = ROWS / 16;

/// True if a device multiplies so: with tensor cores, but without Hopper's, which are faster.
fn is_for(caps: &Caps) -> bool {
    caps.tensor_cores && !caps.warp_groups
}

/// The configuration for the product, if tensor cores take it.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<MmaTile> {
    (is_for(caps) && tiles::fits(problem)).then(|| MmaTile::new(caps, problem))
}

/// The configuration for a product of routed experts, if there are enough pairs for sorting them by
/// expert to pay.
pub(in super::super) fn fit_experts(caps: &Caps, problem: &Problem) -> Option<MmaTile> {
    let routing = tiles::fits_experts(caps, problem).filter(|_| is_for(caps))?;
    Some(MmaTile::of_experts(caps, problem, routing))
}

/// `y[m, n] = sum over k of x[m, k] * weight[n, k]` for each tile of x. `x` is packed; `list` has
/// the batch of the weight of each tile, then the row of y of each of its rows.
#[kernel(waits)]
fn quantized_matmul_mma_tile<S: Int, B: Int, V: Size>(
    #[early] weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    list: &[u32],
    y: &mut [u32],
    sizes: Sizes,
    integers: u32,
    #[comptime] config: MmaTile,
) {
    // The weight's components.
    early(3usize);
    if comptime!(config.overlaps && config.listed) {
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
    let column = CUBE_POS_Y * comptime!(N_TILE as u32)
        + unit / 32u32 * comptime!(ROWS as u32)
        + unit % 32u32 / 4u32 * 2u32;
    if comptime!(config.listed) {
        // Tiles of a list have one part.
        if batch == WRONG {
            store_nan(list, y, &sizes, tile, column, config);
        }
        if batch >= WRONG {
            terminate!();
        }
    }
    let memory =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(config.shared() / 16), 128usize);
    let memory = register(address(&memory));
    let mut pipe = ring(memory, part, tile, blocks, config);
    let rows = (batch * n, n, column, sizes.runs);
    let mut sums = multiply_tile::<S, B, V>(weight, x, rows, &mut pipe, integers, config);
    add_parts(memory + unit * 16u32, part, &mut sums, config);
    if part == 0u32 {
        store(&sums, list, y, &sizes, tile, column, config);
    }
}

/// The sums of a tile, of a part of K each: for each operand of the weight, its products with 8
/// rows of x each. `rows` are the first row of the weight's batch, how many it has, the first of
/// the unit's in it, and how many runs a row has.
#[cube]
fn multiply_tile<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    x: &[Vector<u32, Const<4>>],
    rows: (u32, u32, u32, u32),
    pipe: &mut Pipe,
    integers: u32,
    #[comptime] config: MmaTile,
) -> Array<Vector<f32, Const<4>>> {
    let layout = comptime!(config.decoding.layout);
    let part = UNIT_POS_X / UNITS as u32;
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(OPERANDS * config.octets()));
    #[unroll]
    for i in 0..comptime!(OPERANDS * config.octets()) {
        sums[i] = Vector::<f32, Const<4>>::new(0.0f32);
    }
    let mut loaded = fragment::none::<S, B>(OPERANDS, layout);
    let mut next = fragment::none::<S, B>(OPERANDS, layout);
    fetch_block::<S, B, V>(weight, &mut loaded, rows, part, config);
    if comptime!(config.overlaps && !config.listed) {
        overlap();
    }
    pipe.begin(x, part, config);
    let mut first = 0u32;
    while first < pipe.blocks {
        let block = first + part;
        fetch_block::<S, B, V>(weight, &mut next, rows, block + comptime!(config.parts as u32), config);
        #[unroll]
        for piece in 0..PIECES {
            let at = pipe.wait(x, block, piece, config);
            // The last block may be another part's.
            let mut there = true;
            if comptime!(config.parts > 1) {
                there = block < pipe.blocks;
            }
            if there {
                multiply_piece::<S, B>(&loaded, at, integers, piece, &mut sums, config);
            }
        }
        fragment::copy::<S, B>(&next, &mut loaded, OPERANDS, layout);
        first += comptime!(config.parts as u32);
    }
    sums
}

/// Loads the unit's runs of a block, two rows of each operand; past the rows' ends, their last.
#[cube]
fn fetch_block<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    loaded: &mut Loaded<S, B>,
    rows: (u32, u32, u32, u32),
    block: u32,
    #[comptime] config: MmaTile,
) {
    let (base, n, column, runs) = rows;
    let run = min(block * 4u32 + UNIT_POS_X % 4u32, runs - 1u32);
    #[unroll]
    for operand in 0..OPERANDS {
        let row = min(column + comptime!(16 * operand as u32), n - 2u32);
        let run = (base + row) * runs + run;
        fetch::<S, B, V>(weight, loaded, (run, run + runs), operand, config.decoding.layout);
    }
}

/// Multiplies a piece of the block of the weight that was loaded with the piece of x at `at`.
#[cube]
fn multiply_piece<S: Int, B: Int>(
    loaded: &Loaded<S, B>,
    at: u32,
    integers: u32,
    #[comptime] piece: usize,
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] config: MmaTile,
) {
    let octets = comptime!(config.octets());
    // Tiles of 8 rows by 8 values of x lie one after the other: both halves of a step, for 8 rows
    // after 8 rows.
    let tiles = at + UNIT_POS_X % 32u32 * 16u32;
    let mut scalings = Sequence::<Scaling>::new();
    #[unroll]
    for operand in 0..OPERANDS {
        scalings.push(fragment::scaling::<S, B>(loaded, operand, config.decoding));
    }
    #[unroll]
    for step in 0..STEPS {
        let mut operands = Array::<Vector<u32, Const<4>>>::new(OPERANDS);
        #[unroll]
        for operand in 0..OPERANDS {
            let mut pairs = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for i in 0..4usize {
                // The first pair of both rows, then the second.
                let q = comptime!((piece * STEPS + step) * 2 + i / 2);
                let row = comptime!(i % 2);
                let scaling = scalings.index(operand);
                let pair =
                    fragment::pair::<S, B>(loaded, scaling, integers, q, operand, row, config.decoding);
                pairs.insert(i, pair);
            }
            operands[operand] = pairs;
        }
        #[unroll]
        for o in 0..comptime!(octets / 2) {
            let right = load_tiles(tiles, comptime!(step * config.m_tile * STEP * 2 + o * 512), false);
            #[unroll]
            for i in 0..comptime!(2 * OPERANDS) {
                let (operand, half) = comptime!((i % OPERANDS, i / OPERANDS));
                let sum = comptime!(operand * octets + 2 * o + half);
                let (low, high) =
                    (right.extract(comptime!(2 * half)), right.extract(comptime!(2 * half + 1)));
                sums[sum] = mma(operands[operand], low, high, sums[sum], config.decoding.dtype);
            }
        }
    }
}

/// Adds the sums of the second part of K to those of the first, through the memory of the rings at
/// `others`.
#[cube]
fn add_parts(others: u32, part: u32, sums: &mut Array<Vector<f32, Const<4>>>, #[comptime] config: MmaTile) {
    if comptime!(config.parts == 2) {
        // Copies of pieces past the last are none, but those before have been read.
        wait_copies();
        sync_cube();
        if part == 1u32 {
            #[unroll]
            for i in 0..comptime!(OPERANDS * config.octets()) {
                let mut words = Array::<u32>::new(4usize);
                #[unroll]
                for j in 0..4usize {
                    words[j] = register(u32::reinterpret(sums[i].extract(j)));
                }
                store_words(others + comptime!((i * UNITS * 16) as u32), &words, 0usize);
            }
        }
        sync_cube();
        if part == 0u32 {
            #[unroll]
            for i in 0..comptime!(OPERANDS * config.octets()) {
                sums[i] += shared::<f32, Const<4>>(others, comptime!(i * UNITS * 16), 4usize);
            }
        }
    }
}

/// Writes a unit's sums: of two neighbouring rows of each operand of the weight, two rows of x of
/// every 8.
#[cube]
fn store(
    sums: &Array<Vector<f32, Const<4>>>,
    list: &[u32],
    y: &mut [u32],
    sizes: &Sizes,
    tile: u32,
    column: u32,
    #[comptime] config: MmaTile,
) {
    let octets = comptime!(config.octets());
    #[unroll]
    for i in 0..comptime!(OPERANDS * config.m_tile / 4) {
        let (operand, octet, j) = comptime!((i % OPERANDS, i / OPERANDS / 2, i / OPERANDS % 2));
        let sum = sums[comptime!(operand * octets + octet)];
        let pair = narrow_pair(sum.extract(j), sum.extract(comptime!(j + 2)), config.decoding.dtype);
        let row = comptime!((octet * 8 + j) as u32) + UNIT_POS_X % 4u32 * 2u32;
        let column = column + comptime!(16 * operand as u32);
        store_pair(list, y, sizes, (tile, row, column), pair, config.stored());
    }
}

/// Writes NaN where [`store`] writes sums.
#[cube]
fn store_nan(
    list: &[u32],
    y: &mut [u32],
    sizes: &Sizes,
    tile: u32,
    column: u32,
    #[comptime] config: MmaTile,
) {
    #[unroll]
    for i in 0..comptime!(OPERANDS * config.m_tile / 4) {
        let (operand, octet, j) = comptime!((i % OPERANDS, i / OPERANDS / 2, i / OPERANDS % 2));
        let row = comptime!((octet * 8 + j) as u32) + UNIT_POS_X % 4u32 * 2u32;
        let column = column + comptime!(16 * operand as u32);
        store_pair(list, y, sizes, (tile, row, column), u32::MAX.runtime(), config.stored());
    }
}

fn compiled(target: &Target, config: MmaTile) -> Kernel<QuantizedMatmulMmaTile<'static>> {
    let layout = config.decoding.layout;
    with_components!(layout, S, B => {
        QuantizedMatmulMmaTile::kernel::<S, B>(target, UNITS * config.parts, layout.vector(), config)
    })
}

/// Computes the product.
pub(in super::super) fn launch(
    gpu: &Gpu,
    config: MmaTile,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    multiply(gpu, config, &Tiles::of_rows(problem, config.m_tile), operands)
}

/// Computes the product of routed experts. One sort and one launch per product of the weight.
pub(in super::super) fn launch_experts(
    gpu: &Gpu,
    config: MmaTile,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    sorted::for_each_sorted(gpu, config.m_tile, problem, operands, |tiles, operands| {
        multiply(gpu, config, tiles, operands)
    })
}

/// `x` in `tiles` times `weight` into `y`.
fn multiply(
    gpu: &Gpu,
    config: MmaTile,
    tiles: &Tiles<'_>,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let prepared = tiles::prepare(gpu, config.m_tile, tiles, operands)?;
    let arguments = QuantizedMatmulMmaTile {
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

/// Every width and kind of code in f16, each tile, and bf16.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use crate::gpu::layout::Layout;
    use lowbit_formats::{FloatType, Format};
    use tiles::fragment::Decoding;
    if !is_for(target.caps()) {
        return Vec::new();
    }
    let of_format =
        super::super::tests::gpu_formats().into_iter().map(|format| (format, FloatType::F16, 64, 1, false));
    let affine = Format::affine(4, 64, FloatType::BF16).unwrap();
    let others = [
        (affine, 64, 2, false),
        (affine, 128, 1, false),
        (affine, 128, 2, false),
        (Format::Q8_0, 128, 1, false),
        (Format::Q4_K, 16, 1, true),
        (Format::Q4_0, 32, 1, true),
    ];
    let others = others.map(|(format, rows, parts, listed)| (format, FloatType::BF16, rows, parts, listed));
    let shapes = of_format.chain(others).filter(|shape| tiles::takes(Layout::of(shape.0), shape.1));
    let configs = shapes.map(|(format, dtype, rows, parts, listed)| {
        MmaTile::example(target.caps(), Decoding { layout: Layout::of(format), dtype }, rows, parts, listed)
    });
    configs.map(|config| compiled(target, config).code()).collect()
}
