//! Attention on CUDA's tensor cores: a cube takes a block of query rows through tiles of keys, which it copies to
//! shared memory while it computes. Each plane keeps the sums of its own rows in registers.
//!
//! Rows are counted as in `stream.rs`: by token, then by query head.

use super::combine::{Sight, inverse};
use super::ptx::{copy, exp2, multiply, tiles, wait};
use crate::gpu::ptx::{address, pack};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Everything that the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// The type of q, k, v and y: f16 or bf16.
    pub dtype: FloatType,
    /// D, a multiple of 16.
    pub width: usize,
    /// Dv, a multiple of 16.
    pub value_width: usize,
    /// Blocks of 16 query rows that a plane takes.
    pub blocks: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Keys of a tile, a multiple of 16.
    pub keys: usize,
    /// Tiles in shared memory: with 2, one is copied while the other is used.
    pub stages: usize,
    /// Whether several cubes share the keys: then y is what `combine.rs` puts together.
    pub split: bool,
}

impl Tile {
    /// Query rows of a cube.
    pub fn rows(self) -> usize {
        16 * self.blocks * self.planes
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        32 * self.planes
    }

    /// Vectors of 16 bytes from one row of q or k to the next in shared memory: one more than a row has, so that
    /// the same vector of 8 rows lies in different banks.
    fn stride(self) -> usize {
        self.width / 8 + 1
    }

    fn value_stride(self) -> usize {
        self.value_width / 8 + 1
    }

    /// Vectors of shared memory of a stage: a tile of k, then one of v.
    fn stage(self) -> usize {
        self.keys * (self.stride() + self.value_stride())
    }

    /// Vectors of shared memory: q's rows, then the stages.
    pub fn vectors(self) -> usize {
        self.rows() * self.stride() + self.stages * self.stage()
    }
}

/// Less than any score, and a number when the scale multiplies it.
const LEAST: f32 = -1.0e38;
/// The scales that [`tiled`] takes, in units of log 2, end here.
pub(crate) const STEEPEST: f32 = 3.0;

/// See [`attention`](crate::ops::attention()). `scale` is times log2(e). y holds pairs of q's type, or the bits of f32
/// where the keys are split.
#[cube(launch_unchecked)]
pub(super) fn tiled(
    q: &[Vector<u32, Const<4>>],
    k: &[Vector<u32, Const<4>>],
    v: &[Vector<u32, Const<4>>],
    positions: &[u32],
    y: &mut [u32],
    scales: &mut [f32],
    rows: u32,
    group: u32,
    capacity: u32,
    window: u32,
    scale: u32,
    #[comptime] shape: Tile,
) {
    let scale = f32::reinterpret(scale);
    let mut shared =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(shape.vectors()), 128usize);
    let mut faults = Shared::<[u32]>::new_slice(comptime!(shape.keys));
    let q_at = address(&shared);
    let mut k_at = q_at + comptime!((16 * shape.rows() * shape.stride()) as u32);
    let to_v = comptime!((16 * shape.keys * shape.stride()) as u32);
    let to_next = comptime!((16 * shape.stage()) as u32);
    // The last rows have most keys, and go first.
    let row0 =
        (rows.div_ceil(comptime!(shape.rows() as u32)) - 1u32 - CUBE_POS_Y) * comptime!(shape.rows() as u32);
    copy_rows(q, q_at, row0, rows, group, shape);

    let sight = look(positions, row0, rows, group, capacity, window, shape);
    let base = CUBE_POS_X * capacity;
    if sight.begin < sight.end {
        copy_keys(k, k_at, base, sight.begin, sight.end, comptime!(shape.width), shape);
        copy_keys(v, k_at + to_v, base, sight.begin, sight.end, comptime!(shape.value_width), shape);
    }
    let lane = UNIT_POS_X % 32u32;
    let warp = UNIT_POS_X / 32u32;
    let own = row0 + warp * comptime!((16 * shape.blocks) as u32) + lane / 4u32;
    let mut low = Array::<u32>::new(comptime!(2 * shape.blocks));
    let mut high = Array::<u32>::new(comptime!(2 * shape.blocks));
    #[unroll]
    for r in 0..comptime!(2 * shape.blocks) {
        let position = positions[(min(own + comptime!(8 * r as u32), rows - 1u32) / group) as usize];
        high[r] = select(position < capacity, position + 1u32, 0u32);
        low[r] = high[r] - min(high[r], window);
    }
    let mut sums = Sums::new(shape);
    let mut at = sight.begin;
    // Less one stage's address, this is the other's.
    let both = 2u32 * k_at + to_next;
    while at < sight.end {
        let next = at + comptime!(shape.keys as u32);
        wait();
        sync_cube();
        if comptime!(shape.stages == 2) {
            if next < sight.end {
                copy_keys(k, both - k_at, base, next, sight.end, comptime!(shape.width), shape);
                copy_keys(v, both - k_at + to_v, base, next, sight.end, comptime!(shape.value_width), shape);
            }
        } else if at != sight.begin {
            copy_keys(v, k_at + to_v, base, at, sight.end, comptime!(shape.value_width), shape);
        }
        let mut scores = products(q_at, k_at, shape);
        if at < sight.all_begin || next > min(sight.all_end, sight.end) {
            silence(&mut shared, &mut faults, (k_at + to_v - q_at) / 16u32, shape);
            mask(&mut scores, &faults, &low, &high, at, sight.end, shape);
        }
        let weights = sums.weigh(&mut scores, scale, shape);
        if comptime!(shape.stages == 1) {
            wait();
            sync_cube();
            if next < sight.end {
                copy_keys(k, k_at, base, next, sight.end, comptime!(shape.width), shape);
            }
        }
        sums.add(&weights, k_at + to_v, shape);
        if comptime!(shape.stages == 2) {
            k_at = both - k_at;
        }
        at = next;
    }
    let out = Out { own, rows, group, scale, some: sight.begin < sight.end };
    sums.store(y, scales, &out, shape);
}

/// What the rows of a cube see of the keys.
#[cube]
fn look(
    positions: &[u32],
    row0: u32,
    rows: u32,
    group: u32,
    capacity: u32,
    window: u32,
    #[comptime] shape: Tile,
) -> Sight {
    let mut found = Shared::<[u32]>::new_slice(comptime!(4 * shape.planes));
    let mut begin = 0xffff_ffffu32.runtime();
    let mut end = 0u32.runtime();
    let mut all_begin = 0u32.runtime();
    let mut all_end = 0xffff_ffffu32.runtime();
    #[unroll]
    for i in 0..comptime!(shape.rows().div_ceil(shape.units())) {
        let row =
            row0 + (UNIT_POS_X + comptime!((i * shape.units()) as u32)) % comptime!(shape.rows() as u32);
        let position = positions[(min(row, rows - 1u32) / group) as usize];
        let high = select(position < capacity, position + 1u32, 0u32);
        let low = high - min(high, window);
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
    let mut sight =
        Sight { begin: found[0usize], end: found[1usize], all_begin: found[2usize], all_end: found[3usize] };
    #[unroll]
    for plane in 1..comptime!(shape.planes) {
        sight.begin = min(sight.begin, found[comptime!(4 * plane)]);
        sight.end = max(sight.end, found[comptime!(4 * plane + 1)]);
        sight.all_begin = max(sight.all_begin, found[comptime!(4 * plane + 2)]);
        sight.all_end = min(sight.all_end, found[comptime!(4 * plane + 3)]);
    }
    sight.begin = min(sight.begin, sight.end);
    if comptime!(shape.split) {
        sight.share(comptime!(shape.keys as u32));
    }
    sight
}

/// Where a query row lies among the rows of q and y.
#[cube]
fn place(row: u32, group: u32) -> u32 {
    (row / group * CUBE_COUNT_X + CUBE_POS_X) * group + row % group
}

/// Begins to copy the cube's rows of q.
#[cube]
fn copy_rows(
    q: &[Vector<u32, Const<4>>],
    to: u32,
    row0: u32,
    rows: u32,
    group: u32,
    #[comptime] shape: Tile,
) {
    let vectors = comptime!((shape.width / 8) as u32);
    #[unroll]
    for i in 0..comptime!((shape.rows() * shape.width / 8).div_ceil(shape.units())) {
        let vector = UNIT_POS_X + comptime!((i * shape.units()) as u32);
        let row = vector / vectors;
        // Rows past the last are computed and not stored.
        let from = place(min(row0 + row, rows - 1u32), group) * vectors + vector % vectors;
        let to = to + 16u32 * (row * comptime!(shape.stride() as u32) + vector % vectors);
        let whole = comptime!((shape.rows() * shape.width / 8).is_multiple_of(shape.units()));
        if whole.runtime() || row < comptime!(shape.rows() as u32) {
            copy(q, from, to);
        }
    }
}

/// Begins to copy a tile of keys or values from key `first` on; in place of those past the end comes the last.
#[cube]
fn copy_keys(
    x: &[Vector<u32, Const<4>>],
    to: u32,
    base: u32,
    first: u32,
    end: u32,
    #[comptime] width: usize,
    #[comptime] shape: Tile,
) {
    let vectors = comptime!((width / 8) as u32);
    #[unroll]
    for i in 0..comptime!((shape.keys * width / 8).div_ceil(shape.units())) {
        let vector = UNIT_POS_X + comptime!((i * shape.units()) as u32);
        let key = vector / vectors;
        let from = (base + min(first + key, end - 1u32)) * vectors + vector % vectors;
        let to = to + 16u32 * (key * comptime!((width / 8 + 1) as u32) + vector % vectors);
        let whole = comptime!((shape.keys * width / 8).is_multiple_of(shape.units()));
        if whole.runtime() || key < comptime!(shape.keys as u32) {
            copy(x, from, to);
        }
    }
}

/// The products of a plane's rows with a tile of keys: for each block of rows and each 8 keys, those of rows l / 4
/// and l / 4 + 8 with keys 2 (l % 4) and the next, for lane l.
#[cube]
fn products(q_at: u32, k_at: u32, #[comptime] shape: Tile) -> Array<Vector<f32, Const<4>>> {
    let count = comptime!(shape.keys / 8);
    let stride = comptime!(16 * shape.stride());
    let lane = UNIT_POS_X % 32u32;
    let first = UNIT_POS_X / 32u32 * comptime!((16 * shape.blocks) as u32);
    let q_at = q_at + (first + lane % 16u32) * comptime!(stride as u32) + lane / 16u32 * 16u32;
    let k_at =
        k_at + (lane / 16u32 * 8u32 + lane % 8u32) * comptime!(stride as u32) + lane / 8u32 % 2u32 * 16u32;
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.blocks * count));
    #[unroll]
    for i in 0..comptime!(shape.blocks * count) {
        scores[i] = Vector::<f32, Const<4>>::new(0.0f32);
    }
    #[unroll]
    for d in 0..comptime!(shape.width / 16) {
        let mut rows = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.blocks));
        #[unroll]
        for b in 0..comptime!(shape.blocks) {
            rows[b] = tiles(q_at, comptime!(b * 16 * stride + d * 32), false);
        }
        #[unroll]
        for n in 0..comptime!(count / 2) {
            let keys = tiles(k_at, comptime!(n * 16 * stride + d * 32), false);
            #[unroll]
            for b in 0..comptime!(shape.blocks) {
                let i = comptime!(b * count + 2 * n);
                scores[i] =
                    multiply(rows[b], keys.extract(0usize), keys.extract(1usize), scores[i], shape.dtype);
                let i = comptime!(b * count + 2 * n + 1);
                scores[i] =
                    multiply(rows[b], keys.extract(2usize), keys.extract(3usize), scores[i], shape.dtype);
            }
        }
    }
    scores
}

/// Waits for the tile of values, from vector `first` on, and puts zeros in place of those that are not finite: a weight
/// of 0 would not silence them in rows that do not see them. Marks their keys.
#[cube]
fn silence(
    shared: &mut Shared<[Vector<u32, Const<4>>]>,
    faults: &mut Shared<[u32]>,
    first: u32,
    #[comptime] shape: Tile,
) {
    let mut at = UNIT_POS_X;
    while at < comptime!(shape.keys as u32) {
        faults[at as usize] = 0u32;
        at += comptime!(shape.units() as u32);
    }
    if comptime!(shape.stages == 1) {
        wait();
    }
    sync_cube();
    let vectors = comptime!((shape.value_width / 8) as u32);
    // All bits of the exponents.
    let exponent = comptime!(if shape.dtype == FloatType::F16 { 0x7c00u32 } else { 0x7f80u32 });
    let mut vector = UNIT_POS_X;
    while vector < comptime!(shape.keys as u32) * vectors {
        let key = vector / vectors;
        let at = (first + key * comptime!(shape.value_stride() as u32) + vector % vectors) as usize;
        let values = shared[at];
        let mut fault = false.runtime();
        #[unroll]
        for j in 0..4usize {
            let low = values.extract(j) & exponent;
            let high = (values.extract(j) >> 16u32) & exponent;
            fault = fault || low == exponent || high == exponent;
        }
        if fault {
            shared[at] = Vector::<u32, Const<4>>::new(0u32);
            faults[key as usize] = 1u32;
        }
        vector += comptime!(shape.units() as u32);
    }
    sync_cube();
}

/// Takes the scores of keys that a row does not see to nothing, and those of marked ones that it sees to NaN.
#[cube]
fn mask(
    scores: &mut Array<Vector<f32, Const<4>>>,
    faults: &Shared<[u32]>,
    low: &Array<u32>,
    high: &Array<u32>,
    first: u32,
    end: u32,
    #[comptime] shape: Tile,
) {
    let count = comptime!(shape.keys / 8);
    #[unroll]
    for n in 0..count {
        #[unroll]
        for j in 0..2usize {
            let key = UNIT_POS_X % 4u32 * 2u32 + comptime!((8 * n + j) as u32);
            let fault = faults[key as usize] != 0u32;
            let key = first + key;
            #[unroll]
            for r in 0..comptime!(2 * shape.blocks) {
                let i = comptime!(r / 2 * count + n);
                let mut score = scores[i];
                let element = comptime!(r % 2 * 2 + j);
                let seen = key >= low[r] && key < min(high[r], end);
                let value = select(fault, f32::reinterpret(0x7fc0_0000u32), score.extract(element));
                score.insert(element, select(seen, value, f32::reinterpret(0xff80_0000u32)));
                scores[i] = score;
            }
        }
    }
}

/// Where a lane's rows go.
#[derive(CubeType)]
struct Out {
    /// The first of them.
    own: u32,
    rows: u32,
    group: u32,
    scale: f32,
    /// Whether there were keys at all.
    some: bool,
}

/// What a plane's lane has of its rows: two of each block.
#[derive(CubeType)]
struct Sums {
    /// Sums of weighted values, cut as [`products`] are.
    values: Array<Vector<f32, Const<4>>>,
    /// The greatest score, not scaled.
    max: Array<f32>,
    /// The lane's part of the weights' sum.
    weights: Array<f32>,
}

#[cube]
impl Sums {
    fn new(#[comptime] shape: Tile) -> Sums {
        let mut values = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.blocks * shape.value_width / 8));
        let mut greatest = Array::<f32>::new(comptime!(2 * shape.blocks));
        let mut weights = Array::<f32>::new(comptime!(2 * shape.blocks));
        #[unroll]
        for i in 0..comptime!(shape.blocks * shape.value_width / 8) {
            values[i] = Vector::<f32, Const<4>>::new(0.0f32);
        }
        #[unroll]
        for r in 0..comptime!(2 * shape.blocks) {
            greatest[r] = LEAST;
            weights[r] = 0.0;
        }
        Sums { values, max: greatest, weights }
    }

    /// Scores to weights, rounded and laid out as the left operand of a product with the values.
    fn weigh(
        &mut self,
        scores: &mut Array<Vector<f32, Const<4>>>,
        scale: f32,
        #[comptime] shape: Tile,
    ) -> Array<Vector<u32, Const<4>>> {
        let count = comptime!(shape.keys / 8);
        let mut packed = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.blocks * count / 2));
        #[unroll]
        for i in 0..comptime!(shape.blocks * count / 2) {
            packed[i] = Vector::<u32, Const<4>>::new(0u32);
        }
        #[unroll]
        for r in 0..comptime!(2 * shape.blocks) {
            let first = comptime!(r / 2 * count);
            let element = comptime!(r % 2 * 2);
            let mut greatest = self.max[r];
            #[unroll]
            for n in 0..count {
                let score = scores[comptime!(first + n)];
                greatest = max(greatest, max(score.extract(element), score.extract(comptime!(element + 1))));
            }
            greatest = max(greatest, plane_shuffle_xor(greatest, 1u32));
            greatest = max(greatest, plane_shuffle_xor(greatest, 2u32));
            let shrink = exp2((self.max[r] - greatest) * scale);
            let shift = greatest * scale;
            self.max[r] = greatest;
            let mut sum = 0.0f32;
            #[unroll]
            for n in 0..count {
                let score = scores[comptime!(first + n)];
                let left = exp2(fma(score.extract(element), scale, -shift));
                let right = exp2(fma(score.extract(comptime!(element + 1)), scale, -shift));
                sum += left + right;
                let i = comptime!(r / 2 * count / 2 + n / 2);
                let mut pair = packed[i];
                pair.insert(comptime!(n % 2 * 2 + r % 2), pack(left, right, shape.dtype));
                packed[i] = pair;
            }
            self.weights[r] = fma(self.weights[r], shrink, sum);
            #[unroll]
            for n in 0..comptime!(shape.value_width / 8) {
                let i = comptime!(r / 2 * shape.value_width / 8 + n);
                let mut value = self.values[i];
                value.insert(element, value.extract(element) * shrink);
                value.insert(comptime!(element + 1), value.extract(comptime!(element + 1)) * shrink);
                self.values[i] = value;
            }
        }
        packed
    }

    /// Adds the weighted values of a tile.
    fn add(&mut self, weights: &Array<Vector<u32, Const<4>>>, v_at: u32, #[comptime] shape: Tile) {
        let stride = comptime!(16 * shape.value_stride());
        let lane = UNIT_POS_X % 32u32;
        let v_at = v_at + lane % 16u32 * comptime!(stride as u32) + lane / 16u32 * 16u32;
        #[unroll]
        for n in 0..comptime!(shape.keys / 16) {
            #[unroll]
            for d in 0..comptime!(shape.value_width / 16) {
                let values = tiles(v_at, comptime!(n * 16 * stride + d * 32), true);
                #[unroll]
                for b in 0..comptime!(shape.blocks) {
                    let weight = weights[comptime!(b * shape.keys / 16 + n)];
                    let i = comptime!(b * shape.value_width / 8 + 2 * d);
                    self.values[i] = multiply(
                        weight,
                        values.extract(0usize),
                        values.extract(1usize),
                        self.values[i],
                        shape.dtype,
                    );
                    let i = comptime!(b * shape.value_width / 8 + 2 * d + 1);
                    self.values[i] = multiply(
                        weight,
                        values.extract(2usize),
                        values.extract(3usize),
                        self.values[i],
                        shape.dtype,
                    );
                }
            }
        }
    }

    /// Stores the rows: as the result, or for `combine.rs`.
    fn store(&self, y: &mut [u32], scales: &mut [f32], out: &Out, #[comptime] shape: Tile) {
        let width = comptime!(shape.value_width as u32);
        let column = UNIT_POS_X % 4u32 * 2u32;
        #[unroll]
        for r in 0..comptime!(2 * shape.blocks) {
            let mut weights = self.weights[r];
            weights += plane_shuffle_xor(weights, 1u32);
            weights += plane_shuffle_xor(weights, 2u32);
            let factor = inverse(weights);
            let row = out.own + comptime!(8 * r as u32);
            let element = comptime!(r % 2 * 2);
            if row < out.rows {
                let mut at = place(row, out.group);
                if comptime!(shape.split) {
                    if column == 0u32 {
                        let to = ((at * CUBE_COUNT_Z + CUBE_POS_Z) * 2u32) as usize;
                        // The scores' exponential is natural there.
                        scales[to] = self.max[r] * out.scale * comptime!(std::f32::consts::LN_2);
                        scales[to + 1] = weights;
                    }
                    at += CUBE_POS_Z * CUBE_COUNT_X * out.rows;
                }
                if !comptime!(shape.split) || out.some {
                    #[unroll]
                    for n in 0..comptime!(shape.value_width / 8) {
                        let value = self.values[comptime!(r / 2 * shape.value_width / 8 + n)];
                        let (left, right) = (value.extract(element), value.extract(comptime!(element + 1)));
                        let to = at * width + column + comptime!(8 * n as u32);
                        if comptime!(shape.split) {
                            y[to as usize] = u32::reinterpret(left);
                            y[(to + 1u32) as usize] = u32::reinterpret(right);
                        } else {
                            y[(to / 2u32) as usize] = pack(left * factor, right * factor, shape.dtype);
                        }
                    }
                }
            }
        }
    }
}
