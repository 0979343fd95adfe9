//! Gated linear units: a tensor times a function of another, element by element.

mod bench;
mod constants;
pub(in crate::ops) mod cpu;
mod gate;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
pub(in crate::ops) mod gradient;
#[cfg(test)]
mod tests;

pub use gate::Gate;
pub(in crate::ops) use gate::with_gate;
pub use gradient::{GluGradient, glu_backward};

use super::{Check, elementwise, narrow};
use crate::{Device, KernelError, Tensor};
use std::marker::PhantomData;

pub(in crate::ops) const CHECK: Check = Check("glu");

/// `y = x * f(gate)`, where [`Gate`] says f: of the feed-forward layers of most models (x is the up
/// projection), of gated attention's output and of shared experts. One gate per element, or one per
/// row. A gate with more columns than x is read from its last ones, so that it may be heads of
/// `[query | gate]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]`; or `[.., H * D]` by a gate of H heads | f32, f16, bf16 |
/// | gate | `[.., G]`: the last D columns where `G >= D`, or `[.., 1]`; `[.., H, G]` of heads | f32, f16, bf16 |
/// | y | x's | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. Source: as [`Gate`]'s; ggml's
/// `ggml_glu_split`.
///
/// # Errors
/// [`KernelError::Shape`] for another gate, [`KernelError::Value`] for other dtypes.
pub fn glu(x: &Tensor, gate: &Tensor, by: Gate) -> Result<Tensor, KernelError> {
    let shape = check(CHECK, x, gate)?;
    let rows = x.reshape(&shape)?;
    let y = match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(gpu, &rows, gate, by),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (wide, mut gate) = (CHECK.widened("x", &rows)?, CHECK.widened("gate", gate)?);
            if wide.len() < gate.len() {
                gate = narrow(&gate, gate.dim(-1) - wide.dim(-1), wide.dim(-1))?;
            }
            let y = with_gate!(by, G => match wide.shape() == gate.shape() {
                true => elementwise::map(cpu, cpu::Glu::<G>(PhantomData), [&wide, &gate]),
                false => cpu::rows::<G>(cpu, &wide, &gate),
            });
            y?.cast(x.dtype())
        }
    };
    y?.reshape(x.shape())
}

/// Checks that the op takes these operands. The shape of x, as heads where the gate has some.
pub(in crate::ops) fn check(check: Check, x: &Tensor, gate: &Tensor) -> Result<Vec<usize>, KernelError> {
    check.float("x", x)?;
    let fits = |width: usize, columns: usize| columns >= width || columns == 1;
    let shape = match (x.shape(), gate.shape()) {
        ([], []) => Some(vec![]),
        (shape @ [xs @ .., width], [gates @ .., columns]) if xs == gates && fits(*width, *columns) => {
            Some(shape.to_vec())
        }
        ([xs @ .., all], [gates @ .., heads, columns])
            if xs == gates && *heads > 0 && all.is_multiple_of(*heads) && fits(all / heads, *columns) =>
        {
            Some([xs, &[*heads, all / heads]].concat())
        }
        _ => None,
    };
    let Some(shape) = shape else {
        let want = format!("x {:?} wants the same shape, or a last size that is larger or 1", x.shape());
        return Err(check.shape_error("gate", gate, want));
    };
    check.float("gate", gate)?;
    check.same_device("gate", gate.device(), x.device())?;
    Ok(shape)
}
