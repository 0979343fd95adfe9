//! The keys that a cube's query rows see, the treatment of values that are not finite, and the
//! storing of rows.

use crate::gpu::cuda::ptx::{exp2, meet, pack, register, shared_words, show_writes, store_words};
use crate::ops::attention::gpu::operands::{Sizes, Softcap, VisibleKeys, reciprocal, row_index, seen_keys};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;
use std::f32::consts::LOG2_E;

/// The cut of a cube's query rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Cut {
    /// Query rows of a cube.
    pub rows: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// True if several cubes share the keys of a row.
    pub split: bool,
}

/// The greatest score of no keys: less than any score, and finite when the scale multiplies it.
pub(super) const LOWEST_SCORE: f32 = -1.0e38;

/// A score that is not scaled, bent so that, scaled, it is below the cap: `cap tanh(s / cap)` over
/// the scale. The scale includes the factor log2(e). The error is a few roundings of the cap.
#[cube]
pub(super) fn capped(score: f32, scale: f32, #[comptime] softcap: Option<Softcap>) -> f32 {
    let inverse = comptime!(2.0 * Softcap::inverse(softcap)).runtime();
    let cap = comptime!(LOG2_E * Softcap::value(softcap)).runtime();
    // An infinite power gives 1, and a power of 0 gives -1.
    let bent = 1.0f32 - 2.0f32 / (exp2(score * (scale * inverse)) + 1.0f32);
    bent * (cap / scale)
}

/// The same for all scores that a unit has, if there is a cap.
#[cube]
pub(super) fn cap_scores(
    scores: &mut Array<Vector<f32, Const<4>>>,
    scale: f32,
    #[comptime] count: usize,
    #[comptime] softcap: Option<Softcap>,
) {
    if comptime!(softcap.is_some()) {
        #[unroll]
        for i in 0..count {
            let mut score = scores[i];
            #[unroll]
            for j in 0..4usize {
                score.insert(j, capped(score.extract(j), scale, softcap));
            }
            scores[i] = score;
        }
    }
}

/// The keys that each of a unit's rows sees: those from `low` to `high`.
#[derive(CubeType)]
pub(super) struct RowBounds {
    pub low: Array<u32>,
    pub high: Array<u32>,
}

/// Of `count` rows: row `own`, and every eighth after it.
#[cube]
pub(super) fn row_bounds(positions: &[u32], own: u32, sizes: &Sizes, #[comptime] count: usize) -> RowBounds {
    let mut low = Array::<u32>::new(count);
    let mut high = Array::<u32>::new(count);
    #[unroll]
    for r in 0..count {
        let seen = seen_keys(positions, own + comptime!(8 * r as u32), sizes);
        low[r] = seen.low;
        high[r] = seen.high;
    }
    RowBounds { low, high }
}

#[cube]
impl RowBounds {
    /// The score of row `r` and a key, of which the cube takes those before `end`: -inf where the
    /// row does not see it, and NaN where it does and the key is marked as `bad`.
    pub fn masked(&self, score: f32, #[comptime] r: usize, key: u32, end: u32, bad: bool) -> f32 {
        let seen = key >= self.low[r] && key < min(self.high[r], end);
        let value = select(bad, f32::reinterpret(0x7fc0_0000u32), score);
        select(seen, value, f32::reinterpret(0xff80_0000u32))
    }
}

/// The keys that the cube's rows see, or its part of them where the keys are split.
#[cube]
pub(super) fn visible_keys(positions: &[u32], row0: u32, sizes: &Sizes, #[comptime] cut: Cut) -> VisibleKeys {
    let units = comptime!(32 * cut.planes);
    let mut found = Shared::<[u32]>::new_slice(comptime!(4 * cut.planes));
    let mut visible = VisibleKeys::of_none();
    #[unroll]
    for i in 0..comptime!(cut.rows.div_ceil(units)) {
        let row = row0 + (UNIT_POS_X + comptime!((i * units) as u32)) % comptime!(cut.rows as u32);
        visible.add(&seen_keys(positions, row, sizes));
    }
    visible.add_plane();
    let plane = (UNIT_POS_X / 32u32 * 4u32) as usize;
    let lane = UNIT_POS_X % 32u32;
    if lane == 0u32 {
        found[plane] = visible.begin;
        found[plane + 1] = visible.end;
        found[plane + 2] = visible.all_begin;
        found[plane + 3] = visible.all_end;
    }
    sync_cube();
    visible.begin = found[0usize];
    visible.end = found[1usize];
    visible.all_begin = found[2usize];
    visible.all_end = found[3usize];
    #[unroll]
    for plane in 1..comptime!(cut.planes) {
        visible.begin = min(visible.begin, found[comptime!(4 * plane)]);
        visible.end = max(visible.end, found[comptime!(4 * plane + 1)]);
        visible.all_begin = max(visible.all_begin, found[comptime!(4 * plane + 2)]);
        visible.all_end = min(visible.all_end, found[comptime!(4 * plane + 3)]);
    }
    visible.begin = min(visible.begin, visible.end);
    if comptime!(cut.split) {
        visible.keep_split(comptime!(cut.keys as u32));
    }
    visible
}

/// The places of a tile's vectors of 16 bytes in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Layout {
    /// So many from one row to the next: one more than a row has, so that vectors of the same
    /// column of 8 rows lie in different banks.
    Padded(usize),
    /// Panels of 8 columns and so many rows, as
    /// [`ptx::attention`](crate::gpu::cuda::ptx::attention) describes them.
    Panels(usize),
}

impl Layout {
    fn is_panels(self) -> bool {
        matches!(self, Self::Panels(_))
    }
}

/// The byte at which vector `column` of row `row` lies.
#[cube]
pub(super) fn place(row: u32, column: u32, #[comptime] layout: Layout) -> u32 {
    match comptime!(layout) {
        Layout::Padded(stride) => 16u32 * (row * comptime!(stride as u32) + column),
        Layout::Panels(rows) => {
            column / 8u32 * comptime!(128 * rows as u32) + row * 128u32 + ((column ^ row) % 8u32) * 16u32
        }
    }
}

/// A tile of values, and who takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Values {
    pub dtype: FloatType,
    /// Keys.
    pub keys: usize,
    /// Vectors of 16 bytes of a row.
    pub vectors: usize,
    pub layout: Layout,
    /// Neighbouring units that have it together, from the cube's first on. Others after them may
    /// have tiles of their own.
    pub units: usize,
}

/// The barrier at which the first of those units meet.
const MEETING: u32 = 1;

/// Replaces each vector of the tile of values at `tile` that has a value that is not finite by
/// zeros, and marks its key: in rows that do not see the key, its weight of 0 times such a value
/// would be NaN. The tile is there, for all units that have it; these meet when this ends. Marks
/// are those of the first units' tile, then those of the next.
#[cube]
pub(super) fn zero_non_finite_values(tile: u32, non_finite: &mut Shared<[u32]>, #[comptime] values: Values) {
    let units = comptime!(values.units as u32);
    let vectors = comptime!(values.vectors as u32);
    let (group, unit) = (UNIT_POS_X / units, UNIT_POS_X % units);
    let marks = group * comptime!(values.keys as u32);
    let mut at = unit;
    while at < comptime!(values.keys as u32) {
        non_finite[(marks + at) as usize] = 0u32;
        at += units;
    }
    let meeting = register(MEETING + group);
    meet(meeting, values.units);
    // All bits of the exponents.
    let exponent = comptime!(if values.dtype == FloatType::F16 { 0x7c00u32 } else { 0x7f80u32 });
    let mut vector = unit;
    while vector < comptime!((values.keys * values.vectors) as u32) {
        let key = vector / vectors;
        let at = register(tile + place(key, vector % vectors, values.layout));
        let mut words = shared_words(at, 0usize, 4usize);
        let mut bad = false.runtime();
        #[unroll]
        for j in 0..4usize {
            let low = words[j] & exponent;
            let high = (words[j] >> 16u32) & exponent;
            bad = bad || low == exponent || high == exponent;
        }
        if bad {
            #[unroll]
            for j in 0..4usize {
                words[j] = 0u32;
            }
            store_words(at, &words, 0usize);
            non_finite[(marks + key) as usize] = 1u32;
        }
        vector += units;
    }
    // Tensor cores read the written memory, too.
    if comptime!(values.layout.is_panels()) {
        show_writes();
    }
    meet(meeting, values.units);
}

/// The place of a cube's part of the keys of its rows.
#[derive(CubeType)]
pub(super) struct PartPlace {
    /// The part, and how many a row has memory for.
    pub index: u32,
    pub count: u32,
    /// Query rows of all key heads.
    pub rows: u32,
}

#[cube]
impl PartPlace {
    /// That of a launch with a cube for each part along z, of `rows` query rows per key head.
    pub fn of_cube(rows: u32) -> PartPlace {
        PartPlace { index: CUBE_POS_Z, count: CUBE_COUNT_Z, rows: CUBE_COUNT_X * rows }
    }
}

/// The destination of a unit's rows.
#[derive(CubeType)]
pub(super) struct Destination {
    /// The first of them.
    pub own: u32,
    pub rows: u32,
    pub group: u32,
    pub scale: f32,
    /// True if the cube had keys at all.
    pub any_keys: bool,
    pub part: PartPlace,
}

/// A row to be stored: as the result, or as a part for `gpu/combine.rs`.
#[derive(CubeType)]
pub(super) struct Row {
    /// True if the unit stores sums of values.
    pub there: bool,
    /// The row's start in y.
    at: u32,
    /// The factor of the sums, if they become the result.
    factor: f32,
}

/// The sum of what this unit and its three neighbours have, which share rows.
#[cube]
pub(super) fn sum_of_four(x: f32) -> f32 {
    let x = x + plane_shuffle_xor(x, 1u32);
    x + plane_shuffle_xor(x, 2u32)
}

/// Row `row`, of which its greatest score, not scaled, and its weights' sum were found. A part's
/// scale is stored by the unit that has the row's first columns.
#[cube]
pub(super) fn begin_row(
    scales: &mut [f32],
    out: &Destination,
    row: u32,
    found: (f32, f32),
    first: bool,
    #[comptime] width: usize,
    #[comptime] split: bool,
) -> Row {
    let (greatest, weights) = found;
    let mut at = row_index(min(row, out.rows - 1u32), out.group);
    let mut there = row < out.rows;
    if comptime!(split) {
        if there && first {
            store_scale(scales, at, &out.part, (greatest * out.scale, weights));
        }
        at += out.part.index * out.part.rows;
        there = there && out.any_keys;
    }
    Row { there, at: at * comptime!(width as u32), factor: reciprocal(weights) }
}

/// Stores the scale of this cube's part of row `row` of y: the parts' weights are powers of e.
#[cube]
fn store_scale(scales: &mut [f32], row: u32, part: &PartPlace, found: (f32, f32)) {
    let (exponent, weights) = found;
    let to = ((row * part.count + part.index) * 2u32) as usize;
    scales[to] = exponent * comptime!(std::f32::consts::LN_2);
    scales[to + 1] = weights;
}

#[cube]
impl Row {
    /// Stores two neighbouring columns.
    pub fn store(
        &self,
        y: &mut [u32],
        column: u32,
        pair: (f32, f32),
        #[comptime] dtype: FloatType,
        #[comptime] split: bool,
    ) {
        let to = self.at + column;
        if comptime!(split) {
            y[to as usize] = u32::reinterpret(pair.0);
            y[(to + 1u32) as usize] = u32::reinterpret(pair.1);
        } else {
            y[(to / 2u32) as usize] = pack(pair.0 * self.factor, pair.1 * self.factor, dtype);
        }
    }
}
