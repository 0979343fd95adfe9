//! The rows of a pass over a sequence's last token and those drafted after it.

use crate::tape::{Var, shapes};
use lowbit_kernels::ops::Form;
use lowbit_kernels::{KernelError, Tensor};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// The tokens of one sequence. In tensors, so that a captured pass can be replayed with new ones.
#[derive(Clone, Debug)]
pub struct Span {
    /// Their rows of the pass.
    pub rows: Range<usize>,
    /// u32 `[T]`.
    pub positions: Tensor,
    /// u32 `[0, T]`.
    pub cu_seqlens: Tensor,
    /// Set if they are the sequence's last token and those drafted after it.
    pub(crate) drafts: Option<DraftRows>,
}

/// The sequences of a recurrence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateRows<'a> {
    /// u32 `[S + 1]`: the offsets of the sequences' rows.
    pub cu_seqlens: &'a Tensor,
    /// u32 `[S]`: the sequences' slots, if the states are a pool's.
    pub slots: Option<&'a Tensor>,
    /// The algorithm of the delta rule.
    pub form: Form,
}

impl<'a> StateRows<'a> {
    /// Sequences whose states follow one another.
    pub fn of(cu_seqlens: &'a Tensor) -> Self {
        Self { cu_seqlens, slots: None, form: Form::Auto }
    }
}

/// Rows of one sequence of which each must have the bits of a decode step of its own, although the
/// products take all of them at once. Attention goes row by row, as in a step. A recurrence goes
/// through all rows, token after token, on a copy of its states, and keeps its inputs: nobody knows
/// yet how many of the rows will stay. [`Block::catch_up`](super::Block::catch_up) then moves the
/// states on by the inputs of those that do.
#[derive(Clone, Debug)]
pub(crate) struct DraftRows {
    /// One for each row.
    spans: Vec<Span>,
    inputs: Rc<RefCell<Recurrences>>,
}

/// The inputs of each recurrence of a pass, in the layers' order.
pub(crate) type Recurrences = Vec<Vec<Tensor>>;

impl DraftRows {
    /// Rows at these positions, u32 `[T]`.
    pub fn new(positions: &Tensor) -> Result<Self, KernelError> {
        let cu_seqlens = Tensor::new(&[0u32, 1], &[2], positions.device())?;
        let span = |row: usize| {
            let positions = positions.rows(row, row + 1)?;
            let cu_seqlens = cu_seqlens.clone();
            Ok::<_, KernelError>(Span { rows: row..row + 1, positions, cu_seqlens, drafts: None })
        };
        let spans = (0..positions.len()).map(span).collect::<Result<_, _>>()?;
        Ok(Self { spans, inputs: Rc::default() })
    }

    /// The inputs of recurrences so far.
    pub fn take_inputs(&self) -> Recurrences {
        self.inputs.take()
    }

    /// The results of `mix` for each row of `xs` with the sequence's `cache`, rows joined again.
    pub fn each<C, const N: usize>(
        &self,
        xs: [&Var; N],
        cache: &mut C,
        mut mix: impl FnMut([&Var; N], &Span, &mut C) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        if let [span] = &self.spans[..] {
            return mix(xs, span, cache);
        }
        let ranges: Vec<Range<usize>> = self.spans.iter().map(|span| span.rows.clone()).collect();
        let parts = shapes::each(xs.map(|x| shapes::split_rows(x, &ranges)))?;
        let each = self.spans.iter().enumerate();
        let ys = each.map(|(i, span)| mix(parts.each_ref().map(|x| &x[i]), span, cache));
        shapes::join_rows(&ys.collect::<Result<Vec<_>, _>>()?)
    }

    /// The results of the recurrence `mix` for all rows of `xs`, of which `cu_seqlens` is `[0, T]`.
    /// `states` stay as they are.
    pub fn recurrence<S: Clone, const N: usize>(
        &self,
        xs: [&Var; N],
        cu_seqlens: &Tensor,
        states: &S,
        mut mix: impl FnMut([&Var; N], StateRows<'_>, &mut S) -> Result<Var, KernelError>,
    ) -> Result<Var, KernelError> {
        self.inputs.borrow_mut().push(xs.iter().map(|x| x.tensor().clone()).collect());
        let rows = StateRows { form: Form::Recurrent, ..StateRows::of(cu_seqlens) };
        // The op copies what is shared before it writes.
        mix(xs, rows, &mut states.clone())
    }
}

/// A recurrence's inputs.
pub(super) fn vars<const N: usize>(inputs: &[Tensor]) -> Result<[Var; N], KernelError> {
    let vars: Vec<Var> = inputs.iter().cloned().map(Var::from).collect();
    let got = vars.len();
    vars.try_into().map_err(|_| {
        let (got, want) = (got.to_string(), format!("{N} are wanted"));
        KernelError::Value { op: "catch_up", operand: "inputs", got, want }
    })
}
