use crate::ops::{mul, softcap, softcap_backward};
use crate::{KernelError, Tensor};

/// The function that makes logits of the products of an output layer:
/// `logits = caps * tanh(products * factors / caps)`, or `products * factors` without caps.
///
/// Both are f32 `[V]`: Granite's `logits_scaling` is the reciprocal of its factors, Gemma's
/// `final_logit_softcapping` its caps.
#[derive(Clone, Debug, Default)]
pub struct LogitFunction {
    /// The factor of each logit; 1 without them.
    pub factors: Option<Tensor>,
    /// The bound of each logit, above 0, see [`softcap()`]; none without them.
    pub caps: Option<Tensor>,
}

impl LogitFunction {
    /// The logits of products `[T, V]`.
    ///
    /// # Errors
    /// As [`mul()`] and [`softcap()`].
    pub fn of(&self, products: Tensor) -> Result<Tensor, KernelError> {
        let scaled = self.scaled(products)?;
        self.caps.as_ref().map_or(Ok(scaled.clone()), |caps| softcap(&scaled, caps))
    }

    /// The products' gradient: `dlogits` is the logits'.
    ///
    /// # Errors
    /// As [`Self::of`] and [`softcap_backward`].
    pub fn backward(&self, products: Tensor, dlogits: Tensor) -> Result<Tensor, KernelError> {
        let dscaled = match &self.caps {
            Some(caps) => softcap_backward(&self.scaled(products)?, caps, &dlogits)?,
            None => dlogits,
        };
        self.scaled(dscaled)
    }

    fn scaled(&self, x: Tensor) -> Result<Tensor, KernelError> {
        self.factors.as_ref().map_or(Ok(x.clone()), |factors| mul(&x, factors))
    }
}
