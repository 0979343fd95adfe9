//! The gated layers of a token's experts, in as few launches as a GPU has kernels for.

use super::{CHECK, gather_qmm};
#[cfg(feature = "gpu")]
use super::{Experts, Routing, output_shape, routing};
#[cfg(feature = "gpu")]
use crate::ops::quantized_matmul::{
    gpu::{multiply_experts_glu, plan_of},
    plan::Kernel,
    problem::XOperands,
};
use crate::ops::{Gate, Input};
use crate::{Device, KernelError, QuantizedTensor, Tensor};

/// `y[t, slot] = down[e] glu(up[e] x[t], gate[e] x[t])` with `e = ids[t, slot]`
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[T, K]` | f32, f16, bf16 |
/// | `gate_up` | `[2, E, I, K]`, the gates first | any format |
/// | `down` | `[E, N, I]` | any format |
/// | `ids` | `[T, top_k]` | u32 |
/// | result | `[T, top_k, N]` | as `x` |
///
/// Products are rounded to x's dtype before the gate, as [`glu()`](crate::ops::glu()) of two
/// [`gather_qmm()`] would have them; a GPU's sigmoid is as [`Input`] says.
///
/// # Errors
/// As [`gather_qmm()`]; [`KernelError::Shape`] when `gate_up` is not of two products.
pub fn gated_experts(
    x: &Tensor,
    gate_up: &QuantizedTensor,
    down: &QuantizedTensor,
    ids: &Tensor,
    by: Gate,
) -> Result<Tensor, KernelError> {
    let [tokens, k] = CHECK.dims("x", x, "[T, K]")?;
    if !matches!(gate_up.shape(), [2, ..]) || gate_up.shape().len() != 4 {
        let (got, want) = (gate_up.shape().to_vec(), "[2, E, I, K] is wanted".into());
        return Err(KernelError::Shape { op: CHECK.0, operand: "gate_up", got, want });
    }
    let x = x.reshape(&[tokens, 1, k])?;
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = x.device() {
        Input::from(&x).check(CHECK)?;
        let shape = output_shape(x.shape(), gate_up, ids)?;
        CHECK.ids("ids", ids, gate_up.shape()[1])?;
        CHECK.same_device("gate_up", gate_up.device(), x.device())?;
        CHECK.same_device("ids", ids.device(), x.device())?;
        let experts = Experts { ids, routing: routing(x.shape(), gate_up, ids) };
        if let Some(inner) = multiply_experts_glu(gpu, &x, gate_up, experts, by, &shape[1..])? {
            return gather_qmm(&inner, down, ids);
        }
    }
    let both = gather_qmm(&x, gate_up, ids)?;
    let half = |i: usize| both.rows(i, i + 1)?.reshape(&both.shape()[1..]);
    let (gate, up) = (half(0)?, half(1)?);
    gather_qmm(Input::Glu { x: &up, gate: &gate, by }, down, ids)
}

/// True if [`gated_experts()`] of such an `x` and `slots` experts of each token reads the weight of
/// an expert about once, however many tokens chose it: a shared expert then costs least as one more
/// of the stack.
#[cfg_attr(not(feature = "gpu"), allow(unused_variables))]
pub fn streams_experts(x: &Tensor, gate_up: &QuantizedTensor, slots: usize) -> bool {
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let ([tokens, _], [_, experts, n, _]) = (x.shape(), gate_up.shape()) else { return false };
            let Ok(of_x) = XOperands::new(&Input::from(x)) else { return false };
            let Ok(y_type) = Input::from(x).dtype(CHECK) else { return false };
            let (shape, pairs) = ([*tokens, slots, *n], tokens * slots);
            if shape.contains(&0) {
                return false;
            }
            let routing = Routing { experts: *experts, pairs, share: slots };
            let plan = plan_of(gpu, &of_x, gate_up, Some(routing), &shape, y_type).1;
            matches!(plan.kernel, Kernel::StreamExperts(_))
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => false,
    }
}
