//! How pairs of a token and an expert are grouped.

/// Whether to bring the pairs of an expert together: one product then decodes its weights once for all of them, which
/// pays for copying rows of x and y as soon as experts repeat.
pub(super) fn sort_by_expert(pairs: usize, experts: usize, top_k: usize) -> bool {
    // One token's experts differ from each other.
    pairs > top_k && pairs * 4 > experts
}

/// Pairs from which on bringing those of an expert together takes less than reading its weights again.
#[cfg(feature = "gpu")]
const MANY: usize = 128;

/// On a GPU with tensor cores: whether most experts have no more pairs than one product takes, so that each reads its weight
/// once without sorting them first. Measured on an H200, 256 experts: 512 pairs 53 us, sorted 76; 4096 would gain 5 % at
/// the best, and lose where few experts are chosen by most tokens.
#[cfg(feature = "gpu")]
pub(super) fn few(pairs: usize, experts: usize) -> bool {
    let mean = pairs.div_ceil(experts.max(1));
    pairs >= MANY && mean + 2 * mean.isqrt() <= 8
}

/// On a GPU with tensor cores: the rows of the tiles that pairs are brought together in, where that pays.
#[cfg(feature = "gpu")]
pub(super) fn tiles(pairs: usize, experts: usize) -> Option<usize> {
    /// What a tile costs beside its rows, in rows: the decoding.
    const DECODE: usize = 80;
    if pairs < MANY {
        return None;
    }
    let an_expert = pairs.div_ceil(experts.max(1));
    // Twice the tiles an expert: the last of several is half full.
    let tiles = |rows: usize| (2 * an_expert / rows + 1).max(2);
    [8, 16, 32, 64, 128, 256].into_iter().min_by_key(|&rows| tiles(rows) * (rows + DECODE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_starts_where_experts_repeat() {
        // (tokens, experts, top_k) -> sort
        let table = [
            ((1, 4, 2), false),
            ((1, 256, 8), false),
            ((4, 256, 8), false),
            ((16, 256, 8), true),
            ((2, 4, 2), true),
        ];
        for ((tokens, experts, top_k), want) in table {
            assert_eq!(
                sort_by_expert(tokens * top_k, experts, top_k),
                want,
                "{:?}",
                (tokens, experts, top_k)
            );
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn few_pairs_an_expert() {
        let table = [
            ((127, 256), false),
            ((128, 256), true),
            ((512, 256), true),
            ((1024, 256), true),
            ((1025, 256), false),
            ((4096, 128), false),
            ((200, 0), false),
        ];
        for ((pairs, experts), want) in table {
            assert_eq!(few(pairs, experts), want, "{pairs} pairs, {experts} experts");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn tiles_hold_an_experts_pairs() {
        // (pairs, experts) -> rows
        let table = [
            ((64, 256), None),
            ((512, 256), Some(8)),
            ((4096, 256), Some(32)),
            ((32768, 256), Some(128)),
            ((4096, 1), Some(256)),
        ];
        for ((pairs, experts), want) in table {
            assert_eq!(tiles(pairs, experts), want, "{pairs} pairs, {experts} experts");
        }
    }
}
