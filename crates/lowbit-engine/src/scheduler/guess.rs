//! The guesses that are worth a step's rows.
//!
//! A sequence's guess number `j` of a step comes true with a chance of `a^j`, where `a` is the
//! share of its last guesses that did. The likeliest guesses of all sequences are made, as many as
//! give the most tokens per second: tokens are one for each sequence and the guesses' chances, and
//! the seconds are those that steps of as many sequences with about as many guesses took. A number
//! of guesses that was not measured is tried, the least first, if it would pay in the time of the
//! next smaller one; and a measurement is forgotten after a while, so that it is tried again.

use crate::runner::GuessLimits;
use std::collections::BTreeMap;
use std::time::Duration;

/// Steps after which a measurement is forgotten: what trying costs is one step of so many.
const FORGOTTEN: u64 = 512;

/// The part of a measurement that a new one replaces.
const NEW: f64 = 0.25;

/// The share of guesses that come true, of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share(f64);

impl Default for Share {
    /// Before its first guess.
    fn default() -> Self {
        Self(0.7)
    }
}

impl Share {
    /// Takes the outcome of a step: of `drafted` guesses the first `accepted` came true, and those
    /// after the first wrong one say nothing.
    pub fn take(&mut self, drafted: usize, accepted: usize) {
        /// One in so many guesses counts.
        const GUESSES: f64 = 8.0;
        /// Steps without guesses in which a share is forgotten.
        const STEPS: f64 = 512.0;
        if drafted == 0 {
            self.0 += (Self::default().0 - self.0) / STEPS;
        }
        for index in 0..drafted.min(accepted + 1) {
            let came_true = if index < accepted { 1.0 } else { 0.0 };
            self.0 += (came_true - self.0) / GUESSES;
        }
    }
}

/// The times that steps took.
#[derive(Debug, Default)]
pub(super) struct Guessing {
    /// Seconds, by the groups of the numbers of sequences and guesses, and the number of the step
    /// that was measured last.
    times: BTreeMap<(usize, usize), (f64, u64)>,
    /// Steps so far.
    steps: u64,
}

impl Guessing {
    /// Takes the time of a step of so many sequences and guesses.
    pub fn measured(&mut self, sequences: usize, guesses: usize, time: Duration) {
        self.steps += 1;
        let (steps, seconds) = (self.steps, time.as_secs_f64());
        self.times.retain(|_, (_, last)| *last + FORGOTTEN > steps);
        let (known, last) = self.times.entry((group(sequences), group(guesses))).or_insert((seconds, steps));
        *known += (seconds - *known) * NEW;
        *last = steps;
    }

    /// The guesses of each sequence in a step of so many, of which `each` has those that guess,
    /// with the most guesses that they have room for.
    pub fn plan(&self, sequences: usize, each: &[(Share, usize)], limits: GuessLimits) -> Vec<usize> {
        let mut chances: Vec<(f64, usize)> = vec![];
        for (index, &(Share(share), most)) in each.iter().enumerate() {
            chances.extend((1..=most as i32).map(|depth| (share.powi(depth), index)));
        }
        // Of equally likely ones the first sequence's: a stable sort.
        chances.sort_by(|a, b| b.0.total_cmp(&a.0));
        chances.truncate(limits.rows.saturating_sub(sequences));
        let mut guesses = vec![0; each.len()];
        let count = if limits.fixed { chances.len() } else { self.count(sequences, &chances) };
        chances[..count].iter().for_each(|&(_, index)| guesses[index] += 1);
        guesses
    }

    /// The number of these guesses, the likeliest first, that a step of so many sequences makes.
    fn count(&self, sequences: usize, chances: &[(f64, usize)]) -> usize {
        let of = group(sequences);
        let Some(&(mut seconds, _)) = self.times.get(&(of, 0)) else { return 0 };
        let mut tokens = sequences as f64;
        let (mut best, mut count) = (tokens / seconds, 0);
        let mut untried = vec![];
        let mut rest = chances;
        while !rest.is_empty() {
            let done = chances.len() - rest.len();
            let more = (group(done + 1) - done).min(rest.len());
            tokens += rest[..more].iter().map(|(chance, _)| chance).sum::<f64>();
            rest = &rest[more..];
            match self.times.get(&(of, group(done + 1))) {
                Some(&(known, _)) => {
                    seconds = known;
                    if tokens / seconds > best {
                        (best, count) = (tokens / seconds, done + more);
                    }
                }
                None => untried.push((tokens / seconds, done + more)),
            }
        }
        untried.into_iter().find(|&(rate, _)| rate > best).map_or(count, |(_, count)| count)
    }
}

/// Numbers that are measured together, by their largest: powers of two, and 0.
fn group(number: usize) -> usize {
    if number == 0 { 0 } else { number.next_power_of_two() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(rows: usize) -> GuessLimits {
        GuessLimits { most: 3, rows, fixed: false }
    }

    const MICRO: Duration = Duration::from_micros(1);

    /// Steps of `count` sequences of these shares for whose time `time` is asked; the tokens per
    /// second of the last ones of each with what `plan` says, and without guesses.
    fn gain(shares: &[f64], time: impl Fn(usize) -> u32) -> f64 {
        let mut guessing = Guessing::default();
        let each: Vec<_> = shares.iter().map(|&share| (Share(share), 3)).collect();
        let (mut tokens, mut seconds) = (0.0, 0.0);
        for _ in 0..2000 {
            let plan = guessing.plan(shares.len(), &each, limits(64));
            let guesses = plan.iter().sum();
            let expected = |(&share, &guesses): (&f64, &usize)| -> f64 {
                (0..=guesses as i32).map(|depth| share.powi(depth)).sum()
            };
            tokens += shares.iter().zip(&plan).map(expected).sum::<f64>();
            let took = time(shares.len() + guesses) * MICRO;
            seconds += took.as_secs_f64();
            guessing.measured(shares.len(), guesses, took);
        }
        let without = shares.len() as f64 / (time(shares.len()) * MICRO).as_secs_f64();
        tokens / seconds / without
    }

    #[test]
    fn guesses_are_made_where_they_pay() {
        // Rows that cost nothing, little, and all that a step takes.
        assert!(gain(&[0.7], |_| 2000) > 2.5);
        assert!(gain(&[0.7], |rows| 2000 + 200 * rows as u32) > 1.9);
        assert!((0.99..1.01).contains(&gain(&[0.7], |rows| 2000 * rows as u32)));
        // Guesses that are hardly ever right.
        assert!(gain(&[0.05; 4], |rows| 2000 + 200 * rows as u32) > 0.99);
        // As on GPUs, a row more can cost as much as many.
        assert!(gain(&[0.7; 16], |rows| if rows > 16 { 9000 } else { 4000 }) > 1.1);
        assert!((0.99..1.01).contains(&gain(&[0.7; 16], |rows| if rows > 16 { 12_000 } else { 4000 })));
    }

    #[test]
    fn the_likeliest_guesses_come_first() {
        let mut guessing = Guessing::default();
        guessing.measured(3, 0, 2000 * MICRO);
        let each = [(Share(0.1), 3), (Share(0.9), 3), (Share(0.5), 3)];
        assert_eq!(guessing.plan(3, &each, limits(64)), [0, 1, 0], "it is tried");
        for guesses in 0..10 {
            guessing.measured(3, guesses, (2000 + 300 * guesses as u32) * MICRO);
        }
        assert_eq!(guessing.plan(3, &each, limits(64)), [0, 3, 1]);
        assert_eq!(guessing.plan(3, &each, limits(5)), [0, 2, 0], "two rows are left");
        assert_eq!(guessing.plan(3, &each, limits(2)), [0, 0, 0]);
        assert_eq!(guessing.plan(3, &[], limits(64)), [] as [usize; 0]);
        let fixed = GuessLimits { fixed: true, ..limits(64) };
        assert_eq!(guessing.plan(3, &each, fixed), [3, 3, 3]);
    }

    #[test]
    fn shares_follow_the_last_guesses() {
        let mut share = Share::default();
        (0..40).for_each(|_| share.take(3, 0));
        assert!(share.0 < 0.01, "{share:?}");
        (0..400).for_each(|_| share.take(0, 0));
        assert!(share.0 > 0.3, "it is tried again: {share:?}");
        (0..20).for_each(|_| share.take(3, 3));
        assert!(share.0 > 0.99, "{share:?}");
        // Two of three guesses before the first wrong one.
        (0..100).for_each(|_| share.take(8, 2));
        assert!((0.5..0.8).contains(&share.0), "{share:?}");
    }
}
