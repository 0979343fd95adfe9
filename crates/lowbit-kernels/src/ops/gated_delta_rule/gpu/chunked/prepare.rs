//! The part that does not depend on the state: `T`, `P` and the gates of a chunk of one value head,
//! by one cube.
//!
//! 1. Keys and queries go to shared memory, and so do decays and betas.
//! 2. Planes multiply keys with keys and queries with keys, as far as one comes after the other.
//! 3. A unit per token and operand goes down a column of these products: times the decays they are
//!    `L`, in place, and `P`.
//! 4. A unit per column inverts `I + L` by forward substitution, in the place of the queries'
//!    products.
//!
//! Without a correction there is no `L`.

#![allow(unsafe_code)] // Launches.

use super::config::{BLOCK, MatrixChunks};
use super::multiply::{Product, Side, add_products, store};
use super::stage::{Tokens, Words, fetch_tokens, stage_tokens};
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::float::narrow;
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::math;
use crate::gpu::matrices::{VECTOR, zeros};
use crate::gpu::sequences::{Piece, piece};
use crate::ops::gated_delta_rule::gpu::operands::{Inputs, InputsArgs, Prepared};
use crate::ops::gated_delta_rule::gpu::{Problem, Sizes, cubes, key_head};
use crate::ops::gated_delta_rule::{CHECK, GatedDeltaInputs};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use half::{bf16, f16};
use lowbit_formats::FloatType;

/// A chunk's decays and betas in shared memory: 1 and 0 for tokens past the last.
#[derive(CubeType)]
struct Gates {
    decays: Shared<[f32]>,
    betas: Shared<[f32]>,
}

/// One cube per value head and slot of a chunk. See [`Prepared`] for what it writes.
#[kernel]
pub(super) fn gated_delta_rule_cmma_prepare<E: Float>(
    inputs: &Inputs,
    cu_seqlens: &[u32],
    transforms: &mut [u16],
    pairs: &mut [u16],
    gates: &mut [f32],
    sizes: Sizes,
    #[comptime] config: MatrixChunks,
) {
    let (tokens, key_pitch, pitch) = comptime!((config.cut.tokens, config.key_pitch(), config.token_pitch()));
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let head = CUBE_POS_X as usize;
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let piece = piece(cu_seqlens, slot, sizes.sequences as usize, sizes.tokens as usize, tokens);
    let rows = comptime!(tokens * key_pitch / VECTOR);
    let mut keys = Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(rows, 16usize);
    let mut queries = Shared::<[Vector<E, Const<4>>]>::new_aligned_slice(rows, 16usize);
    let mut products = Shared::<[f32]>::new_aligned_slice(comptime!(2 * tokens * pitch), 16usize);
    let mut of_chunk =
        Gates { decays: Shared::<[f32]>::new_slice(tokens), betas: Shared::<[f32]>::new_slice(tokens) };
    if piece.first < piece.last {
        let key_head = key_head(key_heads, value_heads, head, config.head_map);
        let of = Tokens { first: piece.first, last: piece.last, key_heads, key_head };
        let mut loaded = Array::<Words>::new(comptime!(config.share(config.chunk_vectors())));
        let count = piece.last - piece.first;
        fetch_tokens(&inputs.k, &mut loaded, &of, config);
        stage_tokens::<E>(&loaded, &mut keys, count, config);
        fetch_tokens(&inputs.q, &mut loaded, &of, config);
        stage_tokens::<E>(&loaded, &mut queries, count, config);
        load_gates(inputs, &mut of_chunk, &piece, (head, value_heads), config);
        sync_cube();
        if comptime!(config.corrects()) {
            multiply_pairs::<E>(&keys, &keys, &mut products, 0usize, config);
        }
        multiply_pairs::<E>(&queries, &keys, &mut products, comptime!(tokens * pitch).runtime(), config);
        sync_cube();
        let index = slot * value_heads + head;
        let unit = UNIT_POS_X as usize;
        if unit < tokens {
            let gate = finish_keys(&mut products, &of_chunk, unit, config);
            gates[index * comptime!(config.gates()) + tokens + unit] = gate;
        } else if unit < comptime!(2 * tokens) {
            let j = unit - tokens;
            let matrix = index * comptime!(tokens * tokens);
            let gate = finish_queries(&products, &of_chunk, pairs, matrix, j, config);
            gates[index * comptime!(config.gates()) + j] = gate;
        }
        if comptime!(config.corrects()) {
            sync_cube();
            if unit < tokens {
                let matrix = index * comptime!(tokens * tokens);
                invert(&mut products, of_chunk.betas[unit], transforms, matrix, unit, config);
            }
        }
    }
}

/// Brings the chunk's decays and betas for one of so many value heads.
#[cube]
fn load_gates(
    inputs: &Inputs,
    to: &mut Gates,
    piece: &Piece,
    head: (usize, usize),
    #[comptime] config: MatrixChunks,
) {
    let unit = UNIT_POS_X as usize;
    if unit < comptime!(config.cut.tokens) {
        let mut decay = 1.0f32;
        let mut beta = 0.0f32;
        if piece.first + unit < piece.last {
            let gate = (piece.first + unit) * head.1 + head.0;
            decay = math::exp(inputs.log_decay[gate]);
            beta = inputs.beta[gate];
        }
        to.decays[unit] = decay;
        to.betas[unit] = beta;
    }
}

/// The products of all rows of `left` with the keys up to their own, from `products[first]` on.
#[cube]
fn multiply_pairs<E: Float>(
    left: &Shared<[Vector<E, Const<4>>]>,
    keys: &Shared<[Vector<E, Const<4>>]>,
    products: &mut Shared<[f32]>,
    first: usize,
    #[comptime] config: MatrixChunks,
) {
    let (m, n) = comptime!((config.matrices.m, config.matrices.n));
    let (tokens, pitch) = comptime!((config.cut.tokens, config.token_pitch()));
    let side = comptime!(Side::new(config.key_pitch(), VECTOR));
    let of = comptime!(Product { matrices: config.matrices, left: side, right: side, depth: config.key_dim });
    let row = comptime!(config.key_pitch() / VECTOR);
    let mut tile = PLANE_POS as usize;
    while tile < comptime!(tokens / m * (tokens / n)) {
        let i = tile / comptime!(tokens / n) * m;
        let j = tile % comptime!(tokens / n) * n;
        if j < i + m {
            let sum = zeros(config.matrices);
            let end = comptime!(config.key_dim).runtime();
            add_products(left, keys, &sum, (i * row, j * row), end, of);
            store(&sum, products, first + i * pitch + j, pitch, config.matrices);
        }
        tile += (CUBE_DIM / PLANE_DIM) as usize;
    }
}

/// Makes column `j` of `L` of the products of keys, and gives `D[last][j]`, times beta where there
/// is no `L`.
#[cube]
fn finish_keys(
    products: &mut Shared<[f32]>,
    gates: &Gates,
    j: usize,
    #[comptime] config: MatrixChunks,
) -> f32 {
    let pitch = comptime!(config.token_pitch());
    let mut after = 1.0f32;
    for i in 0..comptime!(config.cut.tokens) {
        let later = i > j;
        after *= select(later, gates.decays[i], 1.0f32);
        if comptime!(config.corrects()) {
            let at = i * pitch + j;
            products[at] = select(later, products[at] * after * gates.betas[i], 0.0f32);
        }
    }
    if comptime!(config.corrects()) { after } else { after * gates.betas[j] }
}

/// Writes column `j` of `P`, made of the products of queries (and of beta where there is no `L`),
/// and gives `g[j]`.
#[cube]
fn finish_queries(
    products: &Shared<[f32]>,
    gates: &Gates,
    pairs: &mut [u16],
    matrix: usize,
    j: usize,
    #[comptime] config: MatrixChunks,
) -> f32 {
    let (tokens, pitch) = comptime!((config.cut.tokens, config.token_pitch()));
    let mut before = 1.0f32;
    let mut after = 1.0f32;
    for i in 0..tokens {
        let decay = gates.decays[i];
        before *= select(i <= j, decay, 1.0f32);
        after *= select(i > j, decay, 1.0f32);
        let pair = select(i >= j, products[(tokens + i) * pitch + j] * after, 0.0f32);
        let pair = if comptime!(config.corrects()) { pair } else { pair * gates.betas[j] };
        pairs[matrix + i * tokens + j] = u16::cast_from(narrow(pair, config.dtype));
    }
    before
}

/// Writes column `j` of `T`, by forward substitution, a block of rows at a time. (The loop over
/// blocks is not unrolled: the instructions of a whole column would be fetched more slowly than
/// they run.) The inverse's rows are kept behind those of `L`.
#[cube]
fn invert(
    shared: &mut Shared<[f32]>,
    beta: f32,
    transforms: &mut [u16],
    matrix: usize,
    j: usize,
    #[comptime] config: MatrixChunks,
) {
    let (tokens, pitch) = comptime!((config.cut.tokens, config.token_pitch()));
    // The rows above the column's block are 0.
    let first = j / BLOCK;
    for block in first..comptime!(tokens / BLOCK).runtime() {
        let row0 = block * BLOCK;
        let mut x = Array::<f32>::new(BLOCK);
        #[unroll]
        for i in 0..BLOCK {
            x[i] = select(row0 + i == j, 1.0f32, 0.0f32);
        }
        for k in first * BLOCK..row0 {
            let above = -shared[(tokens + k) * pitch + j];
            #[unroll]
            for i in 0..BLOCK {
                x[i] = fma(shared[(row0 + i) * pitch + k], above, x[i]);
            }
        }
        #[unroll]
        for i in 1..BLOCK {
            let mut sum = x[i];
            #[unroll]
            for k in 0..i {
                sum = fma(-shared[(row0 + i) * pitch + row0 + k], x[k], sum);
            }
            x[i] = sum;
        }
        #[unroll]
        for i in 0..BLOCK {
            shared[(tokens + row0 + i) * pitch + j] = x[i];
            transforms[matrix + (row0 + i) * tokens + j] = u16::cast_from(narrow(x[i] * beta, config.dtype));
        }
    }
}

pub(super) fn compiled(target: &Target, config: MatrixChunks) -> Kernel<GatedDeltaRuleCmmaPrepare<'static>> {
    match config.dtype {
        FloatType::BF16 => GatedDeltaRuleCmmaPrepare::kernel::<bf16>(target, config.units(), config),
        _ => GatedDeltaRuleCmmaPrepare::kernel::<f16>(target, config.units(), config),
    }
}

/// Prepares the chunks in all `slots` slots.
pub(super) fn launch(
    problem: &Problem,
    config: MatrixChunks,
    slots: usize,
    state: &Tensor,
    prepared: &Prepared,
) -> Result<(), KernelError> {
    let GatedDeltaInputs { q, k, gates, cu_seqlens, .. } = *problem.inputs;
    let (log_decay, beta) = gates.computed()?;
    let [y, z] = cubes(slots)?;
    let arguments = GatedDeltaRuleCmmaPrepare {
        inputs: InputsArgs {
            q: q.buffer()?,
            k: k.buffer()?,
            log_decay: log_decay.buffer()?,
            beta: beta.buffer()?,
        },
        cu_seqlens: cu_seqlens.buffer()?,
        transforms: (&prepared.transforms).into(),
        pairs: (&prepared.pairs).into(),
        gates: (&prepared.gates).into(),
        sizes: problem.sizes(state)?,
    };
    let kernel = compiled(problem.gpu.target(), config);
    // SAFETY: the sizes are the tensors', offsets past the tokens leave a slot empty, and there is
    // memory for each slot.
    unsafe { problem.gpu.launch(kernel, [CHECK.index(problem.dims.value_heads)?, y, z], arguments) }
}
