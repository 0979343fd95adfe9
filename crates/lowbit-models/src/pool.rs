//! The caches of many sequences in one pool, so that one launch serves them all: keys and values in
//! pages of 64 tokens, states of delta nets in slots.

mod windows;

use crate::cache::LayerCache;
use crate::layers::{PoolSpan, SpanWindow, Step};
use crate::{Logits, Model, ModelError, Predictor};
use lowbit_kernels::ops::PAGE_TOKENS;
use lowbit_kernels::{KernelError, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windows::{MarkedPages, WindowPages, WindowPool};

/// Pages and slots of every layer. Page 0 and slot 0 are nobody's: rows of a batch that no sequence
/// has read and write them.
#[derive(Debug)]
pub struct CachePool {
    /// Keys and values `[pages, Hkv, 64, head_dim]`; states `[slots, ..]`.
    layers: Vec<LayerCache>,
    /// Of layers that keep the whole text.
    pages: Places,
    /// Of layers that keep a window, if there are some.
    window: Option<WindowPool>,
    slots: Places,
    marks: Places,
    /// Each layer's states of a sequence that has not begun.
    blank: Vec<LayerCache>,
    has_states: bool,
    /// Of the layer for multi-token prediction, if the pool has it.
    predictor: Option<LayerCache>,
}

/// One sequence's part of a [`CachePool`]. Dropped, its pages and its slot are free again.
#[derive(Debug)]
pub struct PoolCache {
    pages: Vec<Arc<Place>>,
    windowed: WindowPages,
    /// None while it is parked.
    slot: Option<Place>,
    position: usize,
}

/// New tokens of one text, and the caches in a pool that have seen the tokens before them.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct PoolSequence<'a> {
    pub tokens: &'a [u32],
    pub cache: &'a mut PoolCache,
    /// Marks that get the states on the way, in the order of their places, which are after some or
    /// all of `tokens` at multiples of 64 tokens of the text: see [`CachePool::mark_at`].
    pub marks: &'a [PoolMark],
}

/// The states of all delta nets after some tokens, in a [`CachePool`], and the pages of the windows
/// before that place. When the last clone is dropped, these are free again.
#[derive(Clone, Debug)]
pub struct PoolMark {
    position: usize,
    /// None in models without states and windows.
    place: Option<Arc<Place>>,
    /// There after the pass that reaches the mark.
    windowed: MarkedPages,
}

/// The numbers of free pages, slots or marks.
#[derive(Clone, Debug)]
struct Places(Arc<Mutex<Vec<u32>>>);

/// A page, a slot or a mark that is in use.
#[derive(Debug)]
struct Place {
    number: u32,
    free: Places,
}

impl Places {
    /// 1 to `count`; 0 is nobody's.
    fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new((1..=count as u32).rev().collect())))
    }

    fn list(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Place> {
        Some(Place { number: self.list().pop()?, free: self.clone() })
    }

    fn len(&self) -> usize {
        self.list().len()
    }
}

impl Place {
    /// Its row, if it is a mark's.
    fn mark(&self) -> usize {
        self.number as usize - 1
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.free.list().push(self.number);
    }
}

impl PoolCache {
    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens that fit into its pages.
    pub fn capacity(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// The numbers of its pages, in the order of its tokens.
    pub(crate) fn pages(&self) -> impl ExactSizeIterator<Item = u32> + Clone {
        self.pages.iter().map(|page| page.number)
    }

    /// Its states' place. One that is parked cannot run.
    pub(crate) fn slot(&self) -> Result<u32, ModelError> {
        self.slot.as_ref().map(|slot| slot.number).ok_or(ModelError::PoolIsFull)
    }

    /// The same of layers that keep a window: 0 for pages that were given back. None in models
    /// without such layers.
    pub(crate) fn window_pages(&self) -> Option<impl ExactSizeIterator<Item = u32> + Clone> {
        self.windowed.numbers()
    }

    /// Gives up the states and windows, and the pages behind the first `tokens` tokens, until
    /// [`CachePool::go_back`] to one of these places.
    pub fn park(&mut self, tokens: usize) {
        self.slot = None;
        self.pages.truncate(tokens.div_ceil(PAGE_TOKENS));
        self.windowed = WindowPages::default();
    }

    pub(crate) fn advance(&mut self, tokens: usize) {
        self.position += tokens;
        self.windowed.forget(self.position);
    }
}

impl PoolMark {
    /// Tokens before it.
    pub fn position(&self) -> usize {
        self.position
    }
}

impl CachePool {
    /// Room for `pages` pages of 64 tokens, `slots` sequences of `model`, and `marks` marks of
    /// their states. Layers with a window have as many pages as all others, and those of the marks.
    ///
    /// # Errors
    /// [`KernelError::Gpu`], [`KernelError::TooLarge`] without memory for them.
    pub fn new(model: &Model, pages: usize, slots: usize, marks: usize) -> Result<Self, ModelError> {
        let windows = pages + marks * model.cache_size()?.window_pages();
        Self::with_window_pages(model, [pages, slots, marks], windows)
    }

    /// The same with so many pages in layers with a window. [`CacheSize::window_pages`] for each
    /// mark, two more than that for each slot, and those of the tokens of the longest pass are
    /// enough for everything.
    ///
    /// [`CacheSize::window_pages`]: crate::CacheSize::window_pages
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_window_pages(
        model: &Model,
        [pages, slots, marks]: [usize; 3],
        window_pages: usize,
    ) -> Result<Self, ModelError> {
        let device = model.device();
        let blank = model.decoder().layer_caches(device, false)?;
        let layers = blank.iter().map(|layer| {
            let pages = if layer.window().is_some() { window_pages } else { pages };
            layer.in_pool([pages + 1, slots + 1, marks], device)
        });
        let window = blank.iter().filter_map(LayerCache::window).max();
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            window: window.map(|tokens| WindowPool::new(tokens, window_pages)),
            pages: Places::new(pages),
            slots: Places::new(slots),
            marks: Places::new(marks),
            has_states: blank.iter().any(|layer| layer.states().next().is_some()),
            blank,
            predictor: None,
        })
    }

    /// The same, empty as yet, with keys and values of a layer for multi-token prediction in each
    /// page.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_predictor(self, model: &Model, predictor: &Predictor) -> Result<Self, ModelError> {
        let device = model.device();
        let layer = predictor.layer_cache(device)?.in_pool([self.pages.len() + 1, 0, 0], device)?;
        Ok(Self { predictor: Some(layer), ..self })
    }

    /// Pages that no sequence has, of layers that keep the whole text.
    pub fn free_pages(&self) -> usize {
        self.pages.len()
    }

    /// Pages that no sequence and no mark has, of layers that keep a window; `None` in models
    /// without such layers.
    pub fn free_window_pages(&self) -> Option<usize> {
        self.window.as_ref().map(WindowPool::free_pages)
    }

    /// The pages of a sequence's windows before its first token.
    fn no_windows(&self) -> WindowPages {
        self.window.as_ref().map_or_else(WindowPages::default, WindowPool::begin)
    }

    /// Takes the pages in layers with a window that the next `tokens` tokens write to.
    pub(crate) fn make_ready(&self, cache: &mut PoolCache, tokens: usize) -> Result<(), ModelError> {
        let end = cache.position + tokens;
        match &self.window {
            _ if cache.capacity() < end => Err(ModelError::PoolIsFull),
            Some(window) => window.take(&mut cache.windowed, cache.position..end),
            None => Ok(()),
        }
    }

    /// An empty cache; `None` if all slots are taken.
    ///
    /// # Errors
    /// [`KernelError::Gpu`].
    pub fn cache(&mut self) -> Result<Option<PoolCache>, KernelError> {
        let Some(slot) = self.slots.take() else { return Ok(None) };
        self.restore(slot.number, None)?;
        let windowed = self.no_windows();
        Ok(Some(PoolCache { pages: vec![], windowed, slot: Some(slot), position: 0 }))
    }

    /// Makes room in `cache` for `tokens` tokens in all; false if the pool has too few free pages:
    /// then nothing changes.
    pub fn make_room(&self, cache: &mut PoolCache, tokens: usize) -> bool {
        let missing = tokens.div_ceil(PAGE_TOKENS).saturating_sub(cache.pages.len());
        let mut pages = Vec::with_capacity(missing);
        while pages.len() < missing {
            let Some(page) = self.pages.take() else { return false };
            pages.push(Arc::new(page));
        }
        cache.pages.extend(pages);
        true
    }

    /// A mark for the states after `position` tokens, which a pass then writes
    /// ([`PoolSequence::marks`]).
    ///
    /// # Errors
    /// [`ModelError::PoolIsFull`] when all marks are taken.
    pub fn mark_at(&self, position: usize) -> Result<PoolMark, ModelError> {
        let take = || self.marks.take().map(Arc::new).ok_or(ModelError::PoolIsFull);
        let place = (self.has_states || self.window.is_some()).then(take).transpose()?;
        Ok(PoolMark { position, place, windowed: MarkedPages::default() })
    }

    /// Sets the states in `slot` to those of `mark`, or to those of a sequence that has not begun.
    fn restore(&mut self, slot: u32, mark: Option<&PoolMark>) -> Result<(), KernelError> {
        let mark = mark.and_then(|mark| mark.place.as_ref()).map(|place| place.mark());
        for layers in self.layers.iter_mut().zip(&self.blank) {
            if let (LayerCache::DeltaNet(states), LayerCache::DeltaNet(blank)) = layers {
                states.restore(slot as usize, mark, blank)?;
            }
        }
        Ok(())
    }

    /// Goes back to the first `tokens` tokens, a multiple of 64 or all; `mark` is of this place, in
    /// models with states or windows. Later pages that other sequences read are exchanged for free
    /// ones.
    ///
    /// # Errors
    /// [`KernelError::Gpu`]; [`ModelError::PoolIsFull`] without these, or a slot for a cache that
    /// was parked; [`KernelError::Value`] where a window was given back and is no mark's.
    pub fn go_back(
        &mut self,
        cache: &mut PoolCache,
        tokens: usize,
        mark: Option<&PoolMark>,
    ) -> Result<(), ModelError> {
        let windowed = self.windows_at(&cache.windowed, tokens, mark)?;
        for page in cache.pages.iter_mut().skip(tokens / PAGE_TOKENS) {
            if Arc::strong_count(page) > 1 {
                *page = Arc::new(self.pages.take().ok_or(ModelError::PoolIsFull)?);
            }
        }
        if cache.slot.is_none() {
            cache.slot = Some(self.slots.take().ok_or(ModelError::PoolIsFull)?);
        }
        (cache.position, cache.windowed) = (tokens, windowed);
        let slot = cache.slot()?;
        Ok(mark.map_or(Ok(()), |mark| self.restore(slot, Some(mark)))?)
    }

    /// The pages in layers with a window of a sequence that goes on after the first `tokens`
    /// tokens.
    fn windows_at(
        &self,
        of: &WindowPages,
        tokens: usize,
        mark: Option<&PoolMark>,
    ) -> Result<WindowPages, KernelError> {
        let at = |window: &WindowPool| window.at(of, tokens, mark.map(|mark| &mark.windowed));
        self.window.as_ref().map_or_else(|| Ok(WindowPages::default()), at)
    }

    /// A sequence that goes on from the first `tokens` tokens of `cache`, a multiple of 64, whose
    /// pages both read from now on, and with room for `capacity` tokens. `None` without a free slot
    /// or pages.
    ///
    /// # Errors
    /// [`KernelError::Gpu`]; [`KernelError::Value`] where a window was given back and is no mark's.
    pub fn fork(
        &mut self,
        cache: &PoolCache,
        (tokens, mark): (usize, Option<&PoolMark>),
        capacity: usize,
    ) -> Result<Option<PoolCache>, KernelError> {
        let windowed = self.windows_at(&cache.windowed, tokens, mark)?;
        let Some(slot) = self.slots.take() else { return Ok(None) };
        let pages = cache.pages[..tokens / PAGE_TOKENS].to_vec();
        mark.map_or(Ok(()), |mark| self.restore(slot.number, Some(mark)))?;
        let mut fork = PoolCache { pages, windowed, slot: Some(slot), position: tokens };
        Ok(self.make_room(&mut fork, capacity).then_some(fork))
    }

    pub(crate) fn layers(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// The layer for multi-token prediction.
    pub(crate) fn predictor(&mut self) -> Result<&mut LayerCache, KernelError> {
        self.predictor.as_mut().ok_or_else(|| KernelError::Value {
            op: "guess",
            operand: "pool",
            got: "without the layer for multi-token prediction".into(),
            want: "one that was made with it is wanted".into(),
        })
    }
}

impl Model {
    /// As [`Self::forward`] for a sequence in `pool`, for whose tokens `cache` has room.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`ModelError::PoolIsFull`] without that room.
    pub fn forward_in(
        &self,
        pool: &mut CachePool,
        cache: &mut PoolCache,
        tokens: &[u32],
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        self.forward_batch_in(pool, &mut [PoolSequence { tokens, cache, marks: &[] }], logits)
    }

    /// As [`Self::forward_batch`] for sequences in `pool`, whose caches have room for their tokens:
    /// one pass, in which attention alone goes sequence by sequence. Recurrences stop for marks,
    /// and nothing else does.
    ///
    /// # Errors
    /// As [`Self::forward_batch`]; [`ModelError::PoolIsFull`] without that room;
    /// [`KernelError::Value`] for marks of other places or out of order, and for [`Logits::All`]
    /// with marks before the end. No cache is changed then.
    pub fn forward_batch_in(
        &self,
        pool: &mut CachePool,
        batch: &mut [PoolSequence<'_>],
        logits: Logits,
    ) -> Result<Option<Tensor>, ModelError> {
        self.forward_batch_predicting(pool, batch, logits, None)
    }

    /// The same. A layer for multi-token prediction reads the tokens, too: of the states before
    /// each sequence's first token, `[1, hidden_size]` where they are known, which then are those
    /// of its last token.
    ///
    /// # Errors
    /// As [`Self::forward_batch_in`]; [`KernelError::Value`] for a pool without that layer.
    pub fn forward_batch_predicting(
        &self,
        pool: &mut CachePool,
        batch: &mut [PoolSequence<'_>],
        logits: Logits,
        predictor: Option<(&Predictor, &mut [Option<Tensor>])>,
    ) -> Result<Option<Tensor>, ModelError> {
        self.check_batch(batch.iter().map(|sequence| (sequence.tokens, sequence.cache.position())))?;
        if logits != Logits::None {
            self.check_head()?;
        }
        for PoolSequence { tokens, cache, .. } in &mut *batch {
            pool.make_ready(cache, tokens.len())?;
        }
        let turns = turns(batch)?;
        if turns.len() > 1 && logits == Logits::All {
            // The rows of a sequence are not together then.
            let (got, want) = ("before the end".into(), "none of them is for all logits".into());
            return Err(KernelError::Value { op: "forward", operand: "marks", got, want }.into());
        }
        let step = Step::in_pool(&turns, self.device())?;
        let ids = turns.iter().flatten().flat_map(|span| {
            let PoolSequence { tokens, cache, .. } = &batch[span.sequence];
            &tokens[span.positions.start - cache.position()..span.positions.end - cache.position()]
        });
        let ids: Vec<u32> = ids.copied().collect();
        let ids = Tensor::new(&ids, &[ids.len()], self.device())?;
        let hidden = self.decoder().run_in_pool(&ids, &step, pool.layers())?;
        if let Some((predictor, before)) = predictor {
            let states = self.decoder().normed(&hidden)?.into_tensor();
            predictor.read_in(self, pool, (&ids, &states), (&step, &turns), before)?;
        }
        for PoolSequence { tokens, cache, marks } in batch {
            for mark in *marks {
                // A mark that an earlier pass reached stays as it is.
                let _ = mark.windowed.set(cache.windowed.marked(mark.position));
            }
            cache.advance(tokens.len());
        }
        self.logits_of(&hidden, &step, logits)
    }
}

/// The pieces of each sequence, cut at its marks: the first ones of all, then the second ones.
fn turns(batch: &[PoolSequence<'_>]) -> Result<Vec<Vec<PoolSpan>>, ModelError> {
    let mut turns: Vec<Vec<PoolSpan>> = vec![];
    for (sequence, PoolSequence { tokens, cache, marks }) in batch.iter().enumerate() {
        let (slot, end) = (cache.slot()?, cache.position() + tokens.len());
        let mut start = cache.position();
        let places = marks.iter().map(|mark| (mark.position, mark.place.as_ref().map(|it| it.mark())));
        let last = marks.last().is_none_or(|mark| mark.position != end).then_some((end, None));
        for (turn, (next, mark)) in places.chain(last).enumerate() {
            if next <= start || next > end {
                let (got, want) =
                    (next.to_string(), format!("a place after {start}, up to {end}, is wanted"));
                return Err(KernelError::Value { op: "forward", operand: "marks", got, want }.into());
            }
            let pages = cache.pages().take(next.div_ceil(PAGE_TOKENS)).collect();
            if turns.len() == turn {
                turns.push(vec![]);
            }
            let window = cache.window_pages().map(|pages| SpanWindow {
                pages: pages.take(next.div_ceil(PAGE_TOKENS)).collect(),
                first: cache.windowed.first_seen(start),
            });
            turns[turn].push(PoolSpan { sequence, positions: start..next, pages, window, slot, mark });
            start = next;
        }
    }
    Ok(turns)
}
