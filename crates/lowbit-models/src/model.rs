use crate::layers::{Decoder, DecoderConfig, Step};
use crate::{Cache, Config, ModelError, Target, Weights, arch};
use lowbit_files::Checkpoint;
use lowbit_kernels::{Device, KernelError, Tensor};

/// A loaded language model.
#[derive(Clone, Debug)]
pub struct Model {
    architecture: String,
    config: DecoderConfig,
    decoder: Decoder,
    target: Target,
    warnings: Vec<String>,
}

/// Which tokens' logits a forward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the pass only fills the cache.
    None,
    /// The last token's, `[1, vocab_size]`.
    Last,
    /// All, `[T, vocab_size]`.
    All,
}

impl Model {
    /// Loads `checkpoint` for `device`. On the CPU weights are repacked and activations rounded to 8 bits, see
    /// [`Target::with_exact`].
    ///
    /// # Errors
    /// [`ModelError`]: an unknown architecture or quantisation, a missing, surplus or misshapen tensor, a
    /// configuration that lacks a key or contradicts itself.
    pub fn load(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        Self::load_for(checkpoint, Target::new(device, None)?)
    }

    /// Loads `checkpoint` for a device and a type of activations.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_for(checkpoint: &Checkpoint, target: Target) -> Result<Self, ModelError> {
        let config = Config::new(checkpoint)?;
        let weights = Weights::new(checkpoint, &target);
        let (decoder_config, decoder) = arch::load(&config, &weights)?;
        let architecture = config.architecture()?;
        let warnings = crate::warnings(checkpoint)?;
        Ok(Self { architecture, config: decoder_config, decoder, target, warnings })
    }

    /// As the checkpoint spells it.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// What lowbit ignores in the checkpoint, see [`warnings`](crate::warnings()).
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.target.device
    }

    /// The device that its logits can be copied to and read on.
    pub fn host(&self) -> &Device {
        &self.target.host
    }

    /// Waits for the device to finish what it was given.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when some of it failed.
    pub fn synchronize(&self) -> Result<(), ModelError> {
        Ok(self.device().synchronize()?)
    }

    /// Empty caches for one sequence.
    pub fn cache(&self) -> Cache {
        Cache::default()
    }

    /// Runs `tokens` after those that `cache` has seen, and returns the logits asked for, f32 `[.., vocab_size]`, on the
    /// model's device.
    ///
    /// # Errors
    /// [`ModelError::Token`] for an id outside the vocabulary, [`ModelError::ContextLength`] when the tokens do not
    /// fit, [`ModelError::NoTokens`] for none. The cache is unchanged then.
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        self.check(tokens, cache)?;
        let device = self.device();
        let ids = Tensor::new(tokens, &[tokens.len()], device)?;
        let hidden = self.decoder.hidden(&ids, cache)?;
        Ok(match logits {
            Logits::None => None,
            Logits::Last => Some(self.decoder.logits(&hidden.rows(tokens.len() - 1, tokens.len())?)?),
            Logits::All => Some(self.decoder.logits(&hidden)?),
        })
    }

    /// The logits after one token, f32 `[1, vocab_size]`, recorded from device buffers alone.
    pub(crate) fn decode(
        &self,
        token: &Tensor,
        step: &Step,
        cache: &mut Cache,
    ) -> Result<Tensor, KernelError> {
        self.decoder.logits(&self.decoder.run(token, step, cache)?)
    }

    /// Makes room for `tokens` more.
    pub(crate) fn reserve(&self, cache: &mut Cache, tokens: usize) -> Result<(), KernelError> {
        self.decoder.reserve(cache, tokens, self.device())
    }

    fn check(&self, tokens: &[u32], cache: &Cache) -> Result<(), ModelError> {
        if tokens.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let (total, limit) = (cache.position() + tokens.len(), self.config.max_position_embeddings);
        if total > limit {
            return Err(ModelError::ContextLength { tokens: total, limit });
        }
        self.check_ids(tokens)
    }

    /// Checks that every id is in the vocabulary.
    pub(crate) fn check_ids(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(ModelError::Token { index, id: tokens[index], vocab_size }),
            None => Ok(()),
        }
    }
}
