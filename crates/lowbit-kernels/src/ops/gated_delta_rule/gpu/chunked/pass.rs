//! The pass through each sequence's chunks. A cube has some columns of a head's state: in f32 in
//! its units' registers, and rounded and transposed in shared memory, where planes multiply it. A
//! chunk has five steps, with a `sync_cube` after each, for the elements of cooperative matrices
//! are opaque: decays are applied where sums have gone to shared memory.
//!
//! | step | makes | of |
//! |---|---|---|
//! | 1 | `S^T k` and `S^T q` | the rounded state, keys and queries |
//! | 2 | the error `v - g S^T k`, rounded, and `g S^T q` | 1 and values |
//! | 3 | `delta` | `T` and the error |
//! | 4 | `delta`, rounded, and `D[last] delta`, rounded | 3 |
//! | 5 | `g S^T q + P delta`, and what the keys add to the state | 4 |
//!
//! Without a correction, step 1 reads the state for queries alone, step 2 makes `delta`,
//! which is `v`, and step 3 is left out.
//!
//! Then `y` is written, the state decays and takes what the keys add, and the next chunk's
//! operands, which were loaded meanwhile, take the places of this one's. Columns are rows of
//! `update` and of the rounded state, and of `delta` times `D[last]`.

#![allow(unsafe_code)] // Launches.

use super::config::MatrixChunks;
use super::multiply::{Product, Side, add_products, load, store};
use super::stage::{Tile, Tokens, Words, fetch_matrix, fetch_tokens, stage_matrix, stage_tokens};
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::float::{narrow, read, rounded};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::matrices::{VECTOR, zeros};
use crate::gpu::sequences::{Sequences, SequencesArgs, bounds, state_row};
use crate::ops::gated_delta_rule::gpu::operands::{Operands, OperandsArgs, Prepared};
use crate::ops::gated_delta_rule::gpu::{Problem, Sizes, cubes, key_head};
use crate::ops::gated_delta_rule::{CHECK, GatedDeltaInputs};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use half::{bf16, f16};
use lowbit_formats::FloatType;

type PassOperands = Operands<u16, f32>;

/// The heads, columns and tokens of a cube.
#[derive(Clone, Copy, CubeType)]
struct Location {
    head: usize,
    key_head: usize,
    key_heads: usize,
    value_heads: usize,
    /// Its first column.
    column: usize,
    /// The slot of the sequence's first chunk.
    slot: usize,
    start: usize,
    end: usize,
}

/// Shared memory. Tokens are rows but for what [the module](self) says.
#[derive(CubeType)]
struct Tiles<E: Float> {
    keys: Tile<E>,
    queries: Tile<E>,
    transform: Tile<E>,
    pairs: Tile<E>,
    /// The state, rounded.
    state: Shared<[E]>,
    /// The terms that the keys add to it.
    update: Shared<[f32]>,
    /// `S^T k`, then `delta`; behind them `S^T q`, then `y`.
    sums: Shared<[f32]>,
    /// The error of the prediction, then `delta`.
    errors: Shared<[E]>,
    /// `D[last] delta`.
    steps: Shared<[E]>,
}

/// A unit's loads of a chunk for [`Tiles`].
#[derive(CubeType)]
struct Fetched {
    keys: Array<Words>,
    queries: Array<Words>,
    transform: Array<Words>,
    pairs: Array<Words>,
}

/// A unit's values of a chunk, and their tokens' gates.
#[derive(CubeType)]
struct Values {
    v: Array<f32>,
    before: Array<f32>,
    after: Array<f32>,
    /// Of the whole chunk.
    decay: f32,
}

/// One cube per sequence, value head and some columns of the state. `scale` is an f32.
#[kernel]
pub(super) fn gated_delta_rule_cmma_pass<E: Float>(
    operands: &Operands<u16, f32>,
    of: &Sequences,
    state: &mut [f32],
    y: &mut [u16],
    sizes: Sizes,
    scale: u32,
    #[comptime] config: MatrixChunks,
    #[comptime] pooled: bool,
) {
    let strips = comptime!(config.strips());
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let sequence = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let (sequences, states) = (sizes.sequences as usize, sizes.states as usize);
    let row = state_row(of, sequence, (sequences, states), pooled);
    if row < states {
        let (start, end) = bounds(&of.offsets, sequence, sizes.tokens as usize);
        let head = CUBE_POS_X as usize / strips;
        let at = Location {
            head,
            key_head: key_head(key_heads, value_heads, head, config.head_map),
            key_heads,
            value_heads,
            column: CUBE_POS_X as usize % strips * comptime!(config.cut.columns),
            slot: start / comptime!(config.cut.tokens) + sequence,
            start,
            end,
        };
        if start < end {
            let matrix = (row * value_heads + head) * comptime!(config.key_dim * config.value_dim);
            pass_chunks::<E>(operands, state, y, &at, (matrix, f32::reinterpret(scale)), config);
        }
    }
}

/// Takes the chunks of the sequence in their order into the cube's columns of the state, which is
/// in the matrix at `of.0`. `of.1` is the scale.
#[cube]
fn pass_chunks<E: Float>(
    operands: &PassOperands,
    state: &mut [f32],
    y: &mut [u16],
    at: &Location,
    of: (usize, f32),
    #[comptime] config: MatrixChunks,
) {
    let (matrix, scale) = of;
    let tokens = comptime!(config.cut.tokens);
    let mut tiles = tiles::<E>(config);
    let mut s = Array::<f32>::new(comptime!(config.of_state()));
    #[unroll]
    for i in 0..comptime!(config.of_state()) {
        let (row, column) = state_place(i, config);
        s[i] = state[matrix + state_element(row, at.column + column, config)];
        tiles.state[column * comptime!(config.key_pitch()) + row] = rounded::<E>(s[i], config.dtype);
    }
    let mut fetched = fetched(config);
    fetch(operands, &mut fetched, at, at.start, config);
    stage::<E>(&fetched, &mut tiles, at.end - at.start, config);
    sync_cube();
    let mut first = at.start;
    while first < at.end {
        let next = first + tokens;
        let values = load_values(operands, at, first, config);
        if next < at.end {
            fetch(operands, &mut fetched, at, next, config);
        }
        read_state::<E>(&mut tiles, config);
        sync_cube();
        take_errors::<E>(&mut tiles, &values, config);
        sync_cube();
        if comptime!(config.corrects()) {
            transform_errors::<E>(&mut tiles, config);
            sync_cube();
            take_deltas::<E>(&mut tiles, &values, config);
            sync_cube();
        }
        add_pairs::<E>(&mut tiles, config);
        multiply_keys::<E>(&mut tiles, config);
        sync_cube();
        write_output::<E>(&tiles, y, at, (first, scale), config);
        #[unroll]
        for i in 0..comptime!(config.of_state()) {
            let (row, column) = state_place(i, config);
            let place = column * comptime!(config.key_pitch()) + row;
            s[i] = fma(s[i], values.decay, tiles.update[place]);
            tiles.state[place] = rounded::<E>(s[i], config.dtype);
        }
        if next < at.end {
            stage::<E>(&fetched, &mut tiles, at.end - next, config);
        }
        sync_cube();
        first = next;
    }
    #[unroll]
    for i in 0..comptime!(config.of_state()) {
        let (row, column) = state_place(i, config);
        state[matrix + state_element(row, at.column + column, config)] = s[i];
    }
}

#[cube]
fn tiles<E: Float>(#[comptime] config: MatrixChunks) -> Tiles<E> {
    let (tokens, columns) = comptime!((config.cut.tokens, config.cut.columns));
    let rows = comptime!(tokens * config.key_pitch() / VECTOR);
    let matrix = comptime!(tokens * config.token_pitch() / VECTOR);
    let state = comptime!(columns * config.key_pitch());
    Tiles::<E> {
        keys: Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(rows, 16usize),
        queries: Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(rows, 16usize),
        transform: Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(matrix, 16usize),
        pairs: Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(matrix, 16usize),
        state: Shared::<[E]>::new_aligned_slice(state, 16usize),
        update: Shared::<[f32]>::new_aligned_slice(state, 16usize),
        sums: Shared::<[f32]>::new_aligned_slice(comptime!(2 * tokens * config.column_pitch()), 16usize),
        errors: Shared::<[E]>::new_aligned_slice(comptime!(tokens * config.column_pitch()), 16usize),
        steps: Shared::<[E]>::new_aligned_slice(comptime!(columns * config.token_pitch()), 16usize),
    }
}

#[cube]
fn fetched(#[comptime] config: MatrixChunks) -> Fetched {
    let of_tokens = comptime!(config.share(config.chunk_vectors()));
    let of_matrix = comptime!(config.share(config.transform_vectors()));
    Fetched {
        keys: Array::<Words>::new(of_tokens),
        queries: Array::<Words>::new(of_tokens),
        transform: Array::<Words>::new(of_matrix),
        pairs: Array::<Words>::new(of_matrix),
    }
}

/// The index of a chunk of the cube's head among all that were prepared.
#[cube]
fn index(at: &Location, first: usize, #[comptime] config: MatrixChunks) -> usize {
    (at.slot + (first - at.start) / comptime!(config.cut.tokens)) * at.value_heads + at.head
}

/// Loads the unit's part of the chunk that begins with token `first`.
#[cube]
fn fetch(
    operands: &PassOperands,
    to: &mut Fetched,
    at: &Location,
    first: usize,
    #[comptime] config: MatrixChunks,
) {
    let of = Tokens { first, last: at.end, key_heads: at.key_heads, key_head: at.key_head };
    let index = index(at, first, config);
    fetch_tokens(&operands.k, &mut to.keys, &of, config);
    fetch_tokens(&operands.q, &mut to.queries, &of, config);
    if comptime!(config.corrects()) {
        fetch_matrix(&operands.transforms, &mut to.transform, index, config);
    }
    fetch_matrix(&operands.pairs, &mut to.pairs, index, config);
}

/// Puts it into shared memory, with zeros for tokens past the last of `count`.
#[cube]
fn stage<E: Float>(from: &Fetched, to: &mut Tiles<E>, count: usize, #[comptime] config: MatrixChunks) {
    stage_tokens::<E>(&from.keys, &mut to.keys, count, config);
    stage_tokens::<E>(&from.queries, &mut to.queries, count, config);
    if comptime!(config.corrects()) {
        stage_matrix::<E>(&from.transform, &mut to.transform, config);
    }
    stage_matrix::<E>(&from.pairs, &mut to.pairs, config);
}

/// The row and column of a unit's element `i` of the cube's columns of the state.
#[cube]
fn state_place(#[comptime] i: usize, #[comptime] config: MatrixChunks) -> (usize, usize) {
    let place = UNIT_POS_X as usize + comptime!(i * config.units());
    (place % comptime!(config.key_dim), place / comptime!(config.key_dim))
}

/// The index of an element in a head's matrix.
#[cube]
fn state_element(row: usize, column: usize, #[comptime] config: MatrixChunks) -> usize {
    row * comptime!(config.value_dim) + column
}

/// The token and column of a unit's element `i` of the chunk's values.
#[cube]
fn value_place(#[comptime] i: usize, #[comptime] config: MatrixChunks) -> (usize, usize) {
    let place = UNIT_POS_X as usize + comptime!(i * config.units());
    (place / comptime!(config.cut.columns), place % comptime!(config.cut.columns))
}

/// Loads a unit's values of the chunk that begins with token `first`: zeros for tokens past the
/// last.
#[cube]
fn load_values(
    operands: &PassOperands,
    at: &Location,
    first: usize,
    #[comptime] config: MatrixChunks,
) -> Values {
    let (tokens, count) = comptime!((config.cut.tokens, config.of_values()));
    let gates = index(at, first, config) * comptime!(config.gates());
    let mut v = Array::<f32>::new(count);
    let mut before = Array::<f32>::new(count);
    let mut after = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        let (row, column) = value_place(i, config);
        let token = min(first + row, at.end - 1);
        let place = (token * at.value_heads + at.head) * comptime!(config.value_dim) + at.column + column;
        v[i] = select(first + row < at.end, read(&operands.v, place, config.dtype), 0.0f32);
        before[i] = operands.gates[gates + row];
        after[i] = operands.gates[gates + tokens + row];
    }
    Values { v, before, after, decay: operands.gates[gates + comptime!(tokens - 1)] }
}

/// The product of something with the state, or with errors, whose rows are places of the depth.
fn by_state(config: MatrixChunks) -> Product {
    Product {
        matrices: config.matrices,
        left: Side::new(config.key_pitch(), VECTOR),
        right: Side::new(config.key_pitch(), 1),
        depth: config.key_dim,
    }
}

fn by_errors(config: MatrixChunks) -> Product {
    Product {
        matrices: config.matrices,
        left: Side::new(config.token_pitch(), VECTOR),
        right: Side::new(config.column_pitch(), 1).by_depth(),
        depth: config.cut.tokens,
    }
}

fn by_keys(config: MatrixChunks) -> Product {
    Product {
        matrices: config.matrices,
        left: Side::new(config.token_pitch(), 1),
        right: Side::new(config.key_pitch(), VECTOR).by_depth(),
        depth: config.cut.tokens,
    }
}

/// `S^T k`, but where nothing is corrected, and `S^T q`.
#[cube]
fn read_state<E: Float>(tiles: &mut Tiles<E>, #[comptime] config: MatrixChunks) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.column_pitch()));
    let (along_m, along_n) = comptime!((config.cut.tokens / m, config.cut.columns / n));
    let row = comptime!(config.key_pitch() / VECTOR);
    let of = comptime!(by_state(config));
    let end = comptime!(config.key_dim).runtime();
    let mut tile = PLANE_POS as usize;
    if comptime!(!config.corrects()) {
        tile += comptime!(along_m * along_n);
    }
    while tile < comptime!(2 * along_m * along_n) {
        let (i, j) = (tile / along_n * m, tile % along_n * n);
        let sum = zeros(config.matrices);
        let right = j * comptime!(config.key_pitch());
        if i < comptime!(config.cut.tokens) {
            add_products(&tiles.keys, &tiles.state, &sum, (i * row, right), end, of);
        } else {
            let left = (i - comptime!(config.cut.tokens)) * row;
            add_products(&tiles.queries, &tiles.state, &sum, (left, right), end, of);
        }
        store(&sum, &mut tiles.sums, i * pitch + j, pitch, config.matrices);
        tile += (CUBE_DIM / PLANE_DIM) as usize;
    }
}

/// The error of the prediction, and what the state that the chunk finds gives of `y`. Where nothing
/// is corrected, the error is `delta`, and its part that is left at the chunk's end is made, too.
#[cube]
fn take_errors<E: Float>(tiles: &mut Tiles<E>, values: &Values, #[comptime] config: MatrixChunks) {
    #[unroll]
    for i in 0..comptime!(config.of_values()) {
        let (row, column) = value_place(i, config);
        let at = row * comptime!(config.column_pitch()) + column;
        let before = values.before[i];
        if comptime!(config.corrects()) {
            tiles.errors[at] = rounded::<E>(values.v[i] - before * tiles.sums[at], config.dtype);
        } else {
            tiles.errors[at] = rounded::<E>(values.v[i], config.dtype);
            tiles.steps[column * comptime!(config.token_pitch()) + row] =
                rounded::<E>(values.v[i] * values.after[i], config.dtype);
        }
        tiles.sums[at + comptime!(config.cut.tokens * config.column_pitch())] *= before;
    }
}

/// `delta`, in the place of `S^T k`. Only what is on or below the diagonal of `T` is multiplied: a
/// NaN does not reach earlier blocks.
#[cube]
fn transform_errors<E: Float>(tiles: &mut Tiles<E>, #[comptime] config: MatrixChunks) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.column_pitch()));
    let (along_m, along_n) = comptime!((config.cut.tokens / m, config.cut.columns / n));
    let of = comptime!(by_errors(config));
    let mut tile = PLANE_POS as usize;
    while tile < comptime!(along_m * along_n) {
        let (i, j) = (tile / along_n * m, tile % along_n * n);
        let sum = zeros(config.matrices);
        let left = i * comptime!(config.token_pitch() / VECTOR);
        add_products(&tiles.transform, &tiles.errors, &sum, (left, j), i + m, of);
        store(&sum, &mut tiles.sums, i * pitch + j, pitch, config.matrices);
        tile += (CUBE_DIM / PLANE_DIM) as usize;
    }
}

/// Rounds `delta`, and what of it is left at the chunk's end.
#[cube]
fn take_deltas<E: Float>(tiles: &mut Tiles<E>, values: &Values, #[comptime] config: MatrixChunks) {
    #[unroll]
    for i in 0..comptime!(config.of_values()) {
        let (row, column) = value_place(i, config);
        let at = row * comptime!(config.column_pitch()) + column;
        let delta = tiles.sums[at];
        tiles.errors[at] = rounded::<E>(delta, config.dtype);
        tiles.steps[column * comptime!(config.token_pitch()) + row] =
            rounded::<E>(delta * values.after[i], config.dtype);
    }
}

/// Adds `P delta` to what the state gave of `y`.
#[cube]
fn add_pairs<E: Float>(tiles: &mut Tiles<E>, #[comptime] config: MatrixChunks) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.column_pitch()));
    let (along_m, along_n) = comptime!((config.cut.tokens / m, config.cut.columns / n));
    let of = comptime!(by_errors(config));
    let mut tile = PLANE_POS as usize;
    while tile < comptime!(along_m * along_n) {
        let (i, j) = (tile / along_n * m, tile % along_n * n);
        let at = (i + comptime!(config.cut.tokens)) * pitch + j;
        let sum = load(&tiles.sums, at, pitch, config.matrices);
        let left = i * comptime!(config.token_pitch() / VECTOR);
        add_products(&tiles.pairs, &tiles.errors, &sum, (left, j), i + m, of);
        store(&sum, &mut tiles.sums, at, pitch, config.matrices);
        tile += (CUBE_DIM / PLANE_DIM) as usize;
    }
}

/// The terms that the keys add to the state, transposed. Planes in the middle begin, for the first
/// ones have added pairs.
#[cube]
fn multiply_keys<E: Float>(tiles: &mut Tiles<E>, #[comptime] config: MatrixChunks) {
    let (m, n, pitch) = comptime!((config.matrices.m, config.matrices.n, config.key_pitch()));
    let (along_m, along_n) = comptime!((config.cut.columns / m, config.key_dim / n));
    let of = comptime!(by_keys(config));
    let end = comptime!(config.cut.tokens).runtime();
    let planes = (CUBE_DIM / PLANE_DIM) as usize;
    let mut tile = (PLANE_POS as usize + planes / 2) % planes;
    while tile < comptime!(along_m * along_n) {
        let (i, j) = (tile / along_n * m, tile % along_n * n);
        let sum = zeros(config.matrices);
        let left = i * comptime!(config.token_pitch());
        add_products(&tiles.steps, &tiles.keys, &sum, (left, j / VECTOR), end, of);
        store(&sum, &mut tiles.update, i * pitch + j, pitch, config.matrices);
        tile += planes;
    }
}

/// Writes `y` of the chunk that begins with token `of.0`, times `of.1`.
#[cube]
fn write_output<E: Float>(
    tiles: &Tiles<E>,
    y: &mut [u16],
    at: &Location,
    of: (usize, f32),
    #[comptime] config: MatrixChunks,
) {
    let (first, scale) = of;
    #[unroll]
    for i in 0..comptime!(config.of_values()) {
        let (row, column) = value_place(i, config);
        let token = first + row;
        if token < at.end {
            let sum =
                tiles.sums[(row + comptime!(config.cut.tokens)) * comptime!(config.column_pitch()) + column];
            let place = (token * at.value_heads + at.head) * comptime!(config.value_dim) + at.column + column;
            y[place] = u16::cast_from(narrow(sum * scale, config.dtype));
        }
    }
}

/// The kernel for a state per sequence, or for a pool of them.
pub(super) fn compiled(
    target: &Target,
    config: MatrixChunks,
    pooled: bool,
) -> Kernel<GatedDeltaRuleCmmaPass<'static>> {
    match config.dtype {
        FloatType::BF16 => GatedDeltaRuleCmmaPass::kernel::<bf16>(target, config.units(), config, pooled),
        _ => GatedDeltaRuleCmmaPass::kernel::<f16>(target, config.units(), config, pooled),
    }
}

/// Passes over all sequences.
pub(super) fn launch(
    problem: &Problem,
    config: MatrixChunks,
    prepared: &Prepared,
    state: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    let GatedDeltaInputs { cu_seqlens, slots, .. } = *problem.inputs;
    let columns = CHECK.index(problem.dims.value_heads * config.strips())?;
    let [sequences, more] = cubes(problem.inputs.sequences())?;
    let arguments = GatedDeltaRuleCmmaPass {
        operands: problem.operands(prepared)?,
        of: SequencesArgs::new(cu_seqlens, slots)?,
        state: state.buffer()?,
        y: y.buffer()?,
        sizes: problem.sizes(state)?,
        scale: problem.params.scale.to_bits(),
    };
    let kernel = compiled(problem.gpu.target(), config, slots.is_some());
    // SAFETY: the sizes are the tensors', which the config supports; a sequence whose offsets go
    // past the tokens, or its slot past the pool, is left out, and all chunks of the others are
    // prepared.
    unsafe { problem.gpu.launch(kernel, [columns, sequences, more], arguments) }
}
