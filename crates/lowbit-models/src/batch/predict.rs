//! Guesses of a layer for multi-token prediction.

use super::passes::Passes;
use super::rows::Rows;
use super::{BatchSteps, bucket};
use crate::{CachePool, Model, ModelError, PoolCache, Predictor};
use lowbit_kernels::ops::{self, RowText, SampleKind, SampleParams};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::cmp::Reverse;

/// A text whose next tokens are guessed.
#[derive(Debug)]
pub struct MtpRow<'a> {
    /// The caches of all its tokens but the last.
    pub cache: &'a PoolCache,
    /// All its tokens.
    pub text: &'a [u32],
    /// `[m, hidden_size]`: the states before its last m tokens, which the layer has not seen.
    pub states: Tensor,
    /// The guesses that are wanted, for which the cache has room.
    pub most: usize,
}

/// The rows of the layer's passes. Those of a pass that nobody wants any more run on: they write to
/// their own later places, or to page 0.
#[derive(Debug)]
pub(super) struct MtpBatch {
    /// Tokens that the layer has not seen; several may be of one text.
    unseen: Rows,
    /// The states before them.
    before: States,
    /// u32 `[texts]`: the last of these rows of each text.
    ends: Tensor,
    /// The last token of each text, then the last guess.
    guessed: Rows,
    /// The states before the next guesses.
    states: States,
    /// u32, zeros: the layer has no recurrence.
    none: Tensor,
    passes: Passes<Pass, ()>,
}

/// The kind of a pass, in which rows and texts that are nobody's fill up the buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pass {
    /// Over tokens that the layer has not seen, `rows` of `texts` texts.
    Unseen { rows: usize, texts: usize },
    /// Over the last guess of so many texts.
    Guessed(usize),
}

/// States in memory that stays.
#[derive(Debug)]
struct States {
    /// `[1, rows, hidden_size]`.
    states: Tensor,
    /// u32 `[rows]`: 0, 1, 2, ..
    places: Tensor,
}

impl States {
    /// Room for `rows` of them, zeros of the type of `like`.
    fn new(rows: usize, like: &Tensor) -> Result<Self, KernelError> {
        let (places, device): (Vec<u32>, _) = ((0..rows as u32).collect(), like.device());
        let states = Tensor::allocate_zeros(&[1, rows, like.dim(1)], like.dtype(), device)?;
        Ok(Self { states, places: Tensor::new(&places, &[rows], device)? })
    }

    /// The first `count`, `[count, hidden_size]`.
    fn first(&self, count: usize) -> Result<Tensor, KernelError> {
        self.states.reshape(&self.states.shape()[1..])?.rows(0, count)
    }

    /// Overwrites the first ones by `new`, `[n, hidden_size]`.
    fn write(&mut self, new: &Tensor) -> Result<(), KernelError> {
        let count = new.dim(0);
        let new = new.reshape(&[count, 1, new.dim(1)])?;
        ops::kv_append(&mut self.states, &new, &self.places.rows(0, count)?)
    }
}

impl MtpBatch {
    /// For states like these.
    fn new(of: &BatchSteps, like: &Tensor, device: &Device) -> Result<Self, KernelError> {
        // Rows of the widest pass; guesses may reach beyond the context.
        let (rows, texts, columns) = (bucket(usize::MAX), of.capacity(), of.known.shape()[1] + 1);
        let zeros = |count: usize| Tensor::new(&vec![0u32; count], &[count], device);
        let known = |rows| Rows::new([rows, columns], 0, false, device);
        Ok(Self {
            unseen: known(rows)?,
            before: States::new(rows, like)?,
            ends: zeros(texts)?,
            guessed: known(texts)?,
            states: States::new(texts, like)?,
            none: zeros(rows + 1)?,
            passes: Passes::default(),
        })
    }

    /// As [`BatchSteps::captures`].
    pub fn captures(&self) -> usize {
        self.passes.captures
    }

    /// Tells the device these texts and the tokens that the layer has not seen. Returns the first
    /// pass, which is over them.
    fn update(&mut self, texts: &[&MtpRow<'_>]) -> Result<Pass, KernelError> {
        let (greedy, mut unseen, mut last, mut ends) = (SampleParams::default(), vec![], vec![], vec![]);
        for (place, row) in texts.iter().enumerate() {
            let length = row.text.len();
            for length in length + 1 - row.states.dim(0)..=length {
                self.unseen.write_pages(unseen.len(), row.cache)?;
                unseen.push(end_of(row.text, length, &greedy));
            }
            self.guessed.write_pages(place, row.cache)?;
            last.push(end_of(row.text, length, &greedy));
            ends.push(unseen.len() as u32 - 1);
        }
        let (rows, count) = (bucket(unseen.len()), bucket(texts.len()));
        self.unseen.state.set_rows(0, &unseen)?;
        (unseen.len()..rows).try_for_each(|row| self.unseen.clear(row))?;
        self.guessed.state.set_rows(0, &last)?;
        (last.len()..count).try_for_each(|row| self.guessed.clear(row))?;
        ends.resize(count, 0);
        self.ends.write_at(0, &ends)?;
        let states: Vec<Tensor> = texts.iter().map(|row| row.states.clone()).collect();
        self.before.write(&ops::concat_rows(&states)?)?;
        Ok(Pass::Unseen { rows, texts: count })
    }

    /// As [`BatchSteps::guess`].
    fn guess_all(
        &mut self,
        of: (&Model, &Predictor),
        pool: &mut CachePool,
        rows: &[MtpRow<'_>],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        // Those that want most come first: each pass has the first ones.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&row| Reverse(rows[row].most));
        let (mut guesses, mut order) = (vec![vec![]; rows.len()], &order[..]);
        while !order.is_empty() {
            let (most, mut unseen) = (self.unseen.shape()[0], 0);
            let fits = |&&row: &&usize| {
                unseen += rows[row].states.dim(0);
                unseen <= most
            };
            let (first, rest) = order.split_at(order.iter().take_while(fits).count().max(1));
            let texts: Vec<&MtpRow<'_>> = first.iter().map(|&row| &rows[row]).collect();
            let of_texts = self.guess(of, pool, &texts)?;
            first.iter().zip(of_texts).for_each(|(&row, of_text)| guesses[row] = of_text);
            order = rest;
        }
        Ok(guesses)
    }

    /// Up to as many guesses of each text as it wants; those that want most come first.
    fn guess(
        &mut self,
        (model, predictor): (&Model, &Predictor),
        pool: &mut CachePool,
        texts: &[&MtpRow<'_>],
    ) -> Result<Vec<Vec<u32>>, KernelError> {
        let wanted = |guesses: usize| texts.iter().take_while(|row| row.most >= guesses).count();
        let (mut pass, mut coming) = (self.update(texts)?, vec![]);
        for guesses in 1.. {
            let mut passes = std::mem::take(&mut self.passes);
            let ran = passes.run(pass, model.device(), || self.record((model, predictor), pool, pass));
            self.passes = passes;
            self.passes.keep(ran?);
            if wanted(guesses) > 0 {
                coming.push(self.guessed.state.drawn(0..wanted(guesses))?);
            }
            match wanted(guesses + 1) {
                0 => break,
                count => pass = Pass::Guessed(bucket(count)),
            }
        }
        let mut guesses = vec![vec![]; texts.len()];
        for drawn in coming {
            // A row without a likeliest token has no guess.
            guesses.iter_mut().zip(drawn.wait()?).for_each(|(guesses, id)| guesses.extend(id.ok()));
        }
        Ok(guesses)
    }

    /// Runs the layer on the rows of a pass, and draws the likeliest tokens after them, which
    /// become those of `guessed`.
    fn record(
        &mut self,
        (model, predictor): (&Model, &Predictor),
        pool: &mut CachePool,
        pass: Pass,
    ) -> Result<(), KernelError> {
        let (known, before, rows) = match pass {
            Pass::Unseen { rows, .. } => (&self.unseen, &self.before, rows),
            Pass::Guessed(rows) => (&self.guessed, &self.states, rows),
        };
        let none = [self.none.rows(0, rows)?, self.none.rows(0, rows + 1)?];
        let (ids, step) = (known.ids(rows)?, known.step(rows, none.each_ref())?);
        let layers = &mut [pool.predictor()?];
        let states = predictor.layer(model, (&ids, &before.first(rows)?), &step, layers)?;
        let states = match pass {
            Pass::Guessed(_) => states,
            Pass::Unseen { texts, .. } => {
                let all = states.reshape(&[1, rows, states.dim(1)])?;
                ops::kv_gather(&all, &self.ends.rows(0, texts)?)?.reshape(&[texts, states.dim(1)])?
            }
        };
        self.states.write(&states)?;
        let logits = model.decoder().head().forward_f32(&states.into())?.into_tensor();
        ops::sample_rows(&logits, &mut self.guessed.state, SampleKind::default())
    }
}

/// The first `length` tokens of a text.
fn end_of<'a>(text: &'a [u32], length: usize, params: &'a SampleParams) -> RowText<'a> {
    RowText { tokens: &text[length - 1..length], length, step: 0, params, window: 0 }
}

impl BatchSteps {
    /// Runs the last tokens of these texts that the layer has not seen, and guesses: for each up to
    /// as many tokens as it wants. On a GPU passes are captured and replayed, as steps are.
    ///
    /// # Errors
    /// Those of the ops; [`KernelError::Value`] for a pool without
    /// [this layer](CachePool::with_predictor).
    ///
    /// # Panics
    /// For more rows than [`Self::capacity`].
    pub fn guess(
        &mut self,
        (model, predictor): (&Model, &Predictor),
        pool: &mut CachePool,
        rows: &[MtpRow<'_>],
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        let Some(first) = rows.first() else { return Ok(vec![]) };
        let mut batch = match self.predicted.take() {
            Some(batch) => batch,
            None => MtpBatch::new(self, &first.states, model.device())?,
        };
        let result = batch.guess_all((model, predictor), pool, rows);
        if result.is_err() {
            // Nobody knows how far it came.
            batch.passes.clear();
        }
        self.predicted = Some(batch);
        Ok(result?)
    }
}
