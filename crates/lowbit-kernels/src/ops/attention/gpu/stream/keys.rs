//! A step through the keys: the scores of a few keys, the online softmax, and the weighted values.

use super::super::combine::NO_SCORE;
use super::super::operands::capped;
use super::{Queries, StreamConfig, element};
use crate::gpu::float::widen;
use crate::ops::cache_rows::CacheType;
use crate::ops::cache_rows::gpu::{code_of, unit_of};
use crate::ops::pages::gpu::PoolSizes;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The running softmax of a unit's query rows, over the keys that it has met: the sums of its
/// elements of v times their weights, the greatest score, and the weights' sum. A weight is
/// `exp(score - greatest)`.
#[derive(CubeType)]
pub(super) struct Sums {
    pub values: Array<f32>,
    pub max: Array<f32>,
    pub weights: Array<f32>,
}

/// The keys of a step: every `plane / lanes`th from `first` on, before `end`.
#[derive(CubeType)]
pub(super) struct StepKeys {
    /// The row of the head's first key where keys are contiguous.
    pub base: u32,
    /// The token, and its pages' sizes where keys are in pages.
    pub token: u32,
    pub pool: PoolSizes,
    pub first: u32,
    pub end: u32,
    pub lane: u32,
    pub scale: f32,
}

#[cube]
impl StepKeys {
    /// The row of k and v that holds `key`.
    fn row(&self, table: &[u32], key: u32, #[comptime] config: StreamConfig) -> u32 {
        if comptime!(config.paged) {
            let page = min(self.pool.page(table, self.token, key), self.pool.pages - 1u32);
            self.pool.row(page, CUBE_POS_Y, key)
        } else {
            self.base + key
        }
    }
}

#[cube]
impl Sums {
    pub fn clear(&mut self, #[comptime] config: StreamConfig) {
        #[unroll]
        for r in 0..comptime!(config.rows) {
            self.max[r] = NO_SCORE;
            self.weights[r] = 0.0;
        }
        #[unroll]
        for i in 0..comptime!(config.rows * config.slots(config.value_width)) {
            self.values[i] = 0.0;
        }
    }

    /// Adds up the sums of a plane's groups of lanes.
    pub fn add_plane(&mut self, #[comptime] config: StreamConfig) {
        let slots = comptime!(config.slots(config.value_width));
        #[unroll]
        for i in 0..comptime!((config.plane / config.lanes).trailing_zeros() as usize) {
            let mask = comptime!((config.lanes << i) as u32);
            #[unroll]
            for r in 0..comptime!(config.rows) {
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
fn lane_value<K: Int, N: Size>(
    vector: Vector<K, N>,
    #[comptime] i: usize,
    #[comptime] config: StreamConfig,
) -> f32 {
    match comptime!(config.cache) {
        CacheType::Int8 => code_of(u32::cast_from(vector.extract(comptime!(i / 4))), comptime!(i % 4)),
        CacheType::Float(cache) => {
            if comptime!(config.wide && cache.size() == 2) {
                let word = u32::cast_from(vector.extract(comptime!(i / 2)));
                if comptime!(i.is_multiple_of(2)) {
                    widen(word & 0xffffu32, comptime!(cache))
                } else if comptime!(cache == FloatType::BF16) {
                    f32::reinterpret(word & 0xffff_0000u32)
                } else {
                    widen(word >> 16u32, comptime!(cache))
                }
            } else {
                widen(u32::cast_from(vector.extract(i)), comptime!(cache))
            }
        }
    }
}

/// 1/128 of the scale of vector `at` of the row of codes that starts at vector `row`.
#[cube]
fn unit_of_vector<K: Int, N: Size>(
    x: &[Vector<K, N>],
    row: u32,
    at: u32,
    #[comptime] width: usize,
    #[comptime] config: StreamConfig,
) -> f32 {
    // Vectors have 8 codes, or 4 scales.
    let scale = at * 8u32 / comptime!(CacheType::group(width) as u32);
    let words = x[(row + comptime!((width / config.vector()) as u32) + scale / 4u32) as usize];
    let (low, high) = (u32::cast_from(words.extract(0usize)), u32::cast_from(words.extract(1usize)));
    unit_of(select(scale % 4u32 < 2u32, low, high), scale % 2u32 == 1u32)
}

/// A unit's vectors of the step's rows of k or v, and of codes what they are multiplied by.
#[cube]
fn load<K: Int, N: Size>(
    x: &[Vector<K, N>],
    table: &[u32],
    keys: &StepKeys,
    into: &mut Array<Vector<K, N>>,
    units: &mut Array<f32>,
    #[comptime] width: usize,
    #[comptime] masked: bool,
    #[comptime] config: StreamConfig,
) {
    let loads = comptime!(config.loads(width));
    let vectors = comptime!((width / config.vector()) as u32);
    #[unroll]
    for u in 0..comptime!(config.keys) {
        let mut key = keys.first + comptime!((u * config.plane / config.lanes) as u32);
        if comptime!(masked) {
            key = min(key, keys.end - 1u32);
        }
        let row = keys.row(table, key, config) * comptime!(config.row(width) as u32);
        #[unroll]
        for n in 0..loads {
            let mut at = keys.lane + comptime!((n * config.lanes) as u32);
            if comptime!(config.ragged(width)) {
                at = min(at, comptime!(vectors - 1));
            }
            into[u * loads + n] = x[(row + at) as usize];
            if comptime!(config.cache == CacheType::Int8) {
                units[u * loads + n] = unit_of_vector::<K, N>(x, row, at, width, config);
            }
        }
    }
}

/// Takes a step's keys into `sums`: the online softmax. `masked` where some row does not see all of
/// them.
#[cube]
pub(super) fn step<K: Int, N: Size>(
    k: &[Vector<K, N>],
    v: &[Vector<K, N>],
    table: &[u32],
    queries: &Queries,
    sums: &mut Sums,
    keys: &StepKeys,
    #[comptime] masked: bool,
    #[comptime] config: StreamConfig,
) {
    let rows = comptime!(config.rows);
    let mut ks = Array::<Vector<K, N>>::new(comptime!(config.keys * config.loads(config.width)));
    let mut vs = Array::<Vector<K, N>>::new(comptime!(config.keys * config.loads(config.value_width)));
    let mut k_units = Array::<f32>::new(comptime!(config.keys * config.loads(config.width)));
    let mut v_units = Array::<f32>::new(comptime!(config.keys * config.loads(config.value_width)));
    load::<K, N>(k, table, keys, &mut ks, &mut k_units, comptime!(config.width), masked, config);
    load::<K, N>(v, table, keys, &mut vs, &mut v_units, comptime!(config.value_width), masked, config);
    let mut weights = Array::<f32>::new(comptime!(config.keys * rows));
    scores::<K, N>(&ks, &k_units, &queries.values, &mut weights, keys.lane, config);
    #[unroll]
    for r in 0..rows {
        let mut greatest = sums.max[r];
        #[unroll]
        for u in 0..comptime!(config.keys) {
            let mut score = capped(weights[u * rows + r] * keys.scale, config.softcap);
            if comptime!(masked) {
                score = select(queries.sees(keys, r, u, config), score, NO_SCORE);
            }
            weights[u * rows + r] = score;
            greatest = max(greatest, score);
        }
        let shrink = (sums.max[r] - greatest).exp();
        let mut sum = 0.0f32;
        #[unroll]
        for u in 0..comptime!(config.keys) {
            let mut weight = (weights[u * rows + r] - greatest).exp();
            if comptime!(masked) {
                weight = select(queries.sees(keys, r, u, config), weight, 0.0f32);
            }
            weights[u * rows + r] = weight;
            sum += weight;
        }
        sums.max[r] = greatest;
        sums.weights[r] = fma(sums.weights[r], shrink, sum);
        let slots = comptime!(config.slots(config.value_width));
        #[unroll]
        for i in 0..slots {
            sums.values[r * slots + i] *= shrink;
        }
    }
    add_weighted_values::<K, N>(&vs, &v_units, &weights, queries, sums, keys, masked, config);
}

/// The products of all rows with the step's keys.
#[cube]
fn scores<K: Int, N: Size>(
    ks: &Array<Vector<K, N>>,
    units: &Array<f32>,
    qs: &Array<f32>,
    scores: &mut Array<f32>,
    lane: u32,
    #[comptime] config: StreamConfig,
) {
    let rows = comptime!(config.rows);
    let slots = comptime!(config.slots(config.width));
    let vector = comptime!(config.vector());
    #[unroll]
    for u in 0..comptime!(config.keys) {
        #[unroll]
        for r in 0..rows {
            scores[u * rows + r] = 0.0;
        }
        #[unroll]
        for i in 0..slots {
            let loaded = ks[comptime!(u * config.loads(config.width) + i / vector)];
            let mut value = lane_value::<K, N>(loaded, comptime!(i % vector), config);
            if comptime!(config.cache == CacheType::Int8) {
                value *= units[comptime!(u * config.loads(config.width) + i / vector)];
            }
            if comptime!(config.ragged(config.width)) {
                let inside = element(lane, i, config) < comptime!(config.width as u32);
                value = select(inside, value, 0.0f32);
            }
            #[unroll]
            for r in 0..rows {
                scores[u * rows + r] = fma(qs[r * slots + i], value, scores[u * rows + r]);
            }
        }
    }
    #[unroll]
    for bit in 0..comptime!(config.lanes.trailing_zeros()) {
        #[unroll]
        for i in 0..comptime!(config.keys * rows) {
            scores[i] += plane_shuffle_xor(scores[i], comptime!(1u32 << bit));
        }
    }
}

/// Adds the step's weighted values to the sums.
#[cube]
fn add_weighted_values<K: Int, N: Size>(
    vs: &Array<Vector<K, N>>,
    units: &Array<f32>,
    weights: &Array<f32>,
    queries: &Queries,
    sums: &mut Sums,
    keys: &StepKeys,
    #[comptime] masked: bool,
    #[comptime] config: StreamConfig,
) {
    let rows = comptime!(config.rows);
    let slots = comptime!(config.slots(config.value_width));
    let vector = comptime!(config.vector());
    #[unroll]
    for u in 0..comptime!(config.keys) {
        #[unroll]
        for i in 0..slots {
            let loaded = vs[comptime!(u * config.loads(config.value_width) + i / vector)];
            let mut value = lane_value::<K, N>(loaded, comptime!(i % vector), config);
            if comptime!(config.cache == CacheType::Int8) {
                value *= units[comptime!(u * config.loads(config.value_width) + i / vector)];
            }
            #[unroll]
            for r in 0..rows {
                let mut seen = value;
                if comptime!(masked) {
                    // A weight of 0 times NaN would be NaN.
                    seen = select(queries.sees(keys, r, u, config), value, 0.0f32);
                }
                sums.values[r * slots + i] = fma(weights[u * rows + r], seen, sums.values[r * slots + i]);
            }
        }
    }
}
