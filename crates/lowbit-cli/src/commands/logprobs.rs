//! The log-probability of each token of a reply.

use crate::Failure;
use lowbit::{Logits, Model, Tokenizer};
use lowbit_models::{Logprob, ModelError, TokenLogprobs};
use serde::Serialize;

/// Tokens that are scored at a time: a row of logits is as long as the vocabulary.
const ROWS: usize = 32;
/// Tokens before those that run at a time.
const CHUNK: usize = 512;

/// A token that was written, as OpenAI's chat completions and llama-server describe it.
#[derive(Serialize)]
pub struct Scored {
    #[serde(flatten)]
    token: Candidate,
    top_logprobs: Vec<Candidate>,
}

#[derive(Serialize)]
struct Candidate {
    id: u32,
    token: String,
    /// Natural logarithm of the probability before temperature, penalties and cuts.
    logprob: f64,
}

/// Scores the tokens from `start` (at least 1) on, with the `count` likeliest beside each. The
/// model reads the text once more for it: sampling leaves the logits on the device.
pub fn score(
    model: &Model,
    tokenizer: &Tokenizer,
    (tokens, start): (&[u32], usize),
    count: usize,
) -> Result<Vec<Scored>, Failure> {
    let (mut cache, mut scored) = (model.cache(), vec![]);
    for chunk in tokens[..start - 1].chunks(CHUNK) {
        model.forward(chunk, &mut cache, Logits::None)?;
    }
    // The logits after a token are its successor's.
    for chunk in (start..tokens.len()).collect::<Vec<_>>().chunks(ROWS) {
        let (first, end) = (chunk[0], chunk[0] + chunk.len());
        let logits = model.forward(&tokens[first - 1..end - 1], &mut cache, Logits::All)?;
        let logits = logits.ok_or(ModelError::NoTokens)?.to_device(model.host())?;
        let rows = logits.as_slice::<f32>()?.chunks_exact(logits.dim(-1));
        scored.extend(
            rows.zip(&tokens[first..end])
                .map(|(row, &id)| Scored::new(tokenizer, TokenLogprobs::new(row, id, count))),
        );
    }
    Ok(scored)
}

impl Scored {
    /// A token's log-probability, with the spelling of all tokens.
    pub fn new(tokenizer: &Tokenizer, logprobs: TokenLogprobs) -> Self {
        let candidate = |Logprob { id, logprob }| {
            let token = tokenizer.decode(&[id]).unwrap_or_default();
            Candidate { id, token, logprob }
        };
        let TokenLogprobs { token, top } = logprobs;
        Self { token: candidate(token), top_logprobs: top.into_iter().map(candidate).collect() }
    }
}
