//! Which kernel a product runs with, and how it is cut into tasks.

#[cfg(feature = "gpu")]
use crate::gpu::CUBES;

/// The ways to multiply `m` rows of x with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// One row: decode a run and consume it at once.
    MatVec,
    /// A few rows: lanes run along K, so no row is padded.
    Inner,
    /// Many rows: lanes run along M over packed x.
    Outer,
}

/// The variant for `m` rows where a vector has `lanes` lanes.
pub(super) fn variant(m: usize, lanes: usize) -> Variant {
    match m {
        0..=1 => Variant::MatVec,
        m if m < lanes => Variant::Inner,
        _ => Variant::Outer,
    }
}

/// Rows of x that one task of [`Variant::Outer`] takes: its block of packed x stays in the second-level cache.
pub(super) const MC: usize = 256;
/// Weight rows that one task takes at most: with [`MC`], its sums stay in the second-level cache.
const NC: usize = 240;
/// Task borders fall on multiples of this, which every tile's width divides.
const STEP: usize = 24;
/// Values of packed x that stay in the second-level cache.
const CACHED: usize = 1 << 18;

/// Values of a row that [`Variant::Outer`] goes through before it takes the next row, for `m` rows of x.
pub(super) fn stretch(m: usize) -> usize {
    (CACHED / m.max(1)).max(1)
}

/// Multiplications that are worth handing to another thread.
const GRAIN: usize = 1 << 18;
/// What decoding a value costs, in multiplications.
const DECODE: usize = 6;

/// Weight rows a task, for a product of `m x n x k` that is one of `groups` equal ones.
pub(super) fn strip(m: usize, n: usize, k: usize, groups: usize, threads: usize) -> usize {
    let row = k.saturating_mul(m.min(MC) + DECODE).max(1);
    let tasks = (threads * 4).div_ceil(groups * m.div_ceil(MC).max(1));
    let balanced = if threads == 1 { n } else { n.div_ceil(tasks) };
    balanced.max(GRAIN / row).min(NC).next_multiple_of(STEP).min(n.max(1))
}

/// Multiprocessors of an H100 or H200.
#[cfg(feature = "gpu")]
const PROCESSORS: usize = 132;

/// Runs of a row that are enough for two planes.
#[cfg(feature = "gpu")]
const LONG: usize = 384;

/// On a GPU, for codes of `bits` bits, `m` rows of x by `n` of `runs` runs, and planes of `plane` units: the rows of
/// the weight and of x that a cube takes, and its units.
#[cfg(feature = "gpu")]
pub(super) fn gpu(
    bits: usize,
    (m, n, runs): (usize, usize, usize),
    plane: Option<usize>,
) -> (usize, usize, usize) {
    // What is decoded is used for several rows of x.
    let columns = if m == 1 { 1 } else { 4 };
    let most = n.next_power_of_two();
    match plane {
        // Small planes are a CPU's: one does all, without memory that units share.
        Some(plane @ ..32) => ((32 / bits).clamp(1, 8 / columns).min(most), columns, plane),
        // Of 1 to 8 rows by 32 to 256 units, these were the fastest or next to it at 3, 4, 6 and 8 bits on an H200.
        plane => {
            let plane = plane.unwrap_or(64);
            let units = if runs < LONG { plane } else { plane.max(64) };
            (2.min(most), columns, units)
        }
    }
}

/// For the mat-vec on tensor cores, with `m` rows of x for each of `batches` batches of the weight, `[n, runs]`: the rows
/// of x that a cube takes, how many times 16 rows of the weight, its planes, and the pairs of runs of x that they share at
/// a time.
#[cfg(feature = "gpu")]
pub(super) fn mma_vec(batches: usize, (m, n, runs): (usize, usize, usize)) -> (usize, usize, usize, usize) {
    // Fewer planes than these do not fill an H200's multiprocessors: 12 each.
    const PLANES: usize = PROCESSORS * 12;
    let columns = m.next_power_of_two().min(8);
    let others = batches * m.div_ceil(columns);
    // Measured at 4 bits: planes of 4 steps, and 32 rows a cube, which share x, where that leaves enough cubes. More planes
    // than fit all at once make the last ones wait for all that the first ones wait for.
    let planes = (runs / 32).next_power_of_two().clamp(if runs < 32 { 2 } else { 4 }, 8);
    let enough = |tiles: usize| others * n.div_ceil(16 * tiles) * planes >= PLANES;
    let (tiles, planes) = match (enough(2), enough(1)) {
        (true, _) => (2, planes),
        // Short rows leave little to do for what a cube begins with.
        (_, true) if runs < 32 => (2, planes),
        (_, true) => (1, planes),
        _ => (1, 8),
    };
    // Up to 32 KiB of x, or 64 of 8 rows.
    let most = if columns < 8 { 256 / columns } else { 64 };
    (columns, tiles, planes, runs.div_ceil(2).next_power_of_two().min(most).max(4 * planes))
}

/// Cubes of the stream for one row of x, one for each of an H200's multiprocessors, where `groups` groups of tiles leave few
/// of them without any.
#[cfg(feature = "gpu")]
pub(super) fn stream(groups: usize) -> Option<usize> {
    (groups >= PROCESSORS * 3 / 4).then_some(groups.min(PROCESSORS))
}

/// Rows of x from which on the 8 columns of tensor cores' products are rows of x alone.
#[cfg(feature = "gpu")]
pub(super) const SEVERAL: usize = 6;

/// How a product with several rows of x is cut for tensor cores.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Rows of x that a cube takes.
    pub columns: usize,
    /// How many times 16 rows of the weight a plane takes.
    pub tiles: usize,
    /// Planes of a cube that take different rows, and planes that share them.
    pub strips: usize,
    pub splits: usize,
    /// Steps of K that the planes share x of, if there is memory.
    pub chunk: usize,
}

/// For `m` rows of x to each of `batches` batches of the weight, which has `n` rows of `steps` steps.
#[cfg(feature = "gpu")]
pub(super) fn mma_rows(batches: usize, (m, n, steps): (usize, usize, usize)) -> Cut {
    // Planes of a cube, which has a multiprocessor to itself: registers hold no more.
    const PLANES: usize = 16;
    let columns = m.next_multiple_of(8).min(32);
    let tiles = batches * m.div_ceil(columns) * n.div_ceil(16);
    // Every cube reads all of x, so it takes as much of the weight as leaves each multiprocessor a part.
    let rounds = tiles.div_ceil(PROCESSORS * PLANES / 2);
    let strips = tiles.div_ceil(PROCESSORS * rounds.max(1)).min(n.div_ceil(16)).max(1);
    let splits = (PLANES / strips + 1).next_power_of_two() / 2;
    let splits = splits.min(steps.next_power_of_two()).clamp(1, 8);
    let chunk = steps.next_power_of_two().min(16).max(splits);
    Cut { columns, tiles: 1, strips, splits, chunk }
}

/// For rows of x that choose their batch of the weight: each batch has `n` rows of `steps` steps.
#[cfg(feature = "gpu")]
pub(super) fn mma_rows_chosen((n, steps): (usize, usize)) -> Cut {
    // Short rows leave little to do for what a cube begins with.
    let tiles = if steps <= 2 { 2 } else { 1 };
    // Small cubes, several to a multiprocessor: some bring their x while others multiply.
    let strips = n.div_ceil(16 * tiles).next_power_of_two().min(4);
    Cut { columns: 8, tiles, strips, splits: 1, chunk: steps.next_power_of_two().min(4) }
}

/// Rows of x from which on a GPU decodes a weight's run once for several of them.
#[cfg(feature = "gpu")]
const MANY: usize = 33;
/// The same with tensor cores: their smallest tile takes 26 us at 4 bits and 4096 to 14336 on an H200, which is more than
/// 16 rows of x take where several rows are `exact` on tensor cores (14 us for 8, 19 for 16, 32 for 32), and than 5 take
/// elsewhere.
#[cfg(feature = "gpu")]
pub(super) fn many_on_tensor_cores(exact: bool) -> usize {
    if exact { 17 } else { SEVERAL }
}

/// The ways to multiply on a GPU.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Few rows of x.
    MatVec,
    /// Many rows, on any device.
    Tile,
    /// Many rows, on a device's tensor cores.
    TensorCore,
    /// Very many rows, by the library of a device's maker.
    Library(Work),
}

/// What a library of dense products is asked for.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) enum Work {
    /// The weight is dense already.
    Multiply,
    /// The weight is decoded before.
    DecodeAndMultiply,
}

/// The way for `m` rows of x to each of the weight's batches of `n` rows, where tensor cores, from so many rows on, and a
/// library take the operands or not.
#[cfg(feature = "gpu")]
pub(super) fn kernel(
    (m, n): (usize, usize),
    batches: usize,
    tensor_cores: Option<usize>,
    library: Option<Work>,
) -> Kernel {
    /// Rows of a weight that leave most of [`Kernel::Tile`]'s units idle: gates of one output.
    const NARROW: usize = 16;
    /// Rows that pay for writing the decoded weight and reading it again, where the other way is
    /// [`Kernel::TensorCore`].
    const VERY_MANY: usize = 4096;
    match (library, tensor_cores) {
        _ if m < tensor_cores.unwrap_or(MANY) => Kernel::MatVec,
        (Some(Work::Multiply), _) => Kernel::Library(Work::Multiply),
        (Some(work), None) => Kernel::Library(work),
        (Some(work), Some(_)) if m >= VERY_MANY => Kernel::Library(work),
        (_, Some(_)) => Kernel::TensorCore,
        _ if n < NARROW || batches > CUBES || m / 8 > CUBES => Kernel::MatVec,
        _ => Kernel::Tile,
    }
}

/// Rows of x a tile of [`Kernel::TensorCore`], for `m` rows to each of `batches` batches of `n` rows of a weight.
#[cfg(feature = "gpu")]
pub(super) fn tensor_core(m: usize, batches: usize, n: usize) -> usize {
    // What a tile costs beside its rows, in rows: the decoding.
    const DECODE: usize = 80;
    let time = |rows: usize| {
        let tiles = batches * m.div_ceil(rows) * n.div_ceil(128);
        tiles.div_ceil(PROCESSORS) * (rows + DECODE)
    };
    [256, 128, 64].into_iter().min_by_key(|&rows| time(rows)).unwrap_or(64)
}

/// The rows of a weight that a unit of [`Kernel::Tile`] takes, and the units of a cube.
#[cfg(feature = "gpu")]
pub(super) fn tile(plane: Option<usize>) -> (usize, usize) {
    match plane {
        // A CPU has few registers.
        Some(plane @ ..32) => (1, plane),
        _ => (2, 64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_by_rows_and_lanes() {
        let table = [
            (0, 16, Variant::MatVec),
            (1, 16, Variant::MatVec),
            (2, 16, Variant::Inner),
            (15, 16, Variant::Inner),
            (16, 16, Variant::Outer),
            (7, 8, Variant::Inner),
            (8, 8, Variant::Outer),
        ];
        for (m, lanes, want) in table {
            assert_eq!(variant(m, lanes), want, "M={m}, {lanes} lanes");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn rows_and_units_on_gpus() {
        // (bits, (m, n, runs), plane) -> rows of the weight and of x, and units of a cube
        let table = [
            ((4, (1, 4096, 448), Some(32)), (2, 1, 64)),
            ((8, (1, 4096, 128), Some(32)), (2, 1, 32)),
            ((8, (1, 4096, 128), Some(64)), (2, 1, 64)),
            ((4, (1, 4096, 1), Some(32)), (2, 1, 32)),
            ((4, (1, 1, 448), Some(64)), (1, 1, 64)),
            ((4, (1, 4096, 448), None), (2, 1, 64)),
            ((4, (8, 4096, 448), Some(32)), (2, 4, 64)),
            ((4, (1, 4096, 448), Some(8)), (8, 1, 8)),
            ((8, (1, 4096, 448), Some(8)), (4, 1, 8)),
            ((4, (2, 4096, 448), Some(8)), (2, 4, 8)),
        ];
        for ((bits, sizes, plane), want) in table {
            assert_eq!(gpu(bits, sizes, plane), want, "{bits} bits, {sizes:?}, plane {plane:?}");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn rows_and_planes_on_tensor_cores() {
        // (batches, (m, n, runs)) -> rows of x, 16 rows of the weight, planes, pairs of runs of x at a time
        let table = [
            ((1, (1, 14336, 128)), (1, 2, 4, 64)),
            ((1, (1, 4096, 128)), (1, 1, 8, 64)),
            ((1, (1, 4096, 448)), (1, 1, 8, 256)),
            ((1, (1, 28672, 256)), (1, 2, 8, 128)),
            ((8, (1, 512, 64)), (1, 1, 8, 32)),
            ((64, (1, 512, 64)), (1, 2, 4, 32)),
            ((18, (1, 512, 64)), (1, 1, 4, 32)),
            ((9, (1, 2048, 16)), (1, 2, 2, 8)),
            ((1, (3, 14336, 128)), (4, 2, 4, 64)),
            ((1, (32, 14336, 448)), (8, 2, 8, 64)),
            ((1, (1, 1, 1)), (1, 1, 8, 32)),
        ];
        for ((batches, sizes), want) in table {
            assert_eq!(mma_vec(batches, sizes), want, "{batches} batches, {sizes:?}");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn several_rows_on_tensor_cores() {
        // (batches, (m, n, steps)) -> rows of x, strips, splits, chunk
        let table = [
            ((1, (8, 14336, 16)), (8, 7, 2, 16)),
            ((1, (16, 14336, 16)), (16, 7, 2, 16)),
            ((1, (7, 4096, 56)), (8, 2, 8, 16)),
            ((1, (17, 4096, 3)), (24, 2, 4, 4)),
            ((1, (40, 28672, 32)), (32, 7, 2, 16)),
            ((1, (6, 2, 1)), (8, 1, 1, 1)),
            ((1, (6, 0, 0)), (8, 1, 1, 1)),
        ];
        for ((batches, sizes), (columns, strips, splits, chunk)) in table {
            let want = Cut { columns, tiles: 1, strips, splits, chunk };
            assert_eq!(mma_rows(batches, sizes), want, "{batches} batches, {sizes:?}");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn several_rows_that_choose_on_tensor_cores() {
        // (n, steps) -> 16 rows of the weight, strips, chunk
        let table =
            [((512, 8), (1, 4, 4)), ((2048, 2), (2, 4, 2)), ((23, 1), (2, 1, 1)), ((23, 0), (2, 1, 1))];
        for (sizes, (tiles, strips, chunk)) in table {
            let want = Cut { columns: 8, tiles, strips, splits: 1, chunk };
            assert_eq!(mma_rows_chosen(sizes), want, "{sizes:?}");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn streams_have_work_for_most_multiprocessors() {
        for (groups, want) in [(1, None), (98, None), (99, Some(99)), (132, Some(132)), (1792, Some(132))] {
            assert_eq!(stream(groups), want, "{groups} groups of tiles");
        }
    }

    #[test]
    fn strips_cover_and_balance() {
        // (m, n, k, groups, threads) -> rows a task
        let table = [
            ((1, 256, 256, 1, 2), 168),
            ((1, 4096, 4096, 1, 2), 240),
            ((1, 1024, 4096, 1, 2), 144),
            ((1, 3, 4096, 1, 2), 3),
            ((512, 4096, 4096, 1, 1), 240),
            ((512, 96, 4096, 1, 2), 24),
            ((1, 512, 2048, 8, 2), 240),
            ((1, 0, 64, 1, 2), 1),
        ];
        for ((m, n, k, groups, threads), want) in table {
            assert_eq!(strip(m, n, k, groups, threads), want, "{:?}", (m, n, k, groups, threads));
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn many_rows_on_gpus() {
        let (dense, decoded) = (Some(Work::Multiply), Some(Work::DecodeAndMultiply));
        let [exact, inexact] = [true, false].map(|exact| Some(many_on_tensor_cores(exact)));
        // (m, n, tensor cores, library) -> kernel
        for ((m, n, tensor_cores, library), want) in [
            ((32, 64, None, dense), Kernel::MatVec),
            ((5, 64, inexact, dense), Kernel::MatVec),
            ((6, 64, inexact, None), Kernel::TensorCore),
            ((16, 64, exact, dense), Kernel::MatVec),
            ((17, 64, exact, None), Kernel::TensorCore),
            ((33, 64, inexact, dense), Kernel::Library(Work::Multiply)),
            ((4095, 64, exact, decoded), Kernel::TensorCore),
            ((4096, 64, exact, decoded), Kernel::Library(Work::DecodeAndMultiply)),
            ((33, 64, None, decoded), Kernel::Library(Work::DecodeAndMultiply)),
            ((33, 64, None, None), Kernel::Tile),
            ((33, 1, None, None), Kernel::MatVec),
            ((1 << 20, 64, None, None), Kernel::MatVec),
        ] {
            assert_eq!(
                kernel((m, n), 1, tensor_cores, library),
                want,
                "M={m} N={n}, {tensor_cores:?}, {library:?}"
            );
        }
        // (m, batches, n) -> rows of x a tile
        for ((m, batches, n), want) in [
            ((64, 1, 14336), 64),
            ((512, 1, 14336), 256),
            ((512, 1, 4096), 128),
            ((512, 1, 1024), 64),
            ((4096, 1, 14336), 256),
        ] {
            assert_eq!(tensor_core(m, batches, n), want, "M={m}, {batches} batches, N={n}");
        }
    }
}
