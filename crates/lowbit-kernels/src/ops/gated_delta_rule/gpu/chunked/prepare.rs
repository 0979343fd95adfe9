//! What does not depend on the state: `T`, `P` and the gates of a chunk of one head, by one cube.

use super::super::key_head;
use super::super::mma::{address, commit, copy, four, multiply, tiles, wait};
use super::{CHUNK, GATES, PITCH, PREPARERS, Shape, place};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::narrow;
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
    pairs: &mut [u16],
    gates: &mut [f32],
    tokens: u32,
    sequences: u32,
    key_heads: u32,
    value_heads: u32,
    #[comptime] shape: Shape,
) {
    let (key_heads, value_heads) = (key_heads as usize, value_heads as usize);
    let head = CUBE_POS_X as usize;
    let slot = CUBE_POS_Z as usize * comptime!(super::super::CUBES) + CUBE_POS_Y as usize;
    let piece = piece(cu_seqlens, slot, sequences as usize, tokens as usize, CHUNK);
    if piece.first < piece.last {
        // First the keys and queries, then the products of their pairs.
        let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(shape.prepare_words()), 128usize);
        let mut decays = Shared::<[f32]>::new_slice(CHUNK);
        let mut betas = Shared::<[f32]>::new_slice(CHUNK);
        let base = address(&shared);
        let key_head = key_head(key_heads, value_heads, head, shape.head_map);
        load(q, k, base, &piece, key_heads, key_head, shape);
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
            betas[unit] = b;
        }
        wait(0usize);
        sync_cube();
        multiply_pairs(&mut shared, base, shape);
        sync_cube();
        // The work that takes longer falls on other warps from cube to cube: a multiprocessor's quarters have some each.
        let unit = unit ^ ((head + slot) % 2usize * CHUNK);
        let column = unit % CHUNK;
        let matrix = (slot * value_heads + head) * comptime!(CHUNK * CHUNK);
        if unit < CHUNK {
            let at = (slot * value_heads + head) * GATES + column;
            decay_keys(&mut shared, &decays, &betas, gates, at, column);
        } else {
            decay_queries(&shared, &decays, pairs, matrix, column, shape);
        }
        sync_cube();
        if unit < CHUNK {
            invert(base, column, betas[column], transforms, matrix, shape);
        }
    }
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
    #[unroll]
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

/// `k[i] . k[j]`, then `q[i] . k[j]`, over the keys and queries, for `j` up to the end of `i`'s tile.
#[cube]
fn multiply_pairs(shared: &mut Shared<[u32]>, base: u32, #[comptime] shape: Shape) {
    let vectors = comptime!(shape.vectors());
    let queries = base + comptime!((CHUNK * shape.key_dim * 2) as u32);
    let (warp, lane) = (UNIT_POS_X as usize / 32usize, UNIT_POS_X as usize % 32usize);
    let (row, half) = (lane % 16usize, lane / 16usize);
    let mut keys = Array::<f32>::new(32usize);
    let mut of_queries = Array::<f32>::new(32usize);
    #[unroll]
    for i in 0..32usize {
        keys[i] = 0.0;
        of_queries[i] = 0.0;
    }
    #[unroll]
    for depth in 0..comptime!(shape.key_dim / 16) {
        let column = comptime!(2 * depth) + half;
        let left_at = place(warp * 16usize + row, column, vectors);
        let mut left = Array::<u32>::new(8usize);
        let tile = tiles(base + left_at);
        let query = tiles(queries + left_at);
        #[unroll]
        for i in 0..4usize {
            left[i] = tile.extract(i);
            left[comptime!(4 + i)] = query.extract(i);
        }
        #[unroll]
        for block in 0..4usize {
            if block <= warp {
                let right = tiles(base + place(comptime!(block * 16) + row, column, vectors));
                #[unroll]
                for side in 0..2usize {
                    let (b0, b1) = (right.extract(side), right.extract(comptime!(side + 2)));
                    let at = comptime!(block * 8 + side * 4);
                    multiply(&left, 0usize, b0, b1, &mut keys, at, shape.dtype);
                    multiply(&left, 4usize, b0, b1, &mut of_queries, at, shape.dtype);
                }
            }
        }
    }
    sync_cube();
    #[unroll]
    for block in 0..4usize {
        if block <= warp {
            #[unroll]
            for i in 0..8usize {
                let row = warp * 16usize + lane / 4usize + comptime!(i / 2 % 2 * 8);
                let at = row * PITCH + comptime!(block * 16 + i / 4 * 8 + i % 2) + lane % 4usize * 2usize;
                shared[at] = u32::reinterpret(keys[comptime!(block * 8 + i)]);
                shared[at + comptime!(CHUNK * PITCH)] =
                    u32::reinterpret(of_queries[comptime!(block * 8 + i)]);
            }
        }
    }
}

/// Column `j` of `L` in place of the keys' products, and token `j`'s gates.
#[cube]
fn decay_keys(
    shared: &mut Shared<[u32]>,
    decays: &Shared<[f32]>,
    betas: &Shared<[f32]>,
    gates: &mut [f32],
    at: usize,
    j: usize,
) {
    let mut before = 1.0f32;
    let mut after = 1.0f32;
    for i in 0..CHUNK {
        if i <= j {
            before *= decays[i];
        } else {
            after *= decays[i];
            let pair = f32::reinterpret(shared[i * PITCH + j]);
            shared[i * PITCH + j] = u32::reinterpret(pair * after * betas[i]);
        }
    }
    gates[at] = before;
    gates[at + CHUNK] = after;
}

/// Column `j` of `P`.
#[cube]
fn decay_queries(
    shared: &Shared<[u32]>,
    decays: &Shared<[f32]>,
    pairs: &mut [u16],
    matrix: usize,
    j: usize,
    #[comptime] shape: Shape,
) {
    let mut after = 1.0f32;
    for i in 0..CHUNK {
        let mut pair = 0.0f32;
        if i >= j {
            if i > j {
                after *= decays[i];
            }
            pair = f32::reinterpret(shared[(CHUNK + i) * PITCH + j]) * after;
        }
        pairs[matrix + i * CHUNK + j] = u16::cast_from(narrow(pair, shape.dtype));
    }
}

/// Column `j` of `T`, by forward substitution.
#[cube]
fn invert(base: u32, j: usize, beta: f32, transforms: &mut [u16], matrix: usize, #[comptime] shape: Shape) {
    let mut x = Array::<f32>::new(CHUNK);
    #[unroll]
    for i in 0..CHUNK {
        let mut sums = Array::<f32>::new(4usize);
        #[unroll]
        for s in 0..4usize {
            sums[s] = 0.0;
        }
        #[unroll]
        for block in 0..comptime!(i.div_ceil(4)) {
            let row = four(base + comptime!((i * PITCH * 4 + block * 16) as u32));
            #[unroll]
            for s in 0..4usize {
                if comptime!(block * 4 + s < i) {
                    sums[s] = fma(row.extract(s), x[comptime!(block * 4 + s)], sums[s]);
                }
            }
        }
        let sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        x[i] = select(i == j, 1.0f32, 0.0f32) - sum;
        transforms[matrix + i * CHUNK + j] = u16::cast_from(narrow(x[i] * beta, shape.dtype));
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
