//! The part that does not depend on the state: `T`, `P` and the gates of a chunk of one value head,
//! by one cube.
//!
//! 1. Keys and queries go to shared memory; meanwhile the products of the tokens' decays are
//!    computed.
//! 2. Tensor cores multiply keys with keys and queries with keys, as far as one comes after the
//!    other.
//! 3. Times the decays these are `L`, which replaces the keys and queries, and `P`.
//! 4. A unit per column inverts `I + L` by forward substitution.
//!
//! The 64 tokens are worked on in blocks of 16. Without a correction there is no `L`.

#![allow(unsafe_code)] // Launches.

use super::config::{CHUNK, ChunkConfig, GATES, swizzled};
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::cuda::ptx::{
    address, copy_vector_or_zeros, end_copy_group, load_tiles, multiply, pack, shared, wait_copy_groups,
};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::sequences::{Piece, piece};
use crate::ops::gated_delta_rule::gpu::operands::{Inputs, InputsArgs, Prepared};
use crate::ops::gated_delta_rule::gpu::{Problem, Sizes, cubes, key_head};
use crate::ops::gated_delta_rule::{CHECK, GatedDeltaInputs};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Units of a cube.
const UNITS: usize = 128;
/// Floats from one row of `L` to the next: with these, a plane stores its sums into all banks.
const PITCH: usize = 72;
/// Blocks of 16 tokens per chunk.
const BLOCKS: usize = CHUNK / 16;

/// Words of shared memory: the keys and queries, or `L` and the inverse, which replace them.
fn shared_words(config: ChunkConfig) -> usize {
    (CHUNK * (PITCH + CHUNK)).max(CHUNK * config.key_dim)
}

/// One cube per value head and slot of a chunk. See [`Prepared`] for what it writes.
#[kernel]
pub(super) fn gated_delta_rule_prepare(
    inputs: &Inputs,
    cu_seqlens: &[u32],
    transforms: &mut [u16],
    pairs: &mut [u32],
    gates: &mut [f32],
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let head = CUBE_POS_X as usize;
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let piece = piece(cu_seqlens, slot, sizes.sequences as usize, sizes.tokens as usize, CHUNK);
    if piece.first < piece.last {
        // First the keys and queries, then the products of pairs of keys.
        let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(shared_words(config)), 128usize);
        let base = address(&shared);
        let key_head = key_head(key_heads, value_heads, head, config.head_map);
        load(inputs, base, &piece, key_heads, key_head, config);
        let mut decays = Shared::<[f32]>::new_slice(CHUNK);
        let betas = Shared::<[f32]>::new_slice(CHUNK);
        let mut of_chunk = Gates { betas, products: Shared::<[f32]>::new_slice(PRODUCTS) };
        let unit = UNIT_POS_X as usize;
        if unit < CHUNK {
            let mut decay = 1.0f32;
            let mut b = 0.0f32;
            if piece.first + unit < piece.last {
                let gate = (piece.first + unit) * value_heads + head;
                decay = inputs.log_decay[gate].exp();
                b = inputs.beta[gate];
            }
            decays[unit] = decay;
            of_chunk.betas[unit] = b;
        }
        sync_cube();
        if unit < CHUNK {
            multiply_decays(&decays, &mut of_chunk.products, unit);
        }
        wait_copy_groups(0usize);
        sync_cube();
        let index = slot * value_heads + head;
        if unit < CHUNK {
            store_gates(&of_chunk.products, &of_chunk.betas, gates, index * GATES, unit, config);
        }
        let mut products = multiply_pairs(base, config);
        sync_cube();
        store_pairs(&mut products, &of_chunk, &mut shared, pairs, index, config);
        if comptime!(config.corrects()) {
            sync_cube();
            // Other planes invert from cube to cube, so that each quarter of a multiprocessor has
            // some of the work.
            let unit = unit ^ ((head + slot) % 2usize * CHUNK);
            let matrix = index * comptime!(CHUNK * CHUNK);
            if unit < CHUNK {
                invert(&mut shared, base, unit, of_chunk.betas[unit], transforms, matrix, config);
            }
        }
    }
}

// Offsets of the products of decays, in floats. First come `D[i][j]` of tokens in the same block,
// by `i % 16` and `j`.
/// For each token, the product from its block's start to it.
const FROM_START: usize = 16 * CHUNK;
/// For each token, the product from the next one to its block's end.
const TO_END: usize = FROM_START + CHUNK;
/// For each block, the product of all.
const OF_BLOCKS: usize = TO_END + CHUNK;
const PRODUCTS: usize = OF_BLOCKS + BLOCKS;

/// A chunk's gates in shared memory: betas, and products of decays.
#[derive(CubeType)]
struct Gates {
    betas: Shared<[f32]>,
    products: Shared<[f32]>,
}

/// The products of decays that end or begin with token `j`.
#[cube]
fn multiply_decays(decays: &Shared<[f32]>, products: &mut Shared<[f32]>, j: usize) {
    let mut before = 1.0f32;
    let mut after = 1.0f32;
    #[unroll]
    for row in 0..16usize {
        let i = j / 16usize * 16usize + row;
        let decay = decays[i];
        before *= select(i <= j, decay, 1.0f32);
        after *= select(i > j, decay, 1.0f32);
        products[row * CHUNK + j] = after;
    }
    products[FROM_START + j] = before;
    products[TO_END + j] = after;
    if j % 16 == 15 {
        products[OF_BLOCKS + j / 16usize] = before;
    }
}

/// The product of the decays of all blocks strictly between `j`'s and `i`'s.
#[cube]
fn between(products: &Shared<[f32]>, j_block: usize, i_block: usize) -> f32 {
    let mut product = 1.0f32;
    #[unroll]
    for block in 0..BLOCKS {
        product *= select(block > j_block && block < i_block, products[comptime!(OF_BLOCKS + block)], 1.0f32);
    }
    product
}

/// Stores token `j`'s gates.
#[cube]
fn store_gates(
    products: &Shared<[f32]>,
    betas: &Shared<[f32]>,
    gates: &mut [f32],
    at: usize,
    j: usize,
    #[comptime] config: ChunkConfig,
) {
    let mut before = products[FROM_START + j];
    let mut after = products[TO_END + j];
    #[unroll]
    for block in 0..BLOCKS {
        let decay = products[comptime!(OF_BLOCKS + block)];
        before *= select(block < j / 16usize, decay, 1.0f32);
        after *= select(block > j / 16usize, decay, 1.0f32);
    }
    gates[at + j] = before;
    if comptime!(!config.corrects()) {
        after *= betas[j];
    }
    gates[at + CHUNK + j] = after;
}

/// Begins to copy keys, then queries, to shared memory; zeros for tokens past the last.
#[cube]
fn load(
    inputs: &Inputs,
    base: u32,
    piece: &Piece,
    key_heads: usize,
    key_head: usize,
    #[comptime] config: ChunkConfig,
) {
    let vectors = comptime!(config.vectors());
    for i in 0..comptime!(CHUNK * config.vectors() / UNITS) {
        let vector = i * UNITS + UNIT_POS_X as usize;
        let (row, column) = (vector / vectors, vector % vectors);
        let there = piece.first + row < piece.last;
        let token = min(piece.first + row, piece.last - 1usize);
        let at = ((token * key_heads + key_head) * vectors + column) as u32;
        let to = base + swizzled(row, column, vectors);
        copy_vector_or_zeros(&inputs.k, at, to, there);
        copy_vector_or_zeros(&inputs.q, at, to + comptime!((CHUNK * config.key_dim * 2) as u32), there);
    }
    end_copy_group();
}

/// A plane's blocks of keys and of queries. A block is multiplied with the keys up to its own: a
/// plane with more to do for its keys has less to do for its queries.
#[cube]
fn own_blocks() -> (usize, usize) {
    let plane = UNIT_POS_X as usize / 32usize;
    (plane, 3usize - plane)
}

/// A plane's products with the chunk's keys: of its keys, and of its queries.
#[derive(CubeType)]
struct Pairs {
    keys: Array<f32>,
    queries: Array<f32>,
}

/// A plane's products of its keys and of its queries with the keys up to their block.
#[allow(clippy::collapsible_if)] // The outer one is decided when the kernel is compiled.
#[cube]
fn multiply_pairs(base: u32, #[comptime] config: ChunkConfig) -> Pairs {
    let vectors = comptime!(config.vectors());
    let queries = base + comptime!((CHUNK * config.key_dim * 2) as u32);
    let (of_keys, of_queries) = own_blocks();
    let lane = UNIT_POS_X as usize % 32usize;
    let (row, half) = (lane % 16usize, lane / 16usize);
    let mut key_pairs = Array::<f32>::new(32usize);
    let mut query_pairs = Array::<f32>::new(32usize);
    #[unroll]
    for i in 0..32usize {
        key_pairs[i] = 0.0;
        query_pairs[i] = 0.0;
    }
    for depth in 0..comptime!(config.key_dim / 16) {
        let column = 2usize * depth + half;
        let mut left = Array::<u32>::new(8usize);
        let keys = load_tiles(base + swizzled(of_keys * 16usize + row, column, vectors), 0usize, false);
        let query =
            load_tiles(queries + swizzled(of_queries * 16usize + row, column, vectors), 0usize, false);
        #[unroll]
        for i in 0..4usize {
            left[i] = keys.extract(i);
            left[comptime!(4 + i)] = query.extract(i);
        }
        #[unroll]
        for block in 0..BLOCKS {
            if block <= of_keys || block <= of_queries {
                let right =
                    load_tiles(base + swizzled(comptime!(block * 16) + row, column, vectors), 0usize, false);
                #[unroll]
                for side in 0..2usize {
                    let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
                    let at = comptime!(block * 8 + side * 4);
                    if comptime!(config.corrects()) {
                        if block <= of_keys {
                            multiply(&left, 0usize, b0, b1, &mut key_pairs, at, config.dtype);
                        }
                    }
                    if block <= of_queries {
                        multiply(&left, 4usize, b0, b1, &mut query_pairs, at, config.dtype);
                    }
                }
            }
        }
    }
    Pairs { keys: key_pairs, queries: query_pairs }
}

/// Stores `L` in place of the keys and queries, and `P` as the matrix `index`.
#[allow(clippy::collapsible_if)] // The outer one is decided when the kernel is compiled.
#[cube]
fn store_pairs(
    pairs: &mut Pairs,
    gates: &Gates,
    shared: &mut Shared<[u32]>,
    to: &mut [u32],
    index: usize,
    #[comptime] config: ChunkConfig,
) {
    let (of_keys, of_queries) = own_blocks();
    let lane = UNIT_POS_X as usize % 32usize;
    #[unroll]
    for block in 0..BLOCKS {
        if comptime!(config.corrects()) {
            if block <= of_keys {
                decay(&mut pairs.keys, &gates.products, of_keys, block);
                #[unroll]
                for i in 0..8usize {
                    let row = of_keys * 16usize + lane / 4usize + comptime!(i / 2 % 2 * 8);
                    let at = row * PITCH + comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
                    shared[at] = u32::reinterpret(pairs.keys[comptime!(block * 8 + i)] * gates.betas[row]);
                }
            }
        }
        if block <= of_queries {
            decay(&mut pairs.queries, &gates.products, of_queries, block);
            if comptime!(!config.corrects()) {
                multiply_betas(&mut pairs.queries, &gates.betas, block);
            }
            #[unroll]
            for i in 0..4usize {
                let row = of_queries * 16usize + lane / 4usize + comptime!(i % 2 * 8);
                let at = row * comptime!(CHUNK / 2) + comptime!(block * 8 + i / 2 * 4) + lane % 4usize;
                let first = comptime!(block * 8 + i * 2);
                to[index * comptime!(CHUNK * CHUNK / 2) + at] =
                    pack(pairs.queries[first], pairs.queries[comptime!(first + 1)], config.dtype);
            }
        }
    }
}

/// Multiplies a plane's products with the tokens of block `block` by their betas.
#[cube]
fn multiply_betas(pairs: &mut Array<f32>, betas: &Shared<[f32]>, #[comptime] block: usize) {
    let lane = UNIT_POS_X as usize % 32usize;
    #[unroll]
    for i in 0..8usize {
        let j = comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
        pairs[comptime!(block * 8 + i)] *= betas[j];
    }
}

/// Multiplies a plane's products of block `i_block` with the tokens of block `block` by `D`; those
/// with later tokens become 0.
#[cube]
fn decay(pairs: &mut Array<f32>, products: &Shared<[f32]>, i_block: usize, #[comptime] block: usize) {
    let lane = UNIT_POS_X as usize % 32usize;
    let between = between(products, block.runtime(), i_block);
    #[unroll]
    for i in 0..8usize {
        let row = lane / 4usize + comptime!(i / 2 % 2 * 8);
        let j = comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
        let pair = pairs[comptime!(block * 8 + i)];
        let mut value = 0.0f32;
        if i_block > block {
            value =
                pair * (products[FROM_START + i_block * 16usize + row] * (between * products[TO_END + j]));
        } else if i_block * 16usize + row >= j {
            value = pair * products[row * CHUNK + j];
        }
        pairs[comptime!(block * 8 + i)] = value;
    }
}

/// Column `j` of `T`, by forward substitution, a block of rows at a time. (The loop over blocks is
/// not unrolled: the instructions of a whole column would be fetched more slowly than they run.)
/// The inverse's rows are kept in shared memory, behind `L`.
#[cube]
fn invert(
    shared: &mut Shared<[u32]>,
    base: u32,
    j: usize,
    beta: f32,
    transforms: &mut [u16],
    matrix: usize,
    #[comptime] config: ChunkConfig,
) {
    let inverse = comptime!(CHUNK * PITCH);
    // The rows above the blocks of a plane's columns are 0.
    let first = j / 32usize * 2usize;
    for block in first..BLOCKS.runtime() {
        let mut x = Array::<f32>::new(16usize);
        #[unroll]
        for i in 0..16usize {
            x[i] = select(block * 16usize + i == j, 1.0f32, 0.0f32);
        }
        for before in first..block {
            #[unroll]
            for fourth in 0..4usize {
                let mut above = Array::<f32>::new(4usize);
                #[unroll]
                for k in 0..4usize {
                    let row = before * 16usize + comptime!(fourth * 4 + k);
                    above[k] = -f32::reinterpret(shared[inverse + row * CHUNK + j]);
                }
                let at = (block * comptime!(16 * PITCH) + before * 16usize + comptime!(fourth * 4)) * 4usize;
                #[unroll]
                for i in 0..16usize {
                    let row = shared_four(base + at as u32 + comptime!((i * PITCH * 4) as u32));
                    #[unroll]
                    for k in 0..4usize {
                        x[i] = fma(row.extract(k), above[k], x[i]);
                    }
                }
            }
        }
        #[unroll]
        for i in 1..16usize {
            let at = (block * comptime!(16 * PITCH + 16) + comptime!(i * PITCH)) * 4usize;
            let mut sum = x[i];
            #[unroll]
            for fourth in 0..comptime!(i.div_ceil(4)) {
                let row = shared_four(base + at as u32 + comptime!((fourth * 16) as u32));
                #[unroll]
                for k in 0..4usize {
                    if comptime!(fourth * 4 + k < i) {
                        sum = fma(-row.extract(k), x[comptime!(fourth * 4 + k)], sum);
                    }
                }
            }
            x[i] = sum;
        }
        #[unroll]
        for i in 0..16usize {
            let row = block * 16usize + i;
            shared[inverse + row * CHUNK + j] = u32::reinterpret(x[i]);
            let word = pack(x[i] * beta, 0.0f32, config.dtype);
            transforms[matrix + row * CHUNK + j] = u16::cast_from(word & 0xffffu32);
        }
    }
}

/// Four floats of shared memory.
#[cube]
fn shared_four(at: u32) -> Vector<f32, Const<4>> {
    shared::<f32, Const<4>>(at, 0usize, 4usize)
}

pub(super) fn compiled(target: &Target, config: ChunkConfig) -> Kernel<GatedDeltaRulePrepare<'static>> {
    GatedDeltaRulePrepare::kernel(target, UNITS, config)
}

/// Prepares the chunks in all `slots` slots.
pub(super) fn launch(
    problem: &Problem,
    config: ChunkConfig,
    slots: usize,
    state: &Tensor,
    prepared: &Prepared,
) -> Result<(), KernelError> {
    let GatedDeltaInputs { q, k, gates, cu_seqlens, .. } = *problem.inputs;
    let (log_decay, beta) = gates.computed()?;
    let [y, z] = cubes(slots)?;
    let arguments = GatedDeltaRulePrepare {
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
