use super::Drafter;
use crate::ModelError;

/// Guesses from a text that is known beforehand, of which a share is made wrong on purpose: it
/// measures what a share of right guesses is worth. Which ones are wrong depends on their places
/// alone.
#[derive(Clone, Debug)]
pub struct Script {
    text: Vec<u32>,
    share: f64,
}

impl Script {
    /// The text, its prompt included, and the share of guesses that are right, 0 to 1.
    pub fn new(text: Vec<u32>, share: f64) -> Self {
        Self { text, share }
    }

    /// True if the guess of the token at `place` is right.
    fn is_right(&self, place: usize) -> bool {
        // Knuth's multiplicative hash.
        let hash = (place as u32).wrapping_mul(2_654_435_761) ^ 0x5bd1_e995;
        f64::from(hash.wrapping_mul(2_246_822_519) >> 8) / f64::from(1 << 24) < self.share
    }
}

impl Drafter for Script {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        let known = self.text.iter().copied().enumerate().skip(text.len()).take(most);
        let other = |id: u32| if id == 0 { 1 } else { id - 1 };
        Ok(known.map(|(place, id)| if self.is_right(place) { id } else { other(id) }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_kept() {
        let text: Vec<u32> = (0..4000).map(|i| i * 7 % 100).collect();
        for share in [0.0, 0.7, 1.0] {
            let guesses = Script::new(text.clone(), share).draft(&[0], 3999).unwrap();
            let right = guesses.iter().zip(&text[1..]).filter(|(guess, id)| guess == id).count();
            let got = right as f64 / guesses.len() as f64;
            assert!((got - share).abs() < 0.02, "{got} of {share}");
        }
        assert_eq!(Script::new(text, 1.0).draft(&[0; 4000], 5).unwrap(), [] as [u32; 0]);
    }
}
