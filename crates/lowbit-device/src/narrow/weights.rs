//! Some rows of each matrix of a weight.

use super::narrow;
use crate::{KernelError, QuantizedTensor};

impl QuantizedTensor {
    /// Rows `start..start + len` of each matrix of `[.., N, K]`, copied.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when they are not there; [`KernelError::Gpu`] when a GPU has no such
    /// memory left; [`KernelError::Unsupported`] for a repacked weight.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self, KernelError> {
        self.by_rows("narrow")?;
        let n = self.n();
        if start.checked_add(len).is_none_or(|end| end > n) {
            let want = format!("{len} rows from {start} on were asked for");
            return Err(KernelError::Shape {
                op: "narrow",
                operand: "weight",
                got: self.shape().to_vec(),
                want,
            });
        }
        let mut shape = self.shape().to_vec();
        shape[self.shape().len() - 2] = len;
        self.map_components(shape, |component| match component.len() {
            0 => Ok(component.clone()),
            all => {
                let row = all / self.rows();
                narrow(&component.reshape(&[self.rows() / n, n * row])?, start * row, len * row)
            }
        })
    }
}
