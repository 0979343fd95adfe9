//! Multi-token prediction of many sequences whose caches are in one pool.
//!
//! The layer's keys and values are those of one more layer of the pool, in the same pages. Those at
//! a token's position are of the token and the state before it, so that they depend on no later
//! token, and sequences that share pages share them. A token whose state before it is not known,
//! such as a text's first, has a state of zeros there; and behind steps whose states nobody kept
//! there are gaps. Both make guesses worse, and change no text.

use super::Predictor;
use crate::layers::{PoolSpan, Step};
use crate::{CachePool, Model, ModelError, PoolCache};
use lowbit_kernels::ops::{self, DecodeBatch, SampleParams};
use lowbit_kernels::{KernelError, Tensor};
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

/// Rows of a pass of the layer: tokens, their positions, and the pages of their texts.
#[derive(Default)]
struct Rows {
    ids: Vec<u32>,
    positions: Vec<u32>,
    pages: Vec<u32>,
}

impl Rows {
    /// A step over the rows.
    fn step(&self, positions: &Tensor, columns: usize) -> Result<Step, KernelError> {
        let (rows, device) = (positions.len(), positions.device());
        let table = Tensor::new(&self.pages, &[rows, columns], device)?;
        // The layer has no recurrence.
        let none = |count: usize| Tensor::new(&vec![0u32; count], &[count], device);
        let (slots, cu_seqlens) = (none(rows)?, none(rows + 1)?);
        Ok(Step::rows(positions.clone(), (table, None), slots, cu_seqlens))
    }
}

impl Predictor {
    /// Runs the last tokens of these texts that the layer has not seen, and guesses: for each up to
    /// as many tokens as it wants.
    ///
    /// # Errors
    /// Those of the ops; [`KernelError::Value`] for a pool without
    /// [this layer](CachePool::with_predictor).
    pub fn guess_in(
        &self,
        model: &Model,
        pool: &mut CachePool,
        rows: &[MtpRow<'_>],
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        if rows.is_empty() {
            return Ok(vec![]);
        }
        // Those that want most come first: each pass has the first ones.
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&row| Reverse(rows[row].most));
        let sorted: Vec<&MtpRow<'_>> = order.iter().map(|&row| &rows[row]).collect();
        let mut guesses = vec![vec![]; rows.len()];
        for drawn in self.passes(model, pool, &sorted)? {
            for (&row, id) in order.iter().zip(drawn.wait()?) {
                // A row without a likeliest token has no guess.
                if guesses[row].len() < rows[row].most {
                    guesses[row].extend(id.ok());
                }
            }
        }
        Ok(guesses)
    }

    /// The guesses of each pass.
    fn passes(
        &self,
        model: &Model,
        pool: &mut CachePool,
        rows: &[&MtpRow<'_>],
    ) -> Result<Vec<ops::DrawnRows>, ModelError> {
        let device = model.device();
        let columns = rows.iter().map(|row| row.cache.pages().len()).max().unwrap_or(0).max(1);
        let pages = |row: &MtpRow<'_>| {
            let mut pages: Vec<u32> = row.cache.pages().collect();
            pages.resize(columns, 0);
            pages
        };
        let (mut all, mut ends) = (Rows::default(), vec![]);
        for row in rows {
            let (count, length) = (row.states.dim(0), row.text.len());
            all.ids.extend(&row.text[length - count..]);
            all.positions.extend((length - count..length).map(|position| position as u32));
            (0..count).for_each(|_| all.pages.extend(pages(row)));
            ends.push(all.ids.len() as u32 - 1);
        }
        let new = |words: &[u32]| Tensor::new(words, &[words.len()], device);
        let step = all.step(&new(&all.positions)?, columns)?;
        let states: Vec<Tensor> = rows.iter().map(|row| row.states.clone()).collect();
        let states = ops::concat_rows(&states)?;
        let states = self.layer(model, (&new(&all.ids)?, &states), &step, &mut [pool.predictor()?])?;
        let states = ops::kv_gather(&states.reshape(&[1, states.dim(0), states.dim(1)])?, &new(&ends)?)?;
        let mut states = states.reshape(&[rows.len(), states.dim(2)])?;

        let mut batch = DecodeBatch::new(rows.len(), 0, device)?;
        for (place, row) in rows.iter().enumerate() {
            batch.set_row(place, row.text, 0, &SampleParams::default(), 0)?;
        }
        let mut drawn = vec![self.drawn(model, &states, &mut batch)?];
        for guesses in 1..rows[0].most {
            let count = rows.iter().take_while(|row| row.most > guesses).count();
            let pages = rows[..count].iter().flat_map(|row| pages(row)).collect();
            let step = Rows { pages, ..Rows::default() }.step(&batch.positions().rows(0, count)?, columns)?;
            let ids = batch.tokens().rows(0, count)?;
            let before = states.rows(0, count)?;
            states = self.layer(model, (&ids, &before), &step, &mut [pool.predictor()?])?;
            drawn.push(self.drawn(model, &states, &mut batch)?);
        }
        Ok(drawn)
    }

    /// The likeliest tokens after these states, which become those of the batch.
    fn drawn(
        &self,
        model: &Model,
        states: &Tensor,
        batch: &mut DecodeBatch,
    ) -> Result<ops::DrawnRows, KernelError> {
        let logits = model.decoder().head().forward_f32(&states.clone().into())?.into_tensor();
        let kind = batch.kind(0..states.dim(0));
        ops::sample_rows(&logits, batch, kind)?;
        batch.drawn(0..states.dim(0))
    }

    /// Runs the layer over the tokens of a pass over prompts, whose `states` behind the last norm
    /// are `[T, hidden_size]`. `before` has the states before the sequences' first tokens, if they
    /// are known, and then those of their last ones.
    pub(crate) fn read_in(
        &self,
        model: &Model,
        pool: &mut CachePool,
        (ids, states): (&Tensor, &Tensor),
        (step, spans): (&Step, &[Vec<PoolSpan>]),
        before: &mut [Option<Tensor>],
    ) -> Result<(), KernelError> {
        let (mut parts, mut row) = (vec![], 0);
        for span in spans.iter().flatten() {
            let last = row + span.positions.len() - 1;
            let one = [1, states.dim(1)];
            parts.push(match before[span.sequence].take() {
                Some(state) => state,
                None => Tensor::allocate_zeros(&one, states.dtype(), states.device())?,
            });
            if last > row {
                parts.push(states.rows(row, last)?);
            }
            let mut state = Tensor::allocate(&one, states.dtype(), states.device())?;
            ops::copy_rows(states, last, &mut state, 0)?;
            before[span.sequence] = Some(state);
            row = last + 1;
        }
        let states = ops::concat_rows(&parts)?;
        self.layer(model, (ids, &states), step, &mut [pool.predictor()?]).map(drop)
    }
}
