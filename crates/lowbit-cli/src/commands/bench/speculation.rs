//! `bench --model --draft-accept`: replies whose guesses are right in a given share, which says
//! what speculation is worth where that share is reached.

use super::Arguments;
use crate::Failure;
use lowbit::{Checkpoint, Drafter, GenerationOptions, Model, ModelError, Mtp, Predictor, Session};
use lowbit_kernels::Tensor;
use lowbit_models::{Script, Speculation};
use std::ops::ControlFlow::Continue;
use std::time::Instant;

/// Flags of guesses.
#[derive(clap::Args)]
pub struct GuessArguments {
    /// With --model: also time replies whose guesses are right in this share, 0 to 1; with --batch
    /// by an engine, without guesses and with as many as pay. The guesses are made up from the
    /// replies themselves.
    #[arg(long, value_name = "SHARE", requires = "model")]
    pub draft_accept: Option<f64>,
    /// With --draft-accept: guesses per pass [default: 3].
    #[arg(long, value_name = "N", requires = "draft_accept", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=15))]
    pub draft_max: Option<usize>,
    /// With --draft-accept: the model's layer for multi-token prediction guesses, too, and its
    /// guesses are not used, so that its time counts.
    #[arg(long, requires = "draft_accept", conflicts_with = "batch")]
    pub draft_mtp: bool,
}

impl GuessArguments {
    /// Guesses of a pass.
    pub fn most(&self) -> usize {
        self.draft_max.unwrap_or(3)
    }

    /// That the share is one.
    pub fn check(&self) -> Result<(), Failure> {
        match self.draft_accept {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                Err(format!("--draft-accept is {share}: a share from 0 to 1 is wanted").into())
            }
            _ => Ok(()),
        }
    }

    /// The layer that guesses beside the script, if it does.
    pub fn predictor(&self, checkpoint: &Checkpoint, model: &Model) -> Result<Option<Predictor>, Failure> {
        Ok(self.draft_mtp.then(|| Predictor::load(checkpoint, model)).transpose()?)
    }
}

/// Guesses of a script; those of the model's own layer are made as well.
#[derive(Debug)]
struct Forced {
    script: Script,
    mtp: Option<Mtp>,
}

impl Drafter for Forced {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        if let Some(mtp) = &mut self.mtp {
            mtp.draft(text, most)?;
        }
        self.script.draft(text, most)
    }

    fn wants_states(&self) -> bool {
        self.mtp.is_some()
    }

    fn see(&mut self, position: usize, tokens: &[u32], states: &Tensor) -> Result<(), ModelError> {
        self.mtp.as_mut().map_or(Ok(()), |mtp| mtp.see(position, tokens, states))
    }
}

/// A session whose guesses are forced, and what it writes.
pub struct ForcedReply<'m> {
    session: Session<'m>,
    text: Vec<u32>,
    tokens: usize,
}

impl<'m> ForcedReply<'m> {
    /// Of `tokens` tokens after `text`. It is written once without guesses, so that they can be
    /// made up.
    pub fn new(
        arguments: &Arguments,
        model: &'m Model,
        predictor: Option<&Predictor>,
        (text, tokens): (&[u32], usize),
    ) -> Result<Self, Failure> {
        let (share, most) = (arguments.guesses.draft_accept.unwrap_or(1.0), arguments.guesses.most());
        let speculation = |script| {
            let mtp = predictor.map(|predictor| Mtp::new(model, predictor));
            Speculation::new(Forced { script, mtp }).with_most(most).with_fixed_pace()
        };
        let mut reply = Self { session: Session::new(model), text: text.to_vec(), tokens };
        reply.session.speculate(Some(speculation(Script::new(vec![], 0.0))));
        reply.seconds()?;
        let written = reply.session.tokens().to_vec();
        reply.session.speculate(Some(speculation(Script::new(written, share))));
        Ok(reply)
    }

    /// The time from the text's logits to the last token.
    pub fn seconds(&mut self) -> Result<f64, Failure> {
        let Self { session, text, tokens } = self;
        session.clear()?;
        let logits = session.prefill(text, |_| Continue(()))?.ok_or("the prompt was interrupted")?;
        logits.device().synchronize()?;
        let options = GenerationOptions::default().with_max_tokens(*tokens);
        let start = Instant::now();
        session.generate(logits, &options, |_| Continue(()))?;
        Ok(start.elapsed().as_secs_f64())
    }
}
