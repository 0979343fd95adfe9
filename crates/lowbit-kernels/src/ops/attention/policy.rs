//! Which kernel attention runs with on a GPU, and how it is cut into cubes.

use super::gpu::{STEEPEST, Shape, Tile};
use crate::gpu::compile::Target;
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

/// Query rows from which on tensor cores pay.
const MANY: usize = 9;

/// As [`stream`], for tensor cores: where they can compute this, and there are rows enough. `scale` is times log2(e).
pub(super) fn tile(
    [dtype, cache]: [FloatType; 2],
    [rows, heads, capacity, width, value_width]: [usize; 5],
    scale: f32,
    target: &Target,
) -> Option<(Tile, usize)> {
    let whole =
        [width, value_width].iter().all(|&width| width.is_multiple_of(16) && (1..=256).contains(&width));
    let right = dtype == cache && dtype != FloatType::F32 && scale > 0.0 && scale <= STEEPEST;
    if rows < MANY || !whole || !right || !target.tensor_cores() {
        return None;
    }
    // Of an H200's timings: 32 rows a plane where their sums fit into its registers, unless that leaves
    // multiprocessors without work.
    let large = width.max(value_width) <= 128 && rows.div_ceil(128) * heads > FULL[1] / 2;
    let (blocks, planes) = if large { (2, 4) } else { (1, rows.div_ceil(16).min(4)) };
    let mut tile = Tile { dtype, width, value_width, blocks, planes, keys: 64, split: false };
    let count = rows.div_ceil(tile.rows());
    // No grid has more along y.
    if count > 65535 {
        return None;
    }
    let cubes = count * heads;
    let splits = if cubes > FULL[1] * 3 / 8 { 1 } else { FULL[1] / cubes };
    let splits = splits.min(capacity.div_ceil(tile.keys));
    tile.split = splits > 1;
    Some((tile, splits))
}
