//! The recurrence, token after token.
//!
//! A plane's units cut some columns of a head's state into runs of rows, which stay in registers over all tokens. As on
//! the CPU, `S^T k` and `S^T q` are both read from the state before the step.
//!
//! | file | holds |
//! |---|---|
//! | `memory.rs` | vectors and the state to registers, and back |
//! | `token.rs` | what is loaded of a token; its gates and norms |
//! | `convolution.rs` | q, k and v made of their convolution's inputs |

mod convolution;
mod memory;
mod token;

use super::{Problem, key_head};
use crate::gpu::compile::{Target, buffer, overlap};
use crate::gpu::float::with_storage;
use crate::gpu::sequences::bounds;
use crate::gpu::{CUBES, Dispatch};
use crate::ops::causal_conv1d::Activation;
use crate::ops::gated_delta_rule::{CHECK, DecaySign, DeltaGates, Dims, HeadMap, StateLayout, policy};
use crate::ops::l2_norm::L2NormConvention;
use crate::{KernelError, Tensor};
use convolution::Convolution;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};
use memory::{load_state, store, store_state};
use token::{Place, add_up, gates, load_token, normalise};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    /// The type of q, k, v and y.
    dtype: FloatType,
    key_dim: usize,
    value_dim: usize,
    head_map: HeadMap,
    layout: StateLayout,
    sign: DecaySign,
    qk_norm: Option<L2NormConvention>,
    /// What the gates come as.
    gates: GateInputs,
    /// How q, k and v are made, where they are not there.
    convolution: Option<Convolution>,
    /// Units that a column is cut over.
    lanes: usize,
    /// Whether the launch before may still run: see [`overlap`].
    overlaps: bool,
}

/// What a kernel gets for the gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GateInputs {
    /// `a` and `b`, which the gates are computed from; else `log_decay` and `beta` in their places.
    raw: bool,
    dtype: FloatType,
}

impl Shape {
    /// Elements that are loaded together.
    fn vector(self) -> usize {
        if (self.key_dim | self.value_dim).is_multiple_of(FOUR) { FOUR } else { 1 }
    }

    /// Rows of a column that a unit has: fours of them, in turns with the other units.
    fn fours(self) -> usize {
        self.key_dim.div_ceil(FOUR * self.lanes)
    }

    /// Fours of keys, queries and values that a unit has.
    fn blocks(self) -> usize {
        2 * self.fours() + 1
    }

    /// Floats of a token that a unit has.
    fn token(self) -> usize {
        FOUR * self.blocks() + 2
    }

    /// Inputs before its own that a convolution's result is made of.
    fn past(self) -> usize {
        self.convolution.map_or(0, |convolution| convolution.width - 1)
    }

    /// Cubes that the columns of a head take.
    fn cubes(self) -> usize {
        (self.value_dim.div_ceil(FOUR) * self.lanes).div_ceil(UNITS as usize)
    }
}

/// Columns that a unit has, and rows that it has in one place.
const FOUR: usize = 4;
/// Units of a cube.
const UNITS: u32 = 32;

#[cube(launch_unchecked)]
fn recurrent<X: Int, G: Int, N: Size>(
    weight: &[Vector<u32, N>],
    a_log: &[f32],
    dt_bias: &[f32],
    state: &mut [Vector<u32, N>],
    past: &mut [Vector<u32, N>],
    counters: &mut [Atomic<u32>],
    cu_seqlens: &[u32],
    q: &[Vector<X, N>],
    k: &[Vector<X, N>],
    v: &[Vector<X, N>],
    a: &[G],
    b: &[G],
    y: &mut [Vector<X, N>],
    tokens: u32,
    sequences: u32,
    key_heads: u32,
    value_heads: u32,
    scale: u32,
    eps: u32,
    #[comptime] shape: Shape,
) {
    let convolves = comptime!(shape.convolution.is_some());
    let at = place(key_heads as usize, value_heads as usize, shape);
    let sequence = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let there = sequence < sequences as usize;
    let matrix = (sequence * at.value_heads + at.head) * comptime!(shape.key_dim * shape.value_dim);
    let mut s = Array::<f32>::new(comptime!(FOUR * FOUR * shape.fours()));
    let mut of_head = Array::<f32>::new(2usize);
    let mut own = convolution::none(shape);
    let mut writes = false;
    let mut start = 0usize;
    let mut end = 0usize;
    if comptime!(convolves) {
        // No cube is beyond the last sequence: there are counters for all.
        let range = bounds(cu_seqlens, sequence, tokens as usize);
        start = range.0;
        end = range.1;
        let counter = sequence * at.key_heads + at.key_head;
        convolution::load_past::<N>(&*past, sequence, &mut own, &at, shape);
        writes = convolution::begin::<N>(weight, counters, counter, &mut own, &at, shape);
    }
    if there {
        load_state::<N>(&*state, &mut s, matrix, (at.lane, at.column, at.columns), shape);
        if comptime!(shape.gates.raw) {
            of_head[0] = a_log[at.head];
            of_head[1] = dt_bias[at.head];
        }
    }
    // What is above was there before the last launch; its results are below.
    if comptime!(shape.overlaps) {
        overlap();
    }
    if there {
        if comptime!(!convolves) {
            let range = bounds(cu_seqlens, sequence, tokens as usize);
            start = range.0;
            end = range.1;
        }
        // A token's keys, queries, values and gates; the next one's come while one is worked on.
        let mut token = Array::<f32>::new(comptime!(shape.token()));
        if start < end {
            load_token::<X, G, N>(q, k, v, a, b, start, &at, &mut token, shape);
        }
        for t in start..end {
            let mut next = Array::<f32>::new(comptime!(shape.token()));
            #[unroll]
            for i in 0..comptime!(shape.token()) {
                next[i] = 0.0;
            }
            let more = t + 1usize < end;
            if more {
                load_token::<X, G, N>(q, k, v, a, b, t + 1usize, &at, &mut next, shape);
            }
            if comptime!(convolves) {
                convolution::convolve(&mut token, &mut own, shape);
                if more {
                    convolution::add_past::<N>(weight, &mut own, &at, shape);
                }
            }
            let ys = step(&mut s, &mut token, &of_head, scale, eps, shape);
            if at.lane == 0 {
                let first = (t * at.value_heads + at.head) * comptime!(shape.value_dim) + at.column;
                store::<X, N>(y, first, at.columns, &ys, 0usize, 1usize, shape.dtype);
            }
            #[unroll]
            for i in 0..comptime!(shape.token()) {
                token[i] = next[i];
            }
        }
        if start < end {
            store_state::<N>(state, &s, matrix, (at.lane, at.column, at.columns), shape);
            if comptime!(convolves) {
                convolution::store_past::<N>(past, sequence, &own, &at, writes, shape);
            }
        }
    }
}

/// What the unit has to do.
#[cube]
fn place(key_heads: usize, value_heads: usize, #[comptime] shape: Shape) -> Place {
    let cubes = comptime!(shape.cubes());
    let unit = (CUBE_POS_X as usize % cubes) * comptime!(UNITS as usize) + UNIT_POS_X as usize;
    let column = unit / comptime!(shape.lanes) * comptime!(FOUR);
    let head = CUBE_POS_X as usize / cubes;
    Place {
        head,
        key_head: key_head(key_heads, value_heads, head, shape.head_map),
        key_heads,
        value_heads,
        lane: unit % comptime!(shape.lanes),
        column,
        // Units beyond the last column take part in sums.
        columns: comptime!(shape.value_dim) - min(column, comptime!(shape.value_dim)),
    }
}

/// Takes the unit's part of the state through a token, and gives its part of y.
#[cube]
fn step(
    s: &mut Array<f32>,
    token: &mut Array<f32>,
    of_head: &Array<f32>,
    scale: u32,
    eps: u32,
    #[comptime] shape: Shape,
) -> Array<f32> {
    let rows = comptime!(FOUR * shape.fours());
    let scale = f32::reinterpret(scale);
    normalise(token, f32::reinterpret(eps), shape);
    let (a, b) = (token[comptime!(2 * rows + FOUR)], token[comptime!(2 * rows + FOUR + 1)]);
    let (decay, beta) = gates(a, b, of_head, shape);
    let sums = read_state(&*s, &*token, shape);
    let mut ys = Array::<f32>::new(comptime!(FOUR));
    #[unroll]
    for c in 0..FOUR {
        let delta = beta * (token[comptime!(2 * rows + c)] - decay * sums[c]);
        ys[c] = scale * (decay * sums[comptime!(FOUR + c)] + sums[comptime!(2 * FOUR)] * delta);
        #[unroll]
        for r in 0..rows {
            s[r * FOUR + c] = fma(token[r], delta, decay * s[r * FOUR + c]);
        }
    }
    ys
}

/// `S^T k` and `S^T q` for each column, then `k . q`.
#[cube]
fn read_state(s: &Array<f32>, token: &Array<f32>, #[comptime] shape: Shape) -> Array<f32> {
    let rows = comptime!(FOUR * shape.fours());
    let count = comptime!(2 * FOUR + 1);
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = 0.0;
    }
    #[unroll]
    for r in 0..rows {
        let (k, q) = (token[r], token[comptime!(rows + r)]);
        #[unroll]
        for c in 0..FOUR {
            sums[c] = fma(s[r * FOUR + c], k, sums[c]);
            sums[FOUR + c] = fma(s[r * FOUR + c], q, sums[FOUR + c]);
        }
        sums[2 * FOUR] = fma(k, q, sums[2 * FOUR]);
    }
    add_up(&mut sums, count, shape.lanes);
    sums
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let [weight, a_log, dt_bias, state, past, counters, cu_seqlens] = [(); 7].map(|()| buffer());
    let [q, k, v, a, b, y] = [(); 6].map(|()| buffer());
    with_storage!(shape.dtype, X => with_storage!(shape.gates.dtype, G => Box::new(recurrent::Recurrent::<X, G>::new(
        settings, properties, registers, weight, a_log, dt_bias, state, past, counters, cu_seqlens, q, k, v, a, b, y,
        (), (), (), (), (), (), shape.vector(), shape,
    ))))
}

/// Every kernel for `target`, at the sizes of models and at one that fits no vector, of tokens that are there and of such
/// that are convolved.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let of = |dtype, dim, layout, head_map, sign, convolution: Option<_>| {
        let columns = if dtype == FloatType::F32 { 1 << 12 } else { 1 << 18 };
        let columns = if convolution.is_none() { columns } else { 1 << 12 };
        let plain = sign == DecaySign::Rate;
        kernel(
            target,
            Shape {
                dtype,
                key_dim: dim,
                value_dim: dim,
                head_map,
                layout,
                sign,
                qk_norm: if plain { None } else { Some(L2NormConvention::Sum) },
                gates: GateInputs { raw: !plain, dtype: if plain { FloatType::F32 } else { dtype } },
                convolution,
                lanes: policy::gpu_lanes(dim, columns, target.smallest_plane()),
                overlaps: target.overlaps(),
            },
        )
    };
    let usual = Convolution { width: 4, activation: Some(Activation::Silu) };
    let mut kernels = Vec::new();
    for convolution in [None, Some(usual), Some(Convolution { width: 2, activation: None })] {
        for dtype in [FloatType::F32, FloatType::F16, FloatType::BF16] {
            let head_map = HeadMap::Grouped;
            kernels.push(of(dtype, 128, StateLayout::KeyValue, head_map, DecaySign::LogDecay, convolution));
            kernels.push(of(dtype, 128, StateLayout::ValueKey, HeadMap::Tiled, DecaySign::Rate, convolution));
        }
        for (dtype, dim) in [(FloatType::BF16, 256), (FloatType::F32, 37)] {
            let (layout, head_map) = (StateLayout::KeyValue, HeadMap::Grouped);
            kernels.push(of(dtype, dim, layout, head_map, DecaySign::LogDecay, convolution));
        }
    }
    kernels
}

/// Where a launch finds q, k and v.
pub(super) enum Tokens<'a> {
    Given([&'a Tensor; 3]),
    /// They are made of `qkv`, as [`conv_gated_delta_rule`](crate::ops::conv_gated_delta_rule) says; `past` is the
    /// convolution's state.
    Convolved {
        qkv: &'a Tensor,
        weight: &'a Tensor,
        activation: Option<Activation>,
        past: &'a Tensor,
    },
}

/// The shape of a launch over `tokens` with `state`.
fn shape(problem: &Problem, tokens: &Tokens, state: &Tensor, gates: GateInputs) -> Shape {
    let Problem { gpu, dims, params, dtype, .. } = *problem;
    let Dims { key_dim, value_dim, .. } = dims;
    let convolution = match *tokens {
        Tokens::Given(_) => None,
        Tokens::Convolved { weight, activation, .. } => {
            Some(Convolution { width: weight.dim(1), activation })
        }
    };
    let target = gpu.target();
    Shape {
        dtype,
        key_dim,
        value_dim,
        head_map: params.head_map,
        layout: params.state_layout,
        sign: params.sign,
        qk_norm: params.qk_norm.map(|norm| norm.convention),
        gates,
        convolution,
        lanes: policy::gpu_lanes(key_dim, state.len() / key_dim, target.smallest_plane()),
        overlaps: target.overlaps(),
    }
}

/// The gates' operands in the kernel's order, and what they are. What is not there is not read, and `other` stands for it.
fn gate_operands(gates: &DeltaGates, other: &Tensor) -> Result<([Tensor; 4], GateInputs), KernelError> {
    match *gates {
        DeltaGates::Computed { log_decay, beta } => {
            let operands = [log_decay, beta, other, other].map(Tensor::clone);
            Ok((operands, GateInputs { raw: false, dtype: FloatType::F32 }))
        }
        DeltaGates::Raw { a, b, a_log, dt_bias } => {
            let dtype = if a.dtype() == b.dtype() { CHECK.float("a", a)? } else { FloatType::F32 };
            let (a, b) = (a.cast(dtype.dtype())?, b.cast(dtype.dtype())?);
            let operands = [a, b, a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?];
            Ok((operands, GateInputs { raw: true, dtype }))
        }
    }
}

/// Launches the recurrence over all sequences.
pub(super) fn launch(
    problem: &Problem,
    tokens: &Tokens,
    state: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    let Problem { gpu, gates, cu_seqlens, dims, params, .. } = *problem;
    let ([a, b, a_log, dt_bias], gates) = gate_operands(&gates, state)?;
    let shape = shape(problem, tokens, state, gates);
    let index = |value: usize| CHECK.index(value);
    let (sequences, matrices) = (state.dim(0), state.memory()?);
    // What is not there is not read, and the state stands for it.
    let (early, weight, past, counters, [q, k, v]) = match *tokens {
        // What the launch before reads is not early, either: the offsets here, which the convolution did.
        Tokens::Given(tokens) => (6, matrices, matrices, matrices, tokens),
        Tokens::Convolved { qkv, weight, past, .. } => {
            (7, weight.memory()?, past.memory()?, (gpu.counters()?, 0), [qkv; 3])
        }
    };
    let dispatch = Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: [
            index(dims.value_heads * shape.cubes())?,
            index(sequences.min(CUBES))?,
            index(sequences.div_ceil(CUBES))?,
        ],
        buffers: vec![
            weight,
            a_log.memory()?,
            dt_bias.memory()?,
            matrices,
            past,
            counters,
            cu_seqlens.memory()?,
            q.memory()?,
            k.memory()?,
            v.memory()?,
            a.memory()?,
            b.memory()?,
            y.memory()?,
        ],
        scalars: vec![
            index(q.dim(0))?,
            index(sequences)?,
            index(dims.key_heads)?,
            index(dims.value_heads)?,
            params.scale.to_bits(),
            // Not read where nothing is normalised.
            params.qk_norm.map_or(0.0, |norm| norm.eps).to_bits(),
        ],
    };
    gpu.launch_early(early, dispatch)
}
