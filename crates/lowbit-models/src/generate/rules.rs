use crate::{Constraint, GenerationOptions, Model, ModelError};
use lowbit_kernels::ops::{self, LogitBias, LogitMask};
use lowbit_kernels::{KernelError, Tensor};

/// The changes that a text's options make to its logits before a token is drawn: biases, and the
/// tokens that a grammar forbids.
#[derive(Debug)]
pub struct LogitRules {
    /// The token ids and values that `bias` was made of.
    biases: Vec<(u32, f32)>,
    bias: Option<LogitBias>,
    grammar: Option<(Box<dyn Constraint>, LogitMask)>,
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
        let grammar =
            grammar.map(|grammar| Ok::<_, KernelError>((grammar.start(), LogitMask::new(count, device)?)));
        Ok(Self {
            biases: options.logit_bias.clone(),
            bias: LogitBias::new(&options.logit_bias, count, device)?,
            grammar: grammar.transpose()?,
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
            Some((constraint, mask)) => {
                mask.set(constraint.mask()?)?;
                Ok(ops::logit_mask(&logits, mask)?)
            }
        }
    }

    /// The same without a grammar.
    pub(super) fn biased(&self, logits: &Tensor) -> Result<Tensor, KernelError> {
        self.bias.as_ref().map_or_else(|| Ok(logits.clone()), |bias| ops::logit_bias(logits, bias))
    }

    /// Takes the token that was sampled last, unless it ended the text; true if the text is
    /// complete in its grammar.
    ///
    /// # Errors
    /// [`ModelError::Grammar`].
    pub fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        self.grammar.as_mut().map_or(Ok(false), |(constraint, _)| constraint.accept(id))
    }
}
