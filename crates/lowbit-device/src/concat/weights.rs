//! Weights joined along their outermost dimension.

use super::concat;
use crate::tensor::elements;
use crate::{KernelError, QuantizedTensor};

impl QuantizedTensor {
    /// Copies weights of one format and shape `[N, K]` into one `[E, N, K]`.
    ///
    /// # Errors
    /// As [`Self::concat`].
    pub fn stack(weights: &[Self]) -> Result<Self, KernelError> {
        let one = |weight: &Self| weight.reshape(&[&[1], weight.shape()].concat());
        let weights = weights.iter().map(one).collect::<Result<Vec<_>, _>>()?;
        Self::concat(&weights.iter().collect::<Vec<_>>())
    }

    /// Copies weights of one format, whose sizes but the outermost are the same, one after the
    /// other into one.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for none, and for weights that differ; [`KernelError::Device`] for
    /// different devices; [`KernelError::Unsupported`] for rows of repacked weights;
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn concat(weights: &[&Self]) -> Result<Self, KernelError> {
        let refuse = |got: &[usize], want: String| KernelError::Shape {
            op: "concat",
            operand: "weight",
            got: got.to_vec(),
            want,
        };
        let Some(first) = weights.first() else { return Err(refuse(&[], "there is none".into())) };
        let differs = |w: &&&Self| w.shape()[1..] != first.shape()[1..] || w.format() != first.format();
        if let Some(other) = weights.iter().find(differs) {
            let want = format!("the first is {:?} in {} and this is in", first.shape(), first.format());
            return Err(refuse(other.shape(), format!("{want} {}", other.format())));
        }
        if first.shape().len() == 2
            || weights.iter().any(|weight| weight.is_repacked() != first.is_repacked())
        {
            weights.iter().try_for_each(|weight| weight.by_rows("concat"))?;
        }
        let mut shape = first.shape().to_vec();
        shape[0] = weights.iter().fold(0, |sum: usize, weight| sum.saturating_add(weight.shape()[0]));
        if elements(&shape, 1).is_none() {
            return Err(refuse(&shape, "that is more than memory can hold".into()));
        }
        let mut indices = 0..;
        first.map_components(shape, |_| {
            let index = indices.next().unwrap_or(0);
            let flat = |weight: &&Self| {
                let component = &weight.components()[index];
                component.reshape(&[component.len()])
            };
            let parts = weights.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
            concat(&parts.iter().collect::<Vec<_>>())
        })
    }
}
