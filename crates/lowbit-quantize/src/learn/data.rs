//! The texts to learn from.

use crate::QuantizeError;

/// Texts cut into windows, some of them held out for validation.
#[derive(Clone, Debug)]
pub struct Data {
    train: Vec<Vec<u32>>,
    held_out: Vec<Vec<u32>>,
}

/// One in this many windows is held out.
const SHARE: usize = 20;
/// The most windows that are held out.
const MOST_HELD_OUT: usize = 64;

impl Data {
    /// Cuts each text into windows of `length` tokens; the rest of a text is a shorter window. The
    /// last twentieth of all windows, at least one and at most 64, is held out.
    ///
    /// # Errors
    /// [`QuantizeError::Data`] for a length below 2, and for texts that do not make two windows of
    /// at least 2 tokens.
    pub fn new(texts: &[Vec<u32>], length: usize) -> Result<Self, QuantizeError> {
        if length < 2 {
            return Err(QuantizeError::Data(format!(
                "windows of {length} tokens are too short: 2 are the least"
            )));
        }
        let windows = texts.iter().flat_map(|text| text.chunks(length));
        let mut train: Vec<Vec<u32>> =
            windows.filter(|window| window.len() > 1).map(<[u32]>::to_vec).collect();
        if train.len() < 2 {
            let tokens: usize = texts.iter().map(Vec::len).sum();
            let problem = format!(
                "{tokens} tokens in {} texts are too few: there must be two windows, {length} tokens and 2 more of a text, say",
                texts.len()
            );
            return Err(QuantizeError::Data(problem));
        }
        let held_out = (train.len() / SHARE).clamp(1, MOST_HELD_OUT);
        let held_out = train.split_off(train.len() - held_out);
        Ok(Self { train, held_out })
    }

    /// The windows to learn from.
    pub fn train(&self) -> &[Vec<u32>] {
        &self.train
    }

    /// The windows that `draws` draws see, in the order in which they first see them.
    pub(super) fn drawn(&self, draws: usize, seed: u64) -> Vec<usize> {
        let mut order = Order::new(self.train.len(), seed);
        (0..self.train.len().min(draws)).map(|_| order.next()).collect()
    }

    /// The held-out windows.
    pub fn held_out(&self) -> &[Vec<u32>] {
        &self.held_out
    }
}

/// The order in which windows are learned from: all of them once, shuffled, then all again in
/// another order.
#[derive(Clone, Debug)]
pub struct Order {
    /// The state of SplitMix64.
    random: u64,
    rest: Vec<usize>,
    count: usize,
}

impl Order {
    /// Of `count` windows; the same for the same seed.
    pub fn new(count: usize, seed: u64) -> Self {
        Self { random: seed, rest: vec![], count }
    }

    /// The next window.
    pub fn next(&mut self) -> usize {
        if self.rest.is_empty() {
            self.rest = (0..self.count).collect();
            for i in (1..self.count).rev() {
                let other = self.below(i + 1);
                self.rest.swap(i, other);
            }
        }
        self.rest.pop().expect("there are windows")
    }

    /// The random numbers' state, the windows that are still to come before all come again, and how
    /// many there are in all.
    pub fn parts(&self) -> (u64, &[usize], usize) {
        (self.random, &self.rest, self.count)
    }

    /// The inverse of [`Self::parts`].
    pub fn from_parts((random, rest, count): (u64, Vec<usize>, usize)) -> Self {
        Self { random, rest, count }
    }

    /// Checks that these are windows of `windows`, each at most once.
    ///
    /// # Errors
    /// A message that says what is wrong.
    pub fn check(&self, windows: usize) -> Result<(), String> {
        let Self { rest, count, .. } = self;
        if *count != windows {
            return Err(format!(
                "it has an order of {count} windows, but the data has {windows} to learn from"
            ));
        }
        let mut seen = vec![false; windows];
        for &window in rest {
            let seen = seen.get_mut(window);
            let seen = seen.ok_or_else(|| format!("window {window} is to come, but there are {windows}"))?;
            if std::mem::replace(seen, true) {
                return Err(format!("window {window} is to come twice before the others"));
            }
        }
        Ok(())
    }

    fn below(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_cut_and_the_last_held_out() {
        let text = |range: std::ops::Range<u32>| range.collect::<Vec<u32>>();
        let data = Data::new(&[text(0..10), text(20..21), text(30..35)], 4).unwrap();
        assert_eq!(data.train(), [text(0..4), text(4..8), text(8..10)]);
        // The single token behind the last whole window says nothing.
        assert_eq!(data.held_out(), [text(30..34)]);
        let many = Data::new(&[text(0..4000)], 4).unwrap();
        assert_eq!((many.train().len(), many.held_out().len()), (950, 50));
        assert_eq!(Data::new(&[text(0..9000)], 3).unwrap().held_out().len(), MOST_HELD_OUT);
        for texts in [vec![], vec![vec![]], vec![text(0..5)], vec![text(0..6)]] {
            let error = Data::new(&texts, 5).unwrap_err().to_string();
            assert!(error.contains("too few"), "{error}");
        }
        assert!(Data::new(&[text(0..9)], 1).unwrap_err().to_string().contains("too short"));
    }

    #[test]
    fn every_window_once_before_any_again() {
        let take = |seed| {
            let mut order = Order::new(7, seed);
            (0..21).map(|_| order.next()).collect::<Vec<_>>()
        };
        let order = take(3);
        for epoch in order.chunks(7) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6]);
        }
        assert_ne!(order[..7], order[7..14]);
        assert_eq!(order, take(3));
        assert_ne!(order, take(4));
    }
}
