//! How kernels go through rows whose elements belong together, as norms do: a cube or a plane a row.

use super::CUBES;
use super::compile::Target;
use super::float::unpack;
use crate::Tensor;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Elements that a unit loads at once where there are few. Vulkan knows no more.
pub(crate) const VECTOR: usize = 4;
/// Elements that a unit loads at once at the most: 16 bytes of the narrowest floats.
pub(crate) const LONGEST: usize = 8;
/// Rows so wide have enough for longer vectors.
const WIDE: usize = 256;
/// So many rows or fewer leave a device idle: each may have as many units as it has vectors.
const FEW: usize = 128;

/// How a cube takes rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// Units of a cube.
    pub units: usize,
    /// Units that run in step, or 0 where that differs from launch to launch.
    pub plane: usize,
    /// Rows of a cube: one, or one a plane.
    pub rows: usize,
    /// Elements of a vector.
    pub vector: usize,
    /// Whether a unit has one vector of a row at the most, and so keeps it between two goes through the row.
    pub once: bool,
}

impl Rows {
    /// For `count` rows of `width` elements that lie in `tensors`.
    pub fn of(target: &Target, [count, width]: [usize; 2], tensors: &[&Tensor]) -> Self {
        // Rows of heads leave units idle if they take more.
        let most = if width < WIDE { VECTOR } else { LONGEST };
        Self::new(target, [count, width], vector(target, most, width, tensors))
    }

    /// For `count` rows of `width` elements in vectors of `vector`.
    pub fn new(target: &Target, [count, width]: [usize; 2], vector: usize) -> Self {
        let vectors = width.div_ceil(vector);
        let (units, plane, rows) = match target.plane() {
            // Small planes are a CPU's: one does all, without memory that units share.
            Some(plane @ ..32) => (plane, plane, 1),
            Some(plane) if vectors <= if count <= FEW { plane } else { 4 * plane } => (4 * plane, plane, 4),
            Some(plane) if count <= FEW => {
                // No more planes than a plane has units, which `reduce` relies on.
                let most = target.units().min(plane * plane) / plane * plane;
                (vectors.next_multiple_of(plane).min(most), plane, 1)
            }
            Some(plane) => (vectors.div_ceil(2).next_multiple_of(plane).min(512), plane, 1),
            None => (vectors.next_power_of_two().clamp(64, 256), 0, 1),
        };
        Self { units, plane, rows, vector, once: vectors <= units / rows }
    }

    /// Cubes for `count` rows.
    pub fn cubes(self, count: usize) -> [u32; 3] {
        cubes(count.div_ceil(self.rows))
    }

    /// Units that share a row.
    fn units_a_row(self) -> usize {
        self.units / self.rows
    }
}

/// `count` cubes in numbers that every device takes; kernels see them in order as `CUBE_POS`, and perhaps more than
/// `count`.
pub(crate) fn cubes(count: usize) -> [u32; 3] {
    [count.clamp(1, CUBES) as u32, count.div_ceil(CUBES).max(1) as u32, 1]
}

/// How many elements of rows of `width` elements a unit can load at once from all `tensors`: `most` or fewer, and no
/// more than 16 bytes of the narrowest.
pub(crate) fn vector(target: &Target, most: usize, width: usize, tensors: &[&Tensor]) -> usize {
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
pub(crate) fn row(#[comptime] shape: Rows) -> usize {
    if comptime!(shape.rows == 1) {
        CUBE_POS
    } else {
        CUBE_POS * comptime!(shape.rows) + UNIT_POS_X as usize / comptime!(shape.plane)
    }
}

/// This unit's place among those that share its row.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub(crate) fn place(#[comptime] shape: Rows) -> usize {
    if comptime!(shape.rows == 1) {
        UNIT_POS_X as usize
    } else {
        UNIT_POS_X as usize % comptime!(shape.plane)
    }
}

/// How many units share a row.
pub(crate) fn stride(shape: Rows) -> usize {
    shape.units_a_row()
}

/// This unit's vector of the row of x from vector `first` to `end`, where it has no other: loaded before anything waits
/// for another unit, it is there by then. Else [`again`] loads, and this is nothing.
#[allow(clippy::collapsible_if)] // The first is known when the kernel is compiled.
#[cube]
pub(crate) fn ahead<X: Int, V: Size>(
    x: &[Vector<X, V>],
    first: usize,
    end: usize,
    #[comptime] shape: Rows,
) -> Vector<X, V> {
    let mut vector = Vector::<X, V>::new(X::from_int(0));
    if comptime!(shape.once) {
        if place(shape) < end {
            vector = x[first + place(shape)];
        }
    }
    vector
}

/// Vector `i` of x, or what [`ahead`] has of it.
#[cube]
pub(crate) fn again<X: Int, V: Size>(
    ahead: Vector<X, V>,
    x: &[Vector<X, V>],
    i: usize,
    #[comptime] shape: Rows,
) -> Vector<X, V> {
    if comptime!(shape.once) { ahead } else { x[i] }
}

/// The sum of the squares of the row of x from vector `first` to `end`, for all units that share it; `ahead` is what
/// [`ahead`] has of it. Units past the last row come here with an empty one.
#[cube]
pub(crate) fn squares<X: Int, V: Size>(
    ahead: Vector<X, V>,
    x: &[Vector<X, V>],
    first: usize,
    end: usize,
    #[comptime] dtype: FloatType,
    #[comptime] shape: Rows,
) -> f32 {
    let vector = comptime!(shape.vector);
    let mut values = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut i = place(shape);
    while i < end {
        unpack::<X, V>(again::<X, V>(ahead, x, first + i, shape), &mut values, 0usize, vector, dtype);
        #[unroll]
        for j in 0..vector {
            squares = fma(values[j], values[j], squares);
        }
        i += comptime!(stride(shape));
    }
    reduce::<f32, Sum>(squares, shape)
}

/// The smallest planes that there are.
const FEWEST: usize = 4;

/// A way to make one number of many, in any order.
#[cube]
pub(crate) trait Reduce<T: Numeric>: 'static + Send + Sync {
    /// What changes no number.
    fn nothing() -> T;
    fn plane(x: T) -> T;
    fn two(x: T, y: T) -> T;
}

pub(crate) struct Sum;
pub(crate) struct Greatest;
pub(crate) struct Least;

#[cube]
impl Reduce<f32> for Sum {
    fn nothing() -> f32 {
        0.0f32.runtime()
    }

    fn plane(x: f32) -> f32 {
        plane_sum(x)
    }

    fn two(x: f32, y: f32) -> f32 {
        x + y
    }
}

#[cube]
impl Reduce<u32> for Sum {
    fn nothing() -> u32 {
        0u32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_sum(x)
    }

    fn two(x: u32, y: u32) -> u32 {
        x + y
    }
}

#[cube]
impl Reduce<u32> for Greatest {
    fn nothing() -> u32 {
        0u32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_max(x)
    }

    fn two(x: u32, y: u32) -> u32 {
        max(x, y)
    }
}

#[cube]
impl Reduce<u32> for Least {
    fn nothing() -> u32 {
        0xffff_ffffu32.runtime()
    }

    fn plane(x: u32) -> u32 {
        plane_min(x)
    }

    fn two(x: u32, y: u32) -> u32 {
        min(x, y)
    }
}

/// What the units that share a row have, made one, for all of them. Every unit of the cube must come here.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
pub(crate) fn reduce<T: Numeric, R: Reduce<T>>(x: T, #[comptime] shape: Rows) -> T {
    let of_plane = across::<T, R>(x, shape.plane);
    if comptime!(shape.units == shape.rows * shape.plane) {
        of_plane
    } else {
        let plane =
            if comptime!(shape.plane == 0) { PLANE_DIM as usize } else { comptime!(shape.plane).runtime() };
        let unit = UNIT_POS_X as usize;
        let mut partial = Shared::<[T]>::new_slice(comptime!(shape.units / FEWEST));
        if unit % plane == 0 {
            partial[unit / plane] = of_plane;
        }
        sync_cube();
        let mut all = partial[0usize];
        if comptime!(shape.plane == 0) {
            for i in 1..comptime!(shape.units).runtime() / plane {
                all = R::two(all, partial[i]);
            }
        } else {
            // A cube has no more planes than a plane has units: each plane makes one of what all have.
            let planes = comptime!(shape.units / shape.plane);
            let lane = unit % plane;
            all = select(lane < planes, partial[min(lane, planes - 1)], R::nothing());
            all = across::<T, R>(all, shape.plane);
        }
        // Whoever comes again writes.
        sync_cube();
        all
    }
}

/// What the units of a plane, or of a part of one, of `plane` units have, made one, for all of them. Where it is 0, planes
/// differ from launch to launch.
#[cube]
pub(crate) fn across<T: Numeric, R: Reduce<T>>(x: T, #[comptime] plane: usize) -> T {
    if comptime!(plane == 0) {
        R::plane(x)
    } else {
        // CUDA's `plane_sum` is a loop that asks for the plane's size.
        let mut x = x;
        #[unroll]
        for i in 0..comptime!(plane.ilog2()) {
            x = R::two(x, plane_shuffle_xor(x, comptime!(1u32 << i).runtime()));
        }
        x
    }
}
