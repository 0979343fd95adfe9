//! The gradients of [`rms_norm()`](super::rms_norm()) and
//! [`gated_rms_norm()`](super::gated_rms_norm()).

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
pub(in crate::ops) mod reference;
#[cfg(test)]
mod tests;

use crate::ops::Check;
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`rms_norm()`](super::rms_norm()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct RmsNormGradient {
    pub dx: Tensor,
    pub dweight: Tensor,
}

/// The gradients of [`gated_rms_norm()`](super::gated_rms_norm()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct GatedRmsNormGradient {
    pub dx: Tensor,
    pub dgate: Tensor,
    pub dweight: Tensor,
}

/// With `r = 1 / sqrt(mean(x[..]^2) + eps)`, the gradients of `y = x * r * weight`:
///
/// ```text
/// dx[.., d]  = r * (weight[d] * dy[.., d] - x[.., d] * r^2 * mean over e of x[.., e] * weight[e] * dy[.., e])
/// dweight[d] = sum over rows of dy[.., d] * x[.., d] * r
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | dx | `[.., D]` | dy's |
/// | dweight | `[D]` | f32 |
///
/// All arithmetic is f32; sums over rows go 64 rows at a time, as in
/// [`sum_rows()`](crate::ops::sum_rows()).
///
/// # Errors
/// As [`rms_norm()`](super::rms_norm()); [`KernelError::Shape`] for a dy of another shape than x.
///
/// Source: the derivative of mlx 0.32 `fast.rms_norm` (`RMSNorm::vjp`).
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    dy: &Tensor,
) -> Result<RmsNormGradient, KernelError> {
    let (dx, _, dweight) = backward(Check("rms_norm_backward"), (x, None), (weight, eps), dy)?;
    Ok(RmsNormGradient { dx, dweight })
}

/// The gradients of `y = rms_norm(x, weight, eps) * silu(gate)`: dx and dweight are those of
/// [`rms_norm_backward`] with `dy * silu(gate)` for dy, and
///
/// ```text
/// dgate = dy * rms_norm(x, weight, eps) * s * (1 + gate * (1 - s)), s = 1 / (1 + e^-gate)
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, gate, dy | `[.., D]` | f32, f16, bf16 |
/// | weight | `[D]` | f32, f16, bf16 |
/// | dx, dgate | `[.., D]` | dy's |
/// | dweight | `[D]` | f32 |
///
/// # Errors
/// As [`rms_norm_backward`], and [`gated_rms_norm()`](super::gated_rms_norm()).
pub fn gated_rms_norm_backward(
    x: &Tensor,
    gate: &Tensor,
    weight: &Tensor,
    eps: f32,
    dy: &Tensor,
) -> Result<GatedRmsNormGradient, KernelError> {
    let check = Check("gated_rms_norm_backward");
    let (dx, dgate, dweight) = backward(check, (x, Some(gate)), (weight, eps), dy)?;
    Ok(GatedRmsNormGradient { dx, dgate: dgate.expect("a gate has a gradient"), dweight })
}

/// `(dx, dgate, dweight)`.
fn backward(
    check: Check,
    (x, gate): (&Tensor, Option<&Tensor>),
    (weight, eps): (&Tensor, f32),
    dy: &Tensor,
) -> Result<(Tensor, Option<Tensor>, Tensor), KernelError> {
    super::check(check, x, gate, weight, eps)?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let [x, dy, weight] = [("x", x), ("dy", dy), ("weight", weight)].map(|(name, x)| check.widened(name, x));
    let (x, dy, weight) = (x?, dy?, weight?);
    let gate = gate.map(|gate| check.widened("gate", gate)).transpose()?;
    let (dx, dgate, dweight) = match x.device() {
        _ if x.is_empty() => {
            let zeros = |x: &Tensor| Tensor::allocate_zeros(x.shape(), DType::F32, x.device());
            (zeros(&x)?, gate.as_ref().map(zeros).transpose()?, zeros(&weight)?)
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let norm = gpu::Norm { x: &x, gate: gate.as_ref(), weight: &weight, eps, dy: &dy };
            norm.backward(check, gpu)?
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => on_cpu(cpu, (&x, gate.as_ref()), (&weight, eps), &dy)?,
    };
    Ok((dx.cast(dtype)?, dgate.map(|dgate| dgate.cast(dtype)).transpose()?, dweight))
}

/// `(dx, dgate, dweight)` of f32 tensors.
fn on_cpu(
    cpu: &Cpu,
    (x, gate): (&Tensor, Option<&Tensor>),
    (weight, eps): (&Tensor, f32),
    dy: &Tensor,
) -> Result<(Tensor, Option<Tensor>, Tensor), KernelError> {
    let new = |of: &Tensor| Tensor::allocate(of.shape(), DType::F32, of.device());
    let (mut dx, mut dgate, mut dweight) = (new(x)?, gate.map(new).transpose()?, new(weight)?);
    let gates = match (gate, &mut dgate) {
        (Some(gate), Some(dgate)) => Some((gate.as_slice()?, dgate.as_mut_slice()?)),
        _ => None,
    };
    let norm = cpu::Norm { x: x.as_slice()?, weight: weight.as_slice()?, eps, dy: dy.as_slice()? };
    norm.backward(cpu, dx.as_mut_slice()?, gates, dweight.as_mut_slice()?);
    Ok((dx, dgate, dweight))
}
