//! Reverse-mode differentiation of a model's forward pass.
//!
//! Layers compute with [`Var`]s, by the functions of [`ops`]. A `Var` that no tape recorded is a
//! tensor and nothing else, and these functions then call the op of the same name in
//! [`lowbit_kernels::ops`]: generation runs through the same layers as training. One that a
//! [`Tape`] recorded knows its slot there, and every op that reads it appends a record: the slots
//! of its results, and a rule that makes its operands' gradients of theirs. [`Tape::backward`]
//! calls the rules from the last to the first.
//!
//! The tape is told the parameters whose gradients are wanted by name ([`Parameters`]), with the
//! values to compute with. So the model itself never changes while it is trained.

mod attention;
pub mod ops;
mod parameters;
pub(crate) mod shapes;

pub(crate) use attention::{Heads, attention, attention_in_pool, attention_to_cached, attention_to_pool};
pub(crate) use parameters::Weight;
pub use parameters::{Inventory, Named, Parameter, Parameters};

use lowbit_formats::DType;
use lowbit_kernels::ops::WeightGradient;
use lowbit_kernels::{KernelError, Tensor, ops as kernels};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// A tensor of a forward pass, and its slot on a tape where one records.
#[derive(Clone, Debug)]
pub struct Var {
    tensor: Tensor,
    source: Option<(Tape, usize)>,
}

/// The slot of a value whose gradient is wanted. Rules keep slots instead of [`Var`]s, which would
/// keep the tape that keeps the rules.
pub(crate) type Slot = Option<usize>;

/// Makes the operands' gradients of the results', which are `None` where nothing that was
/// differentiated read them.
type Rule = Box<dyn FnOnce(Vec<Option<Tensor>>, &mut Gradients) -> Result<(), KernelError>>;

/// A recording of one forward pass. Clones are handles to the same one.
#[derive(Clone)]
pub struct Tape(Rc<Recording>);

/// The part of a forward pass that a tape keeps for its gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The values that each op's gradient needs.
    Ops,
    /// The inputs of each block of the model, and the values that ops outside of blocks need. The
    /// backward pass computes a block again, once its turn comes: one more forward pass for the
    /// memory of one block.
    ///
    /// Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    Blocks,
    /// Nothing: the pass computes with the parameters, and has no gradients.
    Nothing,
}

struct Recording {
    kept: Kept,
    parameters: Rc<Parameters>,
    records: RefCell<Vec<(Range<usize>, Rule)>>,
    /// The type of the value in each slot, which its gradient has too.
    slots: RefCell<Vec<DType>>,
}

/// The sums of a backward pass so far, and its result.
#[derive(Debug, Default)]
pub struct Gradients {
    slots: Vec<Option<Tensor>>,
    dtypes: Vec<DType>,
    parameters: HashMap<Arc<str>, WeightGradient>,
}

impl Var {
    /// Its value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Its value, without what is recorded of it.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// Size `i`, counted from the end where it is negative.
    pub fn dim(&self, i: isize) -> usize {
        self.tensor.dim(i)
    }

    pub(crate) fn tape(&self) -> Option<&Tape> {
        self.source.as_ref().map(|(tape, _)| tape)
    }

    pub(crate) fn slot(&self) -> Slot {
        self.source.as_ref().map(|(_, slot)| *slot)
    }
}

impl AsRef<Tensor> for Var {
    fn as_ref(&self) -> &Tensor {
        &self.tensor
    }
}

/// A constant: nothing records what is computed of it alone.
impl From<Tensor> for Var {
    fn from(tensor: Tensor) -> Self {
        Self { tensor, source: None }
    }
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({} records)", self.0.records.borrow().len())
    }
}

impl Tape {
    /// An empty recording, which computes with these parameters.
    pub fn new(parameters: Rc<Parameters>) -> Self {
        Self::keeping(Kept::Ops, parameters)
    }

    /// The same, which keeps no more than this.
    pub fn keeping(kept: Kept, parameters: Rc<Parameters>) -> Self {
        let (records, slots) = Default::default();
        Self(Rc::new(Recording { kept, parameters, records, slots }))
    }

    /// The part of the pass that it keeps.
    pub(crate) fn kept(&self) -> Kept {
        self.0.kept
    }

    /// A value that the pass begins with, and whose gradient is wanted.
    pub fn leaf(&self, tensor: Tensor) -> Var {
        let slots = self.take_slots([tensor.dtype()]);
        Var { tensor, source: Some((self.clone(), slots.start)) }
    }

    pub(crate) fn parameters(&self) -> &Rc<Parameters> {
        &self.0.parameters
    }

    /// Appends an op with these results.
    pub(crate) fn record<const N: usize>(
        &self,
        results: [Tensor; N],
        rule: impl FnOnce([Option<Tensor>; N], &mut Gradients) -> Result<(), KernelError> + 'static,
    ) -> [Var; N] {
        let rule = |dys: Vec<Option<Tensor>>, gradients: &mut Gradients| {
            rule(dys.try_into().expect("one for each result"), gradients)
        };
        let results = self.record_all(results.into(), rule);
        results.try_into().expect("one for each result")
    }

    /// Appends an op with one result.
    pub(crate) fn record_one(
        &self,
        result: Tensor,
        rule: impl FnOnce(&Tensor, &mut Gradients) -> Result<(), KernelError> + 'static,
    ) -> Var {
        let [result] = self.record([result], |[dy], gradients| dy.map_or(Ok(()), |dy| rule(&dy, gradients)));
        result
    }

    /// Appends an op with any number of results.
    pub(crate) fn record_all(
        &self,
        results: Vec<Tensor>,
        rule: impl FnOnce(Vec<Option<Tensor>>, &mut Gradients) -> Result<(), KernelError> + 'static,
    ) -> Vec<Var> {
        let slots = self.take_slots(results.iter().map(Tensor::dtype));
        if self.0.kept != Kept::Nothing {
            self.0.records.borrow_mut().push((slots.clone(), Box::new(rule)));
        }
        let recorded = results.into_iter().zip(slots);
        recorded.map(|(tensor, slot)| Var { tensor, source: Some((self.clone(), slot)) }).collect()
    }

    fn take_slots(&self, dtypes: impl IntoIterator<Item = DType>) -> Range<usize> {
        let mut slots = self.0.slots.borrow_mut();
        let start = slots.len();
        slots.extend(dtypes);
        start..slots.len()
    }

    /// The gradients of the sum of `value * dy` over `seeds`, by all leaves and parameters. The
    /// recording is empty afterwards: each rule frees what it kept of the forward pass.
    ///
    /// # Errors
    /// Those of the ops' gradients.
    ///
    /// # Panics
    /// When it keeps [`Kept::Nothing`].
    pub fn backward(&self, seeds: &[(&Var, &Tensor)]) -> Result<Gradients, KernelError> {
        assert!(self.0.kept != Kept::Nothing, "this tape keeps nothing that gradients are made of");
        let dtypes = self.0.slots.borrow().clone();
        let mut gradients = Gradients { slots: vec![None; dtypes.len()], dtypes, ..Gradients::default() };
        for (value, dy) in seeds {
            gradients.add(value.slot(), (*dy).clone())?;
        }
        let records = self.0.records.take();
        for (results, rule) in records.into_iter().rev() {
            let dys: Vec<_> = gradients.slots[results].iter_mut().map(Option::take).collect();
            if dys.iter().any(Option::is_some) {
                rule(dys, &mut gradients)?;
            }
        }
        Ok(gradients)
    }
}

impl Gradients {
    /// Adds to the gradient of a value, in the value's type: a product of 16-bit values has
    /// gradients that are products of such values.
    pub(crate) fn add(&mut self, slot: Slot, gradient: Tensor) -> Result<(), KernelError> {
        let Some(slot) = slot else { return Ok(()) };
        let gradient = gradient.cast(self.dtypes[slot])?;
        let sum = match self.slots[slot].take() {
            Some(sum) => kernels::add(&sum, &gradient)?,
            None => gradient,
        };
        self.slots[slot] = Some(sum);
        Ok(())
    }

    /// Adds to the gradient of a parameter.
    pub(crate) fn add_parameter(
        &mut self,
        name: &Arc<str>,
        gradient: WeightGradient,
    ) -> Result<(), KernelError> {
        match self.parameters.get_mut(name) {
            Some(sum) => sum.add(&gradient),
            None => {
                self.parameters.insert(name.clone(), gradient);
                Ok(())
            }
        }
    }

    /// Adds to the gradient of a weight, if it is a parameter.
    fn add_weight(&mut self, weight: &Weight, gradient: Option<WeightGradient>) -> Result<(), KernelError> {
        gradient.map_or(Ok(()), |gradient| self.add_parameter(&weight.name, gradient))
    }

    /// Adds to the gradient of a tensor, if it is a parameter.
    pub(crate) fn add_tensor(
        &mut self,
        name: Option<&Arc<str>>,
        gradient: Tensor,
    ) -> Result<(), KernelError> {
        name.map_or(Ok(()), |name| self.add_parameter(name, WeightGradient::Values(gradient)))
    }

    /// Adds those of all of `other`'s parameters.
    ///
    /// # Errors
    /// As [`WeightGradient::add`].
    pub fn merge(&mut self, other: Self) -> Result<(), KernelError> {
        other.parameters.into_iter().try_for_each(|(name, gradient)| self.add_parameter(&name, gradient))
    }

    /// The gradient of a leaf, if anything depended on it.
    pub fn of(&self, leaf: &Var) -> Option<&Tensor> {
        self.slots[leaf.slot()?].as_ref()
    }

    /// The gradients of the parameters that anything depended on, by name.
    pub fn parameters(&self) -> &HashMap<Arc<str>, WeightGradient> {
        &self.parameters
    }
}
