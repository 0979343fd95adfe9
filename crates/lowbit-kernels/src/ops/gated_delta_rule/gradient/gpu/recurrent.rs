//! The two passes over all tokens, one after the other: forward through the states, and back
//! through their gradients.
//!
//! As in the forward kernel, [`RecurrentConfig::lanes`] units share four columns of a value head's
//! matrix, keep their rows of them in registers, and load a token's operands while the one before
//! it is worked on. Here a lane's rows are strided by the lanes, so that lanes load neighbours
//! whatever the width is.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, CHUNK, Heads, Problem};
use crate::KernelError;
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows::{Sum, reduce_plane};
use crate::gpu::sequences::bounds;
use crate::ops::gated_delta_rule::gpu::{Sizes, key_head};
use crate::ops::gated_delta_rule::policy;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The compile-time configuration of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RecurrentConfig {
    heads: Heads,
    /// Units that share a column.
    lanes: usize,
}

/// Columns per unit.
const FOUR: usize = 4;
/// Units of a cube.
const UNITS: usize = 32;

/// Rows per unit at the most, where planes are large enough: four columns of them and two tokens
/// fit into registers.
const ROWS: usize = 16;

impl RecurrentConfig {
    fn new(target: &Target, heads: Heads, columns: usize) -> Self {
        let plane = target.smallest_plane();
        let most = heads.key_dim.div_ceil(ROWS).next_power_of_two();
        let lanes = policy::gpu_lanes(heads.key_dim, columns, plane).max(most).min(plane);
        Self { heads, lanes }
    }

    /// Rows per unit.
    fn rows(self) -> usize {
        self.heads.key_dim.div_ceil(self.lanes)
    }

    /// Cubes that share the columns of a head.
    fn cubes(self) -> usize {
        (self.heads.value_dim.div_ceil(FOUR) * self.lanes).div_ceil(UNITS)
    }

    /// Floats of a token per unit, going forward: k, v, decay and beta.
    fn forward_token(self) -> usize {
        self.rows() + FOUR + 2
    }

    /// And going back: k, dy, decay, beta and q.
    fn back_token(self) -> usize {
        2 * self.rows() + FOUR + 2
    }
}

/// The sequence, heads and columns of a unit.
#[derive(CubeType, Clone, Copy)]
struct Place {
    sequence: usize,
    head: usize,
    key_head: usize,
    key_heads: usize,
    value_heads: usize,
    lane: usize,
    /// Its first column, and how many there are from there on: none for units past the last, which
    /// take part in sums.
    column: usize,
    columns: usize,
}

#[cube]
fn place(sizes: &Sizes, #[comptime] config: RecurrentConfig) -> Place {
    let cubes = comptime!(config.cubes());
    let value_dim = comptime!(config.heads.value_dim);
    let unit = (CUBE_POS_X as usize % cubes) * UNITS + UNIT_POS_X as usize;
    let column = unit / comptime!(config.lanes) * comptime!(FOUR);
    let head = CUBE_POS_X as usize / cubes;
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    Place {
        sequence: CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize,
        head,
        key_head: key_head(key_heads, value_heads, head, config.heads.head_map),
        key_heads,
        value_heads,
        lane: unit % comptime!(config.lanes),
        column,
        columns: value_dim - min(column, value_dim.runtime()),
    }
}

/// Loads a unit's rows of token t of q or k to `token[first]` and on, zeros past the last.
#[cube]
fn load_rows(
    x: &[f32],
    t: usize,
    at: &Place,
    token: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] config: RecurrentConfig,
) {
    let key_dim = comptime!(config.heads.key_dim);
    let start = (t * at.key_heads + at.key_head) * key_dim;
    #[unroll]
    for i in 0..comptime!(config.rows()) {
        let row = comptime!(i * config.lanes) + at.lane;
        token[first + i] = 0.0;
        if row < key_dim {
            token[first + i] = x[start + row];
        }
    }
}

/// Loads a unit's columns of token t of v or dy, and the token's decay and beta, behind its rows of
/// k.
#[cube]
fn load_columns(
    x: &[f32],
    gates: &Gates,
    t: usize,
    at: &Place,
    token: &mut Array<f32>,
    #[comptime] config: RecurrentConfig,
) {
    let first = comptime!(config.rows());
    let gate = t * at.value_heads + at.head;
    let start = gate * comptime!(config.heads.value_dim) + at.column;
    #[unroll]
    for c in 0..FOUR {
        token[first + c] = 0.0;
        if c < at.columns {
            token[first + c] = x[start + c];
        }
    }
    token[comptime!(first + FOUR)] = gates.decay[gate];
    token[comptime!(first + FOUR + 1)] = gates.beta[gate];
}

/// `x^T k` for each of the unit's columns of x.
#[cube]
fn times_key(x: &Array<f32>, token: &Array<f32>, #[comptime] config: RecurrentConfig) -> Array<f32> {
    let mut sums = Array::<f32>::new(FOUR);
    #[unroll]
    for c in 0..FOUR {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..comptime!(config.rows()) {
            sum = fma(x[i * FOUR + c], token[i], sum);
        }
        sums[c] = reduce_plane::<f32, Sum>(sum, config.lanes);
    }
    sums
}

/// Stores the unit's part of a matrix as checkpoint `slot`.
#[cube]
fn store_checkpoint(
    to: &mut [f32],
    x: &Array<f32>,
    slot: usize,
    at: &Place,
    #[comptime] config: RecurrentConfig,
) {
    let (key_dim, value_dim) = comptime!((config.heads.key_dim, config.heads.value_dim));
    let first = ((slot * at.value_heads + at.head) * value_dim + at.column) * key_dim;
    #[unroll]
    for c in 0..FOUR {
        #[unroll]
        for i in 0..comptime!(config.rows()) {
            let row = comptime!(i * config.lanes) + at.lane;
            if c < at.columns && row < key_dim {
                to[first + c * key_dim + row] = x[i * FOUR + c];
            }
        }
    }
}

/// Stores the unit's columns of token t, if it is the first of those that share them.
#[cube]
fn store_columns(to: &mut [f32], x: &Array<f32>, t: usize, at: &Place, #[comptime] config: RecurrentConfig) {
    let start = (t * at.value_heads + at.head) * comptime!(config.heads.value_dim) + at.column;
    #[unroll]
    for c in 0..FOUR {
        if c < at.columns && at.lane == 0 {
            to[start + c] = x[c];
        }
    }
}

/// `[T, Hv]`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Gates {
    decay: Box<[f32]>,
    beta: Box<[f32]>,
}

/// The operands of the forward pass, per token.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct ForwardInputs {
    k: Box<[f32]>,
    v: Box<[f32]>,
}

/// Every token's residual, and the state before each chunk: one cube per sequence, value head and
/// some columns of the state.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn gated_delta_rule_backward_forward(
    inputs: &ForwardInputs,
    gates: &Gates,
    cu_seqlens: &[u32],
    state: &[f32],
    residual: &mut [f32],
    states: &mut [f32],
    sizes: Sizes,
    #[comptime] config: RecurrentConfig,
) {
    let rows = comptime!(config.rows());
    let count = comptime!(config.forward_token());
    let at = place(&sizes, config);
    if at.sequence < sizes.sequences as usize {
        let mut s = Array::<f32>::new(comptime!(rows * FOUR));
        load_state(state, &mut s, &at, config);
        let (start, end) = bounds(cu_seqlens, at.sequence, sizes.tokens as usize);
        let slot = start / CHUNK + at.sequence;
        let mut token = Array::<f32>::new(count);
        if start < end {
            load_rows(&inputs.k, start, &at, &mut token, 0usize, config);
            load_columns(&inputs.v, gates, start, &at, &mut token, config);
        }
        let mut t = start;
        while t < end {
            if (t - start) % CHUNK == 0 {
                store_checkpoint(states, &s, slot + (t - start) / CHUNK, &at, config);
            }
            let mut next = Array::<f32>::new(count);
            // The last token is loaded once more.
            let after = min(t + 1, end - 1);
            load_rows(&inputs.k, after, &at, &mut next, 0usize, config);
            load_columns(&inputs.v, gates, after, &at, &mut next, config);
            let (decay, beta) = (token[comptime!(rows + FOUR)], token[comptime!(rows + FOUR + 1)]);
            let mut r = times_key(&s, &token, config);
            #[unroll]
            for c in 0..FOUR {
                r[c] = token[rows + c] - decay * r[c];
                let delta = beta * r[c];
                #[unroll]
                for i in 0..rows {
                    s[i * FOUR + c] = fma(token[i], delta, decay * s[i * FOUR + c]);
                }
            }
            store_columns(residual, &r, t, &at, config);
            #[unroll]
            for i in 0..count {
                token[i] = next[i];
            }
            t += 1;
        }
    }
}

/// Loads the unit's part of its sequence's state before.
#[cube]
fn load_state(state: &[f32], s: &mut Array<f32>, at: &Place, #[comptime] config: RecurrentConfig) {
    let (key_dim, value_dim) = comptime!((config.heads.key_dim, config.heads.value_dim));
    let matrix = (at.sequence * at.value_heads + at.head) * comptime!(key_dim * value_dim);
    #[unroll]
    for i in 0..comptime!(config.rows()) {
        let row = comptime!(i * config.lanes) + at.lane;
        #[unroll]
        for c in 0..FOUR {
            s[i * FOUR + c] = 0.0;
            if c < at.columns && row < key_dim {
                s[i * FOUR + c] = state[matrix + row * value_dim + at.column + c];
            }
        }
    }
}

/// The operands of the backward pass, per token.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct BackInputs {
    q: Box<[f32]>,
    k: Box<[f32]>,
    dy: Box<[f32]>,
}

/// The results of the backward pass.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct BackOutputs {
    ddelta: Box<[f32]>,
    dv: Box<[f32]>,
    state_gradients: Box<[f32]>,
}

/// Every token's ddelta and dv, and the gradient of the state after each chunk: cubes as above.
/// `scale` is the bits of an f32.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn gated_delta_rule_backward_back(
    inputs: &BackInputs,
    gates: &Gates,
    cu_seqlens: &[u32],
    outputs: &mut BackOutputs,
    sizes: Sizes,
    scale: u32,
    #[comptime] config: RecurrentConfig,
) {
    let rows = comptime!(config.rows());
    let (count, of_q) = comptime!((config.back_token(), rows + FOUR + 2));
    let at = place(&sizes, config);
    let scale = f32::reinterpret(scale);
    if at.sequence < sizes.sequences as usize {
        let mut g = Array::<f32>::new(comptime!(rows * FOUR));
        #[unroll]
        for i in 0..comptime!(rows * FOUR) {
            g[i] = 0.0;
        }
        let (start, end) = bounds(cu_seqlens, at.sequence, sizes.tokens as usize);
        let slot = start / CHUNK + at.sequence;
        let mut token = Array::<f32>::new(count);
        if start < end {
            load_rows(&inputs.k, end - 1, &at, &mut token, 0usize, config);
            load_columns(&inputs.dy, gates, end - 1, &at, &mut token, config);
            load_rows(&inputs.q, end - 1, &at, &mut token, of_q, config);
        }
        let mut t = end;
        while t > start {
            t -= 1;
            let (chunk, of_chunk) = ((t - start) / CHUNK, (t - start) % CHUNK);
            if of_chunk == comptime!(CHUNK - 1) || t + 1 == end {
                store_checkpoint(&mut outputs.state_gradients, &g, slot + chunk, &at, config);
            }
            let mut next = Array::<f32>::new(count);
            // The first token is loaded once more.
            let before = max(t, start + 1) - 1;
            load_rows(&inputs.k, before, &at, &mut next, 0usize, config);
            load_columns(&inputs.dy, gates, before, &at, &mut next, config);
            load_rows(&inputs.q, before, &at, &mut next, of_q, config);
            let (decay, beta) = (token[comptime!(rows + FOUR)], token[comptime!(rows + FOUR + 1)]);
            #[unroll]
            for c in 0..FOUR {
                let dy = scale * token[rows + c];
                #[unroll]
                for i in 0..rows {
                    g[i * FOUR + c] = fma(token[of_q + i], dy, g[i * FOUR + c]);
                }
            }
            let ddelta = times_key(&g, &token, config);
            let mut dv = Array::<f32>::new(FOUR);
            #[unroll]
            for c in 0..FOUR {
                dv[c] = beta * ddelta[c];
                #[unroll]
                for i in 0..rows {
                    g[i * FOUR + c] = decay * (g[i * FOUR + c] - token[i] * dv[c]);
                }
            }
            store_columns(&mut outputs.ddelta, &ddelta, t, &at, config);
            store_columns(&mut outputs.dv, &dv, t, &at, config);
            #[unroll]
            for i in 0..count {
                token[i] = next[i];
            }
        }
    }
}

fn forward_kernel(
    target: &Target,
    config: RecurrentConfig,
) -> Kernel<GatedDeltaRuleBackwardForward<'static>> {
    GatedDeltaRuleBackwardForward::kernel(target, UNITS, config)
}

fn back_kernel(target: &Target, config: RecurrentConfig) -> Kernel<GatedDeltaRuleBackwardBack<'static>> {
    GatedDeltaRuleBackwardBack::kernel(target, UNITS, config)
}

#[cfg(test)]
pub(super) fn kernels(target: &Target, heads: Heads) -> Vec<Box<dyn CubeKernel>> {
    let of = |columns| {
        let config = RecurrentConfig::new(target, heads, columns);
        [forward_kernel(target, config).code(), back_kernel(target, config).code()]
    };
    [1 << 12, 1 << 18].into_iter().flat_map(of).collect()
}

/// Fills the residuals, `ddelta`, `dv` and both checkpoints of each chunk.
pub(super) fn launch(problem: &Problem<'_>) -> Result<(), KernelError> {
    let Problem { gpu, operands, heads, sizes, .. } = *problem;
    let (sequences, columns) = (operands.state.dim(0), operands.state.len() / heads.key_dim);
    let config = RecurrentConfig::new(gpu.target(), heads, columns);
    let cubes = [operands.v.dim(1) * config.cubes(), sequences.min(CUBES), sequences.div_ceil(CUBES)];
    let [x, y, z] = cubes.map(|count| CHECK.index(count));
    let cubes = [x?, y?, z?];
    let gates = || {
        let [decay, ..] = &problem.decays;
        Ok::<_, KernelError>(GatesArgs { decay: decay.buffer()?, beta: operands.beta.buffer()? })
    };
    let forward = GatedDeltaRuleBackwardForward {
        inputs: ForwardInputsArgs { k: operands.k.buffer()?, v: operands.v.buffer()? },
        gates: gates()?,
        cu_seqlens: operands.cu_seqlens.buffer()?,
        state: operands.state.buffer()?,
        residual: problem.residual.buffer()?,
        states: problem.states.buffer()?,
        sizes,
    };
    let back = GatedDeltaRuleBackwardBack {
        inputs: BackInputsArgs {
            q: operands.q.buffer()?,
            k: operands.k.buffer()?,
            dy: operands.dy.buffer()?,
        },
        gates: gates()?,
        cu_seqlens: operands.cu_seqlens.buffer()?,
        outputs: BackOutputsArgs {
            ddelta: problem.ddelta.buffer()?,
            dv: problem.gradients.dv.buffer()?,
            state_gradients: problem.state_gradients.buffer()?,
        },
        sizes,
        scale: problem.params.scale.to_bits(),
    };
    // SAFETY: the sizes are the tensors', rows and columns past the last are neither read nor
    // written, and a sequence whose offsets go past the tokens is left out.
    unsafe {
        gpu.launch(forward_kernel(gpu.target(), config), cubes, forward)?;
        gpu.launch(back_kernel(gpu.target(), config), cubes, back)
    }
}
