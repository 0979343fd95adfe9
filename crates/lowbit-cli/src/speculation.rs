//! Guesses that a reply's passes verify.

use crate::options::{Loaded, ModelOptions};
use crate::{Failure, out};
use lowbit::{Checkpoint, GenerationOptions, Model, ModelError, Tokenizer, dry_generation, dry_speculation};
use lowbit_files::{shown, shown_path};
use lowbit_models::{DraftModel, Mtp, Ngrams, Predictor, Speculation};

/// Flags of speculation.
#[derive(clap::Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationOptions {
    /// Guess tokens and verify several in one pass; what is written stays the same. `ngram` guesses
    /// what followed in the text before, `mtp` asks the model's own layers for it.
    #[arg(long, value_name = "SOURCE", value_enum, conflicts_with = "draft_model")]
    speculate: Option<Source>,
    /// The same by a smaller model with the same tokens, named as --model is.
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<String>,
    /// The most guesses of a pass: up to 15 on a CPU [default: 8], 3 on a GPU [default: 3].
    #[arg(long, value_name = "N", visible_alias = "num-draft-tokens", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=15))]
    draft_max: Option<usize>,
    /// Verify no guesses where there are fewer than this [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=15))]
    draft_min: Option<usize>,
}

/// The source of guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Source {
    /// The text: what followed where its last tokens stood before.
    Ngram,
    /// The model's layers for multi-token prediction.
    Mtp,
}

/// The loaded source of guesses.
pub struct Guesses {
    predictor: Option<Predictor>,
    draft: Option<Loaded>,
    most: Option<usize>,
    least: Option<usize>,
}

impl SpeculationOptions {
    /// That the flags make sense, before a model is opened.
    pub fn check(&self) -> Result<(), Failure> {
        let limits = [("--draft-max", self.draft_max), ("--draft-min", self.draft_min)];
        match limits.into_iter().find(|(_, limit)| limit.is_some()) {
            Some((flag, _)) if !self.is_on() => {
                Err(format!("{flag} goes with --speculate or --draft-model").into())
            }
            _ => Ok(()),
        }
    }

    /// True if a flag asks for guesses.
    pub fn is_on(&self) -> bool {
        self.speculate.is_some() || self.draft_model.is_some()
    }

    /// Work that compiles kernels ahead, see [`Model::load_compiled`].
    pub fn compile(
        &self,
        model: &Model,
        prompts: &[usize],
        options: &GenerationOptions,
    ) -> Result<(), ModelError> {
        match self.is_on() {
            true => dry_speculation(model, prompts, options, self.draft_max.unwrap_or(usize::MAX)),
            false => Ok(()),
        }
    }

    /// Loads the source of guesses for the model that `options` name, if a flag asks for it.
    pub fn load(&self, options: &ModelOptions, loaded: &Loaded) -> Result<Option<Guesses>, Failure> {
        if !self.is_on() {
            return Ok(None);
        }
        let predictor = match self.speculate {
            Some(Source::Mtp) => Some(Predictor::load(&loaded.checkpoint, &loaded.model)?),
            Some(Source::Ngram) | None => None,
        };
        let draft = self.draft_model.as_ref().map(|name| draft_model(name, options, loaded));
        let (most, least) = (self.draft_max, self.draft_min);
        let guesses = Guesses { predictor, draft: draft.transpose()?, most, least };
        let most = guesses.speculation(&loaded.model)?.most(loaded.model.device());
        if let Some(wanted) = self.draft_max.filter(|&wanted| wanted > most) {
            out::note!("note: a pass verifies up to {most} guesses on this device, not {wanted}");
        }
        Ok(Some(guesses))
    }
}

/// Loads the draft model of this name, which must have the tokens of `loaded`.
fn draft_model(name: &str, options: &ModelOptions, loaded: &Loaded) -> Result<Loaded, Failure> {
    let opened = options.named(name, None)?.open_with_tokenizer()?;
    check_tokens((&opened.checkpoint, &opened.tokenizer), (&loaded.checkpoint, &loaded.tokenizer))?;
    let draft =
        opened.load(|model| dry_generation(model, &[4, 16, 64, 256], &GenerationOptions::default()))?;
    draft.model.check_head()?;
    Ok(draft)
}

/// Refuses a draft model whose ids stand for other tokens than the model's.
fn check_tokens(
    (draft, its): (&Checkpoint, &Tokenizer),
    (model, own): (&Checkpoint, &Tokenizer),
) -> Result<(), Failure> {
    let ids = 0..its.vocab_size().max(own.vocab_size()) as u32;
    let token = |tokenizer: &Tokenizer, id| match tokenizer.token(id) {
        Some(token) => format!("{:?}", shown(&token).to_string()),
        None => "no token".into(),
    };
    match ids.into_iter().find(|&id| its.token(id) != own.token(id)) {
        None => Ok(()),
        Some(id) => Err(format!(
            "--draft-model {}: token {id} is {}, but {} in {}: a draft model has the model's tokens",
            shown_path(draft.path()),
            token(its, id),
            token(own, id),
            shown_path(model.path())
        )
        .into()),
    }
}

impl Guesses {
    /// The speculation of a session of `model`.
    pub fn speculation<'m>(&'m self, model: &'m Model) -> Result<Speculation<'m>, Failure> {
        let speculation = match (&self.predictor, &self.draft) {
            (Some(predictor), _) => Speculation::new(Mtp::new(model, predictor)),
            (None, Some(draft)) => Speculation::new(DraftModel::new(&draft.model, model)?),
            (None, None) => Speculation::new(Ngrams::default()),
        };
        let speculation = match self.most {
            Some(most) => speculation.with_most(most),
            None => speculation,
        };
        Ok(speculation.with_least(self.least.unwrap_or(1)))
    }
}
