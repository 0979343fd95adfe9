//! The grouping of pairs of a token and an expert.

/// True if to bring the pairs of an expert together: one product then decodes its weights once for
/// all of them, which pays for copying rows of x and y as soon as experts repeat.
pub(super) fn sort_by_expert(pairs: usize, experts: usize, top_k: usize) -> bool {
    // One token's experts differ from each other.
    pairs > top_k && pairs * 4 > experts
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
}
