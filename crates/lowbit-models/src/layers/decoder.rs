use super::block::{alone, constant_row, scaled};
use super::tied::{head_prefix, is_headless, is_tied};
use super::{
    Block, DecoderSpec, Embedding, LayerEmbeddings, Linear, Multipliers, Residual, RmsNorm, StateRows, Step,
};
use crate::cache::{Cache, LayerCache, window};
use crate::names::LM_HEAD;
use crate::tape::ops::{add, softcap};
use crate::tape::{Inventory, Kept, Tape, Var};
use crate::{Config, ModelError, Weights, arch};
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{CacheType, LogitFunction};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::sync::Arc;

/// The values that every decoder's configuration has.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DecoderConfig {
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f32,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    /// True if the checkpoint has no output layer, and the embedding stands in its place: the model
    /// computes states, and no logits.
    pub headless: bool,
    /// False if tokens see those after them: whole texts are computed at once, and have no logits.
    pub causal: bool,
}

impl DecoderConfig {
    /// Reads the sizes. GGUF has its vocabulary's size in the embedding's shape, and ties it to the
    /// output by leaving the output out.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn new(config: &Config<'_>, weights: &Weights<'_>) -> Result<Self, ModelError> {
        let vocab_size = match config.is_gguf() {
            // A missing embedding and one without dimensions are refused when it is asked for.
            true => {
                weights.shape("", "token_embd.weight").and_then(|shape| shape.first().copied()).unwrap_or(1)
            }
            false => config.size("vocab_size", "")?,
        };
        // Layers of the multi-token-prediction head follow the model's own in GGUF.
        let predictors =
            if config.is_gguf() { config.optional_size("", "nextn_predict_layers")?.unwrap_or(0) } else { 0 };
        let layers = config.layer_count()?;
        weights.check_layers(if config.is_gguf() { "block_count" } else { "num_hidden_layers" }, layers)?;
        // They would count as such a head's.
        let beyond = |name: &&str| arch::gguf_layer(name).is_some_and(|layer| layer >= layers);
        if let Some(name) = weights.names().filter(|_| config.is_gguf()).find(beyond) {
            let want = format!("there is a tensor {}", lowbit_files::shown(name));
            return Err(config.refuse("block_count", &layers.to_string(), &want));
        }
        let tied = is_tied(config, weights)?;
        let headless = !tied && is_headless(weights);
        Ok(Self {
            hidden_size: config.size("hidden_size", "embedding_length")?,
            num_hidden_layers: layers.saturating_sub(predictors),
            vocab_size,
            rms_norm_eps: config.norm_eps()?,
            max_position_embeddings: config.size("max_position_embeddings", "context_length")?,
            tie_word_embeddings: tied || headless,
            headless,
            causal: true,
        })
    }
}

/// Embedding, blocks, norm and output layer: the form of every architecture here.
#[derive(Clone, Debug)]
pub struct Decoder {
    embedding: Embedding,
    blocks: Arc<[Block]>,
    /// The place of each block's cache among [`Self::layer_caches`]: some share one.
    places: Arc<[usize]>,
    /// The window that each of these caches has to keep, if it need not keep all.
    windows: Arc<[Option<usize>]>,
    /// The embeddings of each layer's own, if layers have some.
    layer_embeddings: Option<LayerEmbeddings>,
    /// The factor of the embedding in each column, `[hidden_size]`, if there is one.
    embedding_scale: Option<Tensor>,
    norm: RmsNorm,
    head: Linear,
    /// From the output layer's products to logits.
    logit_function: LogitFunction,
    activations: FloatType,
    /// The type of cached keys and values.
    cache: CacheType,
}

impl Decoder {
    /// Loads the embedding, the final norm and the output layer, and the layers that `spec`
    /// describes. `weights` is the whole checkpoint, `model` the part of it that contains the
    /// layers.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn load(weights: &Weights<'_>, model: &Weights<'_>, spec: &DecoderSpec) -> Result<Self, ModelError> {
        let config = &spec.config;
        let embedding = Embedding::load(model, config.vocab_size, config.hidden_size)?;
        let top = weights.below(head_prefix(weights), "");
        let head = if config.tie_word_embeddings {
            top.ignore(LM_HEAD);
            embedding.as_linear()
        } else {
            top.linear(LM_HEAD, config.vocab_size, config.hidden_size)?
        };
        let Multipliers { embedding: first, logits, softcap, .. } = spec.multipliers;
        let row = |factor, width| constant_row(factor, width, weights.device());
        let block = |(i, layer)| Block::load(&model.layer(i), spec, layer);
        let blocks: Arc<[Block]> = spec.layers.iter().enumerate().map(block).collect::<Result<_, _>>()?;
        let layer_embeddings = spec.layer_embedding.map(|width| LayerEmbeddings::load(model, config, width));
        let norm = RmsNorm::load(model, spec.norm, config.hidden_size, config.rms_norm_eps)?;
        let (activations, cache) = (weights.activations(), weights.cache());
        let embedding_scale = row(first, config.hidden_size)?;
        let caps = |cap| Tensor::new(&vec![cap; config.vocab_size], &[config.vocab_size], weights.device());
        let logit_function =
            LogitFunction { factors: row(logits, config.vocab_size)?, caps: softcap.map(caps).transpose()? };
        let places = places(&blocks);
        Ok(Self {
            embedding,
            embedding_scale,
            windows: windows(&blocks, &places, config.max_position_embeddings),
            places,
            blocks,
            layer_embeddings: layer_embeddings.transpose()?,
            norm,
            head,
            logit_function,
            activations,
            cache,
        })
    }

    /// All layers.
    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The part of a cache of every layer that has one of its own, empty. Layers with a window keep
    /// that alone, unless they are asked for all.
    pub(crate) fn layer_caches(&self, device: &Device, all: bool) -> Result<Vec<LayerCache>, KernelError> {
        let owners = self.blocks.iter().filter(|block| block.cache_of().is_none());
        let caches = owners.zip(&*self.windows).map(|(block, window)| {
            let mut cache = block.cache(self.cache, device)?;
            window.filter(|_| !all).into_iter().for_each(|window| cache.keep_window(window));
            Ok(cache)
        });
        caches.collect()
    }

    /// True if some layers keep a window alone.
    pub(crate) fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// True if a layer needs what others give it besides the states before it.
    fn has_ties(&self) -> bool {
        self.layer_embeddings.is_some() || self.blocks.iter().any(|block| block.cache_of().is_some())
    }

    /// The states before the first block, and the embeddings of each layer's own.
    fn begin(&self, tokens: &Tensor, tape: Option<&Tape>) -> Result<(Residual, Option<Var>), KernelError> {
        let x = self.unchanged(self.embed(tokens, tape)?)?;
        let own = self.layer_embeddings.as_ref().map(|layers| layers.forward(tokens, &x));
        Ok((x, own.transpose()?))
    }

    /// The part of those that is block `index`'s.
    fn own(&self, all: Option<&Var>, index: usize) -> Result<Option<Var>, KernelError> {
        let both = self.layer_embeddings.as_ref().zip(all);
        both.map(|(layers, all)| layers.of_layer(all, index)).transpose()
    }

    /// Makes room for `tokens` more.
    pub(crate) fn reserve(
        &self,
        cache: &mut Cache,
        tokens: usize,
        device: &Device,
    ) -> Result<(), KernelError> {
        let all = cache.keeps_all();
        cache.reserve(tokens, || self.layer_caches(device, all)).map(|_| ())
    }

    /// The states of all sequences' tokens before the final norm and the output layer, from device
    /// buffers alone; each sequence's cache advances by its tokens.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn run(
        &self,
        tokens: &Tensor,
        step: &Step,
        caches: &mut [&mut Cache],
    ) -> Result<Residual, KernelError> {
        let device = tokens.device();
        let mut layers = Vec::with_capacity(caches.len());
        for (cache, span) in caches.iter_mut().zip(&step.spans) {
            let all = cache.keeps_all();
            layers.push(cache.begin(&span.positions, || self.layer_caches(device, all))?);
        }
        let (mut x, own) = self.begin(tokens, step.tape.as_ref())?;
        for (index, block) in self.blocks.iter().enumerate() {
            let own = self.own(own.as_ref(), index)?;
            let place = self.places[index];
            let mut caches: Vec<_> = layers.iter_mut().map(|layers| &mut layers[place]).collect();
            x = match &step.tape {
                Some(tape) if tape.kept() == Kept::Blocks => self.computed_again(index, x, step, tape)?,
                _ => block.forward(x, own.as_ref(), step, &mut caches)?,
            };
            if !self.places[index + 1..].contains(&place) {
                caches.into_iter().try_for_each(LayerCache::settle)?;
            }
        }
        for (cache, span) in caches.iter_mut().zip(&step.spans) {
            cache.finish(span.rows.len())?;
        }
        Ok(x)
    }

    /// Moves the recurrences' states in `cache` on by `inputs`, those of a pass over
    /// [drafts](Step::drafts): by all rows of `rows`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn catch_up(
        &self,
        inputs: &[Vec<Tensor>],
        rows: StateRows<'_>,
        cache: &mut Cache,
    ) -> Result<(), KernelError> {
        let all = cache.keeps_all();
        let layers = cache.reserve(0, || self.layer_caches(rows.cu_seqlens.device(), all))?;
        self.catch_up_in_pool(inputs, rows, layers)
    }

    /// As [`Self::catch_up`], for sequences in a pool, which has these `layers`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn catch_up_in_pool(
        &self,
        inputs: &[Vec<Tensor>],
        rows: StateRows<'_>,
        layers: &mut [LayerCache],
    ) -> Result<(), KernelError> {
        let recurrences = self.blocks.iter().enumerate().filter(|(_, block)| block.recurs());
        let mut each = recurrences.zip(inputs);
        each.try_for_each(|((index, block), inputs)| {
            block.catch_up(inputs, rows, &mut layers[self.places[index]])
        })
    }

    /// As [`Self::run`], for sequences whose caches are in a pool, which has these `layers`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn run_in_pool(
        &self,
        tokens: &Tensor,
        step: &Step,
        layers: &mut [LayerCache],
    ) -> Result<Residual, KernelError> {
        let (x, own) = self.begin(tokens, None)?;
        self.blocks.iter().enumerate().try_fold(x, |x, (index, block)| {
            let own = self.own(own.as_ref(), index)?;
            block.forward(x, own.as_ref(), step, &mut [&mut layers[self.places[index]]])
        })
    }

    /// The states of T tokens before the first block, f32 `[T, hidden_size]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn embed(&self, tokens: &Tensor, tape: Option<&Tape>) -> Result<Var, KernelError> {
        let x = self.embedding.forward(tokens, tape)?;
        scaled(x, self.embedding_scale.as_ref())
    }

    /// The states after block `index` of those before it, whole sequences.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn block(&self, index: usize, x: &Var, step: &Step) -> Result<Var, KernelError> {
        let Residual { stream, update } = self.whole(index, self.unchanged(x.clone())?, step)?;
        add(&stream, &update)
    }

    /// The states of whole sequences before the final norm and the output layer: as [`Self::run`],
    /// but only one block's keys and values are in memory at a time, unless others read them.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn run_whole(&self, tokens: &Tensor, step: &Step) -> Result<Residual, KernelError> {
        if self.has_ties() {
            let mut caches = vec![Cache::default(); step.spans.len()];
            return self.run(tokens, step, &mut caches.iter_mut().collect::<Vec<_>>());
        }
        let x = self.unchanged(self.embed(tokens, None)?)?;
        (0..self.blocks.len()).try_fold(x, |x, index| self.whole(index, x, step))
    }

    /// Whole sequences through block `index`, with caches of its own.
    fn whole(&self, index: usize, x: Residual, step: &Step) -> Result<Residual, KernelError> {
        let (block, device) = (&self.blocks[index], x.stream.tensor().device());
        if self.has_ties() {
            return Err(alone());
        }
        let mut caches = vec![Cache::default(); step.spans.len()];
        let mut layers = Vec::with_capacity(caches.len());
        for (cache, span) in caches.iter_mut().zip(&step.spans) {
            let new = || Ok(vec![block.cache(self.cache, device)?]);
            layers.extend(cache.reserve(span.rows.len(), new)?.iter_mut());
        }
        block.forward(x, None, step, &mut layers)
    }

    /// Whole sequences through block `index`, of which `tape` records no more than what goes in and
    /// how to compute it again.
    fn computed_again(
        &self,
        index: usize,
        x: Residual,
        step: &Step,
        tape: &Tape,
    ) -> Result<Residual, KernelError> {
        // The tape's record must not keep the tape.
        let (decoder, step) = (self.clone(), Step { tape: None, ..step.clone() });
        let parameters = tape.parameters().clone();
        let (slots, inputs) =
            ([x.stream.slot(), x.update.slot()], [x.stream, x.update].map(Var::into_tensor));
        let forward = move |inputs: &[Tensor; 2], kept| {
            let tape = Tape::keeping(kept, parameters.clone());
            let [stream, update] = inputs.each_ref().map(|x| tape.leaf(x.clone()));
            let step = Step { tape: Some(tape.clone()), ..step.clone() };
            let x = Residual { stream: stream.clone(), update: update.clone() };
            let y = decoder.whole(index, x, &step)?;
            Ok::<_, KernelError>((tape, [stream, update], [y.stream, y.update]))
        };
        let (_, _, y) = forward(&inputs, Kept::Nothing)?;
        let [stream, update] = tape.record(y.map(Var::into_tensor), move |dys, gradients| {
            let (tape, leaves, y) = forward(&inputs, Kept::Ops)?;
            drop(inputs);
            let seeds: Vec<(&Var, &Tensor)> =
                y.iter().zip(&dys).filter_map(|(y, dy)| Some((y, dy.as_ref()?))).collect();
            let of_block = tape.backward(&seeds)?;
            for (slot, leaf) in slots.into_iter().zip(&leaves) {
                if let Some(dx) = of_block.of(leaf) {
                    gradients.add(slot, dx.clone())?;
                }
            }
            gradients.merge(of_block)
        });
        Ok(Residual { stream, update })
    }

    /// A stream that nothing is added to before the next block.
    pub(crate) fn unchanged(&self, stream: Var) -> Result<Residual, KernelError> {
        let (shape, device) = (stream.tensor().shape(), stream.tensor().device());
        let update = Tensor::allocate_zeros(shape, self.activations.dtype(), device)?;
        Ok(Residual { stream, update: update.into() })
    }

    /// Everything of block `index` that has a name.
    pub(crate) fn block_inventory(&self, index: usize) -> Inventory {
        let mut all = Inventory::default();
        self.blocks[index].list(&mut all);
        all
    }

    /// States of T tokens to f32 logits `[T, vocab_size]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn logits(&self, hidden: &Residual) -> Result<Var, KernelError> {
        let logits = self.head.forward_f32(hidden.normed(&self.norm))?;
        let LogitFunction { factors, caps } = &self.logit_function;
        let logits = scaled(logits, factors.as_ref())?;
        caps.as_ref().map_or(Ok(logits.clone()), |caps| softcap(&logits, caps))
    }

    /// From the output layer's products to logits.
    pub(crate) fn logit_function(&self) -> &LogitFunction {
        &self.logit_function
    }

    /// States of T tokens to what the output layer reads, `[T, hidden_size]`.
    ///
    /// # Errors
    /// Those of the ops.
    pub(crate) fn normed(&self, hidden: &Residual) -> Result<Var, KernelError> {
        Ok(hidden.normed(&self.norm).make()?.1)
    }

    /// Everything that has a name.
    pub(crate) fn inventory(&self) -> Inventory {
        let mut all = Inventory::default();
        self.embedding.as_linear().list(&mut all);
        self.layer_embeddings.iter().for_each(|layers| layers.list(&mut all));
        self.blocks.iter().for_each(|block| block.list(&mut all));
        self.norm.list(&mut all);
        self.head.list(&mut all);
        all
    }

    /// The output layer.
    pub(crate) fn head(&self) -> &Linear {
        &self.head
    }
}

/// The window that each cache has to keep for all layers that read it, unless it keeps as much as
/// a text of the whole context needs.
fn windows(blocks: &[Block], places: &[usize], context: usize) -> Arc<[Option<usize>]> {
    let count = places.iter().max().map_or(0, |last| last + 1);
    let readers = |place| blocks.iter().zip(places).filter(move |(_, at)| **at == place);
    let of_place = |place| {
        let all: Option<Vec<usize>> = readers(place).map(|(block, _)| block.window()).collect();
        all?.into_iter().max().filter(|&window| window::capacity(window) < context)
    };
    (0..count).map(of_place).collect()
}

/// The place of each block's cache among those of the blocks that have one of their own.
fn places(blocks: &[Block]) -> Arc<[usize]> {
    let mut own = 0;
    let mut places = Vec::with_capacity(blocks.len());
    for block in blocks {
        // A layer whose cache is another one's follows it.
        let place = block.cache_of().and_then(|of| places.get(of).copied());
        places.push(place.unwrap_or(own));
        own += usize::from(place.is_none());
    }
    places.into()
}
