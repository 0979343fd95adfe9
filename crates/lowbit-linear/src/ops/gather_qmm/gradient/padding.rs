//! Groups experts whose products the vendor BLAS computes together: it takes matrices of one size,
//! so that experts with fewer rows get rows of zeros.

use std::ops::Range;

/// Experts that follow each other, and the rows that each has, with those of zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub experts: Range<usize>,
    pub rows: usize,
}

/// Rows come in multiples of this, so that the library meets few sizes: it takes long to choose how
/// to compute one that is new.
const ROWS: usize = 64;
/// Rows of zeros that take about as long as another call.
const CALL: usize = 512;

/// All experts, `counts` of which rows belong to each, in batches.
fn batches(counts: &[usize]) -> Vec<Batch> {
    let mut batches: Vec<Batch> = vec![];
    for (expert, &count) in counts.iter().enumerate() {
        // An expert without rows has a gradient, too: zeros.
        let rows = count.max(1).next_multiple_of(ROWS);
        if let Some(Batch { experts, rows: each }) = batches.last_mut() {
            let together = rows.max(*each);
            let zeros = together * (experts.len() + 1) - *each * experts.len() - rows;
            if zeros <= CALL {
                (experts.end, *each) = (expert + 1, together);
                continue;
            }
        }
        batches.push(Batch { experts: expert..expert + 1, rows });
    }
    batches
}

/// Pairs of a token and a slot by expert, in batches.
#[derive(Debug)]
pub(super) struct Padding {
    pub batches: Vec<Batch>,
    /// The pair of each row of all batches, or [`NONE`].
    pub order: Vec<u32>,
    /// The row of each pair, or [`NONE`] for one that chose no expert.
    pub places: Vec<u32>,
}

/// Instead of a pair or a row.
pub(super) const NONE: u32 = u32::MAX;

impl Padding {
    /// Of pairs that chose these of so many experts.
    pub fn new(ids: &[u32], experts: usize) -> Self {
        let mut counts = vec![0; experts];
        for &id in ids {
            counts.get_mut(id as usize).into_iter().for_each(|count| *count += 1);
        }
        let batches = batches(&counts);
        let mut ends = Vec::with_capacity(experts);
        let mut rows = 0;
        for Batch { experts, rows: each } in &batches {
            ends.extend(experts.clone().map(|expert| rows + (expert - experts.start) * each));
            rows += experts.len() * each;
        }
        let (mut order, mut places) = (vec![NONE; rows], vec![NONE; ids.len()]);
        for (pair, (&id, place)) in ids.iter().zip(&mut places).enumerate() {
            let Some(end) = ends.get_mut(id as usize) else { continue };
            (order[*end], *place) = (pair as u32, *end as u32);
            *end += 1;
        }
        Self { batches, order, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn like_experts_go_together() {
        let batch = |experts, rows| Batch { experts, rows };
        assert_eq!(batches(&[]), []);
        assert_eq!(batches(&[0, 64, 3]), [batch(0..3, 64)]);
        assert_eq!(batches(&[64, 65, 5000, 64]), [batch(0..2, 128), batch(2..3, 5056), batch(3..4, 64)]);
        // 256 experts with about as many rows each take few calls, and few rows of zeros.
        let counts: Vec<usize> = (0..256).map(|i| 240 + i * 37 % 33).collect();
        let all = batches(&counts);
        let rows: usize = all.iter().map(|batch| batch.experts.len() * batch.rows).sum();
        assert!(all.len() <= 4 && rows < counts.iter().sum::<usize>() * 5 / 4, "{} {rows}", all.len());
        // And where a few have most of them, too.
        let counts: Vec<usize> = (0..256).map(|i| if i % 32 == 5 { 4000 } else { i % 7 * 20 }).collect();
        let all = batches(&counts);
        let rows: usize = all.iter().map(|batch| batch.experts.len() * batch.rows).sum();
        assert!(all.len() <= 40 && rows < counts.iter().sum::<usize>() * 3 / 2, "{} {rows}", all.len());
        assert!(all.windows(2).all(|pair| pair[0].experts.end == pair[1].experts.start));
    }

    #[test]
    fn rows_and_pairs_find_each_other() {
        // Pair 3 chose no expert, and nobody chose expert 1.
        let ids = [2, 0, 2, 3, 0, 2];
        let Padding { batches, order, places } = Padding::new(&ids, 3);
        assert_eq!(batches, [Batch { experts: 0..3, rows: ROWS }]);
        let rows = |expert: usize, pairs: &[u32]| {
            let own = &order[expert * ROWS..][..ROWS];
            assert_eq!(own[..pairs.len()], *pairs, "{expert}");
            assert!(own[pairs.len()..].iter().all(|&pair| pair == NONE));
        };
        rows(0, &[1, 4]);
        rows(1, &[]);
        rows(2, &[0, 2, 5]);
        let row = |expert: usize, i: usize| (expert * ROWS + i) as u32;
        assert_eq!(places, [row(2, 0), row(0, 0), row(2, 1), NONE, row(0, 1), row(2, 2)]);
    }
}
