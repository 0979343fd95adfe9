//! Attention of many query rows by cooperative matrices: `VK_KHR_cooperative_matrix` on Vulkan,
//! `simdgroup_matrix` on Metal. A cube takes a block of query rows through tiles of keys, which its
//! planes share; each plane has some of the rows.
//!
//! | file | holds |
//! |---|---|
//! | `config.rs` | the compile-time configuration of the kernel, and all tiles |
//! | `stage.rs` | q, keys and values on their way to the matrices |
//! | `sums.rs` | the online softmax and the sums of weighted values |

#![allow(unsafe_code)] // Launches.

mod config;
mod stage;
mod sums;

pub(in super::super) use config::CmmaTile;

use super::operands::{Inputs, InputsArgs, Sizes, VisibleKeys, seen_keys};
use super::{Call, Output};
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::matrices::{VECTOR, all_zeros};
use crate::ops::attention::CHECK;
use cubecl_core as cubecl;
use cubecl_core::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl_core::prelude::*;
use half::{bf16, f16};
use lowbit_formats::FloatType;
use stage::{KeyRange, Wide};
use sums::{Destination, RowSums, Tile};

/// A matrix that is loaded from vectors.
type Operand<E> = Matrix<Vector<E, Const<4>>>;

/// The planes' scores, a region each.
type SharedScores = Shared<[Vector<f32, Const<4>>]>;

/// A cube's shared memory, and the vectors that the unit has loaded ahead.
#[derive(CubeType)]
struct Memory<E: Float> {
    /// A tile of keys, and one of values.
    tiles: Shared<[Vector<E, Const<4>>]>,
    scores: SharedScores,
    /// The planes' weights, a region each; before that, rows of q.
    weights: Shared<[Vector<E, Const<4>>]>,
    /// Per key of a masked tile: 1 if some of its values are not finite.
    non_finite: Shared<[u32]>,
    /// Of a tile.
    fetched: Array<Wide>,
}

#[cube]
impl<E: Float> Memory<E> {
    fn new(#[comptime] config: CmmaTile) -> Memory<E> {
        let scores = comptime!(config.cut.planes * config.plane_scores());
        Memory::<E> {
            tiles: Shared::new_aligned_slice(comptime!(config.tiles()), 16usize),
            scores: Shared::new_aligned_slice(scores, 16usize),
            weights: Shared::new_aligned_slice(scores, 16usize),
            non_finite: Shared::new_slice(comptime!(config.cut.keys)),
            fetched: Array::new(comptime!(config.most_loads())),
        }
    }
}

/// See [`attention`](crate::ops::attention()). `scale` is an f32. y holds four values per vector:
/// of q's type, or of f32 where the keys are split.
#[kernel]
pub(super) fn attention_cmma_tile<E: Float, N: Size>(
    inputs: &Inputs<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    y: &mut [Vector<u32, N>],
    scales: &mut [f32],
    sizes: Sizes,
    scale: u32,
    #[comptime] config: CmmaTile,
) {
    let (width, value_width) = comptime!((config.width, config.value_width));
    let mut memory = Memory::<E>::new(config);
    let of_cube = comptime!(config.rows() as u32);
    // The last rows have most keys, and go first.
    let row0 = (sizes.rows.div_ceil(of_cube) - 1u32 - CUBE_POS_Y) * of_cube;
    let own = row0 + PLANE_POS * comptime!(config.cut.rows as u32);
    let visible = visible_keys(&inputs.positions, row0, &sizes, config);
    let keys = KeyRange { base: CUBE_POS_X * sizes.capacity, end: visible.end };
    let any_keys = visible.begin < visible.end;
    if any_keys {
        stage::fetch_ahead(&inputs.k, &mut memory.fetched, &keys, visible.begin, width, config);
    }
    let mut queries = stage::no_queries::<E>(config);
    if multiplies(config) {
        stage::load_queries::<E>(&inputs.q, &mut memory, &mut queries, own, &sizes, config);
    }
    let mut rows = RowSums::new(&inputs.positions, own, &sizes, config);
    let of_row = comptime!(value_width / config.matrices.n);
    let mut values = all_zeros(comptime!(config.matrices_of_scores().0 * of_row), config.matrices);
    if any_keys {
        let tile = (visible.begin, false.runtime());
        stage::bring::<E>(&inputs.k, &mut memory, &keys, tile, (width, 0), config);
    }
    let mut at = visible.begin;
    while at < visible.end {
        let next = at + comptime!(config.cut.keys as u32);
        let masked = at < visible.all_begin || next > min(visible.all_end, visible.end);
        if masked {
            stage::mark_non_finite(&inputs.v, &mut memory.non_finite, &keys, at, config);
        }
        sync_cube();
        stage::fetch_ahead(&inputs.v, &mut memory.fetched, &keys, at, value_width, config);
        if multiplies(config) {
            scores::<E>(&queries, &mut memory, config);
            sync_plane();
            let tile = Tile { first: at, is_first: at == visible.begin, masked };
            rows.weigh::<E>(&mut memory, &mut values, (&tile, &keys), f32::reinterpret(scale), config);
        }
        if comptime!(!config.cut.apart) {
            sync_cube();
        }
        let of = comptime!((value_width, config.values_at()));
        stage::bring::<E>(&inputs.v, &mut memory, &keys, (at, masked), of, config);
        sync_cube();
        if next < visible.end {
            stage::fetch_ahead(&inputs.k, &mut memory.fetched, &keys, next, width, config);
        }
        if multiplies(config) {
            add_weighted_values::<E>(&memory, &mut values, config);
        }
        if comptime!(!config.cut.apart) {
            sync_cube();
        }
        if next < visible.end {
            let tile = (next, false.runtime());
            stage::bring::<E>(&inputs.k, &mut memory, &keys, tile, (width, 0), config);
        }
        at = next;
    }
    if multiplies(config) {
        let out = Destination { own, rows: sizes.rows, group: sizes.group, any_keys };
        rows.store::<N>(&mut memory.scores, &values, y, scales, &out, config);
    }
}

/// True if the plane has rows: where planes are smaller than they may be, some only load.
#[cube]
fn multiplies(#[comptime] config: CmmaTile) -> bool {
    comptime!(config.planes_alike()).runtime() || PLANE_POS < comptime!(config.cut.planes as u32)
}

/// The keys that the cube's rows see, or its part of them where the keys are split. Every plane
/// finds that out by itself.
#[cube]
fn visible_keys(positions: &[u32], row0: u32, sizes: &Sizes, #[comptime] config: CmmaTile) -> VisibleKeys {
    let mut visible = VisibleKeys::of_none();
    #[unroll]
    for i in 0..comptime!(config.rows().div_ceil(config.lanes)) {
        let row = (UNIT_POS_PLANE + comptime!((i * config.lanes) as u32)) % comptime!(config.rows() as u32);
        visible.add(&seen_keys(positions, row0 + row, sizes));
    }
    visible.add_plane();
    visible.begin = min(visible.begin, visible.end);
    if comptime!(config.split) {
        visible.keep_split(comptime!(config.cut.keys as u32));
    }
    visible
}

/// Leaves the products of the plane's rows with the tile of keys in the memory of its scores.
#[cube]
fn scores<E: Float>(queries: &Sequence<Matrix<E>>, memory: &mut Memory<E>, #[comptime] config: CmmaTile) {
    let (m, n, k) = comptime!((config.matrices.m, config.matrices.n, config.matrices.k));
    let (row_count, key_count) = comptime!(config.matrices_of_scores());
    let pitch = comptime!(config.pitch(config.width));
    let sums = all_zeros(comptime!(row_count * key_count), config.matrices);
    #[unroll]
    for step in 0..comptime!(config.width / k) {
        #[unroll]
        for j in 0..key_count {
            let at = comptime!((j * n * pitch + step * k) / VECTOR).runtime();
            let keys = &memory.tiles[at..at + comptime!(n * pitch / VECTOR)];
            // A key is a column of what q is multiplied with.
            let layout = MatrixLayout::ColMajor;
            let keys =
                Operand::<E>::from_slice(MatrixIdent::B, m, n, k, layout, keys, comptime!(pitch as u32));
            #[unroll]
            for i in 0..row_count {
                let sum = sums.index(comptime!(i * key_count + j));
                cmma::execute(queries.index(comptime!(step * row_count + i)), &keys, sum, sum);
            }
        }
    }
    let pitch = comptime!(config.score_pitch());
    let of_plane = PLANE_POS as usize * comptime!(config.plane_scores());
    #[unroll]
    for i in 0..row_count {
        #[unroll]
        for j in 0..key_count {
            let at = of_plane + comptime!((i * m * pitch + j * n) / VECTOR);
            let to = &mut memory.scores[at..at + comptime!(m * pitch / VECTOR)];
            let sum = sums.index(comptime!(i * key_count + j));
            cmma::store(to, sum, comptime!(pitch as u32), MatrixLayout::RowMajor);
        }
    }
}

/// Adds the tile's values times the plane's weights to its sums.
#[cube]
fn add_weighted_values<E: Float>(
    memory: &Memory<E>,
    values: &mut Sequence<Matrix<f32>>,
    #[comptime] config: CmmaTile,
) {
    // Other lanes' weights.
    sync_plane();
    let (m, n, k) = comptime!((config.matrices.m, config.matrices.n, config.matrices.k));
    let row_count = comptime!(config.matrices_of_scores().0);
    let of_row = comptime!(config.value_width / n);
    let pitch = comptime!(config.pitch(config.value_width));
    let weight_pitch = comptime!(config.score_pitch());
    let of_plane = PLANE_POS as usize * comptime!(config.plane_scores());
    #[unroll]
    for step in 0..comptime!(config.cut.keys / k) {
        let mut weights = Sequence::<Operand<E>>::new();
        #[unroll]
        for i in 0..row_count {
            let at = of_plane + comptime!((i * m * weight_pitch + step * k) / VECTOR);
            let rows = &memory.weights[at..at + comptime!(m * weight_pitch / VECTOR)];
            let layout = MatrixLayout::RowMajor;
            let stride = comptime!(weight_pitch as u32);
            weights.push(Operand::<E>::from_slice(MatrixIdent::A, m, n, k, layout, rows, stride));
        }
        #[unroll]
        for j in 0..of_row {
            let at = comptime!(config.values_at() + (step * k * pitch + j * n) / VECTOR).runtime();
            let tile = &memory.tiles[at..at + comptime!(k * pitch / VECTOR)];
            let layout = MatrixLayout::RowMajor;
            let tile =
                Operand::<E>::from_slice(MatrixIdent::B, m, n, k, layout, tile, comptime!(pitch as u32));
            #[unroll]
            for i in 0..row_count {
                let sum = values.index(comptime!(i * of_row + j));
                cmma::execute(weights.index(i), &tile, sum, sum);
            }
        }
    }
}

pub(super) fn compiled(target: &Target, config: CmmaTile) -> Kernel<AttentionCmmaTile<'static>> {
    let words = if config.split { VECTOR } else { VECTOR / 2 };
    match config.dtype {
        FloatType::BF16 => AttentionCmmaTile::kernel::<bf16>(target, config.units(), words, config),
        _ => AttentionCmmaTile::kernel::<f16>(target, config.units(), words, config),
    }
}

/// Launches the kernel, `splits` cubes per key head and block of rows.
pub(super) fn launch(call: &Call, config: CmmaTile, splits: usize, out: Output) -> Result<(), KernelError> {
    let blocks = call.rows().div_ceil(config.rows());
    let cubes = [call.heads()?, CHECK.index(blocks)?, CHECK.index(splits)?];
    let arguments = AttentionCmmaTile {
        inputs: call.inputs()?,
        y: out.y.buffer()?,
        scales: out.scales.buffer()?,
        sizes: call.sizes()?,
        scale: call.params.scale.to_bits(),
    };
    // SAFETY: the sizes are the tensors', and D and Dv multiples of 16; positions beyond the
    // capacity see no keys, and rows past the last are not stored. Each split has its part of y and
    // its scales.
    unsafe { call.gpu.launch(compiled(call.gpu.target(), config), cubes, arguments) }
}
