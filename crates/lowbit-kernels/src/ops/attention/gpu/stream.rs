//! Attention with keys and values streamed through registers, for any types and sizes.
//!
//! A cube takes a few query rows of a key head through all keys, or through its part of them where
//! the keys are split. Its planes take turns with the keys. Within a plane `lanes` units share a
//! key: each has some elements of the rows of q, k and v, and keeps the softmax's running maximum,
//! the weights' sum and the sums of its elements of v, for every query row (online softmax). In the
//! end the units' sums are combined, first within a plane, then over the planes.

#![allow(unsafe_code)] // Launches.

mod keys;
mod output;

use super::operands::{Inputs, InputsArgs, SeenKeys, Sizes, Softcap, VisibleKeys, seen_from, seen_keys};
use super::{Call, Output};
use crate::KernelError;
use crate::gpu::CUBES;
use crate::gpu::compile::Target;
use crate::gpu::float::{read, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::ops::attention::CHECK;
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::gpu::PoolSizes;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use keys::{StepKeys, Sums, step};
use lowbit_formats::FloatType;
use output::{Destination, store};

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamConfig {
    /// The type of q and y.
    pub dtype: FloatType,
    /// The type of k and v.
    pub cache: CacheType,
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
    /// Units of a plane.
    pub plane: usize,
    /// Planes of a cube: each takes some of the keys.
    pub planes: usize,
    /// True if rows of k and v are whole vectors of 16 bytes; of 8 bits vectors of 8 bytes.
    pub wide: bool,
    /// True if several cubes share the keys of a row: then y holds parts, which `combine.rs`
    /// combines.
    pub split: bool,
    /// True if keys are in pages: a cube then has rows of one token, and a part of their keys
    /// (`parts.rs`).
    pub paged: bool,
    /// The cap of scores, if there is one.
    pub softcap: Option<Softcap>,
}

impl StreamConfig {
    /// Elements of a vector.
    fn vector(self) -> usize {
        match self.cache {
            CacheType::Float(cache) if self.wide => 16 / cache.size(),
            CacheType::Float(_) => 1,
            CacheType::Int8 => 8,
        }
    }

    /// Vectors from one row of `width` to the next.
    fn row(self, width: usize) -> usize {
        self.cache.row(width) / self.vector()
    }

    /// Vectors of a row of `width` that a unit has.
    fn loads(self, width: usize) -> usize {
        (width / self.vector()).div_ceil(self.lanes)
    }

    /// Elements of a row of `width` that a unit has.
    fn slots(self, width: usize) -> usize {
        self.loads(width) * self.vector()
    }

    /// True if some units have less of a row than others.
    fn ragged(self, width: usize) -> bool {
        !(width / self.vector()).is_multiple_of(self.lanes)
    }

    /// Keys that a plane takes at once.
    pub fn step(self) -> usize {
        self.plane / self.lanes * self.keys
    }
}

/// See [`attention`](crate::ops::attention()). y is of q's type, or holds the bits of f32 where the
/// keys are split. `scale` is an f32; the cube at 0 along x takes the block of rows `first`.
/// `table` and `pool` are those of pages.
#[kernel]
pub(super) fn attention_stream<Q: Int, K: Int, N: Size, Y: Int>(
    inputs: &Inputs<Q, Vector<K, N>>,
    table: &[u32],
    y: &mut [Y],
    scales: &mut [f32],
    sizes: Sizes,
    pool: PoolSizes,
    scale: u32,
    first: u32,
    #[comptime] config: StreamConfig,
) {
    let count = comptime!(config.rows);
    // The first row of the last tokens, which have most keys, goes first.
    let block = first + CUBE_COUNT_X - 1u32 - CUBE_POS_X;
    let of = rows_of_block(block, &sizes, config);
    let (lane, token) = (of.lane, of.first / sizes.group);
    let queries = load_queries::<Q>(&inputs.q, &inputs.positions, &of, &sizes, config);
    let mut visible = queries.visible_keys(config);
    if comptime!(config.paged) {
        let position = inputs.positions[token as usize];
        let part = seen_from(position, sizes.capacity, sizes.window).part(CUBE_POS_Z);
        visible.begin = part.begin;
        visible.end = part.end;
    } else if comptime!(config.split) {
        visible.keep_split(comptime!((config.step() * config.planes) as u32));
    }

    let mut sums = Sums {
        values: Array::<f32>::new(comptime!(count * config.slots(config.value_width))),
        max: Array::<f32>::new(count),
        weights: Array::<f32>::new(count),
    };
    sums.clear(config);
    let plane = UNIT_POS_X / comptime!(config.plane as u32);
    let member = UNIT_POS_X % comptime!(config.plane as u32) / comptime!(config.lanes as u32);
    // All planes go round together: the compiler must see that all units of a plane reach each
    // shuffle.
    let mut at = visible.begin;
    while at < visible.end {
        let first = at + plane * comptime!(config.step() as u32) + member;
        let keys = StepKeys {
            base: CUBE_POS_Y * sizes.capacity,
            token,
            pool: pool.again(),
            first,
            end: visible.end,
            lane,
            scale: f32::reinterpret(scale),
        };
        let next = at + comptime!((config.step() * config.planes) as u32);
        if at >= visible.all_begin && next <= min(visible.all_end, visible.end) {
            step::<K, N>(&inputs.k, &inputs.v, table, &queries, &mut sums, &keys, false, config);
        } else {
            step::<K, N>(&inputs.k, &inputs.v, table, &queries, &mut sums, &keys, true, config);
        }
        at = next;
    }
    sums.add_plane(config);
    let out = Destination { of, any_keys: visible.begin < visible.end };
    store::<Y>(&sums, y, scales, &out, config);
}

/// A cube's query rows: from row `first` of a key head on, before `count`, `group` of them per
/// token; all rows of a key head; and the unit's lane.
#[derive(CubeType)]
struct Rows {
    first: u32,
    count: u32,
    all: u32,
    group: u32,
    lane: u32,
}

/// The rows of block `block`. Blocks of pages end with a token.
#[cube]
fn rows_of_block(block: u32, sizes: &Sizes, #[comptime] config: StreamConfig) -> Rows {
    let (all, group) = (sizes.rows, sizes.group);
    let lane = UNIT_POS_X % comptime!(config.lanes as u32);
    let count = comptime!(config.rows as u32);
    if comptime!(config.paged) {
        let blocks = group.div_ceil(count);
        let token = block / blocks;
        let first = token * group + block % blocks * count;
        Rows { first, count: (token + 1u32) * group, all, group, lane }
    } else {
        Rows { first: block * count, count: all, all, group, lane }
    }
}

/// The place of query row `row` of this cube's key head among the rows of q and y.
#[cube]
fn row_index(of: &Rows, row: u32) -> u32 {
    (row / of.group * CUBE_COUNT_Y + CUBE_POS_Y) * of.group + row % of.group
}

/// A unit's part of its rows of q, and the keys that each of them sees: from `low` to `high`.
#[derive(CubeType)]
struct Queries {
    values: Array<f32>,
    low: Array<u32>,
    high: Array<u32>,
}

/// Loads a unit's elements of the cube's query rows, and finds the keys that these see.
#[cube]
fn load_queries<Q: Int>(
    q: &[Q],
    positions: &[u32],
    of: &Rows,
    sizes: &Sizes,
    #[comptime] config: StreamConfig,
) -> Queries {
    let (count, slots) = comptime!((config.rows, config.slots(config.width)));
    let mut low = Array::<u32>::new(count);
    let mut high = Array::<u32>::new(count);
    let mut values = Array::<f32>::new(comptime!(count * slots));
    #[unroll]
    for r in 0..count {
        // Rows past the last are computed and not stored.
        let row = min(of.first + comptime!(r as u32), of.count - 1u32);
        let seen = seen_keys(positions, row, sizes);
        low[r] = seen.low;
        high[r] = seen.high;
        let at = row_index(of, row);
        #[unroll]
        for i in 0..slots {
            let element = element(of.lane, i, config);
            let mut value = 0.0f32;
            if element < comptime!(config.width as u32) {
                value = read(q, (at * comptime!(config.width as u32) + element) as usize, config.dtype);
            }
            values[r * slots + i] = value;
        }
    }
    Queries { values, low, high }
}

#[cube]
impl Queries {
    /// The keys that any of the rows sees.
    fn visible_keys(&self, #[comptime] config: StreamConfig) -> VisibleKeys {
        let mut visible = VisibleKeys::of_none();
        #[unroll]
        for r in 0..comptime!(config.rows) {
            visible.add(&SeenKeys { low: self.low[r], high: self.high[r] });
        }
        visible.begin = min(visible.begin, visible.end);
        visible
    }

    /// True if row `r` sees key `u` of a step.
    fn sees(
        &self,
        keys: &StepKeys,
        #[comptime] r: usize,
        #[comptime] u: usize,
        #[comptime] config: StreamConfig,
    ) -> bool {
        let key = keys.first + comptime!((u * config.plane / config.lanes) as u32);
        key >= self.low[r] && key < min(self.high[r], keys.end)
    }
}

/// The element of a row that slot `i` of a unit holds.
#[cube]
fn element(lane: u32, #[comptime] i: usize, #[comptime] config: StreamConfig) -> u32 {
    let vector = comptime!(config.vector());
    (lane + comptime!((i / vector * config.lanes) as u32)) * comptime!(vector as u32)
        + comptime!((i % vector) as u32)
}

/// The kernel with its types chosen by what the buffers store.
pub(super) fn compiled(target: &Target, config: StreamConfig) -> Kernel<AttentionStream<'static>> {
    macro_rules! typed {
        ($q:ty, $k:ty, $y:ty, $vector:expr) => {
            AttentionStream::kernel::<$q, $k, $y>(target, config.plane * config.planes, $vector, config)
        };
    }
    let words = if config.cache == CacheType::Int8 { 2 } else { 4 };
    with_storage!(config.dtype, Q => match (config.wide, config.cache.dtype().size(), config.split) {
        (true, _, true) => typed!(Q, u32, u32, words),
        (true, _, false) => typed!(Q, u32, Q, words),
        (false, 4, true) => typed!(Q, u32, u32, 1),
        (false, 4, false) => typed!(Q, u32, Q, 1),
        (false, _, true) => typed!(Q, u16, u32, 1),
        (false, _, false) => typed!(Q, u16, Q, 1),
    })
}

/// Launches the kernel, `splits` cubes per key head and block of rows.
pub(super) fn launch(
    call: &Call,
    config: StreamConfig,
    splits: usize,
    out: Output,
) -> Result<(), KernelError> {
    let blocks = match config.paged {
        true => call.tokens() * call.group.div_ceil(config.rows),
        false => call.rows().div_ceil(config.rows),
    };
    let blocks = CHECK.index(blocks)?;
    let (table, pool) = call.table();
    let (heads, splits) = (call.heads()?, CHECK.index(splits)?);
    (0..blocks).step_by(CUBES).try_for_each(|first| {
        let cubes = [(blocks - first).min(CUBES as u32), heads, splits];
        let arguments = AttentionStream {
            inputs: call.inputs()?,
            table: table.buffer()?,
            y: out.y.buffer()?,
            scales: out.scales.buffer()?,
            sizes: call.sizes()?,
            pool,
            scale: call.params.scale.to_bits(),
            first,
        };
        // SAFETY: the sizes are the tensors'; positions beyond the capacity see no keys, and rows
        // past the last are not stored. Each split has its part of y and its scales. Positions
        // within the capacity have a page in the table, and pages beyond the pool are not read.
        unsafe { call.gpu.launch(compiled(call.gpu.target(), config), cubes, arguments) }
    })
}
