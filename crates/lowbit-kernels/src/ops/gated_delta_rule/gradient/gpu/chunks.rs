//! Products of a chunk's tokens with each other and with the chunk's state: small matrices, whose
//! results are cut into tiles of 64 x 64. A cube takes a tile, and a unit 4 x 4 results of it,
//! strided by 16. All units of a cube read the same few rows and columns at a time, so that they
//! come out of its cache.

#![allow(unsafe_code)] // Launches.

use super::{CHUNK, Decays, DecaysArgs, EACH, Heads, Problem, SIDE, TILE, UNITS, known_piece};
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows;
use crate::ops::gated_delta_rule::HeadMap;
use crate::ops::gated_delta_rule::gpu::{Sizes, key_head};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// Results of a unit.
const ALL: usize = EACH * EACH;

#[cube]
fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut all = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        all[i] = 0.0;
    }
    all
}

/// The operands of pairs of tokens, in vectors along their heads.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct PairInputs<N: Size> {
    q: Box<[Vector<f32, N>]>,
    k: Box<[Vector<f32, N>]>,
    residual: Box<[Vector<f32, N>]>,
    dy: Box<[Vector<f32, N>]>,
    dv: Box<[Vector<f32, N>]>,
    beta: Box<[f32]>,
    decay: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct PairOutputs {
    reads: Box<[f32]>,
    updates: Box<[f32]>,
    of_decay: Box<[f32]>,
}

/// Adds to `sums[of * ALL + a * EACH + b]` the dot products of row `rows[a]` of `left` with row
/// `rows[EACH + b]` of `right`, in vectors: `width` of them per row.
#[cube]
fn add_dots<N: Size>(
    left: &[Vector<f32, N>],
    right: &[Vector<f32, N>],
    rows: &Array<usize>,
    sums: &mut Array<f32>,
    width: usize,
    #[comptime] of: usize,
) {
    let vector = N::value();
    let mut j = 0usize;
    while j < width {
        let mut ls = Array::<Vector<f32, N>>::new(EACH);
        #[unroll]
        for a in 0..EACH {
            ls[a] = left[rows[a] * width + j];
        }
        #[unroll]
        for b in 0..EACH {
            let r = right[rows[comptime!(EACH + b)] * width + j];
            #[unroll]
            for a in 0..EACH {
                let at = comptime!(of * ALL + a * EACH + b);
                #[unroll]
                for e in 0..vector {
                    sums[at] = fma(ls[a].extract(e), r.extract(e), sums[at]);
                }
            }
        }
        j += 1;
    }
}

/// The matrices of a chunk's pairs of tokens, those of token i in row i: a cube per chunk and head.
/// `scale` is the bits of an f32.
#[kernel]
fn gated_delta_rule_backward_pairs<N: Size>(
    inputs: &PairInputs<N>,
    cu_seqlens: &[u32],
    outputs: &mut PairOutputs,
    sizes: Sizes,
    scale: u32,
    #[comptime] heads: Heads,
) {
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let (matrix, head) = (CUBE_POS, CUBE_POS % value_heads);
    let key_head = key_head(key_heads, value_heads, head, heads.head_map);
    let piece = known_piece(cu_seqlens, matrix / value_heads, &sizes);
    let (first, count) = (piece.first, piece.last - piece.first);
    if count > 0 {
        let (down, across) = (UNIT_POS_X as usize / SIDE, UNIT_POS_X as usize % SIDE);
        // Rows of values and of keys; tokens past the last are computed and not used.
        let mut of_values = Array::<usize>::new(comptime!(2 * EACH));
        let mut of_keys = Array::<usize>::new(comptime!(2 * EACH));
        #[unroll]
        for a in 0..EACH {
            let i = first + min(down + comptime!(a * SIDE), count - 1);
            let t = first + min(across + comptime!(a * SIDE), count - 1);
            of_values[a] = i * value_heads + head;
            of_values[comptime!(EACH + a)] = t * value_heads + head;
            of_keys[a] = i * key_heads + key_head;
            of_keys[comptime!(EACH + a)] = t * key_heads + key_head;
        }
        // residual . dy, residual . dv, k . q and k . k.
        let mut sums = zeros(comptime!(4 * ALL));
        let (values, keys) = (heads.value_dim / N::value(), heads.key_dim / N::value());
        add_dots::<N>(&inputs.residual, &inputs.dy, &of_values, &mut sums, values, 0usize);
        add_dots::<N>(&inputs.residual, &inputs.dv, &of_values, &mut sums, values, 1usize);
        add_dots::<N>(&inputs.k, &inputs.q, &of_keys, &mut sums, keys, 2usize);
        add_dots::<N>(&inputs.k, &inputs.k, &of_keys, &mut sums, keys, 3usize);
        #[unroll]
        for a in 0..EACH {
            let i = down + comptime!(a * SIDE);
            let beta = inputs.beta[of_values[a]];
            // That from token i to token s.
            let mut product = 1.0f32;
            let mut s = i;
            #[unroll]
            for b in 0..EACH {
                let t = across + comptime!(b * SIDE);
                let at = comptime!(a * EACH + b);
                let mut reads = 0.0f32;
                let mut updates = 0.0f32;
                let mut of_decay = 0.0f32;
                if i <= t && t < count {
                    while s < t {
                        s += 1;
                        product *= inputs.decay[(first + s) * value_heads + head];
                    }
                    reads = product * (beta * sums[at]);
                    if i < t {
                        updates = product * (beta * sums[comptime!(ALL + at)]);
                        of_decay = f32::reinterpret(scale) * reads * sums[comptime!(2 * ALL + at)]
                            - updates * sums[comptime!(3 * ALL + at)];
                    }
                }
                let to = (matrix * CHUNK + i) * CHUNK + t;
                outputs.reads[to] = reads;
                outputs.updates[to] = updates;
                outputs.of_decay[to] = of_decay;
            }
        }
    }
}

pub(super) fn pairs(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, slots, .. } = *problem;
    let ([reads, updates, of_decay], dv) = (&problem.pairs, &problem.gradients.dv);
    let mut vector = 1;
    if heads.key_dim.is_multiple_of(rows::VECTOR) {
        let all = [operands.q, operands.k, operands.dy, dv, &problem.residual];
        vector = rows::vector(gpu.target(), rows::VECTOR, heads.value_dim, &all);
    }
    let arguments = GatedDeltaRuleBackwardPairs {
        inputs: PairInputsArgs {
            q: operands.q.buffer()?,
            k: operands.k.buffer()?,
            residual: problem.residual.buffer()?,
            dy: operands.dy.buffer()?,
            dv: dv.buffer()?,
            beta: operands.beta.buffer()?,
            decay: problem.decays[0].buffer()?,
        },
        cu_seqlens: operands.cu_seqlens.buffer()?,
        outputs: PairOutputsArgs {
            reads: reads.buffer()?,
            updates: updates.buffer()?,
            of_decay: of_decay.buffer()?,
        },
        sizes,
        scale: problem.params.scale.to_bits(),
    };
    let cubes = rows::cubes(slots * operands.v.dim(1));
    // SAFETY: the sizes are the tensors', a piece stays within the tokens, and tokens past its last
    // are read as its last.
    unsafe { gpu.launch(pairs_kernel(gpu.target(), vector, heads), cubes, arguments) }
}

fn pairs_kernel(
    target: &Target,
    vector: usize,
    heads: Heads,
) -> Kernel<GatedDeltaRuleBackwardPairs<'static>> {
    GatedDeltaRuleBackwardPairs::kernel(target, UNITS, vector, heads)
}

/// The operands of products with a chunk's state and with its gradient.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct StateInputs {
    states: Box<[f32]>,
    gradients: Box<[f32]>,
    residual: Box<[f32]>,
    dy: Box<[f32]>,
    dv: Box<[f32]>,
    beta: Box<[f32]>,
}

/// As the module's problem says.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct StateOutputs {
    reads: Box<[f32]>,
    gradients: Box<[f32]>,
    taken: Box<[f32]>,
    overlaps: Box<[f32]>,
}

/// `scale B(t) S dy[t]`, `E(t) G delta[t]` and `B(t) S dv[t]`, and the rows' sums of `G * S`: a
/// cube per chunk, head and 64 rows of the state. `scale` is the bits of an f32.
#[kernel]
fn gated_delta_rule_backward_states(
    inputs: &StateInputs,
    decays: &Decays,
    cu_seqlens: &[u32],
    outputs: &mut StateOutputs,
    sizes: Sizes,
    scale: u32,
    #[comptime] heads: Heads,
) {
    let (key_dim, value_dim) = comptime!((heads.key_dim, heads.value_dim));
    let tiles = comptime!(heads.key_dim.div_ceil(TILE));
    let value_heads = sizes.value_heads as usize;
    let (matrix, tile) = (CUBE_POS / tiles, CUBE_POS % tiles);
    let head = matrix % value_heads;
    let piece = known_piece(cu_seqlens, matrix / value_heads, &sizes);
    let (first, count) = (piece.first, piece.last - piece.first);
    if count > 0 {
        let down = UNIT_POS_X as usize / SIDE;
        let row0 = tile * TILE + UNIT_POS_X as usize % SIDE;
        // S dy, G residual, S dv.
        let mut sums = zeros(comptime!(3 * ALL));
        let mut overlaps = zeros(EACH);
        let mut j = 0usize;
        while j < value_dim {
            let column = (matrix * value_dim + j) * key_dim;
            let mut s = Array::<f32>::new(EACH);
            let mut g = Array::<f32>::new(EACH);
            #[unroll]
            for b in 0..EACH {
                // Rows past the last are computed and not stored, and so are tokens.
                let row = min(row0 + comptime!(b * SIDE), comptime!(key_dim - 1).runtime());
                s[b] = inputs.states[column + row];
                g[b] = inputs.gradients[column + row];
                overlaps[b] = fma(s[b], g[b], overlaps[b]);
            }
            #[unroll]
            for a in 0..EACH {
                let t = first + min(down + comptime!(a * SIDE), count - 1);
                let value = (t * value_heads + head) * value_dim + j;
                let (dy, residual, dv) = (inputs.dy[value], inputs.residual[value], inputs.dv[value]);
                #[unroll]
                for b in 0..EACH {
                    let at = comptime!(a * EACH + b);
                    sums[at] = fma(s[b], dy, sums[at]);
                    sums[comptime!(ALL + at)] = fma(g[b], residual, sums[comptime!(ALL + at)]);
                    sums[comptime!(2 * ALL + at)] = fma(s[b], dv, sums[comptime!(2 * ALL + at)]);
                }
            }
            j += 1;
        }
        #[unroll]
        for b in 0..EACH {
            let row = row0 + comptime!(b * SIDE);
            if row < key_dim {
                if down == 0 {
                    outputs.overlaps[matrix * key_dim + row] = overlaps[b];
                }
                #[unroll]
                for a in 0..EACH {
                    let t = down + comptime!(a * SIDE);
                    if t < count {
                        let gate = (first + t) * value_heads + head;
                        let (to, at) = (gate * key_dim + row, comptime!(a * EACH + b));
                        let (from_start, to_end) = (decays.from_start[gate], decays.to_end[gate]);
                        outputs.reads[to] = f32::reinterpret(scale) * (from_start * sums[at]);
                        outputs.gradients[to] = to_end * (inputs.beta[gate] * sums[comptime!(ALL + at)]);
                        outputs.taken[to] = from_start * sums[comptime!(2 * ALL + at)];
                    }
                }
            }
        }
    }
}

pub(super) fn states(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, slots, .. } = *problem;
    let [reads, gradients, taken] = &problem.products;
    let arguments = GatedDeltaRuleBackwardStates {
        inputs: StateInputsArgs {
            states: problem.states.buffer()?,
            gradients: problem.state_gradients.buffer()?,
            residual: problem.residual.buffer()?,
            dy: operands.dy.buffer()?,
            dv: problem.gradients.dv.buffer()?,
            beta: operands.beta.buffer()?,
        },
        decays: problem.decays()?,
        cu_seqlens: operands.cu_seqlens.buffer()?,
        outputs: StateOutputsArgs {
            reads: reads.buffer()?,
            gradients: gradients.buffer()?,
            taken: taken.buffer()?,
            overlaps: problem.overlaps.buffer()?,
        },
        sizes,
        scale: problem.params.scale.to_bits(),
    };
    let cubes = rows::cubes(slots * operands.v.dim(1) * heads.key_dim.div_ceil(TILE));
    // SAFETY: the sizes are the tensors', a piece stays within the tokens, and rows and tokens past
    // the last are read as the last and not written.
    unsafe { gpu.launch(states_kernel(gpu.target(), heads), cubes, arguments) }
}

fn states_kernel(target: &Target, heads: Heads) -> Kernel<GatedDeltaRuleBackwardStates<'static>> {
    GatedDeltaRuleBackwardStates::kernel(target, UNITS, heads)
}

/// The operands of `dq` and `dk`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct InputInputs {
    q: Box<[f32]>,
    k: Box<[f32]>,
    reads: Box<[f32]>,
    gradients: Box<[f32]>,
    taken: Box<[f32]>,
    pair_reads: Box<[f32]>,
    pair_updates: Box<[f32]>,
}

/// `dq` and `dk`: a cube per chunk, key head and 64 of its elements. `scale` is the bits of an f32.
#[kernel]
fn gated_delta_rule_backward_inputs(
    inputs: &InputInputs,
    cu_seqlens: &[u32],
    dq: &mut [f32],
    dk: &mut [f32],
    sizes: Sizes,
    scale: u32,
    #[comptime] heads: Heads,
) {
    let key_dim = comptime!(heads.key_dim);
    let tiles = comptime!(heads.key_dim.div_ceil(TILE));
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let group = value_heads / key_heads;
    let (slot, key_head) = (CUBE_POS / tiles / key_heads, CUBE_POS / tiles % key_heads);
    let piece = known_piece(cu_seqlens, slot, &sizes);
    let (first, count) = (piece.first, piece.last - piece.first);
    if count > 0 {
        let down = UNIT_POS_X as usize / SIDE;
        let column0 = CUBE_POS % tiles * TILE + UNIT_POS_X as usize % SIDE;
        let mut dqs = zeros(ALL);
        let mut dks = zeros(ALL);
        let mut of_group = 0usize;
        while of_group < group {
            let head = if comptime!(heads.head_map == HeadMap::Grouped) {
                key_head * group + of_group
            } else {
                of_group * key_heads + key_head
            };
            let matrix = (slot * value_heads + head) * CHUNK;
            let mut i = 0usize;
            while i < count {
                let key = ((first + i) * key_heads + key_head) * key_dim;
                let mut q = Array::<f32>::new(EACH);
                let mut k = Array::<f32>::new(EACH);
                #[unroll]
                for b in 0..EACH {
                    // Columns past the last are computed and not stored, and so are tokens.
                    let column = min(column0 + comptime!(b * SIDE), comptime!(key_dim - 1).runtime());
                    q[b] = inputs.q[key + column];
                    k[b] = inputs.k[key + column];
                }
                #[unroll]
                for a in 0..EACH {
                    let t = down + comptime!(a * SIDE);
                    // Those of pairs that are not in order are 0.
                    let read_of = f32::reinterpret(scale) * inputs.pair_reads[(matrix + i) * CHUNK + t];
                    let read_by = f32::reinterpret(scale) * inputs.pair_reads[(matrix + t) * CHUNK + i];
                    let update = inputs.pair_updates[(matrix + min(i, t)) * CHUNK + max(i, t)];
                    #[unroll]
                    for b in 0..EACH {
                        let at = comptime!(a * EACH + b);
                        dqs[at] = fma(read_of, k[b], dqs[at]);
                        dks[at] = fma(read_by, q[b], dks[at]);
                        dks[at] = fma(-update, k[b], dks[at]);
                    }
                }
                i += 1;
            }
            #[unroll]
            for a in 0..EACH {
                let t = first + min(down + comptime!(a * SIDE), count - 1);
                #[unroll]
                for b in 0..EACH {
                    let column = min(column0 + comptime!(b * SIDE), comptime!(key_dim - 1).runtime());
                    let (from, at) = ((t * value_heads + head) * key_dim + column, comptime!(a * EACH + b));
                    dqs[at] += inputs.reads[from];
                    dks[at] += inputs.gradients[from] - inputs.taken[from];
                }
            }
            of_group += 1;
        }
        #[unroll]
        for a in 0..EACH {
            #[unroll]
            for b in 0..EACH {
                let (t, column) = (down + comptime!(a * SIDE), column0 + comptime!(b * SIDE));
                if t < count && column < key_dim {
                    let to = ((first + t) * key_heads + key_head) * key_dim + column;
                    dq[to] = dqs[comptime!(a * EACH + b)];
                    dk[to] = dks[comptime!(a * EACH + b)];
                }
            }
        }
    }
}

pub(super) fn inputs(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, slots, .. } = *problem;
    let ([reads, gradients, taken], [pair_reads, pair_updates, _]) = (&problem.products, &problem.pairs);
    let arguments = GatedDeltaRuleBackwardInputs {
        inputs: InputInputsArgs {
            q: operands.q.buffer()?,
            k: operands.k.buffer()?,
            reads: reads.buffer()?,
            gradients: gradients.buffer()?,
            taken: taken.buffer()?,
            pair_reads: pair_reads.buffer()?,
            pair_updates: pair_updates.buffer()?,
        },
        cu_seqlens: operands.cu_seqlens.buffer()?,
        dq: problem.gradients.dq.buffer()?,
        dk: problem.gradients.dk.buffer()?,
        sizes,
        scale: problem.params.scale.to_bits(),
    };
    let cubes = rows::cubes(slots * operands.q.dim(1) * heads.key_dim.div_ceil(TILE));
    // SAFETY: the sizes are the tensors', a piece stays within the tokens, pairs have a place for
    // each of a chunk's tokens, and columns and tokens past the last are read as the last and not
    // written.
    unsafe { gpu.launch(inputs_kernel(gpu.target(), heads), cubes, arguments) }
}

fn inputs_kernel(target: &Target, heads: Heads) -> Kernel<GatedDeltaRuleBackwardInputs<'static>> {
    GatedDeltaRuleBackwardInputs::kernel(target, UNITS, heads)
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, heads: Heads) -> Vec<Box<dyn CubeKernel>> {
    let fits =
        (heads.key_dim | heads.value_dim).is_multiple_of(rows::VECTOR) && target.vector() >= rows::VECTOR;
    vec![
        pairs_kernel(target, if fits { rows::VECTOR } else { 1 }, heads).code(),
        states_kernel(target, heads).code(),
        inputs_kernel(target, heads).code(),
    ]
}
