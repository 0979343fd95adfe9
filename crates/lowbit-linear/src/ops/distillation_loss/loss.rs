//! The result and the checks that the two distillation losses share.

use crate::ops::Check;
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// The result of [`distillation_loss`](super::distillation_loss()); shapes and dtypes as its
/// module says.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DistillationLoss {
    pub kl: Tensor,
    pub dlogits: Tensor,
}

pub(in crate::ops) fn check_dkl(
    check: Check,
    dkl: &Tensor,
    (name, x): (&str, &Tensor),
) -> Result<(), KernelError> {
    check.shape("dkl", dkl, &x.shape()[..1], || format!("{name} {:?}", x.shape()))?;
    check.dtype("dkl", dkl, DType::F32)
}

pub(in crate::ops) fn check_temperature(check: Check, temperature: f32) -> Result<(), KernelError> {
    if temperature > 0.0 && temperature.is_finite() {
        return Ok(());
    }
    Err(check.value("temperature", temperature, "a finite number above 0 is wanted"))
}
