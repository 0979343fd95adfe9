use super::verify::{DraftRows, Recurrences, Span, StateRows};
use super::{
    Attention, DecoderSpec, FeedforwardSpec, GatedDeltaNet, KimiDelta, LatentAttention, LayerInput,
    LayerNorms, LayerSpec, Mamba2, MixerSpec, Mlp, ParallelMoe, PartInput, RmsNorm, ShortConv, SparseMoe,
};
use crate::cache::{DeltaCache, LayerCache};
use crate::names::MLP;
use crate::tape::ops::{AddRmsNorm, mul};
use crate::tape::{Inventory, Tape, Var, shapes};
use crate::{ModelError, Outline, Weights};
use lowbit_kernels::ops::{CacheType, Form};
use lowbit_kernels::{Device, KernelError, Tensor, ops};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// One layer of a decoder, as a [`LayerSpec`] describes it.
#[derive(Clone, Debug)]
pub struct Block {
    norms: BlockNorms,
    mixer: Mixer,
    feedforward: Feedforward,
    /// The factor of what the two add, `[hidden_size]`, if there is one.
    scale: Option<Tensor>,
    /// The use of embeddings of its own, if it has some.
    input: Option<LayerInput>,
    /// The factor of the layer's result, `[hidden_size]`, if there is one.
    scalar: Option<Tensor>,
}

/// As [`LayerNorms`](super::LayerNorms).
#[derive(Clone, Debug)]
struct BlockNorms {
    mixer: Option<RmsNorm>,
    after_mixer: Option<RmsNorm>,
    feedforward: Option<RmsNorm>,
    after_feedforward: Option<RmsNorm>,
}

/// The part of a block that mixes tokens.
#[derive(Clone, Debug)]
enum Mixer {
    Attention(Box<Attention>),
    LatentAttention(Box<LatentAttention>),
    DeltaNet(Box<GatedDeltaNet>),
    ShortConv(Box<ShortConv>),
    Mamba2(Box<Mamba2>),
    KimiDelta(Box<KimiDelta>),
    None,
}

/// The part of a block that works on each token alone.
#[derive(Clone, Debug)]
enum Feedforward {
    Dense(Box<Mlp>),
    Sparse(Box<SparseMoe>),
    Parallel(Box<ParallelMoe>),
    None,
}

/// The error for a cache that another kind of layer made.
pub fn wrong_cache() -> KernelError {
    let (got, want) = ("of another kind".to_string(), "each layer made its own".to_string());
    KernelError::Value { op: "block", operand: "cache", got, want }
}

/// The error for a layer that runs without what others give it.
pub(super) fn alone() -> KernelError {
    let got = "run alone".to_string();
    let want = "it reads the cache of an earlier layer, or embeddings of its own".into();
    KernelError::Value { op: "block", operand: "layer", got, want }
}

impl Block {
    /// The layer of `decoder` that `spec` describes, whose tensors are `weights`.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, decoder: &DecoderSpec, spec: &LayerSpec) -> Result<Self, ModelError> {
        let DecoderSpec { config, multipliers, .. } = decoder;
        let mixer = match &spec.mixer {
            MixerSpec::Attention(attention) => Mixer::Attention(Attention::load(weights, attention)?.into()),
            MixerSpec::LatentAttention(latent) => {
                Mixer::LatentAttention(LatentAttention::load(weights, latent)?.into())
            }
            MixerSpec::DeltaNet(net) => Mixer::DeltaNet(GatedDeltaNet::load(weights, net)?.into()),
            MixerSpec::ShortConv(conv) => Mixer::ShortConv(ShortConv::load(weights, conv)?.into()),
            MixerSpec::Mamba2(mamba) => Mixer::Mamba2(Mamba2::load(weights, mamba)?.into()),
            MixerSpec::KimiDelta(kimi) => Mixer::KimiDelta(KimiDelta::load(weights, kimi)?.into()),
            MixerSpec::None => Mixer::None,
        };
        let hidden = config.hidden_size;
        let feedforward = match &spec.feedforward {
            FeedforwardSpec::Dense(mlp) => Feedforward::Dense(Mlp::load(weights, MLP, hidden, *mlp)?.into()),
            FeedforwardSpec::Sparse(moe) => {
                Feedforward::Sparse(SparseMoe::load(weights, moe, hidden)?.into())
            }
            FeedforwardSpec::Parallel(mlp, moe) => {
                Feedforward::Parallel(ParallelMoe::load(weights, (*mlp, moe), config)?.into())
            }
            FeedforwardSpec::None => Feedforward::None,
        };
        let norm = |name| RmsNorm::load(weights, name, hidden, config.rms_norm_eps);
        let LayerNorms { mixer: before, after_mixer, feedforward: between, after_feedforward } = spec.norms;
        let norms = BlockNorms {
            mixer: before.map(norm).transpose()?,
            after_mixer: after_mixer.map(norm).transpose()?,
            feedforward: between.map(norm).transpose()?,
            after_feedforward: after_feedforward.map(norm).transpose()?,
        };
        let row = |factor| constant_row(factor, hidden, weights.device());
        let scalar = match multipliers.layer {
            // As in llama.cpp, a layer without one has 1.
            Some(name) if weights.has(name.0, name.1) => row(weights.values(name, 1)?[0])?,
            _ => None,
        };
        let input = decoder.layer_embedding.map(|width| LayerInput::load(weights, config, width));
        let (scale, input) = (row(multipliers.residual)?, input.transpose()?);
        Ok(Self { norms, mixer, feedforward, scale, input, scalar })
    }

    /// The earlier layer whose cache is this one's, too, if it has none of its own.
    pub(crate) fn cache_of(&self) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.kv_of(),
            _ => None,
        }
    }

    /// The keys that a query sees, if this is a layer of attention to a window.
    pub(crate) fn window(&self) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.window(),
            _ => None,
        }
    }

    /// An empty cache for this layer, keys and values of type `cache`.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, cache: CacheType, device: &Device) -> Result<LayerCache, KernelError> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.cache(cache, device).map(LayerCache::Attention),
            Mixer::LatentAttention(latent) => latent.cache(cache.dtype(), device).map(LayerCache::Attention),
            Mixer::DeltaNet(net) => net.cache(device).map(LayerCache::DeltaNet),
            Mixer::ShortConv(conv) => conv.cache(device).map(LayerCache::DeltaNet),
            Mixer::Mamba2(mamba) => mamba.cache(device).map(LayerCache::DeltaNet),
            Mixer::KimiDelta(kimi) => kimi.cache(device).map(LayerCache::DeltaNet),
            // A state without values.
            Mixer::None => DeltaCache::of_convolution([1, 0, 0], device).map(LayerCache::DeltaNet),
        }
    }

    /// True if the mixer is a recurrence.
    pub(crate) fn recurs(&self) -> bool {
        use Mixer::{DeltaNet, KimiDelta, Mamba2, ShortConv};
        matches!(self.mixer, DeltaNet(_) | KimiDelta(_) | Mamba2(_) | ShortConv(_))
    }

    /// Moves a recurrence's states on by these inputs, which an earlier pass has computed: see
    /// [`DraftRows`].
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache or the inputs of another kind of layer.
    pub(crate) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        cache: &mut LayerCache,
    ) -> Result<(), KernelError> {
        let LayerCache::DeltaNet(states) = cache else { return Err(wrong_cache()) };
        match &self.mixer {
            Mixer::DeltaNet(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::ShortConv(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::Mamba2(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::KimiDelta(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::Attention(_) | Mixer::LatentAttention(_) | Mixer::None => Err(wrong_cache()),
        }
    }

    /// Appends the layer's weights to `all`.
    pub(crate) fn list(&self, all: &mut Inventory) {
        let BlockNorms { mixer, after_mixer, feedforward, after_feedforward } = &self.norms;
        mixer.iter().for_each(|norm| norm.list(all));
        match &self.mixer {
            Mixer::Attention(mixer) => mixer.list(all),
            Mixer::LatentAttention(mixer) => mixer.list(all),
            Mixer::DeltaNet(mixer) => mixer.list(all),
            Mixer::ShortConv(mixer) => mixer.list(all),
            Mixer::Mamba2(mixer) => mixer.list(all),
            Mixer::KimiDelta(mixer) => mixer.list(all),
            Mixer::None => {}
        }
        after_mixer.iter().for_each(|norm| norm.list(all));
        feedforward.iter().for_each(|norm| norm.list(all));
        match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.list(all),
            Feedforward::Sparse(moe) => moe.list(all),
            Feedforward::Parallel(both) => both.list(all),
            Feedforward::None => {}
        }
        after_feedforward.iter().for_each(|norm| norm.list(all));
        self.input.iter().for_each(|input| input.list(all));
    }

    /// Notes the layer's settings.
    pub(crate) fn outline(&self, outline: &mut Outline) {
        match &self.mixer {
            Mixer::Attention(mixer) => mixer.outline(outline),
            Mixer::LatentAttention(mixer) => mixer.outline(outline),
            Mixer::DeltaNet(mixer) => mixer.outline(outline),
            Mixer::ShortConv(mixer) => mixer.outline(outline),
            Mixer::Mamba2(mixer) => mixer.outline(outline),
            Mixer::KimiDelta(mixer) => mixer.outline(outline),
            Mixer::None => outline.word("mixer", "none"),
        }
        match &self.feedforward {
            Feedforward::Dense(mlp) => {
                outline.word("feedforward", "dense");
                outline.word("gate", format!("{:?}", mlp.gate()));
                outline.word("the MLP is gated", mlp.is_gated());
            }
            Feedforward::Sparse(moe) => moe.outline(outline),
            Feedforward::Parallel(both) => both.outline(outline),
            Feedforward::None => outline.word("feedforward", "none"),
        }
        outline.word("norm after the mixer", self.norms.after_mixer.is_some());
        outline.word("norm after the feed-forward part", self.norms.after_feedforward.is_some());
    }

    /// T tokens through the layer, with each sequence's cache, which [`Self::cache`] made, and the
    /// embeddings that are the layer's own, if it has some.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache of another kind of layer.
    pub fn forward(
        &self,
        x: Residual,
        own: Option<&Var>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<Residual, KernelError> {
        let x = self.mixed(x, step, caches)?;
        let norm = self.norms.feedforward.as_ref();
        let (stream, update) = match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.forward_sum(x.input(norm))?,
            Feedforward::Sparse(moe) => {
                let (stream, input) = x.input(norm).make()?;
                (stream, moe.forward(&input)?)
            }
            Feedforward::Parallel(both) => both.forward(&x, norm)?,
            Feedforward::None => return Ok(x),
        };
        let x = Residual { stream, update: self.added(update, self.norms.after_feedforward.as_ref())? };
        let x = match (&self.input, own) {
            (None, None) => x,
            (Some(input), Some(own)) => input.forward(&x, own)?,
            (Some(_), None) | (None, Some(_)) => return Err(alone()),
        };
        let scalar = self.scalar.as_ref();
        Ok(Residual { stream: scaled(x.stream, scalar)?, update: scaled(x.update, scalar)? })
    }

    /// T tokens through the mixer, if there is one.
    fn mixed(
        &self,
        x: Residual,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<Residual, KernelError> {
        let input = x.input(self.norms.mixer.as_ref());
        let (stream, update) = match &self.mixer {
            Mixer::None => return Ok(x),
            Mixer::Attention(mixer) => mixer.forward(input, step, caches)?,
            Mixer::LatentAttention(mixer) => mixer.forward(input, step, caches)?,
            Mixer::DeltaNet(mixer) => mixer.forward(input, step, caches)?,
            Mixer::ShortConv(mixer) => mixer.forward(input, step, caches)?,
            Mixer::Mamba2(mixer) => mixer.forward(input, step, caches)?,
            Mixer::KimiDelta(mixer) => mixer.forward(input, step, caches)?,
        };
        Ok(Residual { stream, update: self.added(update, self.norms.after_mixer.as_ref())? })
    }

    /// The term that is added to the residual stream: the norm of `update`, if there is one, times
    /// the factor.
    fn added(&self, update: Var, norm: Option<&RmsNorm>) -> Result<Var, KernelError> {
        let normed = norm.map_or(Ok(update.clone()), |norm| norm.forward(&update))?;
        scaled(normed, self.scale.as_ref())
    }
}

/// `factor` in each of `width` columns, if it is not 1.
pub(super) fn constant_row(
    factor: f32,
    width: usize,
    device: &Device,
) -> Result<Option<Tensor>, KernelError> {
    (factor != 1.0).then(|| Tensor::new(&vec![factor; width], &[width], device)).transpose()
}

/// `x` times a row of factors, if there is one.
pub(super) fn scaled(x: Var, factors: Option<&Tensor>) -> Result<Var, KernelError> {
    factors.map_or(Ok(x.clone()), |factors| mul(&x, &factors.clone().into()))
}

/// The residual stream and what the last layer adds to it: the sum is taken together with the norm
/// that follows, by the product that reads that norm where there is only one.
#[derive(Debug)]
pub struct Residual {
    /// f32 `[T, hidden_size]`.
    pub stream: Var,
    /// The same shape, in the activations' type.
    pub update: Var,
}

impl Residual {
    /// The sum's norm in the activations' type.
    pub fn normed<'a>(&'a self, norm: &'a RmsNorm) -> AddRmsNorm<'a> {
        norm.of_sum(&self.stream, &self.update)
    }

    /// The input of a part of a layer: the sum's norm, if there is one, or the sum.
    pub fn input<'a>(&'a self, norm: Option<&'a RmsNorm>) -> PartInput<'a> {
        let Self { stream: h, update: x } = self;
        norm.map_or(PartInput::Plain { h, x }, |norm| PartInput::Normed(self.normed(norm)))
    }

    /// The last token of each sequence.
    pub(crate) fn last(&self, step: &Step) -> Result<Self, KernelError> {
        let xs = [&self.stream, &self.update].map(Var::tensor);
        let rows: Vec<u32> = step.ends().map(|end| (end - 1) as u32).collect();
        let last = if rows.len() == xs[0].dim(0) {
            xs.map(|x| Ok(x.clone()))
        } else if let [row] = rows[..] {
            xs.map(|x| x.rows(row as usize, row as usize + 1))
        } else {
            let ids = Tensor::new(&rows, &[rows.len()], xs[0].device())?;
            // A row of the pass is a place of a cache with one head.
            xs.map(|x| {
                let rows = ops::kv_gather(&x.reshape(&[1, x.dim(0), x.dim(1)])?, &ids)?;
                rows.reshape(&[ids.len(), x.dim(1)])
            })
        };
        let [stream, update] = shapes::each(last)?.map(Var::from);
        Ok(Self { stream, update })
    }
}

/// The places of a forward pass's tokens: those of all sequences after each other.
#[derive(Clone, Debug)]
pub struct Step {
    /// The sequences whose caches are their own.
    pub(crate) spans: Vec<Span>,
    /// The tape that records the pass, if there is one.
    pub(crate) tape: Option<Tape>,
    /// u32 `[sequences + 1]`: where each sequence begins, if all begin with their first token and
    /// nobody wants what they leave behind: a recurrence then takes all of them at once, and leaves
    /// their caches as they are.
    pub(crate) whole: Option<Tensor>,
    /// The sequences' places in a pool, if their caches are there: each layer then has one cache,
    /// the pool's.
    pub(crate) pool: Option<PoolRows>,
}

/// The places of sequences in a [`CachePool`](crate::CachePool). In tensors, as in [`Span`].
#[derive(Clone, Debug)]
pub(crate) struct PoolRows {
    /// u32 `[T]`.
    pub positions: Tensor,
    /// All rows of the pass after each other, for attention: a decode step is one part, and each
    /// piece of a prompt is one.
    pub parts: Vec<PagedRows>,
    /// All rows of the pass after each other, for recurrences: a sequence whose states are marked
    /// on the way has pieces in several turns.
    pub turns: Vec<PoolTurn>,
    /// The end of each sequence's rows.
    pub ends: Vec<usize>,
    /// Set if a sequence's rows are its last token and those drafted after it, as in
    /// [`DraftRows`]: the inputs of recurrences, which run on copies of the states.
    pub inputs: Option<Rc<RefCell<Recurrences>>>,
}

/// Rows of a pass that a recurrence takes at once, and the marks of states that it writes after
/// them.
#[derive(Clone, Debug)]
pub(crate) struct PoolTurn {
    pub rows: Range<usize>,
    /// u32 `[S]`: the sequences' states.
    pub slots: Tensor,
    /// u32 `[S + 1]`.
    pub cu_seqlens: Tensor,
    /// Slots, and the marks that get their states.
    pub marks: Vec<(usize, usize)>,
}

/// Rows of a pass whose sequences have as many of them each, and the pages of these sequences.
#[derive(Clone, Debug)]
pub(crate) struct PagedRows {
    pub rows: Range<usize>,
    /// u32 `[T]`, of these rows alone.
    pub positions: Tensor,
    /// u32 `[S, N]`.
    pub table: Tensor,
    /// In models with layers that keep a window: what these have instead.
    pub window: Option<PagedWindow>,
}

/// The pages of sequences in layers that keep a window.
#[derive(Clone, Debug)]
pub(crate) struct PagedWindow {
    /// u32 `[S, N]`: 0 for pages that were given back, which nobody sees.
    pub table: Tensor,
    /// Of one sequence, u32 `[n]` and `[T]`: the pages that its rows see, and the rows' places in
    /// these.
    pub seen: Option<[Tensor; 2]>,
}

impl PagedRows {
    /// The pages in layers of this kind.
    pub(crate) fn table_of(&self, windowed: bool) -> &Tensor {
        self.window.as_ref().filter(|_| windowed).map_or(&self.table, |window| &window.table)
    }
}

/// A piece of a sequence's new tokens, and its places in a pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolSpan {
    /// The sequence's place in the batch.
    pub sequence: usize,
    /// The positions of the tokens.
    pub positions: Range<usize>,
    /// The sequence's pages until the last of them.
    pub pages: Vec<u32>,
    /// The same in layers that keep a window, if there are some.
    pub window: Option<SpanWindow>,
    pub slot: u32,
    /// The mark that gets the states after them.
    pub mark: Option<usize>,
}

/// A piece's pages in layers that keep a window.
#[derive(Clone, Debug)]
pub(crate) struct SpanWindow {
    /// From the text's start on, 0 for those that were given back.
    pub pages: Vec<u32>,
    /// The place of the first that its tokens see.
    pub first: usize,
}

impl SpanWindow {
    /// As tensors, for tokens at `positions`.
    fn uploaded(&self, positions: Range<usize>, device: &Device) -> Result<PagedWindow, KernelError> {
        let Self { pages, first } = self;
        let new = |ids: &[u32]| Tensor::new(ids, &[ids.len()], device);
        let places = positions.map(|position| (position - first * ops::PAGE_TOKENS) as u32);
        let seen = [new(&pages[*first..])?, new(&places.collect::<Vec<_>>())?];
        Ok(PagedWindow { table: Tensor::new(pages, &[1, pages.len()], device)?, seen: Some(seen) })
    }
}

impl Step {
    /// Sequences whose caches are their own.
    fn of(spans: Vec<Span>) -> Self {
        Self { spans, tape: None, whole: None, pool: None }
    }

    /// For each sequence, the tokens that it has seen and those that come now.
    pub(crate) fn new(
        sequences: impl IntoIterator<Item = (usize, usize)>,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let mut first = 0;
        let spans = sequences.into_iter().map(|(start, tokens)| {
            let positions: Vec<u32> = (start..start + tokens).map(|position| position as u32).collect();
            let rows = first..first + tokens;
            first = rows.end;
            Ok(Span {
                rows,
                positions: Tensor::new(&positions, &[tokens], device)?,
                cu_seqlens: Tensor::new(&[0, tokens as u32], &[2], device)?,
                drafts: None,
            })
        });
        Ok(Self::of(spans.collect::<Result<_, KernelError>>()?))
    }

    /// Whole sequences of these lengths, whose caches are not read afterwards.
    pub(crate) fn whole(
        lengths: impl IntoIterator<Item = usize> + Clone,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let mut offsets = vec![0];
        let mut end = 0;
        offsets.extend(lengths.clone().into_iter().map(|length| {
            end += length as u32;
            end
        }));
        let whole = Some(Tensor::new(&offsets, &[offsets.len()], device)?);
        Ok(Self { whole, ..Self::new(lengths.into_iter().map(|length| (0, length)), device)? })
    }

    /// One token of one sequence, whose place the tensors of a [`Span`] say.
    pub(crate) fn one(positions: Tensor, cu_seqlens: Tensor) -> Self {
        Self::of(vec![Span { rows: 0..1, positions, cu_seqlens, drafts: None }])
    }

    /// The last token of a sequence and those drafted after it, at these positions, u32 `[T]`: see
    /// [`DraftRows`].
    pub(crate) fn drafts(positions: &Tensor) -> Result<Self, KernelError> {
        let tokens = positions.len();
        let cu_seqlens = Tensor::new(&[0, tokens as u32], &[2], positions.device())?;
        let drafts = Some(DraftRows::new(positions)?);
        Ok(Self::of(vec![Span { rows: 0..tokens, positions: positions.clone(), cu_seqlens, drafts }]))
    }

    /// As [`Self::new`], where all tokens of a sequence but the first are drafts. A sequence
    /// without drafts makes a step, whose states need no copy.
    pub(crate) fn with_drafts(
        sequences: impl IntoIterator<Item = (usize, usize)>,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let mut step = Self::new(sequences, device)?;
        for span in step.spans.iter_mut().filter(|span| span.rows.len() > 1) {
            span.drafts = Some(DraftRows::new(&span.positions)?);
        }
        Ok(step)
    }

    /// The inputs of the recurrences of each sequence that has drafts; none of others.
    pub(crate) fn recurrences(&self) -> Vec<Recurrences> {
        let of_span = |span: &Span| span.drafts.as_ref().map(DraftRows::take_inputs).unwrap_or_default();
        self.spans.iter().map(of_span).collect()
    }

    /// Tokens of sequences in a pool, in turns: a sequence's next piece is in the next turn.
    pub(crate) fn in_pool(turns: &[Vec<PoolSpan>], device: &Device) -> Result<Self, KernelError> {
        let new = |ids: &[u32]| Tensor::new(ids, &[ids.len()], device);
        let all = || turns.iter().flatten();
        let ids = all().flat_map(|span| span.positions.clone()).map(|position| position as u32);
        let positions = new(&ids.collect::<Vec<_>>())?;
        let (parts, ends) = (vec![], vec![0; turns[0].len()]);
        let mut pool = PoolRows { positions, parts, turns: vec![], ends, inputs: None };
        let mut end = 0;
        for spans in turns {
            let (first, mut offsets, mut slots, mut marks) = (end, vec![0], vec![], vec![]);
            for span in spans {
                let rows = end..end + span.positions.len();
                end = rows.end;
                pool.ends[span.sequence] = end;
                offsets.push((end - first) as u32);
                slots.push(span.slot);
                marks.extend(span.mark.map(|mark| (span.slot as usize, mark)));
                let positions = pool.positions.rows(rows.start, rows.end)?;
                let table = Tensor::new(&span.pages, &[1, span.pages.len()], device)?;
                let window = span.window.as_ref();
                let window = window.map(|window| window.uploaded(span.positions.clone(), device));
                pool.parts.push(PagedRows { rows, positions, table, window: window.transpose()? });
            }
            let (slots, cu_seqlens) = (new(&slots)?, new(&offsets)?);
            pool.turns.push(PoolTurn { rows: first..end, slots, cu_seqlens, marks });
        }
        Ok(Self { pool: Some(pool), ..Self::of(vec![]) })
    }

    /// Tokens of many sequences in a pool, one of each unless they are
    /// [drafts](Self::of_drafts), whose pages are the rows of the tables: the second is that of
    /// layers that keep a window, if there are some.
    pub(crate) fn rows(
        positions: Tensor,
        (table, windows): (Tensor, Option<Tensor>),
        slots: Tensor,
        cu_seqlens: Tensor,
    ) -> Self {
        let rows = 0..positions.len();
        let window = windows.map(|table| PagedWindow { table, seen: None });
        let parts = vec![PagedRows { rows: rows.clone(), positions: positions.clone(), table, window }];
        let turns = vec![PoolTurn { rows: rows.clone(), slots, cu_seqlens, marks: vec![] }];
        let ends = rows.map(|row| row + 1).collect();
        let inputs = None;
        Self { pool: Some(PoolRows { positions, parts, turns, ends, inputs }), ..Self::of(vec![]) }
    }

    /// The same where a sequence's rows are its last token and those drafted after it: attention
    /// takes them as it takes rows of different sequences, recurrences go through them one after
    /// the other, and leave the states as they are.
    pub(crate) fn of_drafts(mut self) -> Self {
        self.pool.iter_mut().for_each(|pool| pool.inputs = Some(Rc::default()));
        self
    }

    /// The inputs of the recurrences of a pass over [drafts](Self::of_drafts) in a pool.
    pub(crate) fn recurrences_in_pool(&self) -> Recurrences {
        let inputs = self.pool.as_ref().and_then(|pool| pool.inputs.as_ref());
        inputs.map(|inputs| inputs.take()).unwrap_or_default()
    }

    /// The end of each sequence's rows.
    fn ends(&self) -> impl Iterator<Item = usize> {
        let in_pool = self.pool.iter().flat_map(|pool| pool.ends.iter().copied());
        self.spans.iter().map(|span| span.rows.end).chain(in_pool)
    }

    /// The results of `mix` for the rows of `xs`, from the sequences' places and their states: all
    /// at once where these lie together. `new` makes the states of so many sequences that begin.
    pub(crate) fn with_states<const N: usize>(
        &self,
        xs: [&Var; N],
        caches: &mut [&mut LayerCache],
        new: impl FnOnce(usize) -> Result<DeltaCache, KernelError>,
        mut mix: impl FnMut([&Var; N], StateRows<'_>, &mut DeltaCache) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        match (&self.whole, &self.pool, &mut *caches) {
            (Some(cu_seqlens), ..) => mix(xs, StateRows::of(cu_seqlens), &mut new(self.spans.len())?),
            (None, Some(rows), [LayerCache::DeltaNet(states)]) => rows.in_turns(xs, states, mix),
            (None, Some(_), _) => Err(wrong_cache()),
            (None, None, _) => self.each_span(xs, caches, |xs, span, cache| match (cache, &span.drafts) {
                (LayerCache::DeltaNet(states), None) => mix(xs, StateRows::of(&span.cu_seqlens), states),
                (LayerCache::DeltaNet(states), Some(drafts)) => {
                    drafts.recurrence(xs, &span.cu_seqlens, &*states, &mut mix)
                }
                (LayerCache::Attention(_), _) => Err(wrong_cache()),
            }),
        }
    }

    /// The results of `mix` for each sequence's rows of `xs` with its cache, rows joined again:
    /// row by row where these are drafts.
    pub(crate) fn each<const N: usize>(
        &self,
        xs: [&Var; N],
        caches: &mut [&mut LayerCache],
        mut mix: impl FnMut([&Var; N], &Span, &mut LayerCache) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        self.each_span(xs, caches, |xs, span, cache| match &span.drafts {
            Some(drafts) => drafts.each(xs, cache, &mut mix),
            None => mix(xs, span, cache),
        })
    }

    /// The results of `mix` for each sequence's rows of `xs` with its cache, rows joined again.
    fn each_span<const N: usize>(
        &self,
        xs: [&Var; N],
        caches: &mut [&mut LayerCache],
        mut mix: impl FnMut([&Var; N], &Span, &mut LayerCache) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        if let ([span], [cache]) = (&self.spans[..], &mut *caches) {
            return mix(xs, span, cache);
        }
        let ranges: Vec<_> = self.spans.iter().map(|span| span.rows.clone()).collect();
        let parts = shapes::each(xs.map(|x| shapes::split_rows(x, &ranges)))?;
        let each = self.spans.iter().zip(caches).enumerate();
        let results = each.map(|(i, (span, cache))| mix(parts.each_ref().map(|x| &x[i]), span, cache));
        shapes::join_rows(&results.collect::<Result<Vec<_>, _>>()?)
    }
}

impl PoolRows {
    /// As [`Step::with_states`], turn by turn.
    fn in_turns<const N: usize>(
        &self,
        xs: [&Var; N],
        states: &mut DeltaCache,
        mut mix: impl FnMut([&Var; N], StateRows<'_>, &mut DeltaCache) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        if let (Some(inputs), [turn]) = (&self.inputs, &self.turns[..]) {
            inputs.borrow_mut().push(xs.iter().map(|x| x.tensor().clone()).collect());
            let rows = StateRows { form: Form::Recurrent, ..StateRows::of(&turn.cu_seqlens) };
            return mix(xs, rows, &mut states.copied(&turn.slots)?);
        }
        let mut run = |xs: [&Var; N], PoolTurn { slots, cu_seqlens, marks, .. }: &PoolTurn| {
            let y = mix(xs, StateRows { slots: Some(slots), ..StateRows::of(cu_seqlens) }, states)?;
            states.mark(marks)?;
            Ok::<_, KernelError>(y)
        };
        if let [turn] = &self.turns[..] {
            return run(xs, turn);
        }
        let ranges: Vec<_> = self.turns.iter().map(|turn| turn.rows.clone()).collect();
        let parts = shapes::each(xs.map(|x| shapes::split_rows(x, &ranges)))?;
        let turns = self.turns.iter().enumerate();
        let ys = turns.map(|(i, turn)| run(parts.each_ref().map(|x| &x[i]), turn));
        shapes::join_rows(&ys.collect::<Result<Vec<_>, _>>()?)
    }
}
