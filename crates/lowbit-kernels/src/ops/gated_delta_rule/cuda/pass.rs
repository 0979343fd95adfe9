//! The pass through each sequence's chunks. A cube has [`COLUMNS`] columns of a head's state, and
//! its planes have three roles that work at the same time:
//!
//! - A *state plane* has 16 columns, transposed, in registers. It takes chunk `c` into them, and
//!   hands over the state as the chunk finds it, and `delta`, both rounded, through shared memory.
//! - An *output plane* computes `y` of chunk `c - 1` from what its state plane has handed over.
//! - *Loader planes* copy the operands of later chunks into shared memory.
//!
//! All products have a transposed left operand, `[16 columns, depth]`, which is the sum of a
//! product before, rounded; their right operands lie in shared memory.
//!
//! Without a correction, `delta` is `v`, and there is no `T`.
//!
//! Invariants: every plane of a cube goes through as many turns, with one `sync_cube` at the end of
//! each. In turn `c` state planes read stage `c` of the keys, output planes stage `c - 1` of the
//! queries and the handover of turn `c - 1`, and loaders fill stages `c + 2` and `c + 1`, which
//! nobody reads then; `c + 1` and `c` where shared memory holds two stages alone.

#![allow(unsafe_code)] // Launches.

mod layout;
mod load;

use super::config::{CHUNK, COLUMNS, ChunkConfig, PLANES, swizzled};
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::cuda::ptx::{
    address, end_copy_group, load_tiles, multiply, pack, shared, shared_words, store_words, transpose_tile,
    wait_copy_groups,
};
use crate::gpu::float::widen;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::sequences::{Sequences, SequencesArgs, bounds, state_row};
use crate::ops::gated_delta_rule::gpu::operands::{Operands, OperandsArgs, Prepared};
use crate::ops::gated_delta_rule::gpu::{Problem, Sizes, cubes, key_head};
use crate::ops::gated_delta_rule::{CHECK, GatedDeltaInputs};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use layout::{SharedLayout, handover, key_stage, plane, query_stage};
use load::{LOADERS, LoadedOperands, Location, load_keys, load_queries};

/// Units of either role.
const UNITS: usize = 32 * PLANES;
/// One cube per sequence, value head and [`COLUMNS`] columns of the state. `scale` is an f32.
#[kernel]
pub(super) fn gated_delta_rule_pass(
    operands: &Operands<Vector<u32, Const<4>>, Vector<u32, Const<4>>>,
    of: &Sequences,
    state: &mut [f32],
    y: &mut [u32],
    sizes: Sizes,
    scale: u32,
    #[comptime] config: ChunkConfig,
    #[comptime] pooled: bool,
) {
    let cubes = comptime!(cubes_per_head(config));
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let sequence = CUBE_POS_Z as usize * CUBES + CUBE_POS_Y as usize;
    let (sequences, states) = (sizes.sequences as usize, sizes.states as usize);
    let row = state_row(of, sequence, (sequences, states), pooled);
    if row < states {
        let (start, end) = bounds(&of.offsets, sequence, sizes.tokens as usize);
        let head = CUBE_POS_X as usize / cubes;
        let at = Location {
            head,
            key_head: key_head(key_heads, value_heads, head, config.head_map),
            key_heads,
            value_heads,
            column: CUBE_POS_X as usize % cubes * COLUMNS,
            slot: start / CHUNK + sequence,
            start,
            end,
        };
        if start < end {
            let matrix = (row * value_heads + head) * comptime!(config.key_dim * config.value_dim);
            pass_chunks(operands, state, y, &at, matrix, f32::reinterpret(scale), config);
        }
    }
}

/// Bytes of shared memory.
pub(super) fn shared_memory(config: ChunkConfig) -> usize {
    SharedLayout::of(config).size()
}

/// Takes the chunks of the sequence in their order into the cube's columns of the state, which is
/// the matrix at `matrix`.
#[cube]
fn pass_chunks(
    operands: &LoadedOperands,
    state: &mut [f32],
    y: &mut [u32],
    at: &Location,
    matrix: usize,
    scale: f32,
    #[comptime] config: ChunkConfig,
) {
    let shared = Shared::<[u32]>::new_aligned_slice(comptime!(shared_memory(config) / 4), 128usize);
    let base = address(&shared);
    let role = UNIT_POS_X as usize / UNITS;
    let mut s = zeros(comptime!(config.key_dim / 2));
    let chunks = (at.end - at.start).div_ceil(CHUNK);
    if role == 0 {
        #[unroll]
        for i in 0..comptime!(config.key_dim / 2) {
            s[i] = state[matrix + element(i, at.column, config)];
        }
    } else if role >= 2 {
        load_keys(operands, base, at, 0usize, config);
        end_copy_group();
        if comptime!(config.stages == 3) {
            load_keys(operands, base, at, 1usize, config);
            load_queries(operands, base, at, 0usize, config);
            end_copy_group();
        }
        wait_copy_groups(comptime!(config.stages - 2));
    }
    sync_cube();
    for chunk in 0..chunks + 1usize {
        if role == 0 {
            if chunk < chunks {
                update_state(&mut s, base, chunk, config);
            }
        } else if role == 1 {
            if chunk > 0 {
                write_output(y, base, at, chunk - 1usize, scale, config);
            }
        } else {
            load_keys(operands, base, at, chunk + comptime!(config.stages - 1), config);
            load_queries(operands, base, at, chunk + comptime!(config.stages - 2), config);
            end_copy_group();
            wait_copy_groups(comptime!(config.stages - 2));
        }
        sync_cube();
    }
    if role == 0 {
        #[unroll]
        for i in 0..comptime!(config.key_dim / 2) {
            state[matrix + element(i, at.column, config)] = s[i];
        }
    }
}

/// The row of a 16 by 16 tile, and which half of its columns, that a unit names to load it.
#[cube]
fn tile_row_and_half() -> (usize, usize) {
    (UNIT_POS_X as usize % 16usize, UNIT_POS_X as usize / 16usize % 2usize)
}

/// The place of a state unit's element `i` in a head's matrix.
#[cube]
fn element(#[comptime] i: usize, column: usize, #[comptime] config: ChunkConfig) -> usize {
    let (plane, lane) = (UNIT_POS_X as usize / 32usize, UNIT_POS_X as usize % 32usize);
    let column = column + plane * 16usize + lane / 4usize + comptime!(i / 2 % 2 * 8);
    let row = lane % 4usize * 2usize + comptime!(i / 4 * 8 + i % 2);
    row * comptime!(config.value_dim) + column
}

/// Takes a chunk into the state.
#[cube]
fn update_state(s: &mut Array<f32>, base: u32, chunk: usize, #[comptime] config: ChunkConfig) {
    let layout = comptime!(SharedLayout::of(config));
    let from = key_stage(base, chunk, config);
    let to_output = handover(base, chunk, config);
    // By eights of tokens: first what the state predicts, then the error of that.
    let mut error = zeros(32usize);
    #[unroll]
    for depth in 0..comptime!(config.key_dim / 16) {
        let mut left = Array::<u32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            let (low, high) = (s[comptime!(depth * 8 + i * 2)], s[comptime!(depth * 8 + i * 2 + 1)]);
            left[i] = pack(low, high, config.dtype);
        }
        store_words(to_output + comptime!((depth * 512) as u32), &left, 0usize);
        if comptime!(config.corrects()) {
            multiply_rows(&left, 0usize, from, depth, &mut error, config);
        }
    }
    let before = from + comptime!(layout.key_gates as u32);
    subtract_prediction(&mut error, from + comptime!(layout.values as u32), before, config);

    let mut left = Array::<u32>::new(16usize);
    round_to_left(&error, &mut left, config);
    if comptime!(config.corrects()) {
        let mut delta = zeros(32usize);
        multiply_triangle(&left, from + comptime!(layout.transform as u32), &mut delta, config);
        round_to_left(&delta, &mut left, config);
        take_delta(s, &mut delta, &mut left, from, to_output, config);
    } else {
        take_delta(s, &mut error, &mut left, from, to_output, config);
    }
}

/// Takes `delta`, which is also there as a left operand, into the state, and hands it over.
#[cube]
fn take_delta(
    s: &mut Array<f32>,
    delta: &mut Array<f32>,
    left: &mut Array<u32>,
    from: u32,
    to_output: u32,
    #[comptime] config: ChunkConfig,
) {
    let layout = comptime!(SharedLayout::of(config));
    let before = from + comptime!(layout.key_gates as u32);
    #[unroll]
    for i in 0..4usize {
        store_words(to_output + comptime!((layout.delta + i * 512) as u32), &*left, comptime!(4 * i));
    }

    scale_by_token(delta, before + comptime!((CHUNK * 4) as u32));
    round_to_left(&*delta, left, config);
    let decay = shared_two(before + comptime!((CHUNK * 4 - 8) as u32)).extract(1usize);
    #[unroll]
    for i in 0..comptime!(config.key_dim / 2) {
        s[i] *= decay;
    }
    add_keys_times_delta(s, &*left, from, config);
}

/// `s += left keys`, transposed as the state is: `left` is `delta` of 64 tokens.
#[cube]
fn add_keys_times_delta(s: &mut Array<f32>, left: &Array<u32>, keys: u32, #[comptime] config: ChunkConfig) {
    let (row, half) = tile_row_and_half();
    #[unroll]
    for depth in 0..4usize {
        #[unroll]
        for block in 0..comptime!(config.key_dim / 16) {
            let at = swizzled(
                comptime!(depth * 16) + row,
                comptime!(2 * block) + half,
                comptime!(config.vectors()),
            );
            let tile = load_tiles(keys + at, 0usize, true);
            #[unroll]
            for side in 0..2usize {
                let (b0, b1) = (tile.extract(comptime!(2 * side)), tile.extract(comptime!(2 * side + 1)));
                multiply(
                    left,
                    comptime!(depth * 4),
                    b0,
                    b1,
                    s,
                    comptime!(block * 8 + side * 4),
                    config.dtype,
                );
            }
        }
    }
}

/// Computes and writes a chunk's `y`.
#[cube]
fn write_output(
    y: &mut [u32],
    base: u32,
    at: &Location,
    chunk: usize,
    scale: f32,
    #[comptime] config: ChunkConfig,
) {
    let layout = comptime!(SharedLayout::of(config));
    let from = query_stage(base, chunk, config);
    let from_state = handover(base, chunk, config);
    let mut output = zeros(32usize);
    let mut left = Array::<u32>::new(16usize);
    #[unroll]
    for depth in 0..comptime!(config.key_dim / 16) {
        load_left(from_state + comptime!((depth * 512) as u32), &mut left, 0usize);
        multiply_rows(&left, 0usize, from, depth, &mut output, config);
    }
    scale_by_token(&mut output, from + comptime!(layout.query_gates as u32));
    #[unroll]
    for i in 0..4usize {
        load_left(from_state + comptime!((layout.delta + i * 512) as u32), &mut left, comptime!(4 * i));
    }
    multiply_triangle(&left, from + comptime!(layout.pairs as u32), &mut output, config);

    let lane = UNIT_POS_X as usize % 32usize;
    #[unroll]
    for eight in 0..8usize {
        let token = at.start + chunk * CHUNK + comptime!(eight * 8) + lane / 4usize;
        let row = (token * at.value_heads + at.head) * comptime!(config.value_dim / 2);
        let to = row + at.column / 2usize + plane() * 8usize + lane % 4usize;
        #[unroll]
        for half in 0..2usize {
            let i = comptime!(eight * 4 + half * 2);
            let word =
                transpose_tile(pack(output[i] * scale, output[comptime!(i + 1)] * scale, config.dtype));
            if token < at.end {
                y[to + comptime!(half * 4)] = word;
            }
        }
    }
}

#[cube]
fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut zeros = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        zeros[i] = 0.0;
    }
    zeros
}

/// Reads a part of a left operand, `left[first..first + 4]`, from shared memory.
#[cube]
fn load_left(at: u32, left: &mut Array<u32>, #[comptime] first: usize) {
    let words = shared_words(at, 0usize, 4usize);
    #[unroll]
    for i in 0..4usize {
        left[comptime!(first + i)] = words[i];
    }
}

/// `sums += left rows^T`, for 16 columns of the chunk's keys or queries.
#[cube]
fn multiply_rows(
    left: &Array<u32>,
    #[comptime] tile: usize,
    rows: u32,
    #[comptime] depth: usize,
    sums: &mut Array<f32>,
    #[comptime] config: ChunkConfig,
) {
    let (row, half) = tile_row_and_half();
    #[unroll]
    for block in 0..4usize {
        let at =
            swizzled(comptime!(block * 16) + row, comptime!(2 * depth) + half, comptime!(config.vectors()));
        let right = load_tiles(rows + at, 0usize, false);
        #[unroll]
        for side in 0..2usize {
            let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
            multiply(left, tile, b0, b1, sums, comptime!(block * 8 + side * 4), config.dtype);
        }
    }
}

/// Multiplies each token's sums with its gate.
#[cube]
fn scale_by_token(sums: &mut Array<f32>, gates: u32) {
    #[unroll]
    for eight in 0..8usize {
        let gate = shared_two(gates + comptime!((eight * 32) as u32) + UNIT_POS_X % 4u32 * 8u32);
        #[unroll]
        for i in 0..4usize {
            sums[comptime!(eight * 4 + i)] *= gate.extract(comptime!(i % 2));
        }
    }
}

/// The error of the prediction `v - g S^T k`, from `S^T k`; `v` where nothing is corrected.
#[cube]
fn subtract_prediction(error: &mut Array<f32>, values: u32, before: u32, #[comptime] config: ChunkConfig) {
    let (row, half) = tile_row_and_half();
    if comptime!(config.corrects()) {
        scale_by_token(error, before);
    }
    #[unroll]
    for block in 0..4usize {
        let at = swizzled(comptime!(block * 16) + row, plane() * 2usize + half, comptime!(COLUMNS / 8));
        let v = load_tiles(values + at, 0usize, true);
        #[unroll]
        for i in 0..8usize {
            let word = v.extract(comptime!(i / 4 + i / 2 % 2 * 2));
            let bits = if comptime!(i % 2 == 0) { word & 0xffffu32 } else { word >> 16u32 };
            if comptime!(config.corrects()) {
                error[comptime!(block * 8 + i)] = widen(bits, config.dtype) - error[comptime!(block * 8 + i)];
            } else {
                error[comptime!(block * 8 + i)] = widen(bits, config.dtype);
            }
        }
    }
}

/// Sums, `[16, 64]`, rounded, as a left operand.
#[cube]
fn round_to_left(sums: &Array<f32>, left: &mut Array<u32>, #[comptime] config: ChunkConfig) {
    #[unroll]
    for i in 0..16usize {
        left[i] = pack(sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)], config.dtype);
    }
}

/// `sums += left matrix^T`, for a lower triangular matrix, `[64, 64]`.
#[cube]
fn multiply_triangle(left: &Array<u32>, matrix: u32, sums: &mut Array<f32>, #[comptime] config: ChunkConfig) {
    let (row, half) = tile_row_and_half();
    #[unroll]
    for block in 0..4usize {
        #[unroll]
        for depth in 0..comptime!(block + 1) {
            let at = swizzled(comptime!(block * 16) + row, comptime!(2 * depth) + half, 8usize);
            let right = load_tiles(matrix + at, 0usize, false);
            #[unroll]
            for side in 0..2usize {
                let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
                let at = comptime!(block * 8 + side * 4);
                multiply(left, comptime!(depth * 4), b0, b1, sums, at, config.dtype);
            }
        }
    }
}

/// Two floats of shared memory.
#[cube]
fn shared_two(at: u32) -> Vector<f32, Const<2>> {
    shared::<f32, Const<2>>(at, 0usize, 2usize)
}

/// Cubes that share the columns of a head.
fn cubes_per_head(config: ChunkConfig) -> usize {
    config.value_dim / COLUMNS
}

/// The kernel for a state per sequence, or for a pool of them.
pub(super) fn compiled(
    target: &Target,
    config: ChunkConfig,
    pooled: bool,
) -> Kernel<GatedDeltaRulePass<'static>> {
    GatedDeltaRulePass::kernel(target, 2 * UNITS + LOADERS, config, pooled)
}

/// Passes over all sequences.
pub(super) fn launch(
    problem: &Problem,
    config: ChunkConfig,
    prepared: &Prepared,
    state: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    let GatedDeltaInputs { cu_seqlens, slots, .. } = *problem.inputs;
    let columns = CHECK.index(problem.dims.value_heads * cubes_per_head(config))?;
    let [sequences, more] = cubes(problem.inputs.sequences())?;
    let arguments = GatedDeltaRulePass {
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
