//! The states of recurrences: gated delta nets, Mamba-2, short convolutions.

use lowbit_formats::DType;
use lowbit_kernels::{Device, KernelError, Tensor, ops};

/// A gated delta net's or a Mamba-2 layer's state: the convolution's last inputs, f32
/// `[S, C, W - 1]`, and the recurrence's matrix, f32 `[S, Hv, Dk, Dv]`. In a
/// [`Cache`](crate::Cache), which is one sequence's, S is 1. A short convolution has the first
/// alone, and the second without values.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaCache {
    pub conv: Tensor,
    pub state: Tensor,
    /// In a pool, `[marks, ..]` for each of the two that has values: states that are kept.
    pub(crate) marked: Vec<Tensor>,
}

impl DeltaCache {
    /// Of a convolution, `[S, C, W - 1]`, and of a recurrence, `[S, Hv, Dk, Dv]`.
    pub(crate) fn of_sizes(
        conv: [usize; 3],
        state: [usize; 4],
        device: &Device,
    ) -> Result<Self, KernelError> {
        Ok(Self {
            conv: Tensor::allocate_zeros(&conv, DType::F32, device)?,
            state: Tensor::allocate_zeros(&state, DType::F32, device)?,
            marked: vec![],
        })
    }

    /// A short convolution's, `[S, C, W - 1]`.
    pub(crate) fn of_convolution(conv: [usize; 3], device: &Device) -> Result<Self, KernelError> {
        Self::of_sizes(conv, [conv[0], 0, 0, 0], device)
    }

    /// Of a pool's: copies of the states in these slots, u32 `[S]`, one after the other.
    pub(crate) fn copied(&self, slots: &Tensor) -> Result<Self, KernelError> {
        let copy = |states: &Tensor| {
            let shape = [&[slots.len()], &states.shape()[1..]].concat();
            if states.is_empty() {
                return Tensor::allocate_zeros(&shape, states.dtype(), states.device());
            }
            // A state is a row of a cache with one head.
            let (count, row) = (states.dim(0), states.len() / states.dim(0));
            ops::kv_gather(&states.reshape(&[1, count, row])?, slots)?.reshape(&shape)
        };
        Ok(Self { conv: copy(&self.conv)?, state: copy(&self.state)?, marked: vec![] })
    }

    /// Of a pool's: copies the states in these slots to these marks.
    pub(crate) fn mark(&mut self, marks: &[(usize, usize)]) -> Result<(), KernelError> {
        let Self { conv, state, marked } = self;
        let states = [&*conv, &*state].into_iter().filter(|tensor| !tensor.is_empty());
        for (states, marked) in states.zip(marked) {
            marks.iter().try_for_each(|&(slot, mark)| ops::copy_rows(states, slot, marked, mark))?;
        }
        Ok(())
    }

    /// Of a pool's: sets the states in `slot` to those of a mark, or to zero.
    pub(crate) fn restore(
        &mut self,
        slot: usize,
        mark: Option<usize>,
        blank: &Self,
    ) -> Result<(), KernelError> {
        let Self { conv, state, marked } = self;
        let blank = [&blank.conv, &blank.state];
        let states = [conv, state].into_iter().zip(blank).filter(|(tensor, _)| !tensor.is_empty());
        for (index, (states, blank)) in states.enumerate() {
            match mark {
                Some(mark) => ops::copy_rows(&marked[index], mark, states, slot)?,
                None => ops::copy_rows(blank, 0, states, slot)?,
            }
        }
        Ok(())
    }
}
