//! Texts to embeddings, as sentence-transformers and llama.cpp make them.

use lowbit_files::{Checkpoint, EmbeddingConfig, Pooling, Tokenizer, shown};
use lowbit_models::{Model, Pooled};
use std::ops::ControlFlow::{self, Continue};

use crate::Error;

/// Options of [`Embedder`]. Those that are not set are as the checkpoint says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbedOptions {
    /// The text before each input.
    pub prompt: Prompt,
    /// The pooling, which makes one vector of the states of a text's tokens; `None` leaves it to
    /// the checkpoint.
    pub pooling: Option<Pooling>,
    /// True if embeddings are divided by their length; `None` leaves it to the checkpoint.
    pub normalize: Option<bool>,
    /// The number of elements that are kept, for models that were trained so that the first ones
    /// suffice (Matryoshka). What is kept is normalised again.
    pub dimensions: Option<usize>,
}

/// The text before each input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Prompt {
    /// The checkpoint's default prompt, if it has one.
    #[default]
    Default,
    /// The checkpoint's prompt of this name.
    Named(String),
    /// This text.
    Text(String),
}

impl EmbedOptions {
    /// With this before each text.
    #[must_use]
    pub fn with_prompt(self, prompt: Prompt) -> Self {
        Self { prompt, ..self }
    }

    /// With a pooling other than the checkpoint's.
    #[must_use]
    pub fn with_pooling(self, pooling: Pooling) -> Self {
        Self { pooling: Some(pooling), ..self }
    }

    /// With embeddings of length 1, or as they come.
    #[must_use]
    pub fn with_normalize(self, normalize: bool) -> Self {
        Self { normalize: Some(normalize), ..self }
    }

    /// With the first so many elements.
    #[must_use]
    pub fn with_dimensions(self, dimensions: usize) -> Self {
        Self { dimensions: Some(dimensions), ..self }
    }
}

/// Makes embeddings with a model.
///
/// ```no_run
/// use lowbit::{EmbedOptions, LanguageModel, Prompt};
///
/// let model = LanguageModel::open("Qwen/Qwen3-Embedding-0.6B")?;
/// let query = model.embedder(&EmbedOptions::default().with_prompt(Prompt::Named("query".into())))?;
/// let query = query.embed(&["What is the capital of China?"])?;
/// let documents = model.embedder(&EmbedOptions::default())?;
/// let documents = documents.embed(&["The capital of China is Beijing.", "Apples are red."])?;
/// assert!(lowbit::cosine(&query[0], &documents[0]) > lowbit::cosine(&query[0], &documents[1]));
/// # Ok::<(), lowbit::Error>(())
/// ```
#[derive(Debug)]
pub struct Embedder<'m> {
    model: &'m Model,
    tokenizer: &'m Tokenizer,
    pooling: Pooling,
    normalize: bool,
    dimensions: usize,
    /// The text before each.
    prompt: String,
    /// Tokens at its start that are not pooled.
    skip: usize,
    fitting: Fitting,
}

impl<'m> Embedder<'m> {
    /// Makes embeddings as `checkpoint`, which `model` and `tokenizer` are of, says and `options`
    /// change it.
    ///
    /// # Errors
    /// [`Error::File`] for settings that cannot be read or are not computed; [`Error::Pooling`],
    /// [`Error::Ranks`], [`Error::Prompt`] and [`Error::Dimensions`].
    pub fn new(
        checkpoint: &Checkpoint,
        (model, tokenizer): (&'m Model, &'m Tokenizer),
        options: &EmbedOptions,
    ) -> Result<Self, Error> {
        let config = checkpoint.embedding_config()?;
        let path = checkpoint.path();
        if config.ranks && options.pooling.is_none() {
            return Err(Error::Ranks { path: path.into() });
        }
        let pooling = options.pooling.or(config.pooling);
        let pooling = pooling.ok_or_else(|| Error::Pooling { path: path.into() })?;
        let hidden_size = model.embedding_size();
        let dimensions = options.dimensions.unwrap_or(hidden_size);
        if !(1..=hidden_size).contains(&dimensions) {
            return Err(Error::Dimensions { got: dimensions, hidden_size });
        }
        let prompt = prompt(checkpoint, &config, &options.prompt)?;
        let fitting = Fitting::new(tokenizer, model, &config)?;
        let skip = match config.include_prompt || prompt.is_empty() {
            true => 0,
            // As sentence-transformers counts it: without a special token at the end.
            false => {
                let ids = fitting.encode(tokenizer, &prompt)?.ids;
                ids.len() - usize::from(ids.last().is_some_and(|&id| tokenizer.is_special(id)))
            }
        };
        let normalize = options.normalize.unwrap_or(config.normalize);
        Ok(Self { model, tokenizer, pooling, normalize, dimensions, prompt, skip, fitting })
    }

    /// The elements of an embedding.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// The most tokens of a text, with those around it.
    pub fn most_tokens(&self) -> usize {
        self.fitting.most
    }

    /// The tokens of `text`, with the prompt before it and what the tokenizer adds, cut to what the
    /// model reads.
    ///
    /// # Errors
    /// [`Error::File`] when the tokenizer has no token for a part of it.
    pub fn tokens(&self, text: &str) -> Result<FittedTokens, Error> {
        match self.prompt.is_empty() {
            true => self.fitting.encode(self.tokenizer, text),
            false => self.fitting.encode(self.tokenizer, &format!("{}{text}", self.prompt)),
        }
    }

    /// The embedding of each text, in their order.
    ///
    /// # Errors
    /// Those of [`Self::tokens`]; [`Error::Model`] for a text without tokens, and for states that
    /// are NaN or infinite; [`Error::Kernel`] when a GPU fails.
    pub fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<f32>>, Error> {
        let tokens = texts.iter().map(|text| Ok(self.tokens(text.as_ref())?.ids));
        self.embed_tokens(&tokens.collect::<Result<Vec<_>, Error>>()?)
    }

    /// As [`Self::embed`], of the ids of texts' [`tokens`](Self::tokens).
    ///
    /// # Errors
    /// Those of [`Self::embed`].
    pub fn embed_tokens<T: AsRef<[u32]>>(&self, tokens: &[T]) -> Result<Vec<Vec<f32>>, Error> {
        // Nothing breaks it off.
        Ok(self.embed_in_passes(tokens, || Continue(()))?.unwrap_or_default())
    }

    /// As [`Self::embed_tokens`]. `between` is called between two passes of the model, where others
    /// may use the device; if it returns `Break`, the result is `None`.
    ///
    /// # Errors
    /// Those of [`Self::embed`].
    pub fn embed_in_passes<T: AsRef<[u32]>>(
        &self,
        tokens: &[T],
        between: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Vec<Vec<f32>>>, Error> {
        let texts: Vec<Pooled<'_>> =
            tokens.iter().map(|tokens| Pooled { tokens: tokens.as_ref(), skip: self.skip }).collect();
        let Some(mut embeddings) = self.model.pooled_in_passes(&texts, self.pooling, between)? else {
            return Ok(None);
        };
        for embedding in &mut embeddings {
            embedding.truncate(self.dimensions);
            if self.normalize {
                normalize(embedding);
            }
        }
        Ok(Some(embeddings))
    }
}

/// The prompt that is asked for; empty for none.
pub(crate) fn prompt(
    checkpoint: &Checkpoint,
    config: &EmbeddingConfig,
    wanted: &Prompt,
) -> Result<String, Error> {
    let name = match wanted {
        Prompt::Text(text) => return Ok(text.clone()),
        Prompt::Named(name) => name,
        Prompt::Default => match &config.default_prompt {
            Some(name) => name,
            None => return Ok(String::new()),
        },
    };
    match config.prompts.iter().find(|(known, _)| known == name) {
        Some((_, text)) => Ok(text.clone()),
        None => {
            let names: Vec<_> = config.prompts.iter().map(|(name, _)| shown(name).to_string()).collect();
            let known = if names.is_empty() { "none".into() } else { names.join(", ") };
            Err(Error::Prompt { path: checkpoint.path().into(), name: name.clone(), known })
        }
    }
}

/// The tokens of a text as a model reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FittedTokens {
    /// Their ids.
    pub ids: Vec<u32>,
    /// Tokens of the text that were cut off, since the model reads no more.
    pub cut: usize,
}

/// Cuts texts to what a model reads, and keeps the tokens that the tokenizer puts around them.
#[derive(Debug)]
pub(crate) struct Fitting {
    /// The most tokens, with those around a text.
    most: usize,
    cut_at_start: bool,
    /// The tokens around a text, as those of an empty one.
    around: Vec<u32>,
}

impl Fitting {
    pub(crate) fn new(tokenizer: &Tokenizer, model: &Model, config: &EmbeddingConfig) -> Result<Self, Error> {
        let context = model.config().max_position_embeddings;
        let most = config.max_tokens.map_or(context, |most| most.min(context));
        Ok(Self { most, cut_at_start: config.cut_at_start, around: tokenizer.encode("", true)? })
    }

    pub(crate) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<FittedTokens, Error> {
        let ids = tokenizer.encode(text, true)?;
        if ids.len() <= self.most {
            return Ok(FittedTokens { ids, cut: 0 });
        }
        let plain = tokenizer.encode(text, false)?;
        let room = self.most.saturating_sub(self.around.len()).min(plain.len());
        let kept = if self.cut_at_start { &plain[plain.len() - room..] } else { &plain[..room] };
        // The tokens around the text are those before and after the plain ones.
        let before = (0..=self.around.len()).find(|&before| {
            let (start, end) = self.around.split_at(before);
            ids.starts_with(start) && ids[start.len()..].starts_with(&plain) && ids.ends_with(end)
        });
        let (start, end) = self.around.split_at(before.unwrap_or(0));
        Ok(FittedTokens { ids: [start, kept, end].concat(), cut: plain.len() - room })
    }
}

/// Divides `embedding` by its length, which as with torch's `normalize` counts as at least 1e-12.
fn normalize(embedding: &mut [f32]) {
    let length = dot(embedding, embedding).sqrt().max(1e-12);
    embedding.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
}

fn dot(one: &[f32], other: &[f32]) -> f64 {
    one.iter().zip(other).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// The cosine of the angle between two embeddings: 0 where one of them is all zeros.
pub fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let lengths = (dot(one, one) * dot(other, other)).sqrt();
    if lengths > 0.0 { (dot(one, other) / lengths) as f32 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_angles() {
        let mut embedding = [3.0, -4.0];
        normalize(&mut embedding);
        assert_eq!(embedding, [0.6, -0.8]);
        let mut zeros = [0.0; 3];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 2.0]), 0.0);
        assert_eq!(cosine(&[1.0, 2.0], &[2.0, 4.0]), 1.0);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
