use crate::Request;
use crate::runner::GuessLimits;
use lowbit_kernels::Device;
use lowbit_models::{Drafter, Model, Mtp, Ngrams, Predictor};
use std::fmt;
use std::sync::Arc;

/// The source of guesses of the next tokens, of which a step verifies several. What is written does
/// not depend on them.
///
/// The engine makes as many guesses as pay: a guess counts as many tokens as it is likely to give,
/// by what became of the last ones of its request, and its cost is what passes of so many rows were
/// measured to take.
#[derive(Clone)]
pub struct Guesses {
    source: Source,
    most: usize,
    fixed: bool,
}

#[derive(Clone)]
enum Source {
    Drafters(Arc<MakeDrafter>),
    Mtp(Arc<Predictor>),
}

type MakeDrafter = dyn Fn(&Request) -> Box<dyn Drafter> + Send + Sync;

/// Guesses of a request in a step by default.
const MOST: usize = 8;

/// Rows of a step with guesses on a CPU: as many go through the kernels for few rows, in which a
/// row has the bits of a step of its own.
const CPU_ROWS: usize = 16;

/// The same on a GPU, where more rows than that take about as long per row as prompts.
const GPU_ROWS: usize = 64;

/// Guesses of a request on a GPU: as many rows go through one kernel with the token before them.
const MOST_ON_GPUS: usize = 3;

impl Guesses {
    /// Guesses from each request's own text, see [`Ngrams`].
    pub fn ngrams() -> Self {
        Self::of_drafters(|_| Box::<Ngrams>::default())
    }

    /// Guesses of the model's own layer for multi-token prediction, which was loaded for it.
    pub fn mtp(predictor: Predictor) -> Self {
        Self::of(Source::Mtp(predictor.into()))
    }

    /// Guesses of a drafter for each request.
    pub fn of_drafters(make: impl Fn(&Request) -> Box<dyn Drafter> + Send + Sync + 'static) -> Self {
        Self::of(Source::Drafters(Arc::new(make)))
    }

    fn of(source: Source) -> Self {
        Self { source, most: MOST, fixed: false }
    }

    /// With as many guesses as there may be in each step, whether they pay or not.
    #[must_use]
    pub fn with_fixed_pace(self) -> Self {
        Self { fixed: true, ..self }
    }

    /// With at most so many guesses of a request in a step, of 15 on a CPU and 3 on a GPU; 8 by
    /// default.
    #[must_use]
    pub fn with_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The guesses that steps on `device` may have.
    pub(crate) fn limits(&self, device: &Device) -> GuessLimits {
        let (most, rows) = match device {
            Device::Cpu(_) => (CPU_ROWS - 1, CPU_ROWS),
            Device::Gpu(_) => (MOST_ON_GPUS, GPU_ROWS),
        };
        GuessLimits { most: self.most.min(most), rows, fixed: self.fixed }
    }

    /// The drafter of a request.
    pub(crate) fn drafter(&self, model: &Model, request: &Request) -> Box<dyn Drafter> {
        match &self.source {
            Source::Drafters(make) => make(request),
            Source::Mtp(predictor) => Box::new(Mtp::new(model, predictor)),
        }
    }

    /// The layer that guesses, if it is one of the model's.
    pub(crate) fn predictor(&self) -> Option<&Predictor> {
        match &self.source {
            Source::Drafters(_) => None,
            Source::Mtp(predictor) => Some(predictor),
        }
    }
}

impl fmt::Debug for Guesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            Source::Drafters(_) => "drafters",
            Source::Mtp(_) => "a layer of the model",
        };
        f.debug_struct("Guesses").field("source", &source).field("most", &self.most).finish()
    }
}
