use super::{Slope, operands};
use crate::ops::{Check, elementwise, mul};
use crate::{Device, KernelError, Tensor};

/// The gradient of [`softcap()`](super::softcap()) by x: `dx = dz * (1 - tanh(x / y)^2)`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, y | as in [`softcap()`](super::softcap()) | f32, f16, bf16 |
/// | dz | x's | f32, f16, bf16 |
/// | dx | x's | dz's |
///
/// The slope is computed from `e^(-2 |x / y|)`, which keeps its digits where tanh is close to 1. It
/// is rounded to x's dtype before the product.
///
/// # Errors
/// As [`softcap()`](super::softcap()); [`KernelError::Shape`] for a dz of another shape.
pub fn softcap_backward(x: &Tensor, y: &Tensor, dz: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("softcap_backward");
    operands(check, x, y)?;
    check.shape("dz", dz, x.shape(), || "x".into())?;
    let slope = match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => super::gpu::slope(check, gpu, x, y)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (wide, y) = (check.widened("x", x)?, check.widened("y", y)?);
            elementwise::map_rows(cpu, Slope, &wide, &y)?.cast(x.dtype())?
        }
    };
    mul(dz, &slope)
}
