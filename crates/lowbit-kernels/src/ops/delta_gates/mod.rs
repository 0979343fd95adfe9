//! The gates of the gated delta rule, from a token's projections.
//! ```text
//! log_decay[t, h] = -exp(a_log[h]) * softplus(a[t, h] + dt_bias[h])
//! beta[t, h]      = sigmoid(b[t, h])
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `a`, `b` | `[T, Hv]` | f32, f16 or bf16 |
//! | `a_log`, `dt_bias` | `[Hv]` | f32, f16 or bf16 |
//! | `log_decay`, `beta` | `[T, Hv]` | f32 |
//!
//! All arithmetic and both results are f32, whatever the activations' dtype: decays are multiplied
//! over thousands of tokens.
//!
//! Sources: transformers 5 `Qwen3NextGatedDeltaNet.forward`; mlx-lm 0.32 `compute_g` (which returns
//! `exp(log_decay)`).

mod bench;
mod channels;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
pub(crate) mod reference;
mod steps;
#[cfg(test)]
mod tests;

pub(super) use channels::check_channels;
pub(crate) use channels::reference as channel_reference;
pub use channels::{ChannelDecay, channel_gates};
pub use gradient::{DeltaGatesGradient, delta_gates_backward};
pub(super) use steps::check_steps;
#[cfg(feature = "gpu")]
pub(crate) use steps::compute_step_gates;
pub(crate) use steps::reference as step_reference;
pub use steps::{StepLimits, step_gates};

use super::Check;
use crate::simd::math;
use crate::{Device, KernelError, Tensor};

/// Returns `(log_decay, beta)`.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::Value`] for operands that do not fit the
/// [module](self)'s table. NaN and infinity pass through.
pub fn delta_gates(
    a: &Tensor,
    b: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("delta_gates");
    let heads = check(op, [a, b], [a_log, dt_bias])?;
    match a.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(op, gpu, [a, b], [a_log, dt_bias]),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let [a, b, a_log, dt_bias] =
                [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)].map(|(n, x)| op.widened(n, x));
            let (mut log_decay, mut beta) = (a?, b?);
            let (a_log, dt_bias) = (a_log?, dt_bias?);
            let rates: Vec<f32> = a_log.as_slice::<f32>()?.iter().map(|&a| -a.exp()).collect();
            let dt_bias = dt_bias.as_slice::<f32>()?;
            let cost = COST * heads;
            cpu.for_each_rows(log_decay.as_mut_slice::<f32>()?, heads, cost, |_, rows| {
                for row in rows.chunks_exact_mut(heads) {
                    for ((x, &rate), &bias) in row.iter_mut().zip(&rates).zip(dt_bias) {
                        *x = rate * softplus(*x + bias);
                    }
                }
            });
            cpu.for_each_rows(beta.as_mut_slice::<f32>()?, heads, cost, |_, rows| {
                rows.iter_mut().for_each(|x| *x = math::sigmoid(*x));
            });
            Ok((log_decay, beta))
        }
    }
}

/// Checks the operands against the [module](self)'s table; returns the number of heads.
pub(super) fn check(
    op: Check,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
) -> Result<usize, KernelError> {
    let [_, heads] = op.dims("a", a, "[T, Hv]")?;
    op.shape("b", b, a.shape(), || format!("a {:?}", a.shape()))?;
    op.shape("a_log", a_log, &[heads], || format!("a {:?}", a.shape()))?;
    op.shape("dt_bias", dt_bias, &[heads], || format!("a {:?}", a.shape()))?;
    for (name, x) in [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)] {
        op.float(name, x)?;
        op.same_device(name, x.device(), a.device())?;
    }
    Ok(heads)
}

/// Simple operations per gate.
const COST: usize = 64;

/// `ln(1 + e^x)`, without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
