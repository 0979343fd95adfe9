//! Guesses that a server's steps verify.

use crate::Failure;
use crate::options::Loaded;
use crate::speculation::Source;
use lowbit::{GenerationOptions, Model, ModelError, dry_guesses};
use lowbit_engine::{Guesses, Predictor};

/// Flags of a server's speculation.
#[derive(clap::Args)]
#[command(next_help_heading = "Speculation")]
pub struct ServerSpeculation {
    /// Guess tokens and verify several in a step, as many as pay; what is written stays the same.
    /// `ngram` guesses what followed in the text before, `mtp` asks the model's own layer for it.
    #[arg(long, value_name = "SOURCE", value_enum)]
    speculate: Option<Source>,
    /// The most guesses of a request in a step: up to 15 on a CPU [default: 8], 3 on a GPU
    /// [default: 3].
    #[arg(long, value_name = "N", visible_alias = "num-draft-tokens", requires = "speculate", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=15))]
    draft_max: Option<usize>,
}

impl ServerSpeculation {
    /// Work that compiles kernels ahead, see [`Model::load_compiled`].
    pub fn compile(&self, model: &Model, rows: usize, options: &GenerationOptions) -> Result<(), ModelError> {
        /// Guesses of a row on a GPU.
        const MOST: usize = 3;
        match self.speculate {
            Some(_) => dry_guesses(model, (rows, self.draft_max.unwrap_or(MOST).min(MOST)), options),
            None => Ok(()),
        }
    }

    /// Loads the source of guesses of an engine that runs this model.
    pub fn load(&self, loaded: &Loaded) -> Result<Option<Guesses>, Failure> {
        let guesses = match self.speculate {
            None => return Ok(None),
            Some(Source::Ngram) => Guesses::ngrams(),
            Some(Source::Mtp) => Guesses::mtp(Predictor::load(&loaded.checkpoint, &loaded.model)?),
        };
        Ok(Some(self.draft_max.into_iter().fold(guesses, Guesses::with_most)))
    }
}
