//! The source of a stream's x: memory, or the result that another op would write there. Every cube
//! then makes all of x, in shared memory: it is a few times ten kilobytes that the cache has, and a
//! launch less. The planes that multiply make it, a unit some vectors of 8 values.

use super::super::super::problem::{Source, VECTOR};
use crate::gpu::cuda::ptx;
use crate::gpu::float::{narrow, widen};
use crate::gpu::math::reciprocal;
use crate::gpu::rows::{Sum, reduce_plane};
use crate::ops::glu::Gate;
use crate::ops::glu::gpu as gates;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Planes of a [`stream`](super::super::stream) that make x and multiply.
pub(in super::super) const PLANES: usize = 16;
/// The meeting point of these planes: 0 is for all units.
pub(in super::super) const MEETING: u32 = 1;

/// The configuration with which a cube makes x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct XConfig {
    pub source: Option<Source>,
    /// The type of x.
    pub dtype: FloatType,
    /// Vectors that a unit makes at the most.
    pub batch: usize,
    /// Units that make x.
    pub units: usize,
    /// The type of the other operand.
    other: FloatType,
    /// Vectors of a head of x and of its gates, where those lie in another way.
    heads: Option<(usize, usize)>,
    /// The weight of a norm, if there is one.
    norm: Option<Weight>,
}

/// The layout of the weight of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Weight {
    /// As long as x.
    Whole,
    /// So many vectors, again for each head.
    Repeated(usize),
}

impl XConfig {
    /// Of `values` values at the most, by `units` units.
    pub fn new(source: Option<Source>, dtype: FloatType, values: usize, units: usize) -> Self {
        let (other, heads, norm) = match source {
            None | Some(Source::Glu(_)) => (dtype, None, None),
            Some(Source::HeadsGlu { vectors, gates, .. }) => (dtype, Some((vectors, gates)), None),
            Some(Source::GatedRmsNorm { vectors }) => (dtype, None, Some(Weight::Repeated(vectors))),
            Some(Source::AddRmsNorm { h }) => (h, None, Some(Weight::Whole)),
        };
        Self { source, dtype, batch: values.div_ceil(VECTOR * units), units, other, heads, norm }
    }

    /// Vectors of 16 bytes that units share.
    pub fn vectors(self) -> usize {
        if self.source.is_none() { 1 } else { self.batch * self.units }
    }

    /// Bytes that units share.
    pub fn shared(self) -> usize {
        16 * self.vectors() + 4 * PLANES
    }
}

/// The vector that a unit makes as its `j`-th; one that it does not store where there are fewer.
#[cube]
fn vector_of_unit(#[comptime] j: usize, #[comptime] config: XConfig) -> usize {
    UNIT_POS_X as usize + comptime!(j * config.units)
}

/// The operands of x: `count` vectors of both, from vector `first` on.
#[derive(CubeType)]
pub(in super::super) struct Inputs<'a> {
    pub x: &'a [Vector<u32, Const<4>>],
    pub other: &'a [Vector<u32, Const<4>>],
    pub first: usize,
    pub count: usize,
}

#[cube]
impl<'a> Inputs<'a> {
    pub fn new(
        x: &'a [Vector<u32, Const<4>>],
        other: &'a [Vector<u32, Const<4>>],
        first: usize,
        count: usize,
    ) -> Inputs<'a> {
        Inputs::<'a> { x, other, first, count }
    }
}

/// A norm: a unit's part of its weight, and what is added to the mean square.
#[derive(CubeType)]
pub(in super::super) struct Norm {
    factors: Array<f32>,
    eps: f32,
}

/// A unit's part of the norm of x's `count` vectors.
#[cube]
pub(in super::super) fn norm(
    weight: &[Vector<u32, Const<4>>],
    eps: f32,
    count: usize,
    #[comptime] config: XConfig,
) -> Norm {
    let mut factors = Array::<f32>::new(comptime!(config.batch * VECTOR));
    if comptime!(config.norm.is_some()) {
        #[unroll]
        for j in 0..comptime!(config.batch) {
            let mut at = min(vector_of_unit(j, config), count - 1);
            if let Some(Weight::Repeated(vectors)) = comptime!(config.norm) {
                at %= vectors;
            }
            load(weight, at, &mut factors, j, FloatType::F32);
        }
    }
    Norm { factors, eps }
}

/// Makes x, and stores the sum that it is the norm of.
#[cube]
pub(in super::super) fn make(
    from: &Inputs<'_>,
    norm: &Norm,
    sum: &mut [Vector<u32, Const<4>>],
    made: &mut Shared<[Vector<u32, Const<4>>]>,
    #[comptime] config: XConfig,
) {
    let (mut values, others) = operands(from, config);
    match comptime!(config.source) {
        None => {}
        Some(Source::Glu(by)) => gate(&mut values, &others, by, config),
        Some(Source::HeadsGlu { by, .. }) =>
        {
            #[unroll]
            for i in 0..comptime!(config.batch * VECTOR) {
                values[i] = gates::glu::<Fast>(values[i], others[i], by);
            }
        }
        Some(Source::GatedRmsNorm { vectors }) => norm_and_gate(&mut values, &others, norm, vectors, config),
        Some(Source::AddRmsNorm { .. }) => add_and_norm(&mut values, &others, norm, sum, from.count, config),
    }
    keep(&values, made, config);
}

/// Makes x as [`Source::Glu`] says.
#[cube]
pub(in super::super) fn glu(
    from: &Inputs<'_>,
    made: &mut Shared<[Vector<u32, Const<4>>]>,
    #[comptime] config: XConfig,
) {
    let (mut values, others) = operands(from, config);
    if let Some(Source::Glu(by)) = comptime!(config.source) {
        gate(&mut values, &others, by, config);
    }
    keep(&values, made, config);
}

/// The sigmoid that is good enough for values of 16 bits.
pub(in super::super) struct Fast;

#[cube]
impl gates::Sigmoid for Fast {
    fn sigmoid(x: f32) -> f32 {
        ptx::sigmoid(x)
    }
}

/// A unit's values of x and of the other operand.
#[cube]
fn operands(from: &Inputs<'_>, #[comptime] config: XConfig) -> (Array<f32>, Array<f32>) {
    let mut values = Array::<f32>::new(comptime!(config.batch * VECTOR));
    let mut others = Array::<f32>::new(comptime!(config.batch * VECTOR));
    #[unroll]
    for j in 0..comptime!(config.batch) {
        let at = from.first + min(vector_of_unit(j, config), from.count - 1);
        load(from.x, at, &mut values, j, config.dtype);
        let mut behind = at;
        if let Some((vectors, gates)) = comptime!(config.heads) {
            behind = at / vectors * gates + comptime!(gates - vectors) + at % vectors;
        }
        load(from.other, behind, &mut others, j, comptime!(config.other));
    }
    (values, others)
}

/// The others by the gate that is `values`.
#[cube]
fn gate(values: &mut Array<f32>, others: &Array<f32>, #[comptime] by: Gate, #[comptime] config: XConfig) {
    #[unroll]
    for i in 0..comptime!(config.batch * VECTOR) {
        values[i] = gates::glu::<Fast>(others[i], values[i], by);
    }
}

/// Puts what a unit made, rounded, where the others find it.
#[cube]
fn keep(values: &Array<f32>, made: &mut Shared<[Vector<u32, Const<4>>]>, #[comptime] config: XConfig) {
    #[unroll]
    for j in 0..comptime!(config.batch) {
        made[vector_of_unit(j, config)] = vector(values, comptime!(j * VECTOR), config.dtype);
    }
}

/// Norms heads of `vectors` vectors, and multiplies them with `silu(others)`.
#[cube]
fn norm_and_gate(
    values: &mut Array<f32>,
    others: &Array<f32>,
    norm: &Norm,
    #[comptime] vectors: usize,
    #[comptime] config: XConfig,
) {
    #[unroll]
    for j in 0..comptime!(config.batch) {
        // A plane has whole heads.
        let squares = reduce_plane::<f32, Sum>(squares(&*values, j), vectors);
        let root = root(squares, vectors as u32 * 8u32, norm.eps);
        #[unroll]
        for i in 0..VECTOR {
            let at = comptime!(j * VECTOR + i);
            values[at] = values[at] * root * norm.factors[at] * (others[at] * ptx::sigmoid(others[at]));
        }
    }
}

/// Adds to the values, of which one cube stores the sums, and norms them.
#[cube]
fn add_and_norm(
    values: &mut Array<f32>,
    added: &Array<f32>,
    norm: &Norm,
    sum: &mut [Vector<u32, Const<4>>],
    count: usize,
    #[comptime] config: XConfig,
) {
    let vectors = comptime!(config.other.size() / 2);
    let mut sums = Array::<f32>::new(comptime!(config.batch * VECTOR));
    let mut all = 0.0f32;
    #[unroll]
    for j in 0..comptime!(config.batch) {
        #[unroll]
        for i in 0..VECTOR {
            let at = comptime!(j * VECTOR + i);
            sums[at] = values[at] + added[at];
        }
        all += select(vector_of_unit(j, config) < count, squares(&sums, j), 0.0f32.runtime());
        if CUBE_POS_X == 0u32 && vector_of_unit(j, config) < count {
            #[unroll]
            for v in 0..vectors {
                let words = vector(&sums, comptime!(j * VECTOR + 4 * v), comptime!(config.other));
                sum[vector_of_unit(j, config) * vectors + v] = words;
            }
        }
    }
    let root = root(of_cube(all), count as u32 * 8u32, norm.eps);
    #[unroll]
    for i in 0..comptime!(config.batch * VECTOR) {
        values[i] = sums[i] * root * norm.factors[i];
    }
}

/// The 8 values of vector `at`, as a unit's `j`-th.
#[cube]
fn load(
    x: &[Vector<u32, Const<4>>],
    at: usize,
    values: &mut Array<f32>,
    #[comptime] j: usize,
    #[comptime] dtype: FloatType,
) {
    #[unroll]
    for v in 0..comptime!(dtype.size() / 2) {
        let words = x[at * comptime!(dtype.size() / 2) + v];
        #[unroll]
        for i in 0..4usize {
            let word = words.extract(i);
            if comptime!(dtype == FloatType::F32) {
                values[comptime!(j * VECTOR + 4 * v + i)] = f32::reinterpret(word);
            } else {
                values[comptime!(j * VECTOR + 2 * i)] = widen(word & 0xffffu32, dtype);
                values[comptime!(j * VECTOR + 2 * i + 1)] = widen(word >> 16u32, dtype);
            }
        }
    }
}

/// The values from `first` on that fill 16 bytes, rounded.
#[cube]
fn vector(
    values: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] dtype: FloatType,
) -> Vector<u32, Const<4>> {
    let mut vector = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for i in 0..4usize {
        if comptime!(dtype == FloatType::F32) {
            vector.insert(i, u32::reinterpret(values[first + i]));
        } else {
            let low = narrow(values[comptime!(first + 2 * i)], dtype);
            vector.insert(i, low | (narrow(values[comptime!(first + 2 * i + 1)], dtype) << 16u32));
        }
    }
    vector
}

/// The sum of the squares of a unit's `j`-th vector.
#[cube]
fn squares(values: &Array<f32>, #[comptime] j: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..VECTOR {
        let value = values[comptime!(j * VECTOR + i)];
        sum = fma(value, value, sum);
    }
    sum
}

/// The factor by which a norm scales `width` values.
#[cube]
fn root(squares: f32, width: u32, eps: f32) -> f32 {
    reciprocal((squares / f32::cast_from(width) + eps).sqrt())
}

/// The sum of what all units that make x have.
#[cube]
fn of_cube(sum: f32) -> f32 {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    let of_plane = reduce_plane::<f32, Sum>(sum, 32usize);
    let mut partial = Shared::<[f32]>::new_slice(PLANES);
    if unit == 0 {
        partial[plane] = of_plane;
    }
    ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
    reduce_plane::<f32, Sum>(partial[unit % PLANES], PLANES)
}
