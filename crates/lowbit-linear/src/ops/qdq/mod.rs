//! Affine quantise-dequantise for training scales and biases: a weight's codes are chosen once and
//! stay fixed, its scales and biases are trained.
//!
//! | operand | shape | dtype |
//! |---|---|---|
//! | `w`, `y`, `dy` | `[.., K]` | f32 |
//! | `codes` | `[.., K]` | u8 |
//! | `scales`, `biases`, `dscales`, `dbiases` | `[.., K / group_size]` | f32 |
//!
//! Groups have 2 to 1024 values, any number that divides K; there are 2 to 256 levels. This is not
//! `mx.quantize` (see `lowbit-formats` for that): it makes neither end of the range exact, and
//! rounds halves away from zero. Nothing in lowbit calls it: learning trains the scales of a
//! checkpoint's own formats (`quantized_matmul_backward_scales`). It is for training loops that are
//! ported from mlx-native.
//!
//! Source: mlx-native 0.7.1 `qdq_affine`.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

/// A quantised weight.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Qdq {
    pub codes: Tensor,
    pub scales: Tensor,
    pub biases: Tensor,
}

/// Chooses the scale, the bias and the codes of each group of `w`, in f32:
///
/// ```text
/// bias  = min(w)
/// scale = (max(w) - min(w)) / (levels - 1), or 1 where that is not above 0
/// code  = clamp(round((w - bias) / scale), 0, levels - 1), halves away from zero
/// ```
/// The bias of a group with a NaN is NaN.
///
/// # Errors
/// [`KernelError::Shape`] when K is not a multiple of `group_size`; [`KernelError::DType`] when `w`
/// is not f32; [`KernelError::Value`] for a group size or a number of levels out of range.
pub fn qdq_init(w: &Tensor, group_size: usize, levels: usize) -> Result<Qdq, KernelError> {
    let check = Check("qdq_init");
    check.dtype("w", w, DType::F32)?;
    let groups = groups(check, "w", w, group_size)?;
    if !(2..=256).contains(&levels) {
        return Err(check.value("levels", levels, "2 to 256 are wanted, since codes are bytes"));
    }
    let new = |shape: &[usize], dtype| Tensor::allocate(shape, dtype, w.device());
    let mut qdq = Qdq {
        codes: new(w.shape(), DType::U8)?,
        scales: new(&groups, DType::F32)?,
        biases: new(&groups, DType::F32)?,
    };
    match w.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch_init(gpu, w, &qdq, group_size, levels)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::init(cpu, w, &mut qdq, group_size, levels)?,
    }
    Ok(qdq)
}

/// `y = code * scale + bias`.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`], [`KernelError::Device`] and
/// [`KernelError::Value`] for operands that do not fit the [module](self)'s table.
pub fn qdq_forward(qdq: &Qdq, group_size: usize) -> Result<Tensor, KernelError> {
    let check = Check("qdq_forward");
    let Qdq { codes, scales, biases } = qdq;
    check.dtype("codes", codes, DType::U8)?;
    let groups = groups(check, "codes", codes, group_size)?;
    for (name, operand) in [("scales", scales), ("biases", biases)] {
        check.dtype(name, operand, DType::F32)?;
        check.shape(name, operand, &groups, || format!("codes {:?}", codes.shape()))?;
        check.same_device(name, operand.device(), codes.device())?;
    }
    let mut y = Tensor::allocate(codes.shape(), DType::F32, codes.device())?;
    match codes.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch_forward(gpu, qdq, &y, group_size)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::forward(cpu, qdq, &mut y, group_size)?,
    }
    Ok(y)
}

/// The gradient of the scales: `dscale = sum of code * dy` over the group.
///
/// # Errors
/// As [`qdq_forward`].
pub fn qdq_backward_scales(codes: &Tensor, dy: &Tensor, group_size: usize) -> Result<Tensor, KernelError> {
    let check = Check("qdq_backward_scales");
    check.dtype("codes", codes, DType::U8)?;
    check.shape("codes", codes, dy.shape(), || "dy".into())?;
    check.same_device("codes", codes.device(), dy.device())?;
    backward(check, Some(codes), dy, group_size)
}

/// The gradient of the biases: `dbias = sum of dy` over the group.
///
/// # Errors
/// As [`qdq_forward`].
pub fn qdq_backward_biases(dy: &Tensor, group_size: usize) -> Result<Tensor, KernelError> {
    backward(Check("qdq_backward_biases"), None, dy, group_size)
}

fn backward(
    check: Check,
    codes: Option<&Tensor>,
    dy: &Tensor,
    group_size: usize,
) -> Result<Tensor, KernelError> {
    check.dtype("dy", dy, DType::F32)?;
    let mut sums = Tensor::allocate(&groups(check, "dy", dy, group_size)?, DType::F32, dy.device())?;
    match dy.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch_backward(gpu, codes, dy, &sums, group_size)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::backward(cpu, codes, dy, &mut sums, group_size)?,
    }
    Ok(sums)
}

/// The shape of a tensor with one element per group of `x`.
fn groups(
    check: Check,
    operand: &'static str,
    x: &Tensor,
    group_size: usize,
) -> Result<Vec<usize>, KernelError> {
    if !(2..=1024).contains(&group_size) {
        return Err(check.value("group_size", group_size, "2 to 1024 are wanted"));
    }
    let mut shape = x.shape().to_vec();
    match shape.last_mut() {
        Some(k) if k.is_multiple_of(group_size) => *k /= group_size,
        _ => {
            let want = format!("[.., K] with K a multiple of the group size, {group_size}, is wanted");
            return Err(check.shape_error(operand, x, want));
        }
    }
    Ok(shape)
}
