//! Multi-token prediction: layers of the checkpoint that were trained to predict further tokens.

mod in_pool;

use super::Drafter;
use crate::cache::LayerCache;
use crate::layers::{Block, Linear, MixerSpec, Residual, RmsNorm, Step};
use crate::names::{NEXTN, Name};
use crate::tape::shapes;
use crate::{Cache, CacheSize, Config, Model, ModelError, Weights, arch};
use lowbit_files::Checkpoint;
use lowbit_formats::DType;
use lowbit_kernels::gpu::Pass;
use lowbit_kernels::ops::{self, CacheType, DecodeState, SampleParams};
use lowbit_kernels::{Device, KernelError, Tensor};

/// The layer that predicts the token after the next one, of a state and the next token:
///
/// ```text
/// state' = norm(layer(fc([enorm(embed(token)) | hnorm(state)])))
/// ```
///
/// where a state is what the model's output layer reads, which also makes logits of `state'`. The
/// embedding and the output layer are the model's. (GLM's and DeepSeek's checkpoints repeat them
/// beside this layer.)
///
/// Source: vLLM 0.11 `qwen3_next_mtp`, `deepseek_mtp`, `glm4_moe_mtp`; llama.cpp
/// `src/models/qwen35.cpp` (`graph_mtp`).
#[derive(Clone, Debug)]
pub struct Predictor {
    enorm: RmsNorm,
    hnorm: RmsNorm,
    fc: Linear,
    block: Block,
    norm: RmsNorm,
    cache: CacheType,
}

/// The layer's parts as Qwen publishes them, below `mtp.`, in the order of [`NEXTN`].
const MTP: [Name<'static>; 4] =
    [("fc", ""), ("pre_fc_norm_embedding", ""), ("pre_fc_norm_hidden", ""), ("norm", "")];

impl Predictor {
    /// The first layer of `checkpoint` that predicts further tokens, for its `model`: below `mtp.`,
    /// or behind the other layers (`eh_proj`, GGUF's `nextn.eh_proj`).
    ///
    /// # Errors
    /// [`ModelError::NoPredictor`] if there is none; those of loading it.
    pub fn load(checkpoint: &Checkpoint, model: &Model) -> Result<Self, ModelError> {
        let (config, target) = (Config::new(checkpoint)?, model.target());
        let architecture = arch::find(&config)?;
        let weights = Weights::new(checkpoint, target).of(architecture);
        let spec = (architecture.describe)(&config, &weights)?;
        let is_attention =
            |mixer: &MixerSpec| matches!(mixer, MixerSpec::Attention(_) | MixerSpec::LatentAttention(_));
        let none = || ModelError::NoPredictor { path: checkpoint.path().to_path_buf() };
        let layer = spec.layers.iter().rev().find(|layer| is_attention(&layer.mixer)).ok_or_else(none)?;
        let behind = arch::text_model(&weights).layer(spec.config.num_hidden_layers);
        let prefix = weights.names().find_map(|name| name.strip_suffix("mtp.fc.weight"));
        let (parts, below, names) = match prefix {
            Some(prefix) if !weights.is_gguf() => {
                let parts = weights.below(&format!("{prefix}mtp."), "");
                let below = parts.layer(0);
                (parts, below, MTP)
            }
            _ if behind.has_module(NEXTN[0]) => {
                (behind.below("", ""), behind, [0, 1, 2, 3].map(|i| NEXTN[i]))
            }
            _ => return Err(none()),
        };
        let (hidden, eps) = (spec.config.hidden_size, spec.config.rms_norm_eps);
        let norm = |name| RmsNorm::load(&parts, name, hidden, eps);
        Ok(Self {
            fc: parts.linear(names[0], hidden, 2 * hidden)?,
            enorm: norm(names[1])?,
            hnorm: norm(names[2])?,
            norm: norm(names[3])?,
            block: Block::load(&below, &spec, layer)?,
            cache: target.cache,
        })
    }

    /// An empty cache of this layer.
    pub(crate) fn layer_cache(&self, device: &Device) -> Result<LayerCache, KernelError> {
        self.block.cache(self.cache, device)
    }

    /// The size of a text's keys and values in this layer.
    ///
    /// # Errors
    /// Those of allocating an empty cache.
    pub fn cache_size(&self, device: &Device) -> Result<CacheSize, KernelError> {
        Ok(CacheSize::of(&[self.layer_cache(device)?]))
    }

    /// The states of these tokens, each with the state before it, `[T, hidden_size]`; `cache` has
    /// the layer's keys and values.
    fn forward(
        &self,
        model: &Model,
        (ids, states): (&Tensor, &Tensor),
        step: &Step,
        cache: &mut Cache,
    ) -> Result<Tensor, KernelError> {
        let device = ids.device();
        let layers = cache.reserve(ids.len(), || Ok(vec![self.layer_cache(device)?]))?;
        let mut layers: Vec<_> = layers.iter_mut().collect();
        let states = self.layer(model, (ids, states), step, &mut layers)?;
        cache.advance(ids.len());
        Ok(states)
    }

    /// The same with the keys and values of `layers`.
    pub(crate) fn layer(
        &self,
        model: &Model,
        (ids, states): (&Tensor, &Tensor),
        step: &Step,
        layers: &mut [&mut LayerCache],
    ) -> Result<Tensor, KernelError> {
        let decoder = model.decoder();
        let embedded = decoder.unchanged(decoder.embed(ids, None)?)?;
        let (_, token) = embedded.normed(&self.enorm).make()?;
        let state = self.hnorm.forward(&states.clone().into())?;
        let update = self.fc.forward(&shapes::concat([&token, &state])?)?;
        let device = ids.device();
        let stream = Tensor::allocate_zeros(update.tensor().shape(), DType::F32, device)?;
        let x = Residual { stream: stream.into(), update };
        let y = self.block.forward(x, None, step, layers)?;
        Ok(y.normed(&self.norm).make()?.1.into_tensor())
    }
}

/// Guesses of a model's own [`Predictor`], which reads the text behind the model: a guess after
/// another one reads its own state in place of the model's.
#[derive(Debug)]
pub struct Mtp {
    model: Model,
    predictor: Predictor,
    /// Place `i` is of the token at `start + i + 1` and the state of the token before it.
    cache: Cache,
    start: usize,
    /// Rows that have not run: the first one's place in the text, tokens, and the states before
    /// them.
    rows: Option<(usize, Vec<u32>, Tensor)>,
    /// The last token's place and its state, `[1, hidden_size]`: the token after it is not known.
    last: Option<(usize, Tensor)>,
    guesser: Option<Guesser>,
}

/// Steps of a [`Predictor`] on its own guesses. On a GPU a step is captured and replayed.
#[derive(Debug)]
struct Guesser {
    state: DecodeState,
    /// `[1, hidden_size]`: the state before the next token.
    before: Tensor,
    /// u32 `[0, 1]`.
    cu_seqlens: Tensor,
    pass: Option<Pass>,
}

/// Rows that wait for the next guess at most: longer parts of a text run at once.
const WAITING: usize = 16;

impl Mtp {
    /// Guesses of `predictor` for `model`, which it was loaded for.
    pub fn new(model: &Model, predictor: &Predictor) -> Self {
        // Both share their weights with the originals.
        let (model, predictor, cache) = (model.clone(), predictor.clone(), Cache::default());
        Self { model, predictor, cache, start: 0, rows: None, last: None, guesser: None }
    }

    /// Goes to the cache's place of the token behind `place`.
    fn seek(&mut self, place: usize) -> Result<(), KernelError> {
        match place.checked_sub(self.start).filter(|&position| position <= self.cache.position()) {
            Some(position) => self.cache.set_position(position),
            None => {
                // The text before it is not known, as if it began here.
                self.cache.clear()?;
                self.start = place;
            }
        }
        Ok(())
    }

    /// Runs the rows that wait; the last one's state, `[1, hidden_size]`.
    fn flush(&mut self) -> Result<Option<Tensor>, KernelError> {
        let Some((place, tokens, states)) = self.rows.take() else { return Ok(None) };
        self.seek(place)?;
        let device = self.model.device();
        let step = Step::new([(self.cache.position(), tokens.len())], device)?;
        let ids = Tensor::new(&tokens, &[tokens.len()], device)?;
        if !self.cache.has_room(tokens.len()) {
            self.release();
        }
        let states = self.predictor.forward(&self.model, (&ids, &states), &step, &mut self.cache)?;
        Ok(Some(states.rows(tokens.len() - 1, tokens.len())?))
    }

    /// Forgets the captured step: the cache is about to move.
    fn release(&mut self) {
        self.guesser.iter_mut().for_each(|guesser| guesser.pass = None);
    }

    /// The likeliest token after this state, `[1, hidden_size]`, which becomes the guesser's. What
    /// else makes logits of the output layer's products keeps their order.
    fn guess(&mut self, state: &Tensor) -> Result<(), KernelError> {
        let Some(guesser) = &mut self.guesser else { return Ok(()) };
        let logits = self.model.decoder().head().forward_f32(&state.clone().into())?.into_tensor();
        ops::sample_next(&logits, &mut guesser.state, &SampleParams::default())?;
        ops::copy_rows(state, 0, &mut guesser.before, 0)
    }

    /// Runs the last guess, and makes the next one.
    fn record(&mut self) -> Result<(), KernelError> {
        let Some(guesser) = &self.guesser else { return Ok(()) };
        let step = Step::one(guesser.state.position().clone(), guesser.cu_seqlens.clone());
        let row = (guesser.state.token(), &guesser.before);
        let state = self.predictor.forward(&self.model, row, &step, &mut self.cache)?;
        self.guess(&state)
    }

    fn step(&mut self) -> Result<(), KernelError> {
        if !self.cache.has_room(1) {
            self.release();
        }
        let position = self.cache.position();
        let pass = self.guesser.as_ref().and_then(|guesser| guesser.pass.as_ref());
        match pass {
            Some(pass) => pass.replay()?,
            None => {
                let device = self.model.device().clone();
                let pass = device.capture(|| {
                    self.cache.set_position(position);
                    self.record()
                })?;
                self.keep(pass);
            }
        }
        self.cache.set_position(position + 1);
        Ok(())
    }

    /// Keeps the captured pass of a guess, if the device has captured it.
    fn keep(&mut self, pass: Option<Pass>) {
        if let Some(guesser) = &mut self.guesser {
            guesser.pass = pass;
        }
    }

    /// Takes the place behind `text`'s token before the last.
    fn begin(&mut self, text: &[u32], state: &Tensor) -> Result<(), KernelError> {
        // The cache's places are counted from its start, and the first token has none.
        let own = &text[self.start + 1..];
        if let Some(guesser) = &mut self.guesser {
            return guesser.state.restart(own);
        }
        let device = self.model.device();
        self.guesser = Some(Guesser {
            state: DecodeState::new(own, 0, device)?,
            before: Tensor::allocate_zeros(state.shape(), state.dtype(), device)?,
            cu_seqlens: Tensor::new(&[0u32, 1], &[2], device)?,
            pass: None,
        });
        Ok(())
    }
}

/// `states` behind `before`, if there is one, in memory of their own.
fn joined(before: Option<&Tensor>, states: Tensor) -> Result<Tensor, KernelError> {
    match before {
        Some(before) => ops::concat_rows(&[before.clone(), states]),
        None => Ok(states),
    }
}

impl Drafter for Mtp {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        let Some((&token, before)) = text.split_last() else { return Ok(vec![]) };
        let Some((_, state)) = self.last.as_ref().filter(|(place, _)| place + 1 == before.len()) else {
            return Ok(vec![]);
        };
        let (place, mut tokens, states) = match self.rows.take() {
            Some((place, tokens, states)) => (place, tokens, Some(states)),
            None => (before.len() - 1, vec![], None),
        };
        tokens.push(token);
        self.rows = Some((place, tokens, joined(states.as_ref(), state.clone())?));
        let Some(state) = self.flush()? else { return Ok(vec![]) };
        let position = self.cache.position();
        self.begin(text, &state)?;
        self.guess(&state)?;
        let mut guesses = Vec::with_capacity(most);
        for index in 0..most {
            if index > 0 {
                self.step()?;
            }
            guesses.extend(self.guesser.as_ref().map(|guesser| guesser.state.drawn()).transpose()?);
        }
        // The last row was the model's; those of guesses are not.
        self.cache.set_position(position);
        Ok(guesses.into_iter().map(|guess| guess.wait()).collect::<Result<_, _>>()?)
    }

    fn wants_states(&self) -> bool {
        true
    }

    fn see(&mut self, position: usize, tokens: &[u32], states: &Tensor) -> Result<(), ModelError> {
        self.flush()?;
        let count = tokens.len();
        let before = self.last.take().filter(|(place, _)| place + 1 == position).map(|(_, state)| state);
        let (place, known) = match &before {
            Some(_) => (position - 1, tokens),
            None => (position, &tokens[1..]),
        };
        let mut last = Tensor::allocate_zeros(&[1, states.dim(1)], states.dtype(), states.device())?;
        ops::copy_rows(states, count - 1, &mut last, 0)?;
        self.last = Some((position + count - 1, last));
        if known.is_empty() {
            return Ok(());
        }
        let states = match count {
            1 => before.ok_or(ModelError::NoTokens)?,
            _ => joined(before.as_ref(), states.rows(0, count - 1)?)?,
        };
        self.rows = Some((place, known.to_vec(), states));
        if known.len() > WAITING {
            self.flush()?;
        }
        Ok(())
    }
}
