//! The recurrence, token after token.
//!
//! A cube goes through all tokens of a sequence with some columns of a value head's state.
//! [`RecurrentConfig::lanes`] units share four columns: each keeps its rows of them in registers
//! over all tokens, and sums over rows are shuffled between the units. As on the CPU, `S^T k` (but
//! where nothing is corrected) and `S^T q` are both read from the state before the step; where each
//! channel of the keys has its own decay, after the rows are multiplied by these. A token's
//! operands are loaded while the one before it is worked on.

#![allow(unsafe_code)] // Launches.

mod memory;

use super::{Problem, Sizes, key_head};
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::exp;
use crate::gpu::sequences::{Sequences, SequencesArgs, bounds, state_row};
#[cfg(test)]
use crate::ops::StepLimits;
use crate::ops::delta_gates;
use crate::ops::gated_delta_rule::{
    CHECK, DeltaGates, GatedDeltaInputs, GatedDeltaRule, HeadMap, Rule, policy,
};
use crate::ops::l2_norm;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};
use memory::{load, load_state, store, store_state};

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RecurrentConfig {
    /// The type of q, k, v and y.
    dtype: FloatType,
    rule: Rule,
    key_dim: usize,
    value_dim: usize,
    head_map: HeadMap,
    /// True if it normalises q and k.
    qk_norm: bool,
    gates: GateInputs,
    /// Units that share a column.
    lanes: usize,
    /// True if states are in a pool.
    pooled: bool,
}

/// The kernel's operands for the gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GateInputs {
    source: GateSource,
    dtype: FloatType,
}

/// The data that gates come as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum GateSource {
    /// `log_decay` and `beta`, in the places of `a` and `b`.
    Computed,
    /// The same, with a decay for each channel of the keys.
    Channels,
    /// `a` and `b`, which they are computed from.
    Raw,
    /// `dt`, in the place of `a`; the bits of the limits.
    Steps([u32; 2]),
}

impl GateInputs {
    /// True if they have parameters per value head.
    fn has_parameters(self) -> bool {
        !matches!(self.source, GateSource::Computed | GateSource::Channels)
    }

    /// The bits of the limits of steps, if the gates are made of these: then `b` is not read.
    fn limits(self) -> Option<[u32; 2]> {
        match self.source {
            GateSource::Steps(limits) => Some(limits),
            GateSource::Computed | GateSource::Channels | GateSource::Raw => None,
        }
    }
}

impl RecurrentConfig {
    /// Elements that are loaded together.
    fn vector(self) -> usize {
        if (self.key_dim | self.value_dim).is_multiple_of(FOUR) { FOUR } else { 1 }
    }

    /// Blocks of four rows per unit. Units take turns with them.
    fn fours(self) -> usize {
        self.key_dim.div_ceil(FOUR * self.lanes)
    }

    /// Floats of a token per unit: those of [`load_token`], in its order.
    fn token(self) -> usize {
        let decays = if self.per_channel() { FOUR * self.fours() } else { 0 };
        2 * FOUR * self.fours() + FOUR + 2 + decays
    }

    /// True if each channel of the keys has a decay of its own.
    fn per_channel(self) -> bool {
        self.gates.source == GateSource::Channels
    }

    /// Cubes that share the columns of a head.
    fn cubes(self) -> usize {
        (self.value_dim.div_ceil(FOUR) * self.lanes).div_ceil(UNITS)
    }
}

/// Columns per unit, and rows per block.
const FOUR: usize = 4;
/// Units of a cube.
const UNITS: usize = 32;

/// The operands that differ from token to token.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct TokenInputs<X: Int, G: Int, N: Size> {
    q: Box<[Vector<X, N>]>,
    k: Box<[Vector<X, N>]>,
    v: Box<[Vector<X, N>]>,
    /// Or `log_decay`.
    a: Box<[G]>,
    /// Or `beta`.
    b: Box<[G]>,
}

/// The parameters of raw gates, per value head; not read where the gates are given.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct HeadInputs {
    a_log: Box<[f32]>,
    dt_bias: Box<[f32]>,
}

/// Two f32: the factor of q, and the epsilon of the norm of q and k, which is not read where there
/// is none.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Constants {
    scale: u32,
    eps: u32,
}

/// One cube per sequence, value head and some columns of the state.
#[kernel]
fn gated_delta_rule_recurrent<X: Int, G: Int, N: Size>(
    inputs: &TokenInputs<X, G, N>,
    of_heads: &HeadInputs,
    of: &Sequences,
    state: &mut [Vector<u32, N>],
    y: &mut [Vector<X, N>],
    sizes: Sizes,
    constants: Constants,
    #[comptime] config: RecurrentConfig,
) {
    let (key_dim, value_dim) = comptime!((config.key_dim, config.value_dim));
    let cubes = comptime!(config.cubes());
    let rows = comptime!(FOUR * config.fours());
    let unit = (CUBE_POS_X as usize % cubes) * UNITS + UNIT_POS_X as usize;
    let lane = unit % comptime!(config.lanes);
    let column = unit / comptime!(config.lanes) * comptime!(FOUR);
    let head = CUBE_POS_X as usize / cubes;
    let sequence = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    let (key_heads, value_heads) = (sizes.key_heads as usize, sizes.value_heads as usize);
    let key_head = key_head(key_heads, value_heads, head, config.head_map);
    let scale = f32::reinterpret(constants.scale);
    let (sequences, states) = (sizes.sequences as usize, sizes.states as usize);
    let state_row = state_row(of, sequence, (sequences, states), config.pooled);
    // The columns from there on; units beyond the last column take part in sums.
    let columns = comptime!(value_dim) - min(column, comptime!(value_dim));

    if state_row < states {
        let matrix = (state_row * value_heads + head) * comptime!(key_dim * value_dim);
        let mut s = Array::<f32>::new(comptime!(rows * FOUR));
        load_state::<N>(&*state, &mut s, matrix, (lane, column, columns), config);
        let (start, end) = bounds(&of.offsets, sequence, sizes.tokens as usize);
        let at = Location { head, key_head, key_heads, value_heads, lane, column, columns };
        let mut token = Array::<f32>::new(comptime!(config.token()));
        // Loaded here, so that a step does not wait for them once it has its token.
        let mut a_log_of_head = 0.0f32;
        let mut dt_bias_of_head = 0.0f32;
        if comptime!(config.gates.has_parameters()) {
            a_log_of_head = of_heads.a_log[head];
            dt_bias_of_head = of_heads.dt_bias[head];
        }
        if start < end {
            load_token::<X, G, N>(inputs, start, &at, &mut token, config);
        }
        for t in start..end {
            let mut next = Array::<f32>::new(comptime!(config.token()));
            #[unroll]
            for i in 0..comptime!(config.token()) {
                next[i] = 0.0;
            }
            if t + 1usize < end {
                load_token::<X, G, N>(inputs, t + 1usize, &at, &mut next, config);
            }
            normalise(&mut token, f32::reinterpret(constants.eps), config);
            let (a, b) = (token[comptime!(2 * rows + FOUR)], token[comptime!(2 * rows + FOUR + 1)]);
            let gates = gates(a, b, a_log_of_head, dt_bias_of_head, config);
            if comptime!(config.per_channel()) {
                decay_rows(&mut s, &token, config);
            }
            let ys = step(&mut s, &token, gates, scale, config);
            if lane == 0 {
                let gate = t * value_heads + head;
                store::<X, N>(y, gate * value_dim + column, columns, &ys, 0usize, config.dtype);
            }
            #[unroll]
            for i in 0..comptime!(config.token()) {
                token[i] = next[i];
            }
        }
        if start < end {
            store_state::<N>(state, &s, matrix, (lane, column, columns), config);
        }
    }
}

/// The heads and columns of a unit.
#[derive(CubeType, Clone, Copy)]
struct Location {
    head: usize,
    key_head: usize,
    key_heads: usize,
    value_heads: usize,
    lane: usize,
    /// Its first column, and how many there are from there on.
    column: usize,
    columns: usize,
}

/// Loads a unit's floats of a token: its part of the keys and of the queries, the values of its
/// columns, and what the gates come as; then the logarithms of the decays of its channels, if they
/// have their own.
#[cube]
fn load_token<X: Int, G: Int, N: Size>(
    of: &TokenInputs<X, G, N>,
    t: usize,
    at: &Location,
    token: &mut Array<f32>,
    #[comptime] config: RecurrentConfig,
) {
    let (key_dim, rows) = comptime!((config.key_dim, FOUR * config.fours()));
    let gate = t * at.value_heads + at.head;
    let key = (t * at.key_heads + at.key_head) * key_dim;
    #[unroll]
    for i in 0..comptime!(config.fours()) {
        let row = (i * comptime!(config.lanes) + at.lane) * FOUR;
        let count = key_dim - min(row, key_dim.runtime());
        load::<X, N>(&of.k, key + row, count, token, comptime!(i * FOUR), config.dtype);
        load::<X, N>(&of.q, key + row, count, token, comptime!(rows + i * FOUR), config.dtype);
    }
    let value = gate * comptime!(config.value_dim) + at.column;
    load::<X, N>(&of.v, value, at.columns, token, comptime!(2 * rows), config.dtype);
    if comptime!(config.per_channel()) {
        let first = comptime!(2 * rows + FOUR + 2);
        token[comptime!(2 * rows + FOUR)] = 0.0;
        #[unroll]
        for i in 0..comptime!(config.fours()) {
            let row = (i * comptime!(config.lanes) + at.lane) * FOUR;
            let count = key_dim - min(row, key_dim.runtime());
            #[unroll]
            for j in 0..FOUR {
                token[comptime!(first + i * FOUR + j)] = 0.0;
                if j < count {
                    token[comptime!(first + i * FOUR + j)] =
                        read(&of.a, gate * key_dim + row + j, config.gates.dtype);
                }
            }
        }
    } else {
        token[comptime!(2 * rows + FOUR)] = read(&of.a, gate, config.gates.dtype);
    }
    if comptime!(config.gates.limits().is_none()) {
        token[comptime!(2 * rows + FOUR + 1)] = read(&of.b, gate, config.gates.dtype);
    }
}

/// Multiplies the unit's rows of the state by a token's decays of their channels.
#[cube]
fn decay_rows(s: &mut Array<f32>, token: &Array<f32>, #[comptime] config: RecurrentConfig) {
    let rows = comptime!(FOUR * config.fours());
    #[unroll]
    for r in 0..rows {
        let decay = exp(token[comptime!(2 * rows + FOUR + 2 + r)]);
        #[unroll]
        for c in 0..FOUR {
            s[r * FOUR + c] *= decay;
        }
    }
}

/// A token's decay and beta; the former is 1 where each channel has its own.
#[cube]
fn gates(a: f32, b: f32, a_log: f32, dt_bias: f32, #[comptime] config: RecurrentConfig) -> (f32, f32) {
    if comptime!(config.gates.source == GateSource::Raw) {
        let (log_decay, beta) = delta_gates::gpu::compute_gates(a, b, a_log, dt_bias);
        (exp(log_decay), beta)
    } else if comptime!(config.gates.limits().is_some()) {
        let limits = comptime!(config.gates.limits().expect("there are some"));
        let (log_decay, beta) = delta_gates::compute_step_gates(a, a_log, dt_bias, limits);
        (exp(log_decay), beta)
    } else if comptime!(config.per_channel()) {
        (1.0f32, b)
    } else {
        (exp(a), b)
    }
}

/// Normalises the unit's part of a token's keys and queries, where that is asked for.
#[cube]
fn normalise(token: &mut Array<f32>, eps: f32, #[comptime] config: RecurrentConfig) {
    if comptime!(config.qk_norm) {
        let rows = comptime!(FOUR * config.fours());
        let mut sums = Array::<f32>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            sums[i] = 0.0;
            #[unroll]
            for r in 0..rows {
                sums[i] = fma(token[i * rows + r], token[i * rows + r], sums[i]);
            }
        }
        add_lanes(&mut sums, 0usize, 2usize, config.lanes);
        #[unroll]
        for i in 0..2usize {
            let scale = l2_norm::gpu::inverse_length(sums[i], eps);
            #[unroll]
            for r in 0..rows {
                token[i * rows + r] *= scale;
            }
        }
    }
}

/// Those of the sums from `first` to `end` over the units that share a column, for all of them.
#[cube]
fn add_lanes(
    sums: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] end: usize,
    #[comptime] lanes: usize,
) {
    #[unroll]
    for round in 0..comptime!(lanes.ilog2()) {
        #[unroll]
        for i in first..end {
            sums[i] += plane_shuffle_xor(sums[i], comptime!(1u32 << round));
        }
    }
}

/// Takes a token into the state, by its decay and beta, and gives the unit's columns of y.
#[cube]
fn step(
    s: &mut Array<f32>,
    token: &Array<f32>,
    gates: (f32, f32),
    scale: f32,
    #[comptime] config: RecurrentConfig,
) -> Array<f32> {
    let (decay, beta) = gates;
    let rows = comptime!(FOUR * config.fours());
    let sums = read_state(&*s, token, config);
    let mut ys = Array::<f32>::new(comptime!(FOUR));
    #[unroll]
    for c in 0..FOUR {
        let delta = if comptime!(config.rule == Rule::Delta) {
            beta * (token[comptime!(2 * rows + c)] - decay * sums[c])
        } else {
            beta * token[comptime!(2 * rows + c)]
        };
        ys[c] = scale * (decay * sums[comptime!(FOUR + c)] + sums[comptime!(2 * FOUR)] * delta);
        #[unroll]
        for r in 0..rows {
            s[r * FOUR + c] = fma(token[r], delta, decay * s[r * FOUR + c]);
        }
    }
    ys
}

/// `S^T k` (0 where nothing is corrected) and `S^T q` for each column, then `k . q`.
#[cube]
fn read_state(s: &Array<f32>, token: &Array<f32>, #[comptime] config: RecurrentConfig) -> Array<f32> {
    let rows = comptime!(FOUR * config.fours());
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
            if comptime!(config.rule == Rule::Delta) {
                sums[c] = fma(s[r * FOUR + c], k, sums[c]);
            }
            sums[FOUR + c] = fma(s[r * FOUR + c], q, sums[FOUR + c]);
        }
        sums[2 * FOUR] = fma(k, q, sums[2 * FOUR]);
    }
    let first = comptime!(if config.rule == Rule::Delta { 0 } else { FOUR });
    add_lanes(&mut sums, first, count, config.lanes);
    sums
}

fn compiled(target: &Target, config: RecurrentConfig) -> Kernel<GatedDeltaRuleRecurrent<'static>> {
    with_storage!(config.dtype, X => with_storage!(config.gates.dtype, G => {
        GatedDeltaRuleRecurrent::kernel::<X, G>(target, UNITS, config.vector(), config)
    }))
}

/// Every kernel for `target`, at the sizes of models and at one that fits no vector.
#[cfg(test)]
pub(super) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let with = |dtype, dim, pooled| {
        let columns = if dtype == FloatType::F32 { 1 << 12 } else { 1 << 18 };
        RecurrentConfig {
            dtype,
            rule: Rule::Delta,
            key_dim: dim,
            value_dim: dim,
            head_map: HeadMap::Grouped,
            qk_norm: true,
            gates: GateInputs { source: GateSource::Raw, dtype },
            lanes: policy::gpu_lanes(dim, columns, target.smallest_plane()),
            pooled,
        }
    };
    let of = |source| GateInputs { source, dtype: FloatType::F32 };
    // The heads of Qwen3.5's GGUF, and gates that are there.
    let tiled = RecurrentConfig {
        head_map: HeadMap::Tiled,
        qk_norm: false,
        gates: of(GateSource::Computed),
        ..with(FloatType::F16, 128, false)
    };
    // Mamba-2's heads of 64 values.
    let additive = |dtype, pooled| {
        let gates = GateInputs { source: GateSource::Steps(StepLimits::NONE.bits()), dtype };
        let config = with(dtype, 128, pooled);
        RecurrentConfig { rule: Rule::Additive, value_dim: 64, qk_norm: false, gates, ..config }
    };
    let mut kernels =
        [FloatType::F32, FloatType::F16, FloatType::BF16].map(|dtype| with(dtype, 128, false)).to_vec();
    kernels.push(tiled);
    kernels.push(with(FloatType::BF16, 256, false));
    kernels.push(with(FloatType::F32, 37, false));
    kernels.push(with(FloatType::BF16, 128, true));
    kernels.extend([additive(FloatType::F16, false), additive(FloatType::BF16, true)]);
    for (dtype, dim, pooled) in
        [(FloatType::F32, 128, false), (FloatType::BF16, 128, true), (FloatType::F16, 37, false)]
    {
        kernels.push(RecurrentConfig { gates: of(GateSource::Channels), ..with(dtype, dim, pooled) });
    }
    kernels.into_iter().map(|config| compiled(target, config).code()).collect()
}

/// The operands `a`, `b`, `a_log` and `dt_bias`, and what they are.
fn gate_operands(gates: &DeltaGates) -> Result<([Tensor; 4], GateInputs), KernelError> {
    match *gates {
        DeltaGates::Computed { log_decay, beta } => {
            // Unused operands get a placeholder buffer.
            let operands = [log_decay, beta, log_decay, beta].map(Tensor::clone);
            let source = if gates.per_channel() { GateSource::Channels } else { GateSource::Computed };
            Ok((operands, GateInputs { source, dtype: FloatType::F32 }))
        }
        DeltaGates::Channels { .. } => {
            let (log_decay, beta) = gates.computed()?;
            gate_operands(&DeltaGates::Computed { log_decay: &log_decay, beta: &beta })
        }
        DeltaGates::Raw { a, b, a_log, dt_bias } => {
            let dtype = if a.dtype() == b.dtype() { CHECK.float("a", a)? } else { FloatType::F32 };
            let (a, b) = (a.cast(dtype.dtype())?, b.cast(dtype.dtype())?);
            let operands = [a, b, a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?];
            Ok((operands, GateInputs { source: GateSource::Raw, dtype }))
        }
        DeltaGates::Steps { dt, a_log, dt_bias, limits } => {
            let operands = [dt.clone(), dt.clone(), a_log.cast(DType::F32)?, dt_bias.cast(DType::F32)?];
            let source = GateSource::Steps(limits.bits());
            Ok((operands, GateInputs { source, dtype: CHECK.float("dt", dt)? }))
        }
    }
}

/// Launches the recurrence over all sequences.
pub(super) fn launch(problem: &Problem, state: &Tensor, y: &Tensor) -> Result<(), KernelError> {
    let Problem { gpu, inputs, dims, params, dtype } = *problem;
    let GatedDeltaInputs { q, k, v, cu_seqlens, slots, .. } = *inputs;
    let ([a, b, a_log, dt_bias], gates) = gate_operands(&inputs.gates)?;
    let GatedDeltaRule { rule, qk_norm, scale, head_map, .. } = *params;
    let (key_dim, value_dim) = (dims.key_dim, dims.value_dim);
    // A step's bits must not depend on how many other sequences take one.
    let sequences = inputs.sequences();
    let alone = if slots.is_some() { 1 } else { sequences };
    let columns = alone * dims.value_heads * value_dim;
    let config = RecurrentConfig {
        dtype,
        rule,
        key_dim,
        value_dim,
        head_map,
        qk_norm: qk_norm.is_some(),
        gates,
        lanes: policy::gpu_lanes(key_dim, columns, gpu.target().smallest_plane()),
        pooled: slots.is_some(),
    };
    let cubes = [dims.value_heads * config.cubes(), sequences.min(CUBES), sequences.div_ceil(CUBES)];
    let [x, y_cubes, z] = cubes.map(|count| CHECK.index(count));
    let arguments = GatedDeltaRuleRecurrent {
        inputs: TokenInputsArgs {
            q: q.buffer()?,
            k: k.buffer()?,
            v: v.buffer()?,
            a: a.buffer()?,
            b: b.buffer()?,
        },
        of_heads: HeadInputsArgs { a_log: a_log.buffer()?, dt_bias: dt_bias.buffer()? },
        of: SequencesArgs::new(cu_seqlens, slots)?,
        state: state.buffer()?,
        y: y.buffer()?,
        sizes: problem.sizes(state)?,
        constants: Constants { scale: scale.to_bits(), eps: qk_norm.unwrap_or(0.0).to_bits() },
    };
    // SAFETY: the sizes are the tensors', rows and columns past the last are neither read nor
    // written, and a sequence whose offsets go past the tokens, or its slot past the pool, is left
    // out.
    unsafe { gpu.launch(compiled(gpu.target(), config), [x?, y_cubes?, z?], arguments) }
}
