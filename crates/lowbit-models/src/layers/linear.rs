use crate::names::EMBED_TOKENS;
use crate::weights::Placement;
use crate::{ModelError, Weights};
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{self, AddRmsNorm, Input};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

/// `y = x W^T + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Arc<QuantizedTensor>,
    bias: Option<Tensor>,
}

impl Linear {
    /// `weight` is `[N, K]`, `bias` `[N]`.
    pub fn new(weight: QuantizedTensor, bias: Option<Tensor>) -> Self {
        Self { weight: Arc::new(weight), bias }
    }

    /// The weight, if there is no bias.
    pub(super) fn weight(&self) -> Option<&QuantizedTensor> {
        self.bias.is_none().then_some(&self.weight)
    }

    /// `[.., K]` to `[.., N]`.
    ///
    /// # Errors
    /// As [`ops::quantized_matmul()`].
    pub fn forward<'a>(&self, x: impl Into<Input<'a>>) -> Result<Tensor, KernelError> {
        self.biased(ops::quantized_matmul(x, &self.weight)?)
    }

    /// `[.., K]` of any activation type to f32 `[.., N]`, without rounding to that type: for logits.
    ///
    /// # Errors
    /// As [`ops::quantized_matmul()`].
    pub fn forward_f32<'a>(&self, x: impl Into<Input<'a>>) -> Result<Tensor, KernelError> {
        self.biased(ops::quantized_matmul_to(x, &self.weight, FloatType::F32)?)
    }

    fn biased(&self, y: Tensor) -> Result<Tensor, KernelError> {
        match &self.bias {
            Some(bias) => ops::add(&y, bias),
            None => Ok(y),
        }
    }
}

/// Linear layers that read the same input. On a GPU their weights are concatenated where they have one format, so that
/// a single token takes one product instead of `N`.
#[derive(Clone, Debug)]
pub struct MergedLinear<const N: usize> {
    parts: [Linear; N],
    whole: Option<Arc<QuantizedTensor>>,
}

impl<const N: usize> MergedLinear<N> {
    /// Moves `parts`, which are on the CPU, to their place.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left or fails.
    pub(crate) fn new(parts: [Linear; N], placement: Placement<'_>) -> Result<Self, KernelError> {
        let device = placement.device;
        let mut moved = Vec::with_capacity(N);
        for part in parts {
            let bias = part.bias.map(|bias| bias.to_device(device)).transpose()?;
            moved.push(Linear::new(placement.weight(&part.weight)?, bias));
        }
        let format = moved[0].weight.format();
        let alike = moved.iter().all(|part| part.bias.is_none() && part.weight.format() == format);
        // Results start at 16 bytes, so that kernels can load whole vectors of them.
        let aligned = moved[..N - 1].iter().all(|part| part.weight.n().is_multiple_of(8));
        let mut whole = None;
        if matches!(device, Device::Gpu(_)) && alike && aligned {
            let weights: Vec<&QuantizedTensor> = moved.iter().map(|part| &*part.weight).collect();
            let joined = QuantizedTensor::concat(&weights)?;
            let mut start = 0;
            for part in &mut moved {
                let end = start + part.weight.n();
                *part = Linear::new(joined.slice(start, end)?, None);
                start = end;
            }
            whole = Some(Arc::new(joined));
        }
        Ok(Self { parts: moved.try_into().expect("as many as there were"), whole })
    }

    /// The layers.
    pub(super) fn parts(&self) -> &[Linear; N] {
        &self.parts
    }

    /// `[T, K]` to `[T, N]` of each.
    ///
    /// # Errors
    /// As [`ops::quantized_matmul()`].
    pub fn forward(&self, x: &Tensor) -> Result<[Tensor; N], KernelError> {
        match &self.whole {
            Some(whole) if x.dim(0) == 1 => self.split(ops::quantized_matmul(x, whole)?),
            _ => {
                let products =
                    ops::quantized_matmul_each(x, &self.parts.each_ref().map(|part| &*part.weight))?;
                let parts = self.parts.iter().zip(products);
                let results: Vec<_> = parts.map(|(part, y)| part.biased(y)).collect::<Result<_, _>>()?;
                Ok(results.try_into().expect("one per part"))
            }
        }
    }

    /// As [`Self::forward`], of the norm of a sum, which comes first.
    ///
    /// # Errors
    /// As [`ops::quantized_matmul()`].
    pub fn forward_sum(&self, x: AddRmsNorm<'_>) -> Result<(Tensor, [Tensor; N]), KernelError> {
        match &self.whole {
            Some(whole) if x.x.dim(0) == 1 => {
                let (sum, y) = ops::quantized_matmul_and_sum(x, whole)?;
                Ok((sum, self.split(y)?))
            }
            // Several products read the norm.
            _ => {
                let (sum, x) = x.tensors()?;
                Ok((sum, self.forward(&x)?))
            }
        }
    }

    /// The parts of one row's results, which lie one after the other.
    fn split(&self, y: Tensor) -> Result<[Tensor; N], KernelError> {
        let y = y.reshape(&[y.len()])?;
        let (mut start, mut results) = (0, Vec::with_capacity(N));
        for part in &self.parts {
            let end = start + part.weight.n();
            results.push(y.rows(start, end)?.reshape(&[1, end - start])?);
            start = end;
        }
        Ok(results.try_into().expect("one per part"))
    }
}

/// Rows by token id, and the same matrix as the output layer of models that tie the two.
#[derive(Clone, Debug)]
pub struct Embedding(Arc<QuantizedTensor>);

impl Embedding {
    /// [`EMBED_TOKENS`] of `[vocab_size, hidden_size]`.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, vocab_size: usize, hidden_size: usize) -> Result<Self, ModelError> {
        Ok(Self(Arc::new(weights.matrix(EMBED_TOKENS, &[vocab_size, hidden_size])?)))
    }

    /// Ids `[T]` to `[T, hidden_size]`.
    ///
    /// # Errors
    /// As [`ops::dequant_gather()`].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor, KernelError> {
        ops::dequant_gather(&self.0, ids, FloatType::F32)
    }

    /// The output layer that shares this matrix.
    pub fn as_linear(&self) -> Linear {
        Linear { weight: self.0.clone(), bias: None }
    }
}
