//! The gates of Mamba-2's rule, from a token's steps of time.

#[cfg(feature = "gpu")]
mod gpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::{COST, softplus};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

#[cfg(feature = "gpu")]
pub(crate) use gpu::compute_step_gates;

/// The least and the largest step of time: `time_step_limit` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// From 0 on.
    pub least: f32,
    /// No less than that; infinity where there is no largest one.
    pub most: f32,
}

impl StepLimits {
    /// No limits.
    pub const NONE: Self = Self { least: 0.0, most: f32::INFINITY };

    /// Their bits, for compile-time configurations.
    #[cfg(feature = "gpu")]
    pub(crate) fn bits(self) -> [u32; 2] {
        [self.least, self.most].map(f32::to_bits)
    }
}

/// Returns `(log_decay, beta)`:
/// ```text
/// beta[t, h]      = clamp(softplus(dt[t, h] + dt_bias[h]), limits)
/// log_decay[t, h] = -exp(a_log[h]) * beta[t, h]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `dt` | `[T, Hv]` | f32, f16 or bf16 |
/// | `a_log`, `dt_bias` | `[Hv]` | f32, f16 or bf16 |
/// | `log_decay`, `beta` | `[T, Hv]` | f32 |
///
/// All arithmetic is f32. There is no gradient.
///
/// Sources: transformers 5.24 `mamba2_chunk_scan` (`dt_softplus`, `dt_limit`); mlx-lm 0.32
/// `compute_dt`.
///
/// # Errors
/// [`KernelError::Shape`] and [`KernelError::Value`] for operands that do not fit the table, and
/// for limits that are negative, not numbers, or in the wrong order. NaN passes through.
pub fn step_gates(
    dt: &Tensor,
    a_log: &Tensor,
    dt_bias: &Tensor,
    limits: StepLimits,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("step_gates");
    let heads = check_steps(op, dt, [a_log, dt_bias], limits)?;
    match dt.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(op, gpu, dt, [a_log, dt_bias], limits),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let [dt, a_log, dt_bias] =
                [("dt", dt), ("a_log", a_log), ("dt_bias", dt_bias)].map(|(name, x)| op.widened(name, x));
            let (mut beta, a_log, dt_bias) = (dt?, a_log?, dt_bias?);
            let rates: Vec<f32> = a_log.as_slice::<f32>()?.iter().map(|&a| -a.exp()).collect();
            let dt_bias = dt_bias.as_slice::<f32>()?;
            cpu.for_each_rows(beta.as_mut_slice::<f32>()?, heads, COST * heads, |_, rows| {
                for row in rows.chunks_exact_mut(heads) {
                    for (x, &bias) in row.iter_mut().zip(dt_bias) {
                        *x = softplus(*x + bias).clamp(limits.least, limits.most);
                    }
                }
            });
            let mut log_decay = Tensor::empty(beta.shape(), DType::F32, beta.device());
            let steps = beta.as_slice::<f32>()?;
            for (i, decay) in log_decay.as_mut_slice::<f32>()?.iter_mut().enumerate() {
                *decay = rates[i % heads] * steps[i];
            }
            Ok((log_decay, beta))
        }
    }
}

/// Checks the operands of [`step_gates`]; returns the number of heads.
pub(in crate::ops) fn check_steps(
    op: Check,
    dt: &Tensor,
    [a_log, dt_bias]: [&Tensor; 2],
    StepLimits { least, most }: StepLimits,
) -> Result<usize, KernelError> {
    let [_, heads] = op.dims("dt", dt, "[T, Hv]")?;
    for (name, x) in [("a_log", a_log), ("dt_bias", dt_bias)] {
        op.shape(name, x, &[heads], || format!("dt {:?}", dt.shape()))?;
    }
    for (name, x) in [("dt", dt), ("a_log", a_log), ("dt_bias", dt_bias)] {
        op.float(name, x)?;
        op.same_device(name, x.device(), dt.device())?;
    }
    if !(least >= 0.0 && least <= most) {
        let got = format!("{least} to {most}");
        return Err(op.value("limits", got, "numbers from 0 on are wanted, the least first"));
    }
    Ok(heads)
}
