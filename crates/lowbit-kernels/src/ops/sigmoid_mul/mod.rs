//! The output gate of gated attention and of shared experts: `x * sigmoid(gate)`.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{SigmoidMulGradient, sigmoid_mul_backward};

use super::{check::Check, narrow};
use crate::{Device, KernelError, Tensor};

/// `y = x * sigmoid(gate)`, with `sigmoid(g) = 1 / (1 + e^-g)`: one gate per element, or one per row. A gate with more
/// columns than x is read from its last ones, so that it may be heads of `[query | gate]`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | gate | `[.., G]`: the last D columns where `G >= D`, or `[.., 1]` | f32, f16, bf16 |
/// | y | `[.., D]` | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. Source: transformers 5.23 `qwen3_next` (attention's output gate
/// and `shared_expert_gate`).
///
/// # Errors
/// [`KernelError::Shape`] for another gate, [`KernelError::Value`] for other dtypes.
pub fn sigmoid_mul(x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
    let (check, dtype) = (check(x, gate)?, x.dtype());
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::sigmoid_mul(check, gpu, x, gate),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (x, mut gate) = (check.widened("x", x)?, check.widened("gate", gate)?);
            if x.len() < gate.len() {
                gate = narrow(&gate, gate.dim(-1) - x.dim(-1), x.dim(-1))?;
            }
            let same = x.shape() == gate.shape();
            let y =
                if same { cpu::sigmoid_mul(cpu, &x, &gate) } else { cpu::sigmoid_mul_rows(cpu, &x, &gate) };
            y?.cast(dtype)
        }
    }
}

/// Checks that the op takes these operands.
pub(super) fn check(x: &Tensor, gate: &Tensor) -> Result<Check, KernelError> {
    let check = Check("sigmoid_mul");
    check.float("x", x)?;
    let fits = match (x.shape(), gate.shape()) {
        ([], []) => true,
        ([xs @ .., width], [gates @ .., columns]) => xs == gates && (columns >= width || *columns == 1),
        _ => false,
    };
    if !fits {
        let want = format!("x {:?} wants the same shape, or a last size that is larger or 1", x.shape());
        return Err(check.shape_error("gate", gate, want));
    }
    check.float("gate", gate)?;
    check.same_device("gate", gate.device(), x.device())?;
    Ok(check)
}
