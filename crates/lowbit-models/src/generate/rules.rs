use crate::{Constraint, GenerationOptions, Grammar, Model, ModelError};
use lowbit_kernels::ops::{self, LogitBias, LogitMask};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::sync::Arc;

/// The changes that a text's options make to its logits before a token is drawn: biases, and the
/// tokens that a grammar forbids.
#[derive(Debug)]
pub struct LogitRules {
    /// The token ids and values that `bias` was made of.
    biases: Vec<(u32, f32)>,
    bias: Option<LogitBias>,
    grammar: Option<Held>,
}

/// A text that is held to a grammar.
#[derive(Debug)]
struct Held {
    constraint: Box<dyn Constraint>,
    /// The tokens that may come next, on the device.
    mask: LogitMask,
    /// The same, if they were found beside other texts'.
    found: Option<Result<Vec<u32>, ModelError>>,
}

impl Held {
    fn find(&mut self) {
        self.found = Some(self.constraint.mask().map(<[u32]>::to_vec));
    }

    /// Writes the mask of the next token.
    fn set(&mut self) -> Result<(), ModelError> {
        match self.found.take() {
            Some(found) => self.mask.set(&found?)?,
            None => self.mask.set(self.constraint.mask()?)?,
        }
        Ok(())
    }
}

impl LogitRules {
    /// Those of `options`, for a text that begins.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a bias of an id outside the vocabulary, or when a GPU has no
    /// memory left.
    pub fn new(options: &GenerationOptions, model: &Model) -> Result<Self, ModelError> {
        let (count, device) = (model.config().vocab_size, model.device());
        let grammar = options.grammar.as_ref();
        let held = |grammar: &Arc<dyn Grammar>| {
            let mask = LogitMask::new(count, device)?;
            Ok::<_, KernelError>(Held { constraint: grammar.start(), mask, found: None })
        };
        Ok(Self {
            biases: options.logit_bias.clone(),
            bias: LogitBias::new(&options.logit_bias, count, device)?,
            grammar: grammar.map(held).transpose()?,
        })
    }

    /// True if they leave the logits as they are.
    pub fn is_empty(&self) -> bool {
        self.bias.is_none() && self.grammar.is_none()
    }

    /// True if the next token's logits depend on the last token.
    pub(super) fn has_grammar(&self) -> bool {
        self.grammar.is_some()
    }

    /// True if these options make the same of every text's logits.
    pub(super) fn are_of(&self, options: &GenerationOptions) -> bool {
        self.grammar.is_none() && options.grammar.is_none() && self.biases == options.logit_bias
    }

    /// The logits from which a text's next token is drawn, f32 for any rule, else as they are.
    ///
    /// # Errors
    /// [`ModelError::Grammar`]; those of [`ops::logit_bias()`] and [`ops::logit_mask()`].
    pub fn apply(&mut self, logits: &Tensor) -> Result<Tensor, ModelError> {
        let logits = self.biased(logits)?;
        match &mut self.grammar {
            None => Ok(logits),
            Some(held) => {
                held.set()?;
                Ok(ops::logit_mask(&logits, &held.mask)?)
            }
        }
    }

    /// Finds the tokens that the grammars of several texts allow next, on all threads of `host`, a
    /// CPU. [`Self::apply`] takes what was found, and finds the rest.
    pub fn find_allowed<'a>(texts: impl Iterator<Item = &'a mut Self>, host: &Device) {
        let held: Vec<_> = texts.filter_map(|text| text.grammar.as_mut()).collect();
        if held.len() > 1
            && let Ok(cpu) = host.as_cpu("grammar")
        {
            cpu.for_each(held, Held::find);
        }
    }

    /// The logits with the biases alone.
    pub(super) fn biased(&self, logits: &Tensor) -> Result<Tensor, KernelError> {
        self.bias.as_ref().map_or_else(|| Ok(logits.clone()), |bias| ops::logit_bias(logits, bias))
    }

    /// Takes the token that was sampled last, unless it ended the text; true if the text is
    /// complete in its grammar.
    ///
    /// # Errors
    /// [`ModelError::Grammar`].
    pub fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        self.grammar.as_mut().map_or(Ok(false), |held| {
            held.found = None;
            held.constraint.accept(id)
        })
    }
}
