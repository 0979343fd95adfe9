//! Which kernel attention runs with on a GPU, and how it is cut into cubes.

use super::gpu::{Combination, STEEPEST, Shape, Tile};
use crate::gpu::CUBES;
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

/// Cubes that share a row's keys at most on tensor cores: more cost more to put together than they save.
const PARTS: usize = 33;

/// As [`stream`], for tensor cores, where they can compute this. `scale` is times log2(e).
pub(super) fn tile(
    [dtype, cache]: [FloatType; 2],
    [rows, heads, capacity, width, value_width]: [usize; 5],
    scale: f32,
    target: &Target,
) -> Option<(Tile, usize)> {
    let whole =
        [width, value_width].iter().all(|&width| width.is_multiple_of(16) && (1..=256).contains(&width));
    let right = dtype == cache && dtype != FloatType::F32 && scale > 0.0 && scale <= STEEPEST;
    if !whole || !right || !target.tensor_cores() {
        return None;
    }
    // Of an H200's timings: 32 rows a plane where their sums fit into its registers, unless that leaves
    // multiprocessors without work.
    let large = width.max(value_width) <= 128 && rows.div_ceil(128) * heads > FULL[1] / 2;
    let (blocks, planes) = if large { (2, 4) } else { (1, rows.div_ceil(16).min(4)) };
    // A step waits for memory: small tiles, and the next one under way. Of few keys, more cubes have smaller ones.
    let (keys, stages) = match planes {
        1 if capacity <= 16 * PARTS => (16, 2),
        1 => (32, 2),
        _ if width.max(value_width) <= 64 => (64, 2),
        _ => (64, 1),
    };
    let mut tile = Tile { dtype, width, value_width, blocks, planes, keys, stages, split: false };
    let count = rows.div_ceil(tile.rows());
    if count > CUBES {
        return None;
    }
    let cubes = count * heads;
    let splits = if cubes > FULL[1] * 3 / 8 { 1 } else { FULL[1] / cubes };
    let splits = splits.min(PARTS).min(capacity.div_ceil(tile.keys));
    tile.split = splits > 1;
    Some((tile, splits))
}

/// How parts of rows of Dv elements become one.
pub(super) fn combine(width: usize, dtype: FloatType, plane: Option<usize>) -> Combination {
    Combination { width, dtype, plane: plane.unwrap_or(FEWEST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_parts_of_streams() {
        // (rows, heads, capacity, D), plane -> rows, lanes, keys and planes of a cube; cubes that share the keys
        let table = [
            ((4, 8, 8192, 128), Some(32), (4, 16, 4, 4), 33),
            ((4, 8, 64, 128), Some(32), (4, 16, 4, 4), 2),
            ((4, 4, 8192, 256), Some(32), (4, 16, 2, 4), 66),
            ((2048, 8, 8192, 128), Some(32), (8, 16, 4, 4), 1),
            ((1, 8, 8192, 64), Some(64), (1, 8, 4, 2), 33),
            ((4, 8, 8192, 128), Some(8), (4, 8, 2, 1), 1),
            ((4, 1, 8192, 128), Some(8), (4, 8, 2, 1), 8),
            ((4, 8, 8192, 20), None, (4, 4, 4, 32), 33),
        ];
        for ((rows, heads, capacity, width), plane, want, splits) in table {
            let sizes = [rows, heads, capacity, width, width];
            let (shape, parts) = stream([FloatType::F32; 2], sizes, plane);
            let got = (shape.rows, shape.lanes, shape.keys, shape.planes);
            assert_eq!((got, parts), (want, splits), "{sizes:?} in planes of {plane:?}");
            assert_eq!(shape.split, splits > 1);
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn tiles_for_tensor_cores() {
        let target = Target::cuda(90);
        let tile = |dtypes, sizes, scale| tile(dtypes, sizes, scale, &target);
        let half = [FloatType::BF16; 2];
        // (rows, heads, D) -> blocks, planes, keys and stages; cubes that share the keys
        let table = [
            ((4, 8, 128), (1, 1, 32, 2), 33),
            ((4, 4, 256), (1, 1, 32, 2), 33),
            ((33, 8, 128), (1, 3, 64, 1), 33),
            ((2048, 8, 128), (1, 4, 64, 1), 1),
            ((16384, 8, 128), (2, 4, 64, 1), 1),
            ((16384, 8, 64), (2, 4, 64, 2), 1),
            ((16384, 4, 256), (1, 4, 64, 1), 1),
        ];
        for ((rows, heads, width), want, splits) in table {
            let (shape, parts) = tile(half, [rows, heads, 8192, width, width], 0.1).unwrap();
            let got = (shape.blocks, shape.planes, shape.keys, shape.stages);
            assert_eq!((got, parts), (want, splits), "{rows} rows of {heads} heads of {width}");
        }
        for (capacity, keys, splits) in [(256, 16, 16), (528, 16, 33), (544, 32, 17)] {
            let (shape, parts) = tile(half, [4, 4, capacity, 256, 256], 0.1).unwrap();
            assert_eq!((shape.keys, parts), (keys, splits), "a capacity of {capacity}");
        }
        let sizes = [4, 8, 8192, 128, 128];
        assert!(tile([FloatType::F32; 2], sizes, 0.1).is_none(), "f32");
        assert!(tile([FloatType::F16, FloatType::BF16], sizes, 0.1).is_none(), "two types");
        assert!(tile(half, sizes, -0.1).is_none() && tile(half, sizes, 0.0).is_none(), "no scale above 0");
        assert!(tile(half, [4, 8, 8192, 72, 128], 0.1).is_none(), "half a block of 16");
        let shared = |rows, width| tile(half, [rows, 8, 8192, width, width], 0.1).unwrap().0.vectors() * 16;
        // What a cube may have, and for two on a multiprocessor.
        assert!(
            [4, 100, 16384]
                .iter()
                .all(|&rows| shared(rows, 256) < 113 << 10 && shared(rows, 128) < 113 << 10)
        );
    }
}
