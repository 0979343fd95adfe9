//! The gradients of [`delta_gates()`](super::delta_gates()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::softplus;
use crate::ops::Check;
use crate::simd::math;
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("delta_gates_backward");

/// Heads of a task.
const HEADS: usize = 8;

/// The gradients of [`delta_gates()`](super::delta_gates()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaGatesGradient {
    pub da: Tensor,
    pub db: Tensor,
    pub da_log: Tensor,
    pub ddt_bias: Tensor,
}

/// With `rate[h] = exp(a_log[h])`:
///
/// ```text
/// da[t, h]    = -rate[h] * sigmoid(a[t, h] + dt_bias[h]) * dlog_decay[t, h]
/// ddt_bias[h] = sum over t of da[t, h]
/// da_log[h]   = sum over t of -rate[h] * softplus(a[t, h] + dt_bias[h]) * dlog_decay[t, h]
/// db[t, h]    = sigmoid(b[t, h]) * (1 - sigmoid(b[t, h])) * dbeta[t, h]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `a`, `b` | `[T, Hv]` | f32, f16 or bf16 |
/// | `a_log`, `dt_bias` | `[Hv]` | f32, f16 or bf16 |
/// | `dlog_decay`, `dbeta` | `[T, Hv]` | f32 |
/// | `da`, `db` | `[T, Hv]` | f32 |
/// | `da_log`, `ddt_bias` | `[Hv]` | f32 |
///
/// All arithmetic is f32; sums over tokens go from the first to the last, 64 at a time, and on a
/// GPU these sums too.
///
/// # Errors
/// As [`delta_gates()`](super::delta_gates()); [`KernelError::Shape`] and [`KernelError::DType`]
/// for gradients that do not fit.
pub fn delta_gates_backward(
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    [dlog_decay, dbeta]: [&Tensor; 2],
) -> Result<DeltaGatesGradient, KernelError> {
    let check = CHECK;
    super::check(check, [a, b], [a_log, dt_bias])?;
    for (name, x) in [("dlog_decay", dlog_decay), ("dbeta", dbeta)] {
        check.shape(name, x, a.shape(), || format!("a {:?}", a.shape()))?;
        check.dtype(name, x, DType::F32)?;
        check.same_device(name, x.device(), a.device())?;
    }
    let wide = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)].map(|(n, x)| check.widened(n, x));
    let [a, b, a_log, dt_bias] = wide;
    let (a, b, a_log, dt_bias) = (a?, b?, a_log?, dt_bias?);
    match a.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, [&a, &b], [&a_log, &dt_bias], [dlog_decay, dbeta]),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => backward(cpu, [&a, &b], [&a_log, &dt_bias], [dlog_decay, dbeta]),
    }
}

/// On the CPU; everything is f32.
fn backward(
    cpu: &Cpu,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    [dlog_decay, dbeta]: [&Tensor; 2],
) -> Result<DeltaGatesGradient, KernelError> {
    let (mut db, heads) = (b.clone(), a.dim(1));
    let new = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::F32, a.device());
    let (mut da, mut da_log, mut ddt_bias) = (new(a.shape())?, new(&[heads])?, new(&[heads])?);
    let dbetas = dbeta.as_slice::<f32>()?;
    cpu.for_each_rows(db.as_mut_slice::<f32>()?, 1, super::COST, |first, b| {
        for (b, dbeta) in b.iter_mut().zip(&dbetas[first..]) {
            // 1 - sigmoid(b) is sigmoid(-b), which keeps its digits.
            *b = math::sigmoid(*b) * math::sigmoid(-*b) * dbeta;
        }
    });
    let (a, dlog_decay) = (a.as_slice::<f32>()?, dlog_decay.as_slice::<f32>()?);
    let (a_log, dt_bias) = (a_log.as_slice::<f32>()?, dt_bias.as_slice::<f32>()?);
    // Of a head each: da's are strided, so they are made in a column of their own.
    let of_heads = da_log
        .as_mut_slice::<f32>()?
        .chunks_mut(HEADS)
        .zip(ddt_bias.as_mut_slice::<f32>()?.chunks_mut(HEADS));
    let mut tasks: Vec<_> = of_heads.map(|sums| (sums, vec![])).collect();
    cpu.for_each(tasks.iter_mut().enumerate().collect(), |(task, ((da_log, ddt_bias), columns))| {
        for (i, (da_log, ddt_bias)) in da_log.iter_mut().zip(ddt_bias.iter_mut()).enumerate() {
            let head = task * HEADS + i;
            let gates = a.iter().skip(head).step_by(heads).zip(dlog_decay.iter().skip(head).step_by(heads));
            let one = |(a, dlog_decay): (&f32, &f32)| {
                let (x, dx) = (a + dt_bias[head], -a_log[head].exp() * dlog_decay);
                (math::sigmoid(x) * dx, softplus(x) * dx)
            };
            let (column, of_rate): (Vec<f32>, Vec<f32>) = gates.map(one).unzip();
            (*ddt_bias, *da_log) = (sum(&column), sum(&of_rate));
            columns.push(column);
        }
    });
    let columns = tasks.into_iter().flat_map(|(_, columns)| columns);
    let da_values = da.as_mut_slice::<f32>()?;
    for (head, column) in columns.enumerate() {
        da_values.iter_mut().skip(head).step_by(heads).zip(column).for_each(|(da, x)| *da = x);
    }
    Ok(DeltaGatesGradient { da, db, da_log, ddt_bias })
}

/// A sum in stretches, so that its error does not grow with all of its terms.
fn sum(x: &[f32]) -> f32 {
    x.chunks(64).map(|x| x.iter().sum::<f32>()).sum()
}
