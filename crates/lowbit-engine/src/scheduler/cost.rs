//! The time that a pass over prompts takes.

use std::time::Duration;

/// The weight that a measurement keeps when the next one comes.
const KEPT: f64 = 0.9;

/// `fixed + tokens * each`, by least squares over the measurements so far, of which the last ones
/// count most. A pass costs something however short it is: by a rate alone, short passes would look
/// slow, and those that follow would be shorter still.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// The sums of weights, tokens, seconds, their products, and the tokens' squares.
    count: f64,
    tokens: f64,
    seconds: f64,
    products: f64,
    squares: f64,
}

impl Cost {
    /// Takes a measurement.
    pub fn add(&mut self, tokens: usize, time: Duration) {
        if time.is_zero() {
            return;
        }
        let (tokens, seconds) = (tokens as f64, time.as_secs_f64());
        let sums = [
            (&mut self.count, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.products, tokens * seconds),
            (&mut self.squares, tokens * tokens),
        ];
        sums.into_iter().for_each(|(sum, new)| *sum = *sum * KEPT + new);
    }

    /// The tokens that take no longer than `time`; 0 before the first measurement.
    pub fn fitting(&self, time: Duration) -> usize {
        let Some((fixed, each)) = self.line() else { return 0 };
        ((time.as_secs_f64() - fixed) / each).max(0.0) as usize
    }

    /// The time of a pass of so many tokens; none before the first measurement.
    pub fn time(&self, tokens: usize) -> Duration {
        let (fixed, each) = self.line().unwrap_or_default();
        Duration::try_from_secs_f64(fixed + each * tokens as f64).unwrap_or_default()
    }

    /// The time of a pass however short it is; none where it is not known.
    pub fn fixed(&self) -> Duration {
        self.time(0)
    }

    /// The seconds of a pass without tokens, and of each token. Where passes of one length alone
    /// were measured, or longer ones took less, all is by the token.
    fn line(&self) -> Option<(f64, f64)> {
        if self.count == 0.0 {
            return None;
        }
        let spread = self.count * self.squares - self.tokens * self.tokens;
        let each = (self.count * self.products - self.tokens * self.seconds) / spread;
        let fixed = (self.seconds - each * self.tokens) / self.count;
        // Rounding leaves a spread of lengths that are all the same.
        let is_line = spread > 1e-6 * self.count * self.squares && each > 0.0 && fixed >= 0.0;
        Some(if is_line { (fixed, each) } else { (0.0, self.seconds / self.tokens) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_parts_do_not_make_long_ones_look_slow() {
        let time = |tokens: usize| Duration::from_micros(5000 + 37 * tokens as u64);
        let mut cost = Cost::default();
        assert_eq!(cost.fitting(Duration::from_secs(1)), 0);
        // By the token alone.
        cost.add(64, time(64));
        assert!((100..120).contains(&cost.fitting(Duration::from_millis(13))));
        cost.add(128, time(128));
        for _ in 0..200 {
            cost.add(64, time(64));
        }
        // As good as forgotten, so that all parts have one length again; a longer one is enough.
        cost.add(192, time(192));
        assert!((215..218).contains(&cost.fitting(Duration::from_millis(13))), "{cost:?}");
        assert_eq!(cost.fitting(Duration::from_millis(4)), 0);
        let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_micros(100);
        assert!(near(cost.fixed(), time(0)) && near(cost.time(300), time(300)), "{cost:?}");
    }

    #[test]
    fn times_that_no_line_fits_are_by_the_token() {
        let mut cost = Cost::default();
        cost.add(100, Duration::from_millis(10));
        cost.add(200, Duration::from_millis(9));
        assert!((315..330).contains(&cost.fitting(Duration::from_millis(20))), "{cost:?}");
        cost.add(50, Duration::ZERO);
    }
}
