//! Which kernel attention runs with on a GPU, and how it is cut into cubes.

use super::gpu::Shape;
use lowbit_formats::FloatType;

/// Units that take turns with keys where planes differ in size: no plane has fewer.
const FEWEST: usize = 4;
/// Planes of a cube on devices that share memory within one.
const PLANES: usize = 4;
/// Elements of a row that a unit has, where it can.
const SLOTS: usize = 8;
/// Units that share a key at most: more of them would spend their time adding up.
const LANES: usize = 16;
/// Cubes that fill a CPU, and the largest devices: two for each of an H200's multiprocessors.
const FULL: [usize; 2] = [8, 264];

/// How many rows, query heads a key head times tokens, of `sizes` (rows, key heads, capacity, D and Dv) a cube takes,
/// and how; and how many cubes share the keys. `dtypes` are q's and k's.
pub(super) fn stream(
    [dtype, cache]: [FloatType; 2],
    [rows, heads, capacity, width, value_width]: [usize; 5],
    plane: Option<usize>,
) -> (Shape, usize) {
    let small = plane.is_some_and(|plane| plane < 32);
    // Planes that differ in size are used as if they were small ones.
    let planes = if small { 1 } else { 32 * PLANES / plane.unwrap_or(FEWEST).max(1) };
    let plane = plane.unwrap_or(FEWEST);
    let widest = width.max(value_width);
    let lanes = widest.div_ceil(SLOTS).next_power_of_two().min(LANES).min(plane);
    let slots = widest.div_ceil(lanes);
    // A small plane is a CPU's: it gains nothing from more at once.
    let most = if slots <= SLOTS && !small { 8 } else { 4 };
    let count = rows.min(most);
    let keys = if slots <= SLOTS && !small { 4 } else { 2 };
    let wide = [width, value_width].iter().all(|width| (width * cache.size()).is_multiple_of(16));
    let mut shape = Shape {
        dtype,
        cache,
        width,
        value_width,
        rows: count,
        lanes,
        keys,
        plane,
        planes,
        wide,
        split: false,
    };
    let steps = capacity.div_ceil(shape.step() * planes);
    let splits = FULL[usize::from(!small)].div_ceil(rows.div_ceil(count) * heads).min(steps);
    shape.split = splits > 1;
    (shape, splits)
}
