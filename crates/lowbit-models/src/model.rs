use crate::cache::CacheSize;
use crate::dense::Dense;
use crate::layers::{Decoder, DecoderConfig, Residual, Step};
use crate::tape::{Inventory, Parameters, Tape, Var, Weight};
use crate::{Cache, Config, ModelError, Target, Weights, arch};
use lowbit_files::Checkpoint;
use lowbit_formats::FloatType;
use lowbit_kernels::{Device, KernelError, Tensor};

/// A loaded language model.
#[derive(Clone, Debug)]
pub struct Model {
    architecture: String,
    config: DecoderConfig,
    decoder: Decoder,
    /// The linear layers behind pooling.
    dense: Vec<Dense>,
    target: Target,
    warnings: Vec<String>,
}

/// New tokens of one text, and the caches that have seen the tokens before them.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Sequence<'a> {
    pub tokens: &'a [u32],
    pub cache: &'a mut Cache,
}

/// The tokens whose logits a forward pass computes.
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
    /// Loads `checkpoint` for `device`. On the CPU weights are repacked and activations rounded to
    /// 8 bits, see [`Target::with_exact`].
    ///
    /// # Errors
    /// [`ModelError`] for an unknown architecture or quantisation, a missing, surplus or misshapen
    /// tensor, and a configuration that lacks a key or contradicts itself.
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
        let (spec, decoder) = arch::load(&config, &weights)?;
        let decoder_config = spec.config;
        let architecture = config.architecture()?;
        let warnings = crate::warnings(checkpoint)?;
        let dense = Dense::all(checkpoint, &target, decoder_config.hidden_size)?;
        Ok(Self { architecture, config: decoder_config, decoder, dense, target, warnings })
    }

    /// As the checkpoint spells it.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Parts of the checkpoint that lowbit ignores, see [`warnings`](crate::warnings()).
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The device on which it runs.
    pub fn device(&self) -> &Device {
        &self.target.device
    }

    /// The type of the activations, except for the residual stream and the logits, which are f32.
    pub fn activations(&self) -> FloatType {
        self.target.activations
    }

    /// The linear layers behind pooling.
    pub(crate) fn dense(&self) -> &[Dense] {
        &self.dense
    }

    /// The host: the device on which its logits can be read.
    pub fn host(&self) -> &Device {
        &self.target.host
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Waits until the device has finished its work.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when some of it failed.
    pub fn synchronize(&self) -> Result<(), ModelError> {
        Ok(self.device().synchronize()?)
    }

    /// Empty caches for one sequence. Layers whose queries see a window keep that, and room for
    /// some tokens more.
    pub fn cache(&self) -> Cache {
        Cache::default()
    }

    /// The same, whose layers with a window keep everything, too: they take more memory, and go
    /// back anywhere.
    pub fn cache_that_keeps_all(&self) -> Cache {
        Cache::that_keeps_all()
    }

    /// The size of a sequence's cache as it grows.
    ///
    /// # Errors
    /// Those of allocating an empty one.
    pub fn cache_size(&self) -> Result<CacheSize, ModelError> {
        let mut size = CacheSize::of(&self.decoder.layer_caches(self.device(), false)?);
        size.attention_layers +=
            self.decoder.blocks().iter().filter(|block| block.cache_of().is_some()).count();
        Ok(size)
    }

    /// Runs `tokens` after those that `cache` has seen, and returns the logits asked for, f32
    /// `[.., vocab_size]`, on the model's device.
    ///
    /// # Errors
    /// [`ModelError::Token`] for an id outside the vocabulary, [`ModelError::ContextLength`] when
    /// the tokens do not fit, [`ModelError::NoTokens`] for none, [`ModelError::NotCausal`] for a
    /// model that computes whole texts alone. The cache is unchanged then.
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        self.check_causal()?;
        self.check(tokens, cache.position())?;
        self.run(&mut [Sequence { tokens, cache }], logits)
    }

    /// As [`Self::forward`], with the states behind the last norm of all tokens,
    /// `[T, hidden_size]`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with_states(
        &self,
        tokens: &[u32],
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<(Option<Tensor>, Tensor), ModelError> {
        self.check(tokens, cache.position())?;
        if logits != Logits::None {
            self.check_head()?;
        }
        let step = Step::new([(cache.position(), tokens.len())], self.device())?;
        let hidden = self.hidden(&mut [Sequence { tokens, cache }], &step)?;
        let states = self.decoder.normed(&hidden)?.into_tensor();
        Ok((self.logits_of(&hidden, &step, logits)?, states))
    }

    /// As [`Self::forward`] for several sequences in one pass, each with its own length and cache.
    /// The logits of the sequences follow one another; with [`Logits::Last`] they are
    /// `[sequences, vocab_size]`.
    ///
    /// # Errors
    /// [`ModelError::InSequence`] with the error of [`Self::forward`], [`ModelError::NoTokens`]
    /// without sequences. No cache is changed then.
    pub fn forward_batch(
        &self,
        batch: &mut [Sequence<'_>],
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        self.check_causal()?;
        self.check_batch(batch.iter().map(|sequence| (sequence.tokens, sequence.cache.position())))?;
        self.run(batch, logits)
    }

    /// The same, of what was checked.
    fn run(&self, batch: &mut [Sequence<'_>], logits: Logits) -> Result<Option<Tensor>, ModelError> {
        if logits != Logits::None {
            self.check_head()?;
        }
        let sequences = batch.iter().map(|sequence| (sequence.cache.position(), sequence.tokens.len()));
        let step = Step::new(sequences, self.device())?;
        let hidden = self.hidden(batch, &step)?;
        self.logits_of(&hidden, &step, logits)
    }

    /// The logits of these states.
    pub(crate) fn logits_of(
        &self,
        hidden: &Residual,
        step: &Step,
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        Ok(match logits {
            Logits::None => None,
            Logits::Last => Some(self.decoder.logits(&hidden.last(step)?)?.into_tensor()),
            Logits::All => Some(self.decoder.logits(hidden)?.into_tensor()),
        })
    }

    pub(crate) fn hidden(&self, batch: &mut [Sequence<'_>], step: &Step) -> Result<Residual, ModelError> {
        let tokens: Vec<u32> = batch.iter().flat_map(|sequence| sequence.tokens).copied().collect();
        let ids = Tensor::new(&tokens, &[tokens.len()], self.device())?;
        let mut caches: Vec<&mut Cache> = batch.iter_mut().map(|sequence| &mut *sequence.cache).collect();
        Ok(self.decoder.run(&ids, step, &mut caches)?)
    }

    /// The input of the output layer for all tokens of `batch`, f32 `[T, hidden_size]`, each
    /// sequence from its start, recorded on `tape` if there is one.
    ///
    /// # Errors
    /// As [`Self::forward_batch`].
    pub(crate) fn normed(&self, batch: &[&[u32]], tape: Option<&Tape>) -> Result<Var, ModelError> {
        Ok(self.decoder.normed(&self.recorded(batch, tape)?)?)
    }

    /// The logits of all tokens of `batch`, f32 `[T, vocab_size]`, recorded on `tape`.
    ///
    /// # Errors
    /// As [`Self::forward_batch`].
    pub fn record(&self, batch: &[&[u32]], tape: &Tape) -> Result<Var, ModelError> {
        self.check_head()?;
        Ok(self.decoder.logits(&self.recorded(batch, Some(tape))?)?)
    }

    fn recorded(&self, batch: &[&[u32]], tape: Option<&Tape>) -> Result<Residual, ModelError> {
        self.check_batch(batch.iter().map(|&tokens| (tokens, 0)))?;
        let mut caches = vec![self.cache_that_keeps_all(); batch.len()];
        let sequences = batch.iter().zip(&mut caches);
        let mut sequences: Vec<_> = sequences.map(|(tokens, cache)| Sequence { tokens, cache }).collect();
        let mut step = Step::whole(batch.iter().map(|tokens| tokens.len()), self.device())?;
        step.tape = tape.cloned();
        self.hidden(&mut sequences, &step)
    }

    /// Refuses to compute a text piece by piece where tokens see those after them.
    fn check_causal(&self) -> Result<(), ModelError> {
        match self.config.causal {
            true => Ok(()),
            false => Err(ModelError::NotCausal { architecture: self.architecture.clone() }),
        }
    }

    /// Refuses to compute logits without an output layer.
    ///
    /// # Errors
    /// [`ModelError::Headless`], [`ModelError::NotCausal`].
    pub fn check_head(&self) -> Result<(), ModelError> {
        self.check_causal()?;
        match self.config.headless {
            true => Err(ModelError::Headless { architecture: self.architecture.clone() }),
            false => Ok(()),
        }
    }

    /// All named tensors, which can be parameters.
    pub fn inventory(&self) -> Inventory {
        self.decoder.inventory()
    }

    /// The output layer's weight, as these parameters have it.
    ///
    /// # Errors
    /// [`ModelError::Headless`]; [`KernelError::Value`] for an output layer with a bias, which no
    /// architecture here has.
    pub(crate) fn output(&self, parameters: &Parameters) -> Result<Weight, ModelError> {
        self.check_head()?;
        let weight = self.decoder.head().weight().ok_or_else(|| KernelError::Value {
            op: "output",
            operand: "lm_head",
            got: "with a bias".into(),
            want: "none is wanted".into(),
        })?;
        Ok(Weight::of(parameters, weight))
    }

    /// The logits after one token, f32 `[1, vocab_size]`, recorded from device buffers alone.
    pub(crate) fn decode(
        &self,
        token: &Tensor,
        step: &Step,
        cache: &mut Cache,
    ) -> Result<Tensor, KernelError> {
        Ok(self.decoder.logits(&self.decoder.run(token, step, &mut [cache])?)?.into_tensor())
    }

    /// Makes room in `cache` for `tokens` in all, those included that it has seen:
    /// [`CacheSize::bytes`] of them, while a pass without room for its tokens doubles the cache.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn make_room(&self, cache: &mut Cache, tokens: usize) -> Result<(), ModelError> {
        let all = cache.keeps_all();
        Ok(cache.make_room(tokens, || self.decoder.layer_caches(self.device(), all))?)
    }

    /// A fork of `cache` whose keys and values have memory of their own, with room for `tokens` in
    /// all, or for as many as `cache` has room for. (A clone shares all memory until either is
    /// written, and then the writer copies. States of delta nets are shared so here, too.)
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn fork(&self, cache: &Cache, tokens: usize) -> Result<Cache, ModelError> {
        Ok(cache.fork(tokens)?)
    }

    /// Makes room for `tokens` more.
    pub(crate) fn reserve(&self, cache: &mut Cache, tokens: usize) -> Result<(), KernelError> {
        self.decoder.reserve(cache, tokens, self.device())
    }

    pub(crate) fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Checks tokens that come after `position` others.
    fn check(&self, tokens: &[u32], position: usize) -> Result<(), ModelError> {
        if tokens.is_empty() {
            return Err(ModelError::NoTokens);
        }
        let (total, limit) = (position + tokens.len(), self.config.max_position_embeddings);
        if total > limit {
            return Err(ModelError::ContextLength { tokens: total, limit });
        }
        self.check_ids(tokens)
    }

    /// Checks each sequence's tokens, which come after so many others.
    pub(crate) fn check_batch<'t>(
        &self,
        batch: impl ExactSizeIterator<Item = (&'t [u32], usize)>,
    ) -> Result<(), ModelError> {
        if batch.len() == 0 {
            return Err(ModelError::NoTokens);
        }
        for (sequence, (tokens, position)) in batch.enumerate() {
            self.check(tokens, position)
                .map_err(|error| ModelError::InSequence { sequence, error: Box::new(error) })?;
        }
        Ok(())
    }

    /// Checks that every id is in the vocabulary.
    ///
    /// # Errors
    /// [`ModelError::Token`] with the first that is not.
    pub fn check_ids(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(ModelError::Token { index, id: tokens[index], vocab_size }),
            None => Ok(()),
        }
    }
}
