//! The places of a forward pass's tokens, and the order in which their states are computed.

use super::verify::{DraftRows, Recurrences, Span, StateRows};
use crate::cache::{DeltaCache, LayerCache, PagedRows, PagedWindow};
use crate::tape::{Tape, Var, shapes};
use lowbit_kernels::ops::Form;
use lowbit_kernels::{Device, KernelError, Tensor, ops};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// The error for a cache that another kind of layer made.
pub fn wrong_cache() -> KernelError {
    let (got, want) = ("of another kind".to_string(), "each layer made its own".to_string());
    KernelError::Value { op: "block", operand: "cache", got, want }
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
    pub(super) fn ends(&self) -> impl Iterator<Item = usize> {
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
