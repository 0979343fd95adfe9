use super::PartInput;
use crate::names::EMBED_TOKENS;
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Tape, Var, shapes};
use crate::target::Placement;
use crate::{ModelError, Weights};
use lowbit_formats::FloatType;
use lowbit_kernels::ops::concat;
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

/// `y = x W^T + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Arc<Named<QuantizedTensor>>,
    bias: Option<Named<Tensor>>,
}

impl Linear {
    /// `weight` is `[N, K]`, `bias` `[N]`.
    pub fn new(weight: Named<QuantizedTensor>, bias: Option<Named<Tensor>>) -> Self {
        Self { weight: Arc::new(weight), bias }
    }

    /// Moves the layer, which is on the CPU, to its place.
    fn placed(self, placement: Placement<'_>) -> Result<Self, KernelError> {
        let bias = self.bias.map(|bias| bias.value.to_device(placement.device).map(|moved| bias.with(moved)));
        let weight = self.weight.with(placement.weight(&self.weight.value)?);
        Ok(Self::new(weight, bias.transpose()?))
    }

    /// The weight, if there is no bias.
    pub(crate) fn weight(&self) -> Option<&Named<QuantizedTensor>> {
        self.bias.is_none().then_some(&self.weight)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        // The output layer may be the embedding.
        if all.weights.iter().all(|weight| weight.name != self.weight.name) {
            all.weights.push(Named::clone(&self.weight));
        }
        all.tensors.extend(self.bias.clone());
    }

    /// `[.., K]` to `[.., N]`.
    ///
    /// # Errors
    /// As [`lowbit_kernels::ops::quantized_matmul()`].
    pub fn forward<'a>(&self, x: impl Into<Input<'a>>) -> Result<Var, KernelError> {
        self.biased(ops::quantized_matmul(x.into(), &self.weight, None)?)
    }

    /// `[.., K]` of any activation type to f32 `[.., N]`, without rounding to that type: for
    /// logits.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_f32<'a>(&self, x: impl Into<Input<'a>>) -> Result<Var, KernelError> {
        self.biased(ops::quantized_matmul(x.into(), &self.weight, Some(FloatType::F32))?)
    }

    fn biased(&self, y: Var) -> Result<Var, KernelError> {
        match &self.bias {
            Some(bias) => ops::add_bias(&y, bias),
            None => Ok(y),
        }
    }
}

/// Linear layers that read the same input. On a GPU their weights are concatenated where they have
/// one format, so that a step takes one product instead of `N`.
#[derive(Clone, Debug)]
pub struct MergedLinear<const N: usize> {
    parts: [Linear; N],
    whole: Option<Linear>,
    /// True if the checkpoint has the whole, and no parts.
    fused: bool,
}

impl<const N: usize> MergedLinear<N> {
    /// Moves `parts`, which are on the CPU, to their place.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left or fails.
    pub(crate) fn new(parts: [Linear; N], placement: Placement<'_>) -> Result<Self, KernelError> {
        let mut moved = Vec::with_capacity(N);
        for part in parts {
            moved.push(part.placed(placement)?);
        }
        let format = moved[0].weight.value.format();
        let has_bias = moved[0].bias.is_some();
        let alike =
            moved.iter().all(|part| part.bias.is_some() == has_bias && part.weight.value.format() == format);
        // Results start at multiples of 32 bytes in every type: kernels can load whole vectors of
        // them, and Metal binds them.
        let aligned = moved[..N - 1].iter().all(|part| part.weight.value.n().is_multiple_of(16));
        let mut whole = None;
        if placement.device.plan().joins_weights && alike && aligned {
            let weights: Vec<&QuantizedTensor> = moved.iter().map(|part| &part.weight.value).collect();
            let joined = QuantizedTensor::concat(&weights)?;
            let mut start = 0;
            for part in &mut moved {
                let end = start + part.weight.value.n();
                *part = Linear::new(part.weight.with(joined.slice(start, end)?), part.bias.take());
                start = end;
            }
            let biases: Vec<&Tensor> =
                moved.iter().flat_map(|part| &part.bias).map(|bias| &bias.value).collect();
            let bias = moved[0].bias.as_ref().map(|first| Ok::<_, KernelError>(first.with(concat(&biases)?)));
            whole = Some(Linear::new(moved[0].weight.with(joined), bias.transpose()?));
        }
        let parts = moved.try_into().expect("as many as there were");
        Ok(Self { parts, whole, fused: false })
    }

    /// The layers of `rows` rows each that `whole`, which is on the CPU, holds one after the other.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left or fails.
    pub(crate) fn fused(
        whole: Linear,
        rows: [usize; N],
        placement: Placement<'_>,
    ) -> Result<Self, KernelError> {
        // Rows of a repacked weight cannot be taken apart.
        let repacked = placement.repacks();
        let whole = if repacked { whole } else { whole.placed(placement)? };
        let mut start = 0;
        let parts = rows.map(|rows| {
            let end = start + rows;
            let weight = whole.weight.with(whole.weight.value.slice(start, end)?);
            let rows = |bias: &Named<Tensor>| bias.value.rows(start, end).map(|rows| bias.with(rows));
            let bias = whole.bias.as_ref().map(rows);
            start = end;
            let part = Linear::new(weight, bias.transpose()?);
            if repacked { part.placed(placement) } else { Ok(part) }
        });
        let whole = (!repacked).then_some(whole);
        Ok(Self { parts: shapes::each(parts)?, whole, fused: true })
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        match &self.whole {
            Some(whole) if self.fused => whole.list(all),
            _ => self.parts.iter().for_each(|part| part.list(all)),
        }
    }

    /// The layers.
    pub(super) fn parts(&self) -> &[Linear; N] {
        &self.parts
    }

    /// `[T, K]` to `[T, N]` of each.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward(&self, x: &Var) -> Result<[Var; N], KernelError> {
        let recorded = x.tape().is_some();
        if let Some(whole) = self.whole_for(x.dim(0), recorded) {
            return self.split(&whole.forward(x)?);
        }
        let products = match &self.whole {
            Some(whole) if !recorded => ops::quantized_matmul_parts(x, &whole.weight, self.widths())?,
            _ => ops::quantized_matmul_each(x, self.parts.each_ref().map(|part| &*part.weight))?,
        };
        let parts = self.parts.iter().zip(products);
        let results: Vec<_> = parts.map(|(part, y)| part.biased(y)).collect::<Result<_, _>>()?;
        Ok(results.try_into().expect("one per part"))
    }

    /// As [`Self::forward`], of the norm of a sum or of the sum, which comes first.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_sum(&self, x: PartInput<'_>) -> Result<(Var, [Var; N]), KernelError> {
        let recorded = x.is_recorded();
        match (self.whole_for(x.update().dim(0), recorded), x) {
            (Some(whole), PartInput::Normed(x)) if !recorded => {
                let (sum, y) = ops::quantized_matmul_and_sum(x, &whole.weight)?;
                Ok((sum, self.split(&whole.biased(y)?)?))
            }
            // Several products read the input, or a tape records it.
            _ => {
                let (sum, x) = x.make()?;
                Ok((sum, self.forward(&x)?))
            }
        }
    }

    /// The concatenated weight, where one product with it is all that is to be done. Training
    /// changes the checkpoint's own tensors.
    fn whole_for(&self, rows: usize, recorded: bool) -> Option<&Linear> {
        self.whole.as_ref().filter(|_| if recorded { self.fused } else { rows == 1 })
    }

    /// The concatenated weight, if there is one without a bias.
    pub(super) fn whole(&self) -> Option<&Named<QuantizedTensor>> {
        self.whole.as_ref()?.weight()
    }

    /// The parts of a result's columns, which lie one after the other.
    fn split(&self, y: &Var) -> Result<[Var; N], KernelError> {
        shapes::split_columns(y, self.widths())
    }

    /// The columns of each layer's result.
    fn widths(&self) -> [usize; N] {
        self.parts.each_ref().map(|part| part.weight.value.n())
    }
}

/// Rows by token id, and the same matrix as the output layer of models that tie the two.
#[derive(Clone, Debug)]
pub struct Embedding(Arc<Named<QuantizedTensor>>);

impl Embedding {
    /// [`EMBED_TOKENS`] of `[vocab_size, hidden_size]`.
    ///
    /// # Errors
    /// As [`Weights::matrix`].
    pub fn load(weights: &Weights<'_>, vocab_size: usize, hidden_size: usize) -> Result<Self, ModelError> {
        Ok(Self(Arc::new(weights.matrix(EMBED_TOKENS, &[vocab_size, hidden_size])?)))
    }

    /// Ids `[T]` to `[T, hidden_size]`, on `tape` if one records.
    ///
    /// # Errors
    /// As [`lowbit_kernels::ops::dequant_gather()`].
    pub fn forward(&self, ids: &Tensor, tape: Option<&Tape>) -> Result<Var, KernelError> {
        ops::dequant_gather(tape, &self.0, ids)
    }

    /// The output layer that shares this matrix.
    pub fn as_linear(&self) -> Linear {
        Linear { weight: self.0.clone(), bias: None }
    }
}
