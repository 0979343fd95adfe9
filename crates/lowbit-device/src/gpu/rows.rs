//! Rows whose elements belong together, as in norms: how many units share a row, which vectors of
//! it each unit loads, and how the units' values are reduced to one.
//!
//! [`Rows`] is chosen on the host and compiled into the kernel: a row gets a whole cube, or one of
//! the planes of a cube. The units of a row are its lanes: lane `i` of `n` takes vectors `i`,
//! `i + n`, `i + 2 n`, and so on. Where planes have one size, the order of every sum follows from
//! [`Rows`] alone, so results are the same in every launch; change it and they change in their last
//! bits.

use super::CUBES;
use super::compile::Target;
use super::float::unpack;
use super::launch::LaunchArgs;
use crate::Tensor;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Elements of the usual vector, and of the longest that Vulkan has.
pub const VECTOR: usize = 4;
/// Elements of the longest vector: 16 bytes of 16-bit floats.
pub const LONGEST: usize = 8;
/// From this width on, rows are loaded in vectors of up to [`LONGEST`] elements.
const WIDE: usize = 256;
/// Up to this many rows, a device is not busy: a row then gets as many units as it has vectors.
const FEW: usize = 128;

/// The distribution of rows over cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rows {
    /// Units of a cube.
    pub units: usize,
    /// Units of a plane, or 0 where that differs from launch to launch.
    pub plane: usize,
    /// Rows per cube: one, or one per plane.
    pub rows: usize,
    /// Elements of a vector.
    pub vector: usize,
    /// True if no unit has more than one vector of a row: it then keeps it in registers between two
    /// passes over the row.
    pub preloads: bool,
}

/// The number of rows of a launch, and their width in vectors.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub struct RowSizes {
    pub count: u32,
    pub vectors: u32,
}

impl Rows {
    /// For `count` rows of `width` elements that lie in `tensors`.
    pub fn of(target: &Target, [count, width]: [usize; 2], tensors: &[&Tensor]) -> Self {
        // Longer vectors would leave units idle in rows as short as a head.
        let most = if width < WIDE { VECTOR } else { LONGEST };
        Self::new(target, [count, width], vector(target, most, width, tensors))
    }

    /// For `count` rows of `width` elements in vectors of `vector`.
    pub fn new(target: &Target, [count, width]: [usize; 2], vector: usize) -> Self {
        let vectors = width.div_ceil(vector);
        let (units, plane, rows) = match target.plane() {
            // Only CPUs have small planes: one plane per row needs no shared memory.
            Some(plane @ ..32) => (plane, plane, 1),
            Some(plane) if vectors <= if count <= FEW { plane } else { 4 * plane } => (4 * plane, plane, 4),
            Some(plane) if count <= FEW => {
                // No more planes than a plane has units: `reduce` relies on that.
                let most = target.units().min(plane * plane) / plane * plane;
                (vectors.next_multiple_of(plane).min(most), plane, 1)
            }
            Some(plane) => (vectors.div_ceil(2).next_multiple_of(plane).min(512), plane, 1),
            None => (vectors.next_power_of_two().clamp(64, 256), 0, 1),
        };
        Self { units, plane, rows, vector, preloads: vectors <= units / rows }
    }

    /// Cubes for `count` rows.
    pub fn cubes(self, count: usize) -> [u32; 3] {
        cubes(count.div_ceil(self.rows))
    }
}

/// At least `count` cubes, in two dimensions that every device can launch. `CUBE_POS` numbers them
/// from 0; kernels must ignore those from `count` on.
pub fn cubes(count: usize) -> [u32; 3] {
    [count.clamp(1, CUBES) as u32, count.div_ceil(CUBES).max(1) as u32, 1]
}

/// The length of the vectors in which rows of `width` elements can be loaded from all `tensors`: at
/// most `most`, and at most 16 bytes of the narrowest element type.
pub fn vector(target: &Target, most: usize, width: usize, tensors: &[&Tensor]) -> usize {
    let fits = |vector: usize| {
        let aligned = |tensor: &&Tensor| {
            tensor.memory().is_ok_and(|(_, start)| start.is_multiple_of(vector * tensor.dtype().size()))
        };
        let loads = tensors.iter().any(|tensor| vector * tensor.dtype().size() <= 16);
        loads && width.is_multiple_of(vector) && tensors.iter().all(aligned)
    };
    let most = most.min(target.vector());
    [LONGEST, VECTOR].into_iter().find(|&vector| vector <= most && fits(vector)).unwrap_or(1)
}

/// The row that this unit works on.
#[cube]
pub fn row(#[comptime] rows: Rows) -> usize {
    if comptime!(rows.rows == 1) {
        CUBE_POS
    } else {
        CUBE_POS * comptime!(rows.rows) + UNIT_POS_X as usize / comptime!(rows.plane)
    }
}

/// This unit's lane: its index among the units that share its row.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub fn lane_in_row(#[comptime] rows: Rows) -> usize {
    if comptime!(rows.rows == 1) { UNIT_POS_X as usize } else { UNIT_POS_X as usize % comptime!(rows.plane) }
}

/// The number of units that share a row.
pub fn lanes_per_row(rows: Rows) -> usize {
    rows.units / rows.rows
}

/// Loads this unit's one vector of a row of x, if units have no more ([`Rows::preloads`]), so that
/// the load overlaps with what comes before its first use. Zeros otherwise: [`preloaded_or_load`]
/// then loads at each use. The row has `end` vectors from vector `first` of x on.
#[allow(clippy::collapsible_if)] // The outer one is decided when the kernel is compiled.
#[cube]
pub fn preload<X: Int, V: Size>(
    x: &[Vector<X, V>],
    first: usize,
    end: usize,
    #[comptime] rows: Rows,
) -> Vector<X, V> {
    let mut vector = Vector::<X, V>::new(X::from_int(0));
    if comptime!(rows.preloads) {
        if lane_in_row(rows) < end {
            vector = x[first + lane_in_row(rows)];
        }
    }
    vector
}

/// Vector `i` of x: `preloaded`, if [`preload`] loaded it, else from memory.
#[cube]
pub fn preloaded_or_load<X: Int, V: Size>(
    preloaded: Vector<X, V>,
    x: &[Vector<X, V>],
    i: usize,
    #[comptime] rows: Rows,
) -> Vector<X, V> {
    if comptime!(rows.preloads) { preloaded } else { x[i] }
}

/// The sum of the squares of a row of x, for all units that share it. The row has `end` vectors
/// from vector `first` of x on; `preloaded` is what [`preload()`] gave for it. Every unit of the
/// cube must call this, those past the last row with an `end` of 0.
#[cube]
pub fn sum_of_squares<X: Int, V: Size>(
    preloaded: Vector<X, V>,
    x: &[Vector<X, V>],
    first: usize,
    end: usize,
    #[comptime] dtype: FloatType,
    #[comptime] rows: Rows,
) -> f32 {
    let vector = comptime!(rows.vector);
    let mut values = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut i = lane_in_row(rows);
    while i < end {
        let xs = preloaded_or_load::<X, V>(preloaded, x, first + i, rows);
        unpack::<X, V>(xs, &mut values, 0usize, vector, dtype);
        #[unroll]
        for j in 0..vector {
            squares = fma(values[j], values[j], squares);
        }
        i += comptime!(lanes_per_row(rows));
    }
    reduce::<f32, Sum>(squares, rows)
}

/// Units of the smallest plane of any device.
const SMALLEST_PLANE: usize = 4;

/// A reduction whose order matters only for rounding.
#[cube]
pub trait Reduce<T: Numeric>: 'static + Send + Sync {
    /// The value that `combine` leaves every other as.
    fn identity() -> T;
    /// The reduction over the plane, for all its units.
    fn plane(x: T) -> T;
    fn combine(x: T, y: T) -> T;
}

pub struct Sum;
pub struct Maximum;
pub struct Minimum;

#[cube]
impl Reduce<f32> for Sum {
    fn identity() -> f32 {
        0.0f32.runtime()
    }

    fn plane(x: f32) -> f32 {
        plane_sum(x)
    }

    fn combine(x: f32, y: f32) -> f32 {
        x + y
    }
}

#[cube]
impl Reduce<u32> for Sum {
    fn identity() -> u32 {
        0u32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_sum(x)
    }

    fn combine(x: u32, y: u32) -> u32 {
        x + y
    }
}

/// Of numbers: NaN may be lost.
#[cube]
impl Reduce<f32> for Maximum {
    fn identity() -> f32 {
        f32::reinterpret(0xff80_0000u32)
    }

    fn plane(x: f32) -> f32 {
        plane_max(x)
    }

    fn combine(x: f32, y: f32) -> f32 {
        max(x, y)
    }
}

#[cube]
impl Reduce<u32> for Maximum {
    fn identity() -> u32 {
        0u32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_max(x)
    }

    fn combine(x: u32, y: u32) -> u32 {
        max(x, y)
    }
}

#[cube]
impl Reduce<u32> for Minimum {
    fn identity() -> u32 {
        0xffff_ffffu32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_min(x)
    }

    fn combine(x: u32, y: u32) -> u32 {
        min(x, y)
    }
}

/// Reduces the `x` of all units that share a row, for all of them. Every unit of the cube must call
/// this.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub fn reduce<T: Numeric, R: Reduce<T>>(x: T, #[comptime] rows: Rows) -> T {
    let of_plane = reduce_plane::<T, R>(x, rows.plane);
    if comptime!(rows.units == rows.rows * rows.plane) {
        of_plane
    } else {
        let plane =
            if comptime!(rows.plane == 0) { PLANE_DIM as usize } else { comptime!(rows.plane).runtime() };
        let unit = UNIT_POS_X as usize;
        let mut partial = Shared::<[T]>::new_slice(comptime!(rows.units / SMALLEST_PLANE));
        if unit % plane == 0 {
            partial[unit / plane] = of_plane;
        }
        sync_cube();
        let mut all = partial[0usize];
        if comptime!(rows.plane == 0) {
            for i in 1..comptime!(rows.units).runtime() / plane {
                all = R::combine(all, partial[i]);
            }
        } else {
            // A cube has no more planes than a plane has units: each plane reduces the results of
            // all planes.
            let planes = comptime!(rows.units / rows.plane);
            let lane = unit % plane;
            all = select(lane < planes, partial[min(lane, planes - 1)], R::identity());
            all = reduce_plane::<T, R>(all, rows.plane);
        }
        // The next call writes to the same memory.
        sync_cube();
        all
    }
}

/// Reduces the `x` of `plane` neighbouring units, for all of them: of a plane, or of an aligned
/// part of one. 0 stands for a plane whose size differs from launch to launch.
#[cube]
pub fn reduce_plane<T: Numeric, R: Reduce<T>>(x: T, #[comptime] plane: usize) -> T {
    if comptime!(plane == 0) {
        R::plane(x)
    } else {
        // CubeCL's `plane_sum` would be a loop over the plane's size, which CUDA asks for at run
        // time.
        let mut x = x;
        #[unroll]
        for i in 0..comptime!(plane.ilog2()) {
            x = R::combine(x, plane_shuffle_xor(x, comptime!(1u32 << i).runtime()));
        }
        x
    }
}
