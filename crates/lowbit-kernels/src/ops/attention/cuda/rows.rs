//! Which keys a cube's query rows see, what becomes of values that are not finite, and how a row is stored.

use crate::gpu::cuda::ptx::{meet, pack, register, shared_words, show_writes, store_words};
use crate::ops::attention::gpu::operands::{Sizes, VisibleKeys, reciprocal, row_index};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// How a cube's query rows and keys are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Cut {
    /// Query rows of a cube.
    pub rows: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// Whether several cubes share the keys of a row.
    pub split: bool,
}

/// The greatest score of no keys: less than any score, and finite when the scale multiplies it.
pub(super) const LOWEST_SCORE: f32 = -1.0e38;

/// Which keys each of a unit's rows sees: those from `low` to `high`.
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
        let row = min(own + comptime!(8 * r as u32), sizes.rows - 1u32);
        let position = positions[(row / sizes.group) as usize];
        high[r] = select(position < sizes.capacity, position + 1u32, 0u32);
        low[r] = high[r] - min(high[r], sizes.window);
    }
    RowBounds { low, high }
}

/// The keys that the cube's rows see, or its part of them where the keys are split.
#[cube]
pub(super) fn visible_keys(positions: &[u32], row0: u32, sizes: &Sizes, #[comptime] cut: Cut) -> VisibleKeys {
    let units = comptime!(32 * cut.planes);
    let mut found = Shared::<[u32]>::new_slice(comptime!(4 * cut.planes));
    let mut begin = 0xffff_ffffu32.runtime();
    let mut end = 0u32.runtime();
    let mut all_begin = 0u32.runtime();
    let mut all_end = 0xffff_ffffu32.runtime();
    #[unroll]
    for i in 0..comptime!(cut.rows.div_ceil(units)) {
        let row = row0 + (UNIT_POS_X + comptime!((i * units) as u32)) % comptime!(cut.rows as u32);
        let position = positions[(min(row, sizes.rows - 1u32) / sizes.group) as usize];
        let high = select(position < sizes.capacity, position + 1u32, 0u32);
        let low = high - min(high, sizes.window);
        begin = min(begin, select(high == 0u32, 0xffff_ffffu32, low));
        end = max(end, high);
        all_begin = max(all_begin, low);
        all_end = min(all_end, high);
    }
    let (begin, end) = (plane_min(begin), plane_max(end));
    let (all_begin, all_end) = (plane_max(all_begin), plane_min(all_end));
    let plane = (UNIT_POS_X / 32u32 * 4u32) as usize;
    let lane = UNIT_POS_X % 32u32;
    if lane == 0u32 {
        found[plane] = begin;
        found[plane + 1] = end;
        found[plane + 2] = all_begin;
        found[plane + 3] = all_end;
    }
    sync_cube();
    let mut visible = VisibleKeys {
        begin: found[0usize],
        end: found[1usize],
        all_begin: found[2usize],
        all_end: found[3usize],
    };
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

/// Where a tile's vectors of 16 bytes lie in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Layout {
    /// So many from one row to the next: one more than a row has, so that vectors of the same column of 8 rows lie in
    /// different banks.
    Padded(usize),
    /// Panels of 8 columns and so many rows, as [`ptx::attention`](crate::gpu::cuda::ptx::attention) describes them.
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
    /// The cube's first units, which have these rows.
    pub units: usize,
}

/// Where those units meet.
const MEETING: u32 = 1;

/// Replaces each vector of the tile of values at `tile` that has a value that is not finite by zeros, and marks its key: in
/// rows that do not see the key, its weight of 0 times such a value would be NaN. The tile is there, for all units that take it;
/// these meet when this ends.
#[cube]
pub(super) fn zero_non_finite_values(tile: u32, non_finite: &mut Shared<[u32]>, #[comptime] values: Values) {
    let units = comptime!(values.units as u32);
    let vectors = comptime!(values.vectors as u32);
    let mut at = UNIT_POS_X;
    while at < comptime!(values.keys as u32) {
        non_finite[at as usize] = 0u32;
        at += units;
    }
    meet(MEETING.runtime(), values.units);
    // All bits of the exponents.
    let exponent = comptime!(if values.dtype == FloatType::F16 { 0x7c00u32 } else { 0x7f80u32 });
    let mut vector = UNIT_POS_X;
    while vector < comptime!((values.keys * values.vectors) as u32) {
        let key = vector / vectors;
        let at = register(tile + place(key, vector % vectors, values.layout));
        let mut words = shared_words(at, 4usize);
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
            non_finite[key as usize] = 1u32;
        }
        vector += units;
    }
    // What was written is for tensor cores, too.
    if comptime!(values.layout.is_panels()) {
        show_writes();
    }
    meet(MEETING.runtime(), values.units);
}

/// A score that a row may not see, or whose key is marked: -inf, or NaN where the row sees a marked key.
#[cube]
pub(super) fn masked(score: f32, seen: bool, bad: bool) -> f32 {
    let value = select(bad, f32::reinterpret(0x7fc0_0000u32), score);
    select(seen, value, f32::reinterpret(0xff80_0000u32))
}

/// Where a unit's rows go.
#[derive(CubeType)]
pub(super) struct Destination {
    /// The first of them.
    pub own: u32,
    pub rows: u32,
    pub group: u32,
    pub scale: f32,
    /// Whether the cube had keys at all.
    pub any_keys: bool,
}

/// A row to be stored: as the result, or as a part for `gpu/combine.rs`.
#[derive(CubeType)]
pub(super) struct Row {
    /// Whether the unit stores sums of values, and where in y the row begins.
    pub there: bool,
    at: u32,
    /// What the sums are multiplied by, if they become the result.
    factor: f32,
}

/// Row `row`, whose greatest score, not scaled, is `greatest` and whose weights' sum is that of this unit's and its three
/// neighbours'. A part's scale is stored.
#[cube]
pub(super) fn begin_row(
    scales: &mut [f32],
    out: &Destination,
    row: u32,
    greatest: f32,
    weights: f32,
    #[comptime] width: usize,
    #[comptime] split: bool,
) -> Row {
    let mut weights = weights;
    weights += plane_shuffle_xor(weights, 1u32);
    weights += plane_shuffle_xor(weights, 2u32);
    let mut at = row_index(min(row, out.rows - 1u32), out.group);
    let mut there = row < out.rows;
    if comptime!(split) {
        let column = UNIT_POS_X % 4u32;
        if there && column == 0u32 {
            store_scale(scales, at, greatest * out.scale, weights);
        }
        at += CUBE_POS_Z * CUBE_COUNT_X * out.rows;
        there = there && out.any_keys;
    }
    Row { there, at: at * comptime!(width as u32), factor: reciprocal(weights) }
}

/// Stores the scale of this cube's part of row `row` of y: the parts' weights are powers of e.
#[cube]
pub(super) fn store_scale(scales: &mut [f32], row: u32, exponent: f32, weights: f32) {
    let to = ((row * CUBE_COUNT_Z + CUBE_POS_Z) * 2u32) as usize;
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
