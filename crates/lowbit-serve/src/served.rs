//! The model that a server answers with: all but the engine, which knows ids alone.

use crate::error::ApiError;
use crate::ids::IdCache;
use lowbit::files::{ChatTemplate, Tokenizer};
use lowbit::{Checkpoint, GenerationOptions, Grammars, Model, RerankOptions, Reranker, Syntax};
use std::sync::{Arc, OnceLock};

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
    /// The compiler of replies' forms, from the first request for one on; or why it cannot.
    pub(crate) grammars: OnceLock<Result<Grammars, String>>,
    /// Ids of conversations that were rendered before.
    pub(crate) ids: IdCache,
    /// The model itself, for embeddings and scores.
    texts: Option<Texts>,
}

/// A model whose texts become embeddings or scores.
#[derive(Debug)]
pub(crate) struct Texts {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) model: Model,
    embeds: bool,
    scores: bool,
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
            grammars: OnceLock::new(),
            ids: IdCache::default(),
            texts: None,
        }
    }

    /// With the model itself, which the engine runs, too: for embeddings and scores, if its
    /// checkpoint says how they are made.
    #[must_use]
    pub fn with_model(self, checkpoint: Checkpoint, model: Model) -> Self {
        let config = checkpoint.embedding_config();
        let embeds = config.is_ok_and(|config| config.pooling.is_some() && !config.ranks);
        let scores = Reranker::new(&checkpoint, (&model, &self.tokenizer), &RerankOptions::default()).is_ok();
        Self { texts: Some(Texts { checkpoint, model, embeds, scores }), ..self }
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

    /// The model, if it makes embeddings.
    ///
    /// # Errors
    /// 400 for one that makes none.
    pub(crate) fn texts_of_embeddings(&self) -> Result<&Texts, ApiError> {
        self.texts.as_ref().filter(|texts| texts.embeds).ok_or_else(|| {
            let problem =
                "makes no embeddings: its checkpoint does not say how the states of a text are pooled";
            ApiError::unsupported("model", format!("{} {problem}", self.name))
        })
    }

    /// The model, if it scores documents.
    ///
    /// # Errors
    /// 400 for one that does not.
    pub(crate) fn texts_of_scores(&self) -> Result<&Texts, ApiError> {
        self.texts.as_ref().filter(|texts| texts.scores).ok_or_else(|| {
            let problem = "scores no documents: its checkpoint names no tokens whose logits make a score";
            ApiError::unsupported("model", format!("{} {problem}", self.name))
        })
    }

    /// True if requests may call it this.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        [&self.name].into_iter().chain(&self.aliases).any(|known| known == name || known == "*")
    }
}
