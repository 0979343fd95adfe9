//! Multi-token prediction of many sequences whose caches are in one pool: prompts.
//! [`BatchSteps::guess`](crate::BatchSteps::guess) goes on.
//!
//! The layer's keys and values are those of one more layer of the pool, in the same pages. Those at
//! a token's position are of the token and the state before it, so that they depend on no later
//! token, and sequences that share pages share them. A token whose state before it is not known,
//! such as a text's first, has a state of zeros there; and behind steps whose states nobody kept
//! there are gaps. Both make guesses worse, and change no text.

use super::Predictor;
use crate::layers::{PoolSpan, Step};
use crate::{CachePool, Model};
use lowbit_kernels::ops;
use lowbit_kernels::{KernelError, Tensor};

impl Predictor {
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
