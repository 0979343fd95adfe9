//! The recurrence, token after token.
//!
//! A plane's units cut some columns of a head's state into runs of rows, which stay in registers over all tokens. As on
//! the CPU, `S^T k` and `S^T q` are both read from the state before the step.

use super::{Problem, key_head};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{narrow, read, widen, with_storage};
use crate::gpu::sequences::bounds;
use crate::gpu::{CUBES, Dispatch};
use crate::ops::delta_gates;
use crate::ops::gated_delta_rule::{
    CHECK, DecaySign, DeltaGates, Dims, GatedDeltaInputs, GatedDeltaRule, HeadMap, StateLayout, policy,
};
use crate::ops::l2_norm::{self, L2NormConvention};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

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
    /// Units that a column is cut over.
    lanes: usize,
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

    /// Floats of a token that a unit has.
    fn token(self) -> usize {
        2 * FOUR * self.fours() + FOUR + 2
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
    q: &[Vector<X, N>],
    k: &[Vector<X, N>],
    v: &[Vector<X, N>],
    a: &[G],
    b: &[G],
    a_log: &[f32],
    dt_bias: &[f32],
    cu_seqlens: &[u32],
    state: &mut [Vector<u32, N>],
    y: &mut [Vector<X, N>],
    tokens: u32,
    sequences: u32,
    key_heads: u32,
    value_heads: u32,
    scale: u32,
    eps: u32,
    #[comptime] shape: Shape,
) {
    let (key_dim, value_dim) = comptime!((shape.key_dim, shape.value_dim));
    let cubes = comptime!(shape.cubes());
    let rows = comptime!(FOUR * shape.fours());
    let unit = (CUBE_POS_X as usize % cubes) * comptime!(UNITS as usize) + UNIT_POS_X as usize;
    let lane = unit % comptime!(shape.lanes);
    let column = unit / comptime!(shape.lanes) * comptime!(FOUR);
    let head = CUBE_POS_X as usize / cubes;
    let sequence = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let (key_heads, value_heads) = (key_heads as usize, value_heads as usize);
    let key_head = key_head(key_heads, value_heads, head, shape.head_map);
    let scale = f32::reinterpret(scale);
    // Columns that there are; units beyond them take part in sums.
    let columns = comptime!(value_dim) - min(column, comptime!(value_dim));

    if sequence < sequences as usize {
        let matrix = (sequence * value_heads + head) * comptime!(key_dim * value_dim);
        let mut s = Array::<f32>::new(comptime!(rows * FOUR));
        load_state::<N>(&*state, &mut s, matrix, (lane, column, columns), shape);
        let (start, end) = bounds(cu_seqlens, sequence, tokens as usize);
        let at = Place { head, key_head, key_heads, value_heads, lane, column, columns };
        // A token's keys, queries, values and gates; the next one's come while one is worked on.
        let mut token = Array::<f32>::new(comptime!(shape.token()));
        // Loaded here, so that a step does not wait for them once it has its token.
        let mut a_log_of_head = 0.0f32;
        let mut dt_bias_of_head = 0.0f32;
        if comptime!(shape.gates.raw) {
            a_log_of_head = a_log[head];
            dt_bias_of_head = dt_bias[head];
        }
        let inputs = Inputs::new(q, k, v, a, b);
        if start < end {
            load_token(&inputs, start, &at, &mut token, shape);
        }
        for t in start..end {
            let mut next = Array::<f32>::new(comptime!(shape.token()));
            #[unroll]
            for i in 0..comptime!(shape.token()) {
                next[i] = 0.0;
            }
            if t + 1usize < end {
                load_token(&inputs, t + 1usize, &at, &mut next, shape);
            }
            normalise(&mut token, f32::reinterpret(eps), shape);
            let (a, b) = (token[comptime!(2 * rows + FOUR)], token[comptime!(2 * rows + FOUR + 1)]);
            let gates = gates(a, b, a_log_of_head, dt_bias_of_head, shape);
            let ys = step(&mut s, &token, gates, scale, shape);
            if lane == 0 {
                let gate = t * value_heads + head;
                store::<X, N>(y, gate * value_dim + column, columns, &ys, 0usize, 1usize, shape.dtype);
            }
            #[unroll]
            for i in 0..comptime!(shape.token()) {
                token[i] = next[i];
            }
        }
        if start < end {
            store_state::<N>(state, &s, matrix, (lane, column, columns), shape);
        }
    }
}

/// What a unit has.
#[derive(CubeType, Clone, Copy)]
struct Place {
    head: usize,
    key_head: usize,
    key_heads: usize,
    value_heads: usize,
    lane: usize,
    /// Its first column, and how many there are from there on.
    column: usize,
    columns: usize,
}

/// What tokens bring: keys, queries and values, and what their gates come as.
#[derive(CubeType)]
struct Inputs<'a, X: Int, G: Int, N: Size> {
    q: &'a [Vector<X, N>],
    k: &'a [Vector<X, N>],
    v: &'a [Vector<X, N>],
    a: &'a [G],
    b: &'a [G],
}

#[cube]
impl<'a, X: Int, G: Int, N: Size> Inputs<'a, X, G, N> {
    fn new(
        q: &'a [Vector<X, N>],
        k: &'a [Vector<X, N>],
        v: &'a [Vector<X, N>],
        a: &'a [G],
        b: &'a [G],
    ) -> Inputs<'a, X, G, N> {
        Inputs::<'a, X, G, N> { q, k, v, a, b }
    }
}

/// The unit's part of a token's keys and queries, then the values of its columns, and what its gates come as.
#[cube]
fn load_token<X: Int, G: Int, N: Size>(
    of: &Inputs<'_, X, G, N>,
    t: usize,
    at: &Place,
    token: &mut Array<f32>,
    #[comptime] shape: Shape,
) {
    let (key_dim, rows) = comptime!((shape.key_dim, FOUR * shape.fours()));
    let gate = t * at.value_heads + at.head;
    let key = (t * at.key_heads + at.key_head) * key_dim;
    #[unroll]
    for i in 0..comptime!(shape.fours()) {
        let row = (i * comptime!(shape.lanes) + at.lane) * FOUR;
        let count = key_dim - min(row, key_dim.runtime());
        load::<X, N>(of.k, key + row, count, token, comptime!(i * FOUR), 1usize, shape.dtype);
        load::<X, N>(of.q, key + row, count, token, comptime!(rows + i * FOUR), 1usize, shape.dtype);
    }
    let value = gate * comptime!(shape.value_dim) + at.column;
    load::<X, N>(of.v, value, at.columns, token, comptime!(2 * rows), 1usize, shape.dtype);
    token[comptime!(2 * rows + FOUR)] = read(of.a, gate, shape.gates.dtype);
    token[comptime!(2 * rows + FOUR + 1)] = read(of.b, gate, shape.gates.dtype);
}

/// A token's decay and beta.
#[cube]
fn gates(a: f32, b: f32, a_log: f32, dt_bias: f32, #[comptime] shape: Shape) -> (f32, f32) {
    if comptime!(shape.gates.raw) {
        let (log_decay, beta) = delta_gates::gpu::one(a, b, a_log, dt_bias);
        (log_decay.exp(), beta)
    } else {
        let log_decay = if comptime!(shape.sign == DecaySign::Rate) { -a } else { a };
        (log_decay.exp(), b)
    }
}

/// Normalises the unit's part of a token's keys and queries, where that is asked for.
#[cube]
fn normalise(token: &mut Array<f32>, eps: f32, #[comptime] shape: Shape) {
    if comptime!(shape.qk_norm.is_some()) {
        let convention = comptime!(shape.qk_norm.expect("it is asked for"));
        let rows = comptime!(FOUR * shape.fours());
        let mut sums = Array::<f32>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            sums[i] = 0.0;
            #[unroll]
            for r in 0..rows {
                sums[i] = fma(token[i * rows + r], token[i * rows + r], sums[i]);
            }
        }
        add_up(&mut sums, 2usize, shape.lanes);
        #[unroll]
        for i in 0..2usize {
            let scale =
                l2_norm::gpu::scale(sums[i], comptime!(shape.key_dim as f32).runtime(), eps, convention);
            #[unroll]
            for r in 0..rows {
                token[i * rows + r] *= scale;
            }
        }
    }
}

/// The sums over the units that share a column, for all of them.
#[cube]
fn add_up(sums: &mut Array<f32>, #[comptime] count: usize, #[comptime] lanes: usize) {
    #[unroll]
    for round in 0..comptime!(lanes.ilog2()) {
        #[unroll]
        for i in 0..count {
            sums[i] += plane_shuffle_xor(sums[i], comptime!(1u32 << round));
        }
    }
}

/// Takes a token into the state, by its decay and beta, and gives what the unit's columns of y are.
#[cube]
fn step(
    s: &mut Array<f32>,
    token: &Array<f32>,
    gates: (f32, f32),
    scale: f32,
    #[comptime] shape: Shape,
) -> Array<f32> {
    let (decay, beta) = gates;
    let rows = comptime!(FOUR * shape.fours());
    let sums = read_state(&*s, token, shape);
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

/// Up to four of the first `count` elements from `at` on, to the places `(first, stride)` of `to`; zeros for the rest.
#[cube]
fn load<S: Int, N: Size>(
    from: &[Vector<S, N>],
    at: usize,
    count: usize,
    to: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] stride: usize,
    #[comptime] dtype: FloatType,
) {
    #[unroll]
    for j in 0..FOUR {
        to[first + j * stride] = 0.0;
    }
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let vector = from[at / FOUR];
            #[unroll]
            for j in 0..FOUR {
                to[first + j * stride] = widen(u32::cast_from(vector.extract(j)), dtype);
            }
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[first + j * stride] = widen(u32::cast_from(from[at + j].extract(0usize)), dtype);
            }
        }
    }
}

/// The inverse of [`load`].
#[cube]
fn store<S: Int, N: Size>(
    to: &mut [Vector<S, N>],
    at: usize,
    count: usize,
    from: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] stride: usize,
    #[comptime] dtype: FloatType,
) {
    let wide = N::value();
    if comptime!(wide == FOUR) {
        if count > 0 {
            let mut vector = Vector::<S, N>::new(S::from_int(0));
            #[unroll]
            for j in 0..FOUR {
                vector.insert(j, S::cast_from(narrow(from[first + j * stride], dtype)));
            }
            to[at / FOUR] = vector;
        }
    } else {
        #[unroll]
        for j in 0..FOUR {
            if j < count {
                to[at + j] = Vector::<S, N>::new(S::cast_from(narrow(from[first + j * stride], dtype)));
            }
        }
    }
}

/// Where line `j` of block `i` of the unit's part of the matrix at `matrix` begins, and how much of it there is: four
/// columns of a row, or four rows of a column.
#[cube]
fn line(
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] shape: Shape,
) -> (usize, usize) {
    let (lane, column, columns) = place;
    let (key_dim, value_dim) = comptime!((shape.key_dim, shape.value_dim));
    let row = (i * comptime!(shape.lanes) + lane) * FOUR;
    let rows = key_dim - min(row, key_dim.runtime());
    if comptime!(shape.layout == StateLayout::KeyValue) {
        (matrix + (row + j) * value_dim + column, select(j < rows, columns, 0usize))
    } else {
        (matrix + (column + j) * key_dim + row, select(j < columns, rows, 0usize))
    }
}

/// The first place of that line in registers, which hold each row's four columns, and the step to the next.
fn registers(i: usize, j: usize, shape: Shape) -> (usize, usize) {
    let first = i * FOUR * FOUR;
    match shape.layout {
        StateLayout::KeyValue => (first + j * FOUR, 1),
        StateLayout::ValueKey => (first + j, FOUR),
    }
}

/// The part of the matrix at `matrix` that the unit at `(lane, column, columns)` has.
#[cube]
fn load_state<N: Size>(
    state: &[Vector<u32, N>],
    s: &mut Array<f32>,
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] shape: Shape,
) {
    #[unroll]
    for i in 0..comptime!(shape.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (at, count) = line(matrix, place, i, j, shape);
            let (first, step) = comptime!(registers(i, j, shape));
            load::<u32, N>(state, at, count, s, first, step, FloatType::F32);
        }
    }
}

/// The inverse of [`load_state`].
#[cube]
fn store_state<N: Size>(
    state: &mut [Vector<u32, N>],
    s: &Array<f32>,
    matrix: usize,
    place: (usize, usize, usize),
    #[comptime] shape: Shape,
) {
    #[unroll]
    for i in 0..comptime!(shape.fours()) {
        #[unroll]
        for j in 0..FOUR {
            let (at, count) = line(matrix, place, i, j, shape);
            let (first, step) = comptime!(registers(i, j, shape));
            store::<u32, N>(state, at, count, s, first, step, FloatType::F32);
        }
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(shape.dtype, X => with_storage!(shape.gates.dtype, G => Box::new(recurrent::Recurrent::<X, G>::new(
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
        buffer(),
        buffer(),
        (),
        (),
        (),
        (),
        (),
        (),
        shape.vector(),
        shape,
    ))))
}

/// Every kernel for `target`, at the sizes of models and at one that fits no vector.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let of = |dtype, dim, layout, head_map, sign| {
        let columns = if dtype == FloatType::F32 { 1 << 12 } else { 1 << 18 };
        let lanes = policy::gpu_lanes(dim, columns, target.smallest_plane());
        let plain = sign == DecaySign::Rate;
        let qk_norm = if plain { None } else { Some(L2NormConvention::Sum) };
        let gates = GateInputs { raw: !plain, dtype: if plain { FloatType::F32 } else { dtype } };
        let (key_dim, value_dim) = (dim, dim);
        kernel(target, Shape { dtype, key_dim, value_dim, head_map, layout, sign, qk_norm, gates, lanes })
    };
    let mut kernels = Vec::new();
    for dtype in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        kernels.push(of(dtype, 128, StateLayout::KeyValue, HeadMap::Grouped, DecaySign::LogDecay));
        kernels.push(of(dtype, 128, StateLayout::ValueKey, HeadMap::Tiled, DecaySign::Rate));
    }
    kernels.push(of(FloatType::BF16, 256, StateLayout::KeyValue, HeadMap::Grouped, DecaySign::LogDecay));
    kernels.push(of(FloatType::F32, 37, StateLayout::KeyValue, HeadMap::Grouped, DecaySign::LogDecay));
    kernels
}

/// The gates' operands in the kernel's order, and what they are.
fn gate_operands(gates: &DeltaGates) -> Result<([Tensor; 4], GateInputs), KernelError> {
    match *gates {
        DeltaGates::Computed { log_decay, beta } => {
            // What is not there is not read, and anything may stand for it.
            let operands = [log_decay, beta, log_decay, beta].map(Tensor::clone);
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
pub(super) fn launch(problem: &Problem, state: &Tensor, y: &Tensor) -> Result<(), KernelError> {
    let Problem { gpu, inputs, dims, params, dtype } = *problem;
    let GatedDeltaInputs { q, k, v, cu_seqlens, .. } = *inputs;
    let ([a, b, a_log, dt_bias], gates) = gate_operands(&inputs.gates)?;
    let Dims { key_heads, key_dim, value_heads, value_dim } = dims;
    let GatedDeltaRule { qk_norm, scale, head_map, state_layout: layout, sign, .. } = *params;
    let columns = state.len() / key_dim;
    let lanes = policy::gpu_lanes(key_dim, columns, gpu.target().smallest_plane());
    let convention = qk_norm.map(|norm| norm.convention);
    let shape =
        Shape { dtype, key_dim, value_dim, head_map, layout, sign, qk_norm: convention, gates, lanes };
    let index = |value: usize| CHECK.index(value);
    let sequences = state.dim(0);
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: [
            index(value_heads * shape.cubes())?,
            index(sequences.min(CUBES))?,
            index(sequences.div_ceil(CUBES))?,
        ],
        buffers: vec![
            q.memory()?,
            k.memory()?,
            v.memory()?,
            a.memory()?,
            b.memory()?,
            a_log.memory()?,
            dt_bias.memory()?,
            cu_seqlens.memory()?,
            state.memory()?,
            y.memory()?,
        ],
        scalars: vec![
            index(q.dim(0))?,
            index(sequences)?,
            index(key_heads)?,
            index(value_heads)?,
            scale.to_bits(),
            // Not read where nothing is normalised.
            qk_norm.map_or(0.0, |norm| norm.eps).to_bits(),
        ],
    })
}
