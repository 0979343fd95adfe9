use super::Drafter;
use crate::ModelError;

/// Guesses from the text itself: those of its tokens that followed where its last few stood before.
/// The longest such ending counts, and of equally long ones the latest.
///
/// Source: transformers 5.24 `PromptLookupCandidateGenerator`, vLLM's `ngram` and llama.cpp's
/// `ngram-simple`, which differ in the place that they prefer.
#[derive(Clone, Debug)]
pub struct Ngrams {
    least: usize,
    most: usize,
    /// Tokens that must have stood together before: more after guesses that were wrong.
    needed: usize,
    /// The text's length at the last guess, and the guesses.
    last: (usize, Vec<u32>),
}

impl Ngrams {
    /// Of endings of `least` tokens or more; endings of more than `most` count as `most`.
    pub fn new(least: usize, most: usize) -> Self {
        let least = least.max(1);
        Self { least, most: most.max(least), needed: least, last: (0, vec![]) }
    }

    /// The place behind the ending's last occurrence, if it is long enough.
    fn find(&self, text: &[u32]) -> Option<usize> {
        let end = text.len().checked_sub(1)?;
        let (mut best, mut longest) = (None, 0);
        for place in (0..end).rev().filter(|&place| text[place] == text[end]) {
            let pairs = text[..=place].iter().rev().zip(text.iter().rev());
            let length = pairs.take(self.most).take_while(|(a, b)| a == b).count();
            if length > longest {
                (best, longest) = (Some(place + 1), length);
                if length == self.most {
                    break;
                }
            }
        }
        best.filter(|_| longest >= self.needed)
    }

    /// Learns what became of the last guesses.
    fn judge(&mut self, text: &[u32]) {
        let (length, guesses) = &self.last;
        let Some((&guess, &token)) = guesses.first().zip(text.get(*length)) else { return };
        self.needed = if guess == token { self.least } else { (self.needed + 1).min(self.most) };
        self.last.1.clear();
    }
}

impl Default for Ngrams {
    /// Endings of 3 to 8 tokens.
    fn default() -> Self {
        Self::new(3, 8)
    }
}

impl Drafter for Ngrams {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        self.judge(text);
        let Some(start) = self.find(text) else { return Ok(vec![]) };
        // A text that repeats itself goes on repeating.
        let period = text.len() - start;
        let guesses: Vec<u32> = (0..most).map(|i| text[start + i % period]).collect();
        self.last = (text.len(), guesses.clone());
        Ok(guesses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_place_counts() {
        let draft = |text: &[u32], most| Ngrams::new(2, 4).draft(text, most).unwrap();
        assert_eq!(draft(&[1, 2, 3, 9, 1, 2], 2), [3, 9]);
        assert_eq!(draft(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4], "the latest of two");
        assert_eq!(draft(&[7, 1, 2, 3, 1, 2, 4, 7, 1, 2], 1), [3], "a longer one before it");
        assert_eq!(draft(&[1, 2, 3, 2], 4), [] as [u32; 0], "one token is too few");
        assert_eq!(draft(&[5, 6, 5, 6, 5, 6], 5), [5, 6, 5, 6, 5], "it goes on repeating");
        assert_eq!(draft(&[], 4), [] as [u32; 0]);
        assert_eq!(draft(&[4], 4), [] as [u32; 0]);
    }

    #[test]
    fn wrong_guesses_ask_for_longer_endings() {
        let mut ngrams = Ngrams::new(2, 3);
        assert_eq!(ngrams.draft(&[1, 2, 3, 9, 1, 2], 1).unwrap(), [3]);
        let wrong = [1, 2, 3, 9, 1, 2, 8, 1, 2];
        assert_eq!(ngrams.draft(&wrong, 1).unwrap(), [] as [u32; 0], "two tokens are too few now");
        let three = [8, 1, 2, 3, 8, 1, 2];
        assert_eq!(ngrams.draft(&three, 1).unwrap(), [3]);
        let right = [8, 1, 2, 3, 8, 1, 2, 3, 5, 5, 1, 2];
        assert_eq!(ngrams.draft(&right, 1).unwrap(), [3], "two are enough again");
    }
}
