//! Where several cubes share a row's keys: how they share them, and how their parts become one.
//!
//! A part of a row is Dv sums of weighted values, the greatest score, and the sum of the weights, all f32. The sums lie
//! part by part, the other two row by row.

use crate::gpu::CUBES;
use crate::gpu::float::write;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The greatest score of no keys: below all, and a difference with it is a number.
pub(super) const NOTHING: f32 = -3.0e38;

/// The keys that rows see: some of them from `begin` to `end`, and all of them from `all_begin` to `all_end`.
#[derive(CubeType)]
pub(super) struct Sight {
    pub begin: u32,
    pub end: u32,
    pub all_begin: u32,
    pub all_end: u32,
}

#[cube]
impl Sight {
    /// Leaves this cube's part of them: whole steps, so that few keys need few cubes.
    pub fn share(&mut self, #[comptime] step: u32) {
        let part = (self.end - self.begin).div_ceil(CUBE_COUNT_Z).div_ceil(step) * step;
        self.begin = min(self.begin + CUBE_POS_Z * part, self.end);
        self.end = min(self.begin + part, self.end);
    }
}

/// What sums are multiplied with to be means: NaN where there is nothing.
#[cube]
pub(super) fn inverse(weights: f32) -> f32 {
    select(weights == 0.0f32, f32::reinterpret(0x7fc0_0000u32), 1.0f32 / weights)
}

/// Whether a part whose weights have this sum (at least 1, NaN, or exactly 0) saw any keys. Bits are compared, since
/// some compilers assume that floats are numbers.
#[cube]
fn has_keys(weights: f32) -> bool {
    u32::reinterpret(weights) != 0u32
}

/// Everything that the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Dv.
    pub width: usize,
    /// The type of y.
    pub dtype: FloatType,
    /// Units that run in step, or a divisor of that.
    pub plane: usize,
}

impl Shape {
    /// Elements that a unit takes.
    pub fn vector(self) -> usize {
        if self.width.is_multiple_of(4) { 4 } else { 1 }
    }

    /// Units that a row's elements are given to.
    fn lanes(self) -> usize {
        (self.width / self.vector()).next_multiple_of(self.plane)
    }

    /// Groups of those, each of which takes some of the parts.
    fn ways(self) -> usize {
        // Devices of small planes share no memory within a cube.
        if self.plane < 32 { 1 } else { (512 / self.lanes()).max(1) }
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        self.lanes() * self.ways()
    }
}

/// Parts that a unit has under way at once.
const AHEAD: usize = 4;

/// `y` of `rows` rows from `count` parts of each; a cube takes a row.
#[cube(launch_unchecked)]
pub(super) fn combine<Y: Int, V: Size>(
    parts: &[Vector<f32, V>],
    scales: &[f32],
    y: &mut [Y],
    rows: u32,
    count: u32,
    #[comptime] shape: Shape,
) {
    let lanes = comptime!(shape.lanes() as u32);
    let vectors = comptime!((shape.width / shape.vector()) as u32);
    let vector = comptime!(shape.vector());
    let step = comptime!(shape.ways() as u32);
    // Cubes past the last row do it again.
    let row = min(CUBE_POS_Y * comptime!(CUBES as u32) + CUBE_POS_X, rows - 1u32);
    let scales_at = row * count * 2u32;
    let mut greatest = NOTHING.runtime();
    let mut written = 0u32.runtime();
    let mut part = UNIT_POS_X % comptime!(shape.plane as u32);
    while part < count {
        let at = (scales_at + 2u32 * part) as usize;
        greatest = max(greatest, scales[at]);
        written = select(has_keys(scales[at + 1]), part + 1u32, written);
        part += comptime!(shape.plane as u32);
    }
    greatest = plane_max(greatest);
    // Keys are shared from the first part on (`Sight::share`): the parts behind the last one with keys may have none,
    // and the sums of such a part were never written.
    written = plane_max(written);
    let column = min(UNIT_POS_X % lanes, vectors - 1u32);
    let way = UNIT_POS_X / lanes;
    let mut sums = Array::<f32>::new(vector);
    #[unroll]
    for i in 0..vector {
        sums[i] = 0.0;
    }
    let mut weights = 0.0f32;
    let mut first = 0u32.runtime();
    while first < written {
        #[unroll]
        for ahead in 0..AHEAD {
            let part = first + way + comptime!(ahead as u32) * step;
            let at = min(part, written - 1u32);
            let values = parts[((at * rows + row) * vectors + column) as usize];
            let scale = (scales[(scales_at + 2u32 * at) as usize] - greatest).exp();
            let weight = scales[(scales_at + 2u32 * at + 1u32) as usize];
            let some = part < written && has_keys(weight);
            weights += select(some, weight * scale, 0.0f32);
            #[unroll]
            for i in 0..vector {
                sums[i] += select(some, values.extract(i) * scale, 0.0f32);
            }
        }
        first += comptime!(AHEAD as u32) * step;
    }
    gather::<Y>(&mut sums, weights, y, row, shape);
}

/// Adds up what the ways have, and stores the row.
#[cube]
fn gather<Y: Int>(sums: &mut Array<f32>, weights: f32, y: &mut [Y], row: u32, #[comptime] shape: Shape) {
    let lanes = comptime!(shape.lanes() as u32);
    let vector = comptime!(shape.vector());
    let stride = comptime!(shape.lanes() * (shape.vector() + 1));
    let column = UNIT_POS_X % lanes;
    let mut weights = weights;
    if comptime!(shape.ways() > 1) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(shape.ways() * stride));
        let at = (UNIT_POS_X / lanes) as usize * stride + column as usize;
        #[unroll]
        for i in 0..vector {
            shared[at + comptime!(i * shape.lanes())] = sums[i];
        }
        shared[at + comptime!(vector * shape.lanes())] = weights;
        sync_cube();
        weights = 0.0f32;
        #[unroll]
        for i in 0..vector {
            sums[i] = 0.0;
        }
        if UNIT_POS_X < lanes {
            #[unroll]
            for way in 0..comptime!(shape.ways()) {
                let at = comptime!(way * stride) + column as usize;
                #[unroll]
                for i in 0..vector {
                    sums[i] += shared[at + comptime!(i * shape.lanes())];
                }
                weights += shared[at + comptime!(vector * shape.lanes())];
            }
        }
    }
    if UNIT_POS_X < comptime!((shape.width / shape.vector()) as u32) {
        let factor = inverse(weights);
        #[unroll]
        for i in 0..vector {
            let element = column * comptime!(vector as u32) + comptime!(i as u32);
            let at = row * comptime!(shape.width as u32) + element;
            write(y, at as usize, sums[i] * factor, shape.dtype);
        }
    }
}
