//! Scores documents for a query with a language model, as sentence-transformers' cross-encoders do.

use crate::Error;
use crate::embed::{Prompt, prompt};
use lowbit_files::{ChatTemplate, Checkpoint, ScoringConfig, Tokenizer};
use lowbit_models::{Model, Session};
use serde_json::{Value, json};
use std::ops::ControlFlow::{self, Continue};

/// Options of [`Reranker`]: [`RerankOptions::default`], changed by its `with_` methods. Those that
/// are not set are as the checkpoint says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RerankOptions {
    /// The system's message, which says what makes a document good: one of the checkpoint's prompts
    /// or a text.
    pub instruction: Prompt,
    /// The tokens whose logits make the score, spelled or as ids: for the document, and against it.
    pub tokens: Option<(String, Option<String>)>,
}

impl RerankOptions {
    /// With this as the system's message.
    #[must_use]
    pub fn with_instruction(self, instruction: Prompt) -> Self {
        Self { instruction, ..self }
    }

    /// With the logits of these tokens: the score is that of the first, less the second's.
    #[must_use]
    pub fn with_tokens(self, true_token: impl Into<String>, false_token: Option<String>) -> Self {
        Self { tokens: Some((true_token.into(), false_token)), ..self }
    }
}

/// Scores documents for queries. A query is read once for all documents where the chat template
/// puts it first.
///
/// ```no_run
/// use lowbit::{LanguageModel, RerankOptions};
///
/// let model = LanguageModel::open("Qwen/Qwen3-Reranker-0.6B")?;
/// let mut reranker = model.reranker(&RerankOptions::default())?;
/// let documents = ["The capital of China is Beijing.", "Apples are red."];
/// let scores = reranker.score("What is the capital of China?", &documents)?;
/// assert!(scores[0].score > scores[1].score);
/// # Ok::<(), lowbit::Error>(())
/// ```
#[derive(Debug)]
pub struct Reranker<'m> {
    model: &'m Model,
    tokenizer: &'m Tokenizer,
    template: ChatTemplate,
    config: ScoringConfig,
    /// The system's message; empty for none.
    instruction: String,
    /// The most tokens of a text.
    most: usize,
    cut_at_start: bool,
    session: Session<'m>,
}

/// The score of a document.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// From 0 to 1, unless the checkpoint says that scores are logits: more is better.
    pub score: f32,
    /// Tokens of the text that the model read: template, query and document.
    pub tokens: usize,
    /// Tokens that were cut off, since the model reads no more. The template's end stays.
    pub cut: usize,
}

impl<'m> Reranker<'m> {
    /// Scores as `checkpoint`, which `model` and `tokenizer` are of, says and `options` change it.
    ///
    /// # Errors
    /// [`Error::File`] for settings that cannot be read or are not computed; [`Error::NoScore`],
    /// [`Error::NoToken`], [`Error::NoPair`] and [`Error::Prompt`].
    pub fn new(
        checkpoint: &Checkpoint,
        (model, tokenizer): (&'m Model, &'m Tokenizer),
        options: &RerankOptions,
    ) -> Result<Self, Error> {
        let path = checkpoint.path();
        let mut scoring = checkpoint.scoring_config()?;
        if let Some((true_token, false_token)) = &options.tokens {
            let id = |token: &String| token_id(tokenizer, model, token);
            let (true_token, false_token) = (id(true_token)?, false_token.as_ref().map(id).transpose()?);
            let said = scoring.unwrap_or_else(|| ScoringConfig::new(true_token, false_token));
            scoring = Some({
                let mut config = said;
                (config.true_token, config.false_token) = (true_token, false_token);
                config
            });
        }
        let config = scoring.ok_or_else(|| Error::NoScore { path: path.into() })?;
        for id in [Some(config.true_token), config.false_token].into_iter().flatten() {
            if id as usize >= model.config().vocab_size {
                return Err(Error::NoToken { token: id.to_string() });
            }
        }
        let texts = checkpoint.embedding_config()?;
        let instruction = prompt(checkpoint, &texts, &options.instruction)?;
        let template = ChatTemplate::from_checkpoint(checkpoint)?;
        let mut template = template.ok_or_else(|| Error::NoPair { path: path.into() })?;
        for (name, value) in &config.variables {
            template = template.with(name, value);
        }
        let context = model.config().max_position_embeddings;
        let most = texts.max_tokens.map_or(context, |most| most.min(context));
        let (session, cut_at_start) = (Session::new(model), texts.cut_at_start);
        let reranker = Self { model, tokenizer, template, config, instruction, most, cut_at_start, session };
        // The template of a plain chat model leaves out roles that it does not know, or refuses
        // them.
        let text = |query, document| reranker.text(query, document);
        let varied = [text("0", "0"), text("1", "0"), text("0", "1")];
        match varied {
            [Ok(one), Ok(other), Ok(third)] if one != other && one != third => Ok(reranker),
            _ => Err(Error::NoPair { path: path.into() }),
        }
    }

    /// The scores of `documents` for `query`, in their order.
    ///
    /// # Errors
    /// [`Error::File`] when the template or the tokenizer refuses a text; [`Error::Kernel`] when a
    /// GPU fails, or for logits that are NaN.
    pub fn score<S: AsRef<str>>(&mut self, query: &str, documents: &[S]) -> Result<Vec<Score>, Error> {
        let mut scores = vec![];
        for document in documents {
            // Nothing breaks it off.
            scores.extend(self.score_in_passes(query, document.as_ref(), || Continue(()))?);
        }
        Ok(scores)
    }

    /// As [`Self::score`] of one document. `between` is called after each pass of the model, where
    /// others may use the device; if it returns `Break`, the result is `None`.
    ///
    /// # Errors
    /// Those of [`Self::score`].
    pub fn score_in_passes(
        &mut self,
        query: &str,
        document: &str,
        mut between: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Score>, Error> {
        let mut ids = self.ids(query, document)?;
        let cut = ids.len().saturating_sub(self.most);
        if cut > 0 && self.cut_at_start {
            ids.drain(..cut);
        } else if cut > 0 {
            let end = self.end(query)?;
            ids.truncate(self.most);
            let kept = end.len().min(ids.len());
            let start = ids.len() - kept;
            ids[start..].copy_from_slice(&end[end.len() - kept..]);
        }
        let read = self.session.tokens();
        // At least one token runs: the score is made of its logits.
        let same = read.iter().zip(&ids[..ids.len().saturating_sub(1)]).take_while(|(a, b)| a == b).count();
        let start = self.session.go_back(same)?;
        let logits = self.session.prefill(&ids[start..], |_| between())?;
        let Some(logits) = logits else { return Ok(None) };
        let logits = logits.to_device(self.model.host())?;
        let values = logits.as_slice::<f32>()?;
        let logit = |id: u32| values[id as usize];
        let difference = logit(self.config.true_token) - self.config.false_token.map_or(0.0, logit);
        let score = if self.config.sigmoid { 1.0 / (1.0 + (-difference).exp()) } else { difference };
        Ok(Some(Score { score, tokens: ids.len(), cut }))
    }

    /// The template's text.
    fn text(&self, query: &str, document: &str) -> Result<String, Error> {
        // As sentence-transformers guesses it from the template's source.
        const PARTS: [&str; 6] =
            ["content[0]", ".type", "'type'", "\"type\"", "item.type", "message.content["];
        let mentions_parts = || PARTS.iter().any(|part| self.template.mentions(part));
        let in_parts = self.config.in_parts.unwrap_or_else(mentions_parts);
        let message = |role: &str, text: &str| -> Value {
            let content = if in_parts { json!([{ "type": "text", "text": text }]) } else { text.into() };
            json!({ "role": role, "content": content })
        };
        let system = (!self.instruction.is_empty()).then(|| message("system", &self.instruction));
        let messages: Vec<Value> =
            system.into_iter().chain([message("query", query), message("document", document)]).collect();
        Ok(self.template.render(&messages, self.config.add_generation_prompt)?)
    }

    fn ids(&self, query: &str, document: &str) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer.encode_chat(&self.text(query, document)?)?)
    }

    /// The tokens with which the template ends whatever the document is.
    fn end(&self, query: &str) -> Result<Vec<u32>, Error> {
        let (one, other) = (self.ids(query, "0")?, self.ids(query, "1")?);
        let same = one.iter().rev().zip(other.iter().rev()).take_while(|(a, b)| a == b).count();
        Ok(one[one.len() - same..].to_vec())
    }
}

/// The id of a token by its spelling, or the number that was given.
fn token_id(tokenizer: &Tokenizer, model: &Model, token: &str) -> Result<u32, Error> {
    let unknown = || Error::NoToken { token: lowbit_files::shown(token).to_string() };
    // A tokenizer's own spelling may have marks in the place of spaces.
    let encoded = tokenizer.encode(token, false)?;
    let id = match encoded[..] {
        [id] => Some(id),
        _ => token.parse().ok().filter(|&id: &u32| (id as usize) < model.config().vocab_size),
    };
    id.ok_or_else(unknown)
}
