//! The gates of Kimi Delta Attention, whose decay each channel of the keys has of its own.

#[cfg(feature = "gpu")]
mod gpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::{COST, softplus};
use crate::ops::Check;
use crate::simd::math;
use crate::{Device, KernelError, Tensor};

/// The formula of a channel's decay, with `x = a[t, h, c] + dt_bias[h, c]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChannelDecay {
    /// `-exp(a_log[h]) * softplus(x)`: Kimi-Linear.
    Softplus,
    /// `bound * sigmoid(exp(a_log[h]) * x)`, with the bound below 0: Ling 3's `kda_lower_bound`.
    Bounded(f32),
}

/// Returns `(log_decay, beta)`:
/// ```text
/// log_decay[t, h, c] = the formula of decay
/// beta[t, h]         = sigmoid(b[t, h])
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `a` | `[T, Hv, Dk]` | f32, f16 or bf16 |
/// | `b` | `[T, Hv]` | f32, f16 or bf16 |
/// | `a_log` | `[Hv]` | f32, f16 or bf16 |
/// | `dt_bias` | `[Hv, Dk]` | f32, f16 or bf16 |
/// | `log_decay` | `[T, Hv, Dk]` | f32 |
/// | `beta` | `[T, Hv]` | f32 |
///
/// All arithmetic is f32. There is no gradient.
///
/// Sources: flash-linear-attention 0.6 `naive_kda_gate`, `naive_kda_lowerbound_gate`; transformers
/// 5.24 `KimiLinearForgetGate`, `BailingHybridForgetGate`; mlx-lm 0.32 `compute_g`.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::Value`] for operands that do not fit the table, and
/// for a bound that is not a finite number below 0. NaN passes through.
pub fn channel_gates(
    a: &Tensor,
    b: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
    decay: ChannelDecay,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("channel_gates");
    check_channels(op, [a, b], [a_log, dt_bias], decay)?;
    let (heads, channels) = (a.dim(1), a.dim(2));
    match a.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(op, gpu, [a, b], [a_log, dt_bias], decay),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let [a, b, a_log, dt_bias] =
                [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)].map(|(n, x)| op.widened(n, x));
            let (mut log_decay, mut beta) = (a?, b?);
            let (a_log, dt_bias) = (a_log?, dt_bias?);
            let rates: Vec<f32> = a_log.as_slice::<f32>()?.iter().map(|&a| a.exp()).collect();
            let dt_bias = dt_bias.as_slice::<f32>()?;
            let width = heads * channels;
            cpu.for_each_rows(log_decay.as_mut_slice::<f32>()?, width, COST * width, |_, rows| {
                for row in rows.chunks_exact_mut(width) {
                    for (i, (x, &bias)) in row.iter_mut().zip(dt_bias).enumerate() {
                        let rate = rates[i / channels];
                        *x = match decay {
                            ChannelDecay::Softplus => -rate * softplus(*x + bias),
                            ChannelDecay::Bounded(bound) => bound * math::sigmoid(rate * (*x + bias)),
                        };
                    }
                }
            });
            cpu.for_each_rows(beta.as_mut_slice::<f32>()?, heads, COST * heads, |_, rows| {
                rows.iter_mut().for_each(|x| *x = math::sigmoid(*x));
            });
            Ok((log_decay, beta))
        }
    }
}

/// Checks the operands of [`channel_gates`].
pub(in crate::ops) fn check_channels(
    op: Check,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    decay: ChannelDecay,
) -> Result<(), KernelError> {
    let [tokens, heads, channels] = op.dims("a", a, "[T, Hv, Dk]")?;
    for (name, x, want) in
        [("b", b, &[tokens, heads][..]), ("a_log", a_log, &[heads]), ("dt_bias", dt_bias, &[heads, channels])]
    {
        op.shape(name, x, want, || format!("a {:?}", a.shape()))?;
    }
    for (name, x) in [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)] {
        op.float(name, x)?;
        op.same_device(name, x.device(), a.device())?;
    }
    match decay {
        ChannelDecay::Bounded(bound) if !(bound.is_finite() && bound < 0.0) => {
            Err(op.value("bound", bound.to_string(), "a finite number below 0 is wanted"))
        }
        _ => Ok(()),
    }
}
