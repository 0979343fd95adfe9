//! Attention with keys and values streamed through registers: some units share each key, a cube takes a few query
//! rows through all keys or through a part of them, and each unit keeps the sums of its elements of all rows.
//!
//! A query row is a token and one of the query heads that read the same key head; rows are counted by token.

use super::combine::{NOTHING, Sight, inverse};
use crate::gpu::float::{narrow, read, widen};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// The type of q and y.
    pub dtype: FloatType,
    /// The type of k and v.
    pub cache: FloatType,
    /// D.
    pub width: usize,
    /// Dv.
    pub value_width: usize,
    /// Query rows of a cube.
    pub rows: usize,
    /// Units that share a key.
    pub lanes: usize,
    /// Keys that those take at once.
    pub keys: usize,
    /// Units that run in step.
    pub plane: usize,
    /// Planes of a cube: each takes some of the keys.
    pub planes: usize,
    /// Whether rows of k and v are whole vectors of 16 bytes.
    pub wide: bool,
    /// Whether several cubes share the keys: then y is what `combine.rs` puts together.
    pub split: bool,
}

impl Shape {
    /// Elements of a vector.
    fn vector(self) -> usize {
        if self.wide { 16 / self.cache.size() } else { 1 }
    }

    /// Vectors of a row of `width` that a unit has.
    fn loads(self, width: usize) -> usize {
        (width / self.vector()).div_ceil(self.lanes)
    }

    /// Elements of a row of `width` that a unit has.
    fn slots(self, width: usize) -> usize {
        self.loads(width) * self.vector()
    }

    /// Whether some units have less of a row than others.
    fn ragged(self, width: usize) -> bool {
        !(width / self.vector()).is_multiple_of(self.lanes)
    }

    /// Keys that a plane takes at once.
    pub fn step(self) -> usize {
        self.plane / self.lanes * self.keys
    }
}

/// See [`attention`](crate::ops::attention()). y is of q's type, or holds the bits of f32 where the keys are split.
#[cube(launch_unchecked)]
pub(super) fn stream<Q: Int, K: Int, N: Size, Y: Int>(
    q: &[Q],
    k: &[Vector<K, N>],
    v: &[Vector<K, N>],
    positions: &[u32],
    y: &mut [Y],
    scales: &mut [f32],
    rows: u32,
    group: u32,
    capacity: u32,
    window: u32,
    scale: u32,
    first: u32,
    #[comptime] shape: Shape,
) {
    let count = comptime!(shape.rows);
    // The first row of the last tokens, which have most keys, goes first.
    let row0 = (first + CUBE_COUNT_X - 1u32 - CUBE_POS_X) * comptime!(count as u32);
    let lane = UNIT_POS_X % comptime!(shape.lanes as u32);
    let of = Rows { first: row0, count: rows, group, lane };
    let queries = load_queries(q, positions, &of, (capacity, window), shape);
    let mut sight = queries.sight(shape);
    if comptime!(shape.split) {
        sight.share(comptime!((shape.step() * shape.planes) as u32));
    }

    let mut sums = Sums {
        values: Array::<f32>::new(comptime!(count * shape.slots(shape.value_width))),
        max: Array::<f32>::new(count),
        weights: Array::<f32>::new(count),
    };
    sums.clear(shape);
    let plane = UNIT_POS_X / comptime!(shape.plane as u32);
    let member = UNIT_POS_X % comptime!(shape.plane as u32) / comptime!(shape.lanes as u32);
    // All planes go round together: the compiler must see that shuffles are met by all of one.
    let mut at = sight.begin;
    while at < sight.end {
        let first = at + plane * comptime!(shape.step() as u32) + member;
        let keys =
            Keys { base: CUBE_POS_Y * capacity, first, end: sight.end, lane, scale: f32::reinterpret(scale) };
        let next = at + comptime!((shape.step() * shape.planes) as u32);
        if at >= sight.all_begin && next <= min(sight.all_end, sight.end) {
            step::<K, N>(k, v, &queries, &mut sums, &keys, false, shape);
        } else {
            step::<K, N>(k, v, &queries, &mut sums, &keys, true, shape);
        }
        at = next;
    }
    sums.gather(shape);
    let out = Out { of, some: sight.begin < sight.end };
    store::<Y>(&sums, y, scales, &out, shape);
}

/// A cube's rows of q and y: from row `first` of a head's `count` on, `group` of a token.
#[derive(CubeType)]
struct Rows {
    first: u32,
    count: u32,
    group: u32,
    lane: u32,
}

/// A row's place among those of all heads.
#[cube]
fn place(of: &Rows, row: u32) -> u32 {
    (row / of.group * CUBE_COUNT_Y + CUBE_POS_Y) * of.group + row % of.group
}

/// What a unit has of its rows of q, and the keys that each of them sees: from `low` to `high`.
#[derive(CubeType)]
struct Queries {
    values: Array<f32>,
    low: Array<u32>,
    high: Array<u32>,
}

/// A cube's queries, which see what `(capacity, window)` leaves of the keys up to their positions.
#[cube]
fn load_queries<Q: Int>(
    q: &[Q],
    positions: &[u32],
    of: &Rows,
    keys: (u32, u32),
    #[comptime] shape: Shape,
) -> Queries {
    let (capacity, window) = keys;
    let (count, slots) = comptime!((shape.rows, shape.slots(shape.width)));
    let mut low = Array::<u32>::new(count);
    let mut high = Array::<u32>::new(count);
    let mut values = Array::<f32>::new(comptime!(count * slots));
    #[unroll]
    for r in 0..count {
        // Rows past the last are computed and not stored.
        let row = min(of.first + comptime!(r as u32), of.count - 1u32);
        let position = positions[(row / of.group) as usize];
        // A position beyond the capacity sees nothing.
        high[r] = select(position < capacity, position + 1u32, 0u32);
        low[r] = high[r] - min(high[r], window);
        let at = place(of, row);
        #[unroll]
        for i in 0..slots {
            let element = element(of.lane, i, shape);
            let mut value = 0.0f32;
            if element < comptime!(shape.width as u32) {
                value = read(q, (at * comptime!(shape.width as u32) + element) as usize, shape.dtype);
            }
            values[r * slots + i] = value;
        }
    }
    Queries { values, low, high }
}

#[cube]
impl Queries {
    /// What all rows together see.
    fn sight(&self, #[comptime] shape: Shape) -> Sight {
        let mut begin = self.low[0usize];
        let mut end = self.high[0usize];
        let mut all_begin = begin;
        let mut all_end = end;
        #[unroll]
        for r in 1..comptime!(shape.rows) {
            let (low, high) = (self.low[r], self.high[r]);
            // Nothing begins nowhere.
            begin = min(begin, select(high == 0u32, begin, low));
            begin = select(end == 0u32, low, begin);
            end = max(end, high);
            all_begin = max(all_begin, low);
            all_end = min(all_end, high);
        }
        Sight { begin, end, all_begin, all_end }
    }

    /// Whether row `r` sees key `u` of a step.
    fn see(&self, keys: &Keys, #[comptime] r: usize, #[comptime] u: usize, #[comptime] shape: Shape) -> bool {
        let key = keys.first + comptime!((u * shape.plane / shape.lanes) as u32);
        key >= self.low[r] && key < min(self.high[r], keys.end)
    }
}

/// Where slot `i` of a unit lies in a row.
#[cube]
fn element(lane: u32, #[comptime] i: usize, #[comptime] shape: Shape) -> u32 {
    let vector = comptime!(shape.vector());
    (lane + comptime!((i / vector * shape.lanes) as u32)) * comptime!(vector as u32)
        + comptime!((i % vector) as u32)
}

/// What a unit has of its rows: over the keys that it has met, sums of the weighted values and of the weights, both
/// over the exponential of the greatest score.
#[derive(CubeType)]
struct Sums {
    values: Array<f32>,
    max: Array<f32>,
    weights: Array<f32>,
}

/// The keys of a step: every `plane / lanes`th from `first` on, before `end`.
#[derive(CubeType)]
struct Keys {
    /// The row of the head's first key.
    base: u32,
    first: u32,
    end: u32,
    lane: u32,
    scale: f32,
}

#[cube]
impl Sums {
    fn clear(&mut self, #[comptime] shape: Shape) {
        #[unroll]
        for r in 0..comptime!(shape.rows) {
            self.max[r] = NOTHING;
            self.weights[r] = 0.0;
        }
        #[unroll]
        for i in 0..comptime!(shape.rows * shape.slots(shape.value_width)) {
            self.values[i] = 0.0;
        }
    }

    /// Adds up what the groups of lanes of a plane have.
    fn gather(&mut self, #[comptime] shape: Shape) {
        let slots = comptime!(shape.slots(shape.value_width));
        #[unroll]
        for i in 0..comptime!((shape.plane / shape.lanes).trailing_zeros() as usize) {
            let mask = comptime!((shape.lanes << i) as u32);
            #[unroll]
            for r in 0..comptime!(shape.rows) {
                let other = plane_shuffle_xor(self.max[r], mask);
                let greatest = max(self.max[r], other);
                let mine = (self.max[r] - greatest).exp();
                let theirs = (other - greatest).exp();
                let weights = plane_shuffle_xor(self.weights[r], mask);
                self.max[r] = greatest;
                self.weights[r] = self.weights[r] * mine + weights * theirs;
                #[unroll]
                for s in 0..slots {
                    let value = plane_shuffle_xor(self.values[r * slots + s], mask);
                    self.values[r * slots + s] = self.values[r * slots + s] * mine + value * theirs;
                }
            }
        }
    }
}

/// Element `i` of a vector of a row.
#[cube]
fn lane_value<K: Int, N: Size>(vector: Vector<K, N>, #[comptime] i: usize, #[comptime] shape: Shape) -> f32 {
    if comptime!(shape.wide && shape.cache.size() == 2) {
        let word = u32::cast_from(vector.extract(comptime!(i / 2)));
        if comptime!(i.is_multiple_of(2)) {
            widen(word & 0xffffu32, shape.cache)
        } else if comptime!(shape.cache == FloatType::BF16) {
            f32::reinterpret(word & 0xffff_0000u32)
        } else {
            widen(word >> 16u32, shape.cache)
        }
    } else {
        widen(u32::cast_from(vector.extract(i)), shape.cache)
    }
}

/// A unit's vectors of the step's rows of k or v.
#[cube]
fn load<K: Int, N: Size>(
    x: &[Vector<K, N>],
    keys: &Keys,
    into: &mut Array<Vector<K, N>>,
    #[comptime] width: usize,
    #[comptime] masked: bool,
    #[comptime] shape: Shape,
) {
    let loads = comptime!(shape.loads(width));
    let vectors = comptime!((width / shape.vector()) as u32);
    #[unroll]
    for u in 0..comptime!(shape.keys) {
        let mut key = keys.first + comptime!((u * shape.plane / shape.lanes) as u32);
        if comptime!(masked) {
            key = min(key, keys.end - 1u32);
        }
        let row = (keys.base + key) * vectors;
        #[unroll]
        for n in 0..loads {
            let mut at = keys.lane + comptime!((n * shape.lanes) as u32);
            if comptime!(shape.ragged(width)) {
                at = min(at, comptime!(vectors - 1));
            }
            into[u * loads + n] = x[(row + at) as usize];
        }
    }
}

/// Takes the step's keys into `sums`. `masked` where some row does not see all of them.
#[cube]
fn step<K: Int, N: Size>(
    k: &[Vector<K, N>],
    v: &[Vector<K, N>],
    queries: &Queries,
    sums: &mut Sums,
    keys: &Keys,
    #[comptime] masked: bool,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let mut ks = Array::<Vector<K, N>>::new(comptime!(shape.keys * shape.loads(shape.width)));
    let mut vs = Array::<Vector<K, N>>::new(comptime!(shape.keys * shape.loads(shape.value_width)));
    load::<K, N>(k, keys, &mut ks, comptime!(shape.width), masked, shape);
    load::<K, N>(v, keys, &mut vs, comptime!(shape.value_width), masked, shape);
    let mut weights = Array::<f32>::new(comptime!(shape.keys * rows));
    scores::<K, N>(&ks, &queries.values, &mut weights, keys.lane, shape);
    #[unroll]
    for r in 0..rows {
        let mut greatest = sums.max[r];
        #[unroll]
        for u in 0..comptime!(shape.keys) {
            let mut score = weights[u * rows + r] * keys.scale;
            if comptime!(masked) {
                score = select(queries.see(keys, r, u, shape), score, NOTHING);
            }
            weights[u * rows + r] = score;
            greatest = max(greatest, score);
        }
        let shrink = (sums.max[r] - greatest).exp();
        let mut sum = 0.0f32;
        #[unroll]
        for u in 0..comptime!(shape.keys) {
            let mut weight = (weights[u * rows + r] - greatest).exp();
            if comptime!(masked) {
                weight = select(queries.see(keys, r, u, shape), weight, 0.0f32);
            }
            weights[u * rows + r] = weight;
            sum += weight;
        }
        sums.max[r] = greatest;
        sums.weights[r] = fma(sums.weights[r], shrink, sum);
        let slots = comptime!(shape.slots(shape.value_width));
        #[unroll]
        for i in 0..slots {
            sums.values[r * slots + i] *= shrink;
        }
    }
    weigh::<K, N>(&vs, &weights, queries, sums, keys, masked, shape);
}

/// The products of all rows with the step's keys.
#[cube]
fn scores<K: Int, N: Size>(
    ks: &Array<Vector<K, N>>,
    qs: &Array<f32>,
    scores: &mut Array<f32>,
    lane: u32,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let slots = comptime!(shape.slots(shape.width));
    let vector = comptime!(shape.vector());
    #[unroll]
    for u in 0..comptime!(shape.keys) {
        #[unroll]
        for r in 0..rows {
            scores[u * rows + r] = 0.0;
        }
        #[unroll]
        for i in 0..slots {
            let loaded = ks[comptime!(u * shape.loads(shape.width) + i / vector)];
            let mut value = lane_value::<K, N>(loaded, comptime!(i % vector), shape);
            if comptime!(shape.ragged(shape.width)) {
                let inside = element(lane, i, shape) < comptime!(shape.width as u32);
                value = select(inside, value, 0.0f32);
            }
            #[unroll]
            for r in 0..rows {
                scores[u * rows + r] = fma(qs[r * slots + i], value, scores[u * rows + r]);
            }
        }
    }
    #[unroll]
    for bit in 0..comptime!(shape.lanes.trailing_zeros()) {
        #[unroll]
        for i in 0..comptime!(shape.keys * rows) {
            scores[i] += plane_shuffle_xor(scores[i], comptime!(1u32 << bit));
        }
    }
}

/// Adds the step's weighted values to the sums.
#[cube]
fn weigh<K: Int, N: Size>(
    vs: &Array<Vector<K, N>>,
    weights: &Array<f32>,
    queries: &Queries,
    sums: &mut Sums,
    keys: &Keys,
    #[comptime] masked: bool,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows);
    let slots = comptime!(shape.slots(shape.value_width));
    let vector = comptime!(shape.vector());
    #[unroll]
    for u in 0..comptime!(shape.keys) {
        #[unroll]
        for i in 0..slots {
            let loaded = vs[comptime!(u * shape.loads(shape.value_width) + i / vector)];
            let value = lane_value::<K, N>(loaded, comptime!(i % vector), shape);
            #[unroll]
            for r in 0..rows {
                let mut seen = value;
                if comptime!(masked) {
                    // A weight of 0 would not silence a NaN.
                    seen = select(queries.see(keys, r, u, shape), value, 0.0f32);
                }
                sums.values[r * slots + i] = fma(weights[u * rows + r], seen, sums.values[r * slots + i]);
            }
        }
    }
}

/// Where a cube's rows go.
#[derive(CubeType)]
struct Out {
    of: Rows,
    /// Whether there were keys at all.
    some: bool,
}

/// Puts the planes' sums together and stores the rows: as the result, or for `combine.rs`.
#[cube]
fn store<Y: Int>(sums: &Sums, y: &mut [Y], scales: &mut [f32], out: &Out, #[comptime] shape: Shape) {
    let width = comptime!(shape.value_width as u32);
    let slots = comptime!(shape.slots(shape.value_width));
    let first = UNIT_POS_X % comptime!(shape.plane as u32) < comptime!(shape.lanes as u32);
    if comptime!(shape.planes == 1) {
        #[unroll]
        for r in 0..comptime!(shape.rows) {
            let row = out.of.first + comptime!(r as u32);
            if first && row < out.of.count {
                let at = place(&out.of, row);
                let factor = inverse(sums.weights[r]);
                if !comptime!(shape.split) || out.some {
                    #[unroll]
                    for i in 0..slots {
                        let element = element(out.of.lane, i, shape);
                        if element < width {
                            let value = sums.values[r * slots + i];
                            put::<Y>(y, place_of(out, at, element, shape), value, factor, shape);
                        }
                    }
                }
                if comptime!(shape.split) && out.of.lane == 0u32 {
                    put_scale(scales, at, sums.max[r], sums.weights[r]);
                }
            }
        }
    } else {
        let stride = comptime!(shape.value_width + 2);
        let plane = (UNIT_POS_X / comptime!(shape.plane as u32)) as usize * stride;
        let mut parts = Shared::<[f32]>::new_slice(comptime!(shape.planes * stride));
        #[unroll]
        for r in 0..comptime!(shape.rows) {
            sync_cube();
            if first {
                #[unroll]
                for i in 0..slots {
                    let element = element(out.of.lane, i, shape);
                    if element < width {
                        parts[plane + element as usize] = sums.values[r * slots + i];
                    }
                }
                parts[plane + comptime!(shape.value_width)] = sums.max[r];
                parts[plane + comptime!(shape.value_width + 1)] = sums.weights[r];
            }
            sync_cube();
            let row = out.of.first + comptime!(r as u32);
            if row < out.of.count {
                finish::<Y>(&parts, y, scales, out, place(&out.of, row), shape);
            }
        }
    }
}

/// Stores a row whose planes' parts are in shared memory.
#[cube]
fn finish<Y: Int>(
    parts: &Shared<[f32]>,
    y: &mut [Y],
    scales: &mut [f32],
    out: &Out,
    row: u32,
    #[comptime] shape: Shape,
) {
    let stride = comptime!(shape.value_width + 2);
    let mut greatest = NOTHING.runtime();
    #[unroll]
    for plane in 0..comptime!(shape.planes) {
        greatest = max(greatest, parts[comptime!(plane * stride + shape.value_width)]);
    }
    let mut weights = 0.0f32;
    let mut factors = Array::<f32>::new(comptime!(shape.planes));
    #[unroll]
    for plane in 0..comptime!(shape.planes) {
        factors[plane] = (parts[comptime!(plane * stride + shape.value_width)] - greatest).exp();
        weights += parts[comptime!(plane * stride + shape.value_width + 1)] * factors[plane];
    }
    let factor = inverse(weights);
    let mut element = UNIT_POS_X;
    if comptime!(shape.split) && !out.some {
        element = comptime!(shape.value_width as u32).runtime();
    }
    while element < comptime!(shape.value_width as u32) {
        let mut value = 0.0f32;
        #[unroll]
        for plane in 0..comptime!(shape.planes) {
            value += parts[comptime!(plane * stride) + element as usize] * factors[plane];
        }
        put::<Y>(y, place_of(out, row, element, shape), value, factor, shape);
        element += comptime!((shape.plane * shape.planes) as u32);
    }
    if comptime!(shape.split) && UNIT_POS_X == 0u32 {
        put_scale(scales, row, greatest, weights);
    }
}

/// Where an element of row `row` goes: of the result, or of the cube's part of it.
#[cube]
fn place_of(out: &Out, row: u32, element: u32, #[comptime] shape: Shape) -> usize {
    let mut at = row;
    if comptime!(shape.split) {
        at += CUBE_POS_Z * CUBE_COUNT_Y * out.of.count;
    }
    (at * comptime!(shape.value_width as u32) + element) as usize
}

/// An element of the result, or of the cube's part of it, the sum itself.
#[cube]
fn put<Y: Int>(y: &mut [Y], at: usize, sum: f32, factor: f32, #[comptime] shape: Shape) {
    if comptime!(shape.split) {
        y[at] = Y::cast_from(u32::reinterpret(sum));
    } else {
        y[at] = Y::cast_from(narrow(sum * factor, shape.dtype));
    }
}

/// What a part's sums are over.
#[cube]
fn put_scale(scales: &mut [f32], row: u32, max: f32, weights: f32) {
    let at = ((row * CUBE_COUNT_Z + CUBE_POS_Z) * 2u32) as usize;
    scales[at] = max;
    scales[at + 1] = weights;
}
