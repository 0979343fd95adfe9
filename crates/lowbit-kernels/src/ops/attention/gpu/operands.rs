//! Common parts of the kernels that go through keys: their operands, the keys of a cube, and the
//! treatment of a row that sees none.

use crate::gpu::launch::LaunchArgs;
use crate::gpu::math::tanh;
use crate::ops::attention::AttentionParams;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The operands of [`attention`](crate::ops::attention()), of elements or vectors `Q` and `K`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops::attention) struct Inputs<Q: CubePrimitive, K: CubePrimitive> {
    pub q: Box<[Q]>,
    pub k: Box<[K]>,
    pub v: Box<[K]>,
    pub positions: Box<[u32]>,
}

/// A query row is a token and one of the query heads that read the same key head. Rows are counted
/// by token, then by head.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops::attention) struct Sizes {
    /// Query rows per key head.
    pub rows: u32,
    /// Query heads per key head.
    pub group: u32,
    /// Keys per key head.
    pub capacity: u32,
    /// The most keys that a query sees up to its own.
    pub window: u32,
    /// The most that it sees after its own.
    pub ahead: u32,
}

/// The bits of the cap of scores, which a kernel's configuration has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::ops::attention) struct Softcap(u32);

impl Softcap {
    pub fn of(params: &AttentionParams) -> Option<Self> {
        params.softcap.map(|cap| Self(cap.to_bits()))
    }

    /// The cap, and 0 where there is none.
    pub fn value(cap: Option<Self>) -> f32 {
        cap.map_or(0.0, |cap| f32::from_bits(cap.0))
    }

    /// `1 / cap`.
    pub fn inverse(cap: Option<Self>) -> f32 {
        Self::value(cap).recip()
    }
}

/// A scaled score, bent towards the cap if there is one.
#[cube]
pub(in crate::ops::attention) fn capped(score: f32, #[comptime] softcap: Option<Softcap>) -> f32 {
    if comptime!(softcap.is_some()) {
        let inverse = comptime!(Softcap::inverse(softcap)).runtime();
        tanh(score * inverse) * comptime!(Softcap::value(softcap)).runtime()
    } else {
        score
    }
}

/// The keys that a cube's query rows see: at least one row sees those from `begin` to `end`, and
/// all rows see those from `all_begin` to `all_end`.
#[derive(CubeType)]
pub(in crate::ops::attention) struct VisibleKeys {
    pub begin: u32,
    pub end: u32,
    pub all_begin: u32,
    pub all_end: u32,
}

/// The keys that a query row sees: those from `low` to `high`.
#[derive(CubeType)]
pub(in crate::ops::attention) struct SeenKeys {
    pub low: u32,
    pub high: u32,
}

/// The keys that query row `row` sees (rows past the last see what the last sees): none if its
/// position is beyond the capacity.
#[cube]
pub(in crate::ops::attention) fn seen_keys(positions: &[u32], row: u32, sizes: &Sizes) -> SeenKeys {
    let position = positions[(min(row, sizes.rows - 1u32) / sizes.group) as usize];
    seen_from(position, sizes.capacity, sizes.window).ahead(sizes.ahead, sizes.capacity)
}

/// The keys up to its own that a query at `position` sees, of `capacity` that there are.
#[cube]
pub(in crate::ops::attention) fn seen_from(position: u32, capacity: u32, window: u32) -> SeenKeys {
    let high = select(position < capacity, position + 1u32, 0u32);
    SeenKeys { low: high - min(high, window), high }
}

#[cube]
impl SeenKeys {
    /// With the `ahead` keys that follow, as far as there are so many.
    pub fn ahead(&self, ahead: u32, capacity: u32) -> SeenKeys {
        let more = select(self.high == 0u32, 0u32, min(ahead, capacity - self.high));
        SeenKeys { low: self.low, high: self.high + more }
    }
}

#[cube]
impl VisibleKeys {
    /// Those of no rows.
    pub fn of_none() -> VisibleKeys {
        VisibleKeys {
            begin: u32::MAX.runtime(),
            end: 0u32.runtime(),
            all_begin: 0u32.runtime(),
            all_end: u32::MAX.runtime(),
        }
    }

    /// Adds a row.
    pub fn add(&mut self, seen: &SeenKeys) {
        // A row that sees nothing begins nowhere.
        self.begin = min(self.begin, select(seen.high == 0u32, u32::MAX, seen.low));
        self.end = max(self.end, seen.high);
        self.all_begin = max(self.all_begin, seen.low);
        self.all_end = min(self.all_end, seen.high);
    }

    /// Adds the rows of the plane's other units.
    pub fn add_plane(&mut self) {
        self.begin = plane_min(self.begin);
        self.end = plane_max(self.end);
        self.all_begin = plane_max(self.all_begin);
        self.all_end = plane_min(self.all_end);
    }

    /// Keeps the part of the keys that this cube goes through: whole multiples of `step` keys, so
    /// that few keys occupy few cubes.
    pub fn keep_split(&mut self, #[comptime] step: u32) {
        let part = (self.end - self.begin).div_ceil(CUBE_COUNT_Z).div_ceil(step) * step;
        self.begin = min(self.begin + CUBE_POS_Z * part, self.end);
        self.end = min(self.begin + part, self.end);
    }
}

/// The place of query row `row` of the cube's key head (its index along x) among the rows of q and
/// y.
#[cube]
pub(in crate::ops::attention) fn row_index(row: u32, group: u32) -> u32 {
    (row / group * CUBE_COUNT_X + CUBE_POS_X) * group + row % group
}

/// The factor that turns sums of weighted values into means: NaN for a row that sees no keys.
#[cube]
pub(in crate::ops::attention) fn reciprocal(weights: f32) -> f32 {
    reciprocal_with(weights, weights)
}

/// The same where the weights are a part of the softmax's denominator, which is `total`.
#[cube]
pub(in crate::ops::attention) fn reciprocal_with(weights: f32, total: f32) -> f32 {
    select(weights == 0.0f32, f32::reinterpret(0x7fc0_0000u32), 1.0f32 / total)
}
