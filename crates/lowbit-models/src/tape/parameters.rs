use super::Tape;
use lowbit_kernels::ops::WeightPart;
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// Something of a checkpoint, by the name that it has there: for a module's weight, without
/// `.weight`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Named<T> {
    pub name: Arc<str>,
    pub value: T,
}

impl AsRef<Tensor> for Named<Tensor> {
    fn as_ref(&self) -> &Tensor {
        &self.value
    }
}

/// A parameter whose gradient is wanted, with the value to compute with: the model's own is not
/// read.
#[derive(Clone, Debug)]
pub enum Parameter {
    /// A part of a weight: scales and biases, or all values, where a latent weight is rounded to
    /// this one, straight through.
    Weight(QuantizedTensor, WeightPart),
    /// A norm's weight, a bias, a convolution: f32.
    Tensor(Tensor),
}

impl Parameter {
    /// The same on another device.
    ///
    /// # Errors
    /// As [`QuantizedTensor::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        match self {
            Self::Weight(weight, part) => Ok(Self::Weight(weight.to_device(device)?, *part)),
            Self::Tensor(tensor) => tensor.to_device(device).map(Self::Tensor),
        }
    }
}

/// By name.
pub type Parameters = HashMap<Arc<str>, Parameter>;

/// A weight as a tape computes with it.
#[derive(Clone)]
pub(crate) struct Weight {
    pub name: Arc<str>,
    pub value: QuantizedTensor,
    /// The gradient that is wanted.
    pub wanted: Option<WeightPart>,
}

impl<T> Named<T> {
    /// Something else of the same name.
    pub fn with<U>(&self, value: U) -> Named<U> {
        Named { name: self.name.clone(), value }
    }
}

/// Everything of a model that has a name and can be a parameter. Clones share memory with the
/// model.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// Embeddings, linear layers and experts, each once.
    pub weights: Vec<Named<QuantizedTensor>>,
    /// Norms, biases and what gated delta nets have besides.
    pub tensors: Vec<Named<Tensor>>,
}

impl Weight {
    /// `weight`, unless it is one of `parameters`.
    pub(crate) fn of(parameters: &Parameters, weight: &Named<QuantizedTensor>) -> Self {
        let (value, wanted) = match parameters.get(&weight.name) {
            Some(Parameter::Weight(value, part)) => (value, Some(*part)),
            _ => (&weight.value, None),
        };
        Self { name: weight.name.clone(), value: value.clone(), wanted }
    }
}

impl Tape {
    /// The weight to compute with.
    pub(super) fn weight(&self, weight: &Named<QuantizedTensor>) -> Weight {
        Weight::of(self.parameters(), weight)
    }

    /// The tensor to compute with; it has a name if its gradient is wanted.
    pub(super) fn tensor(&self, tensor: &Named<Tensor>) -> (Tensor, Option<Arc<str>>) {
        match self.parameters().get(&tensor.name) {
            Some(Parameter::Tensor(value)) => (value.clone(), Some(tensor.name.clone())),
            _ => (tensor.value.clone(), None),
        }
    }
}
