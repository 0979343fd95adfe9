//! The choice of a product's kernel on the CPU, and its cut into tasks.

use crate::simd::Isa;

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

/// Rows of x from which a weight in panels is multiplied in tiles of bf16, where the processor has
/// a unit for them. Milliseconds of integers and of tiles, K = N = 4096, one thread of a processor
/// with AMX, the best of nine runs with cold weights:
///
/// | M | 16 | 24 | 32 | 40 |
/// |---|---|---|---|---|
/// | Q4_0 | 1.98, 2.08 | 2.72, 2.41 | 3.46, 2.42 | 4.08, 2.88 |
/// | Q4_K | 2.04, 2.19 | 2.82, 2.43 | 3.55, 2.54 | 4.23, 3.02 |
/// | Q6_K | 2.36, 2.38 | 3.12, 2.74 | 3.97, 2.70 | 4.74, 3.14 |
/// | Q8_0 | 2.28, 2.55 | 2.95, 2.80 | 3.56, 2.99 | 4.39, 3.42 |
///
/// If a core's other hyperthread multiplies tiles too, which one unit does for both, tiles are even
/// with integers at 32.
pub(super) const TILES_FROM: usize = 32;

/// True if `m` rows of x and a weight in panels are multiplied in tiles of bf16 instead of
/// integers.
pub(super) fn in_tiles(isa: Isa, m: usize) -> bool {
    isa.has_tiles() && m >= TILES_FROM
}

/// Rows of x that one task of [`Variant::Outer`] takes: its block of packed x stays in the
/// second-level cache.
pub(super) const MC: usize = 256;
/// Weight rows that one task takes at most: with [`MC`], its sums stay in the second-level cache.
const NC: usize = 240;
/// Task borders fall on multiples of this, which every tile's width divides.
const STEP: usize = 24;
/// Values of packed x that stay in the second-level cache.
const CACHED: usize = 1 << 18;

/// Values of a row that [`Variant::Outer`] goes through before it takes the next row, for `m` rows
/// of x.
pub(super) fn stretch(m: usize) -> usize {
    (CACHED / m.max(1)).max(1)
}

/// Multiplications that are worth handing to another thread.
const GRAIN: usize = 1 << 18;
/// The cost of decoding a value, in multiplications.
const DECODE: usize = 6;

/// Multiplications that a thread does in a nanosecond, about.
const RATE: usize = 130;

/// Nanoseconds that one thread takes for a product of `m x n x k`, about.
pub(super) fn work(m: usize, n: usize, k: usize) -> usize {
    n.saturating_mul(k).saturating_mul(m + DECODE) / RATE
}

/// Weight rows a task, for a product of `m x n x k` that is one of `groups` equal ones.
pub(super) fn strip(m: usize, n: usize, k: usize, groups: usize, threads: usize) -> usize {
    let row = k.saturating_mul(m.min(MC) + DECODE).max(1);
    let tasks = (threads * 4).div_ceil(groups * m.div_ceil(MC).max(1));
    let balanced = if threads == 1 { n } else { n.div_ceil(tasks) };
    balanced.max(GRAIN / row).min(NC).next_multiple_of(STEP).min(n.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_want_a_unit_and_many_rows() {
        for isa in Isa::all() {
            let unit = isa.name() == "amx";
            assert_eq!([1, 31, 32, 512].map(|m| in_tiles(isa, m)), [false, false, unit, unit], "{isa:?}");
        }
    }

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
}
