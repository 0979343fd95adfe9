//! What does not depend on the state: `T`, `P` and the gates of a chunk of one head, by one cube.

use super::super::key_head;
use super::super::mma::{address, commit, copy, four, pack, tiles, wait};
use super::{CHUNK, GATES, PITCH, PREPARERS, Shape, place};
use crate::gpu::CUBES;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::ptx::multiply;
use crate::gpu::sequences::{Piece, piece};
use crate::ops::gated_delta_rule::DecaySign;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

#[cube(launch_unchecked)]
fn prepare(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    log_decay: &[f32],
    beta: &[f32],
    cu_seqlens: &[u32],
    transforms: &mut [u16],
    pairs: &mut [u32],
    gates: &mut [f32],
    tokens: u32,
    sequences: u32,
    key_heads: u32,
    value_heads: u32,
    #[comptime] shape: Shape,
) {
    let (key_heads, value_heads) = (key_heads as usize, value_heads as usize);
    let head = CUBE_POS_X as usize;
    let slot = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let piece = piece(cu_seqlens, slot, sequences as usize, tokens as usize, CHUNK);
    if piece.first < piece.last {
        // First the keys and queries, then the products of pairs of keys.
        let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(shape.prepare_words()), 128usize);
        let base = address(&shared);
        let key_head = key_head(key_heads, value_heads, head, shape.head_map);
        load(q, k, base, &piece, key_heads, key_head, shape);
        let mut decays = Shared::<[f32]>::new_slice(CHUNK);
        let betas = Shared::<[f32]>::new_slice(CHUNK);
        let mut of_chunk = Gates { betas, products: Shared::<[f32]>::new_slice(PRODUCTS) };
        let unit = UNIT_POS_X as usize;
        if unit < CHUNK {
            let mut decay = 1.0f32;
            let mut b = 0.0f32;
            if piece.first + unit < piece.last {
                let gate = (piece.first + unit) * value_heads + head;
                let log_decay = log_decay[gate];
                decay = if comptime!(shape.sign == DecaySign::Rate) {
                    (-log_decay).exp()
                } else {
                    log_decay.exp()
                };
                b = beta[gate];
            }
            decays[unit] = decay;
            of_chunk.betas[unit] = b;
        }
        sync_cube();
        if unit < CHUNK {
            multiply_decays(&decays, &mut of_chunk.products, unit);
        }
        wait(0usize);
        sync_cube();
        let index = slot * value_heads + head;
        if unit < CHUNK {
            store_gates(&of_chunk.products, gates, index * GATES, unit);
        }
        let mut products = multiply_pairs(base, shape);
        sync_cube();
        store_pairs(&mut products, &of_chunk, &mut shared, pairs, index, shape);
        sync_cube();
        // The work falls on other warps from cube to cube: a multiprocessor's quarters have some each.
        let unit = unit ^ ((head + slot) % 2usize * CHUNK);
        let matrix = index * comptime!(CHUNK * CHUNK);
        if unit < CHUNK {
            invert(&mut shared, base, unit, of_chunk.betas[unit], transforms, matrix, shape);
        }
    }
}

/// Products of decays, as floats: `D[i][j]` within sixteens of tokens, by `i % 16` and `j`; for each token the product
/// from its sixteen's start, and to its end; each sixteen's.
const NEAR: usize = 16 * CHUNK;
const FROM_START: usize = NEAR;
const TO_END: usize = NEAR + CHUNK;
const SIXTEENS: usize = NEAR + 2 * CHUNK;
const PRODUCTS: usize = SIXTEENS + CHUNK / 16;

/// What a cube's units share of a chunk's gates: betas, and products of decays.
#[derive(CubeType)]
struct Gates {
    betas: Shared<[f32]>,
    products: Shared<[f32]>,
}

/// The products of token `j`'s column.
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
        products[SIXTEENS + j / 16usize] = before;
    }
}

/// `D[i][j]` of all tokens of sixteens strictly between `j`'s and `i`'s.
#[cube]
fn between(products: &Shared<[f32]>, j16: usize, i16: usize) -> f32 {
    let mut product = 1.0f32;
    #[unroll]
    for sixteen in 0..4usize {
        product *= select(sixteen > j16 && sixteen < i16, products[comptime!(SIXTEENS + sixteen)], 1.0f32);
    }
    product
}

/// Token `j`'s gates.
#[cube]
fn store_gates(products: &Shared<[f32]>, gates: &mut [f32], at: usize, j: usize) {
    let mut before = products[FROM_START + j];
    let mut after = products[TO_END + j];
    #[unroll]
    for sixteen in 0..4usize {
        let decay = products[comptime!(SIXTEENS + sixteen)];
        before *= select(sixteen < j / 16usize, decay, 1.0f32);
        after *= select(sixteen > j / 16usize, decay, 1.0f32);
    }
    gates[at + j] = before;
    gates[at + CHUNK + j] = after;
}

/// Keys, then queries, to shared memory; zeros for tokens past the last.
#[cube]
fn load(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    base: u32,
    piece: &Piece,
    key_heads: usize,
    key_head: usize,
    #[comptime] shape: Shape,
) {
    let vectors = comptime!(shape.vectors());
    for i in 0..comptime!(CHUNK * shape.vectors() / PREPARERS) {
        let vector = i * PREPARERS + UNIT_POS_X as usize;
        let (row, column) = (vector / vectors, vector % vectors);
        let there = piece.first + row < piece.last;
        let token = min(piece.first + row, piece.last - 1usize);
        let at = (token * key_heads + key_head) * vectors + column;
        let to = base + place(row, column, vectors);
        copy(to, k, at, there);
        copy(to + comptime!((CHUNK * shape.key_dim * 2) as u32), q, at, there);
    }
    commit();
}

/// The sixteens of tokens whose rows a warp has, of keys and of queries: more of one and fewer of the other.
#[cube]
fn sixteens() -> (usize, usize) {
    let warp = UNIT_POS_X as usize / 32usize;
    (warp, 3usize - warp)
}

/// A warp's products with tokens' keys: of its keys, and of its queries.
#[derive(CubeType)]
struct Pairs {
    keys: Array<f32>,
    queries: Array<f32>,
}

/// A warp's products of its keys and of its queries with the keys before them.
#[cube]
fn multiply_pairs(base: u32, #[comptime] shape: Shape) -> Pairs {
    let vectors = comptime!(shape.vectors());
    let queries = base + comptime!((CHUNK * shape.key_dim * 2) as u32);
    let (of_keys, of_queries) = sixteens();
    let lane = UNIT_POS_X as usize % 32usize;
    let (row, half) = (lane % 16usize, lane / 16usize);
    let mut key_pairs = Array::<f32>::new(32usize);
    let mut query_pairs = Array::<f32>::new(32usize);
    #[unroll]
    for i in 0..32usize {
        key_pairs[i] = 0.0;
        query_pairs[i] = 0.0;
    }
    for depth in 0..comptime!(shape.key_dim / 16) {
        let column = 2usize * depth + half;
        let mut left = Array::<u32>::new(8usize);
        let keys = tiles(base + place(of_keys * 16usize + row, column, vectors));
        let query = tiles(queries + place(of_queries * 16usize + row, column, vectors));
        #[unroll]
        for i in 0..4usize {
            left[i] = keys.extract(i);
            left[comptime!(4 + i)] = query.extract(i);
        }
        #[unroll]
        for block in 0..4usize {
            if block <= of_keys || block <= of_queries {
                let right = tiles(base + place(comptime!(block * 16) + row, column, vectors));
                #[unroll]
                for side in 0..2usize {
                    let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
                    let at = comptime!(block * 8 + side * 4);
                    if block <= of_keys {
                        multiply(&left, 0usize, b0, b1, &mut key_pairs, at, shape.dtype);
                    }
                    if block <= of_queries {
                        multiply(&left, 4usize, b0, b1, &mut query_pairs, at, shape.dtype);
                    }
                }
            }
        }
    }
    Pairs { keys: key_pairs, queries: query_pairs }
}

/// `L` in place of the keys and queries, and `P` to the place `index`.
#[cube]
fn store_pairs(
    pairs: &mut Pairs,
    gates: &Gates,
    shared: &mut Shared<[u32]>,
    to: &mut [u32],
    index: usize,
    #[comptime] shape: Shape,
) {
    let (of_keys, of_queries) = sixteens();
    let lane = UNIT_POS_X as usize % 32usize;
    #[unroll]
    for block in 0..4usize {
        if block <= of_keys {
            decay(&mut pairs.keys, &gates.products, of_keys, block);
            #[unroll]
            for i in 0..8usize {
                let row = of_keys * 16usize + lane / 4usize + comptime!(i / 2 % 2 * 8);
                let at = row * PITCH + comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
                shared[at] = u32::reinterpret(pairs.keys[comptime!(block * 8 + i)] * gates.betas[row]);
            }
        }
        if block <= of_queries {
            decay(&mut pairs.queries, &gates.products, of_queries, block);
            #[unroll]
            for i in 0..4usize {
                let row = of_queries * 16usize + lane / 4usize + comptime!(i % 2 * 8);
                let at = row * comptime!(CHUNK / 2) + comptime!(block * 8 + i / 2 * 4) + lane % 4usize;
                let first = comptime!(block * 8 + i * 2);
                to[index * comptime!(CHUNK * CHUNK / 2) + at] =
                    pack(pairs.queries[first], pairs.queries[comptime!(first + 1)], shape.dtype);
            }
        }
    }
}

/// Multiplies a warp's products of sixteen `i16` with tokens of sixteen `block` by `D`; those with later tokens
/// become 0.
#[cube]
fn decay(pairs: &mut Array<f32>, products: &Shared<[f32]>, i16: usize, #[comptime] block: usize) {
    let lane = UNIT_POS_X as usize % 32usize;
    let between = between(products, block.runtime(), i16);
    #[unroll]
    for i in 0..8usize {
        let row = lane / 4usize + comptime!(i / 2 % 2 * 8);
        let j = comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
        let pair = pairs[comptime!(block * 8 + i)];
        let mut value = 0.0f32;
        if i16 > block {
            value = pair * (products[FROM_START + i16 * 16usize + row] * (between * products[TO_END + j]));
        } else if i16 * 16usize + row >= j {
            value = pair * products[row * CHUNK + j];
        }
        pairs[comptime!(block * 8 + i)] = value;
    }
}

/// Column `j` of `T`, by forward substitution, sixteen rows at a time. (Loops over sixteens: instructions of a whole column
/// come slower from memory than they run.) The inverse's rows are kept in shared memory, behind `L`.
#[cube]
fn invert(
    shared: &mut Shared<[u32]>,
    base: u32,
    j: usize,
    beta: f32,
    transforms: &mut [u16],
    matrix: usize,
    #[comptime] shape: Shape,
) {
    let inverse = comptime!(CHUNK * PITCH);
    // The upper half of a warp's columns is 0, up to the sixteens that they are in.
    let first = j / 32usize * 2usize;
    for sixteen in first..4usize {
        let mut x = Array::<f32>::new(16usize);
        #[unroll]
        for i in 0..16usize {
            x[i] = select(sixteen * 16usize + i == j, 1.0f32, 0.0f32);
        }
        for before in first..sixteen {
            #[unroll]
            for fourth in 0..4usize {
                let mut above = Array::<f32>::new(4usize);
                #[unroll]
                for k in 0..4usize {
                    let row = before * 16usize + comptime!(fourth * 4 + k);
                    above[k] = -f32::reinterpret(shared[inverse + row * CHUNK + j]);
                }
                let at =
                    (sixteen * comptime!(16 * PITCH) + before * 16usize + comptime!(fourth * 4)) * 4usize;
                #[unroll]
                for i in 0..16usize {
                    let row = four(base + at as u32 + comptime!((i * PITCH * 4) as u32));
                    #[unroll]
                    for k in 0..4usize {
                        x[i] = fma(row.extract(k), above[k], x[i]);
                    }
                }
            }
        }
        #[unroll]
        for i in 1..16usize {
            let at = (sixteen * comptime!(16 * PITCH + 16) + comptime!(i * PITCH)) * 4usize;
            let mut sum = x[i];
            #[unroll]
            for fourth in 0..comptime!(i.div_ceil(4)) {
                let row = four(base + at as u32 + comptime!((fourth * 16) as u32));
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
            let row = sixteen * 16usize + i;
            shared[inverse + row * CHUNK + j] = u32::reinterpret(x[i]);
            let word = pack(x[i] * beta, 0.0f32, shape.dtype);
            transforms[matrix + row * CHUNK + j] = u16::cast_from(word & 0xffffu32);
        }
    }
}

pub(super) fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(PREPARERS as u32);
    Box::new(prepare::Prepare::new(
        settings,
        properties,
        registers,
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        (),
        (),
        shape,
    ))
}
