//! The model that a server answers with: all but the engine, which knows ids alone.

use lowbit::files::{ChatTemplate, Tokenizer};
use lowbit::{GenerationOptions, Syntax};
use std::sync::Arc;

/// A model's name, its text, and its defaults.
#[derive(Debug)]
#[non_exhaustive]
pub struct Served {
    /// Its name for clients.
    pub name: String,
    /// Further names that it answers to; `*` is any.
    pub aliases: Vec<String>,
    /// Turns texts into ids and back.
    pub tokenizer: Tokenizer,
    /// Writes conversations; without one there are completions alone.
    pub template: Option<ChatTemplate>,
    /// Sampling where a request does not say how: the publisher's.
    pub defaults: GenerationOptions,
    /// The seed of requests that name none; without it each has another.
    pub seed: Option<u64>,
    /// Ids of the model: the rows of its embedding.
    pub vocab_size: usize,
    /// Tokens that a prompt and its reply may have together, where that is less than the engine's.
    pub context: usize,
    /// The syntax of texts that are no conversation.
    pub(crate) plain: Arc<Syntax>,
}

impl Served {
    /// A model of this name, with greedy sampling unless a request says otherwise.
    pub fn new(name: impl Into<String>, tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        Self {
            name: name.into(),
            aliases: vec![],
            vocab_size: tokenizer.vocab_size(),
            context: usize::MAX,
            seed: None,
            tokenizer,
            template,
            defaults: GenerationOptions::default().with_max_tokens(usize::MAX),
            plain: Arc::new(Syntax::plain()),
        }
    }

    /// With these further names.
    #[must_use]
    pub fn with_aliases(self, aliases: Vec<String>) -> Self {
        Self { aliases, ..self }
    }

    /// With this sampling, unless a request says otherwise.
    #[must_use]
    pub fn with_defaults(self, defaults: GenerationOptions) -> Self {
        Self { defaults, ..self }
    }

    /// With this seed for requests that name none.
    #[must_use]
    pub fn with_seed(self, seed: Option<u64>) -> Self {
        Self { seed, ..self }
    }

    /// With this number of ids, where it is not the tokenizer's.
    #[must_use]
    pub fn with_vocab_size(self, vocab_size: usize) -> Self {
        Self { vocab_size, ..self }
    }

    /// With at most this many tokens of a prompt and its reply together.
    #[must_use]
    pub fn with_context(self, context: usize) -> Self {
        Self { context, ..self }
    }

    /// True if requests may call it this.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        name == self.name || self.aliases.iter().any(|alias| alias == name || alias == "*")
    }
}
