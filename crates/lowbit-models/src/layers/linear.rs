use crate::{ModelError, Weights};
use lowbit_formats::FloatType;
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor, ops};
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

    /// `[.., K]` to `[.., N]`.
    ///
    /// # Errors
    /// As [`ops::quantized_matmul()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        let y = ops::quantized_matmul(x, &self.weight)?;
        match &self.bias {
            Some(bias) => ops::add(&y, bias),
            None => Ok(y),
        }
    }
}

/// Rows by token id, and the same matrix as the output layer of models that tie the two.
#[derive(Clone, Debug)]
pub struct Embedding(Arc<QuantizedTensor>);

impl Embedding {
    /// `embed_tokens` or `token_embd` of `[vocab_size, hidden_size]`.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, vocab_size: usize, hidden_size: usize) -> Result<Self, ModelError> {
        Ok(Self(Arc::new(weights.matrix("embed_tokens", "token_embd", &[vocab_size, hidden_size])?)))
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
