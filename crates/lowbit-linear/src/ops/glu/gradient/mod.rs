//! The gradients of [`glu()`](super::glu()).

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::{Gate, with_gate};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`glu()`](super::glu()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct GluGradient {
    pub dx: Tensor,
    pub dgate: Tensor,
}

/// The gradients of `y = v(x) * f(gate)`, where [`Gate`] says f, and v is x for all but
/// [`Gate::SwigluOai`]:
///
/// ```text
/// dx    = dy * f(gate) * v'(x)
/// dgate = dy * v(x) * f'(gate), summed over the row where a row has one gate
///
/// Silu       f'(g) = s (1 + g (1 - s))              s = sigmoid(g)
/// GeluTanh   f'(g) = s (1 + g (1 - s) a'(g))        s = sigmoid(a(g)), a(g) = sqrt(8 / pi) (g + 0.044715 g^3)
/// Sigmoid    f'(g) = s (1 - s)                      s = sigmoid(g)
/// SwigluOai  f'(g) = s (1 + 1.702 g (1 - s))        s = sigmoid(1.702 g); 0 beyond the limits, as v'(x)
/// Relu       f'(g) = 1 for g > 0, otherwise 0
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | gate | as the op's | f32, f16, bf16 |
/// | dx, dgate | x's and gate's; columns of the gate that are not read have gradient 0 | dy's |
///
/// All arithmetic is f32, rounded once.
///
/// # Errors
/// As [`glu()`](super::glu()), of dy too.
pub fn glu_backward(x: &Tensor, gate: &Tensor, by: Gate, dy: &Tensor) -> Result<GluGradient, KernelError> {
    let check = Check("glu_backward");
    let shape = super::check(super::CHECK, x, gate)?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let [rows, wide] = [check.widened("x", x)?.reshape(&shape)?, check.widened("dy", dy)?.reshape(&shape)?];
    let gate = check.widened("gate", gate)?;
    let [dx, dgate] = match x.device() {
        // Of a gate whose row of x is empty, nothing is read.
        _ if x.is_empty() => {
            let zeros = |x: &Tensor| Tensor::allocate_zeros(x.shape(), DType::F32, x.device());
            [zeros(&rows)?, zeros(&gate)?]
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, [&rows, &gate, &wide], by)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => with_gate!(by, G => cpu::run::<G>(cpu, [&rows, &gate, &wide]))?,
    };
    Ok(GluGradient { dx: dx.cast(dtype)?.reshape(x.shape())?, dgate: dgate.cast(dtype)? })
}

/// Columns of x and of the gate.
fn widths(x: &Tensor, gate: &Tensor) -> [usize; 2] {
    [x, gate].map(|x| *x.shape().last().unwrap_or(&1))
}
