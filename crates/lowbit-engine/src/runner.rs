//! The scheduler's view of a model: the seam that simulations replace.

use crate::{EngineError, Request};
use lowbit_models::{Logits, TokenLogprobs};

/// Tokens per block of the prefix cache. Prompts are cut at multiples of it.
pub(crate) const BLOCK: usize = 64;

/// Sizes of a sequence's cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Keys and values of a token, in bytes, in layers that keep those of the whole text.
    pub per_token: usize,
    /// The same in layers that keep a window, and the tokens that they keep at most.
    pub windowed: usize,
    pub window: usize,
    /// Recurrent states and windows, in bytes; 0 for models of attention to the whole text alone.
    /// A cache goes back to marks of them.
    pub states: usize,
    /// The states that a cache takes from the budget: 0 where they have memory of their own.
    pub fixed: usize,
    /// The bytes that a mark takes from it.
    pub mark: usize,
    /// The most marks of all caches together.
    pub marks: usize,
    /// Keys and values are allocated for multiples of this many tokens.
    pub granule: usize,
}

impl Sizes {
    /// The capacity that holds `tokens`.
    pub(crate) fn capacity(&self, tokens: usize) -> usize {
        tokens.checked_next_multiple_of(self.granule).unwrap_or(tokens)
    }

    /// Bytes of a cache of this capacity.
    pub(crate) fn bytes(&self, capacity: usize) -> usize {
        let windows = self.windowed.saturating_mul(capacity.min(self.window));
        self.per_token.saturating_mul(capacity).saturating_add(windows).saturating_add(self.fixed)
    }

    /// Of `context` tokens, those whose cache fits into `budget` bytes.
    pub(crate) fn fitting(&self, context: usize, budget: usize) -> usize {
        if self.bytes(self.capacity(context)) <= budget {
            return context;
        }
        let left = budget.saturating_sub(self.fixed);
        let windows = self.windowed.saturating_mul(self.window);
        let while_windows_grow = (left / (self.per_token + self.windowed).max(1)).min(self.window);
        let tokens = match left.checked_sub(windows) {
            Some(left) => (left / self.per_token.max(1)).max(while_windows_grow),
            None => while_windows_grow,
        };
        tokens - tokens % self.granule
    }
}

/// A sampled token.
#[derive(Clone, Debug)]
pub(crate) struct Sampled {
    pub id: u32,
    pub logprobs: Option<TokenLogprobs>,
    /// True if the reply ends with it: it is a stop id, or completes a grammar.
    pub ends: bool,
}

/// A sequence in a batch of steps.
pub(crate) struct Row<'a, R: Runner + ?Sized> {
    pub cache: &'a mut R::Cache,
    pub sampler: &'a mut R::Sampler,
    /// All tokens up to the one that runs.
    pub text: &'a [u32],
    /// True if the next token is sampled; otherwise it is known already.
    pub samples: bool,
    /// [`Request::logprobs`].
    pub logprobs: Option<usize>,
    /// The most tokens that may be guessed and verified, for which there is room.
    pub guesses: usize,
}

/// The guesses that steps may have.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GuessLimits {
    /// Of a row; 0 where nothing guesses.
    pub most: usize,
    /// The rows of a step with guesses.
    pub rows: usize,
    /// True if there are as many as there may be, whatever they give.
    pub fixed: bool,
}

/// The results of a row.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    /// The tokens drawn: none where nothing is sampled, else one, and one more for each guess that
    /// came true. An error is the last.
    pub drawn: Vec<Outcome>,
    /// Guesses that were verified.
    pub drafted: usize,
}

impl Ran {
    /// Of a row without guesses that samples.
    pub(crate) fn one(drawn: Outcome) -> Self {
        Self { drawn: vec![drawn], drafted: 0 }
    }
}

/// A part of a prompt, in a pass with parts of others.
pub(crate) struct Part<'a, R: Runner + ?Sized> {
    pub cache: &'a mut R::Cache,
    pub tokens: &'a [u32],
    /// The places of the text at which the states are kept: all within these tokens or at their
    /// end, and at the end alone for runners that do not [`Runner::marks_on_the_way`].
    pub places: &'a [usize],
    /// The states at these places, from the pass on; fewer without memory for them.
    pub marks: Vec<(usize, R::Mark)>,
    pub sampler: &'a mut R::Sampler,
    /// True at the prompt's end: the first token is drawn.
    pub draws: bool,
    /// [`Request::logprobs`].
    pub logprobs: Option<usize>,
}

impl<R: Runner> Part<'_, R> {
    /// The logits that a pass of these parts has to compute: where one draws, those of all their
    /// last tokens.
    pub(crate) fn logits(parts: &[Self]) -> Logits {
        match parts.iter().any(|part| part.draws) {
            true => Logits::Last,
            false => Logits::None,
        }
    }

    /// Those that draw.
    pub(crate) fn drawing(parts: &mut [Self]) -> impl Iterator<Item = Drawing<'_, R::Sampler>> {
        let drawing = parts.iter_mut().enumerate().filter(|(_, part)| part.draws);
        drawing.map(|(index, part)| (index, &mut *part.sampler, part.logprobs))
    }
}

/// The number of a row of logits, what draws from it, and [`Request::logprobs`].
pub(crate) type Drawing<'a, S> = (usize, &'a mut S, Option<usize>);

/// The result of a row or a part, of which an error concerns its request alone.
pub(crate) type Outcome = Result<Sampled, EngineError>;

/// A model as the scheduler sees it. Errors that are [`EngineError::DeviceLost`] mean that nothing
/// can run any more, others concern the sequences of the call.
pub(crate) trait Runner {
    /// One sequence's keys, values and states.
    type Cache;
    /// The states at a place of a text, to go back to.
    type Mark;
    /// A sequence's sampling: its options, last tokens and step.
    type Sampler;

    fn sizes(&self) -> Sizes;

    /// An empty cache with room for `capacity` tokens.
    fn cache(&self, capacity: usize) -> Result<Self::Cache, EngineError>;

    /// A copy of `cache` as it was after `tokens` tokens, in memory of its own, with room for
    /// `capacity` tokens, which is no less than the original's. `mark` is of this place, in models
    /// with states.
    fn fork(
        &self,
        cache: &Self::Cache,
        tokens: usize,
        mark: Option<&Self::Mark>,
        capacity: usize,
    ) -> Result<Self::Cache, EngineError>;

    /// Sets `cache` to what it was after `tokens` tokens.
    fn go_back(
        &self,
        cache: &mut Self::Cache,
        tokens: usize,
        mark: Option<&Self::Mark>,
    ) -> Result<(), EngineError>;

    /// The most parts of a pass over prompts.
    fn most_parts(&self) -> usize;

    /// True if a pass keeps states between its tokens, so that it need not end there.
    fn marks_on_the_way(&self) -> bool;

    /// Nobody runs on `cache` until [`Self::go_back`] to one of its marks, or in models without
    /// states to any place, among its first `tokens` tokens. Returns the tokens that it has room
    /// for then, of `capacity` before.
    fn park(&self, _cache: &mut Self::Cache, _tokens: usize, capacity: usize) -> usize {
        capacity
    }

    /// Makes room for `capacity` tokens in all.
    fn make_room(&self, cache: &mut Self::Cache, capacity: usize) -> Result<(), EngineError>;

    /// The cache that `sampler` steps on is about to move or to go.
    fn release(&self, sampler: &mut Self::Sampler);

    /// The sampling of a request's reply, after its prompt.
    fn sampler(&self, request: &Request) -> Result<Self::Sampler, EngineError>;

    /// Runs parts of prompts in one pass, and waits for it; a result for each part that draws, in
    /// order.
    fn prefill(&self, parts: &mut [Part<'_, Self>]) -> Result<Vec<Outcome>, EngineError>;

    /// Kernels compiled and steps captured so far: a pass that does either takes longer than others
    /// like it.
    fn compilations(&self) -> usize {
        0
    }

    /// The guesses that there may be.
    fn guess_limits(&self) -> GuessLimits {
        GuessLimits::default()
    }

    /// Runs a token of each row, and the guesses after it that came true.
    fn decode(&self, rows: &mut [Row<'_, Self>]) -> Result<Vec<Ran>, EngineError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts that fit, where windows are full and where they still grow.
    #[test]
    fn windows_count_by_what_they_keep() {
        let sizes = Sizes {
            per_token: 10,
            windowed: 30,
            window: 320,
            states: 9600,
            fixed: 0,
            mark: 9600,
            granule: 64,
            marks: 1,
        };
        assert_eq!([sizes.bytes(64), sizes.bytes(320), sizes.bytes(1024)], [2560, 12_800, 19_840]);
        for budget in (0..40_000).step_by(997) {
            let tokens = sizes.fitting(4096, budget);
            assert!(sizes.bytes(tokens) <= budget && sizes.bytes(tokens + 64) > budget, "{budget}: {tokens}");
        }
        assert_eq!(sizes.fitting(4096, 1 << 30), 4096);
    }
}
