//! The gradients of [`attention()`](super::attention()).

mod cpu;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use super::{AttentionParams, check_operands};
use crate::ops::Check;
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`attention()`](super::attention()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct AttentionGradient {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
}

/// With `p` the weights of the softmax, the gradients of `y[t, h] = sum_j p[t, h, j] v[g, j]`:
///
/// ```text
/// ds[t, h, j] = p[t, h, j] * (dy[t, h] . v[g, j] - dy[t, h] . y[t, h])
/// dq[t, h]    = scale * sum over j of ds[t, h, j] k[g, j]
/// dk[g, j]    = scale * sum over t and the heads h of g of ds[t, h, j] q[t, h]
/// dv[g, j]    = sum over t and the heads h of g of p[t, h, j] dy[t, h]
/// ```
/// With a soft cap c, ds is multiplied by its slope `1 - (s / c)^2`, where s is the capped score.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q, k, v, positions | as in [`attention()`](super::attention()) | |
/// | y | `[T, Hq, Dv]`, the op's result | f32, f16, bf16 |
/// | dy | as y | f32, f16, bf16 |
/// | dq, dk, dv | q's, k's and v's; keys that no query sees have gradient 0 | dy's |
///
/// Scores are computed anew, on a CPU for a block of queries and of keys at a time, so that no
/// `[T, capacity]` exists, on a GPU for as many tokens as fit into 128 MiB. Everything is f32, in
/// an order that does not depend on the number of threads, and a GPU repeats every bit. A key or
/// value that is not finite may make the gradients of queries that do not see it NaN.
///
/// Source: Dao, "FlashAttention-2" (2023), algorithm 2.
///
/// # Errors
/// As [`attention()`](super::attention()); [`KernelError::Shape`] for a y or dy that does not fit.
/// On a GPU a position beyond the capacity is no error: its rows of dq are NaN, and no key's
/// gradient has them.
pub fn attention_backward(
    [q, k, v]: [&Tensor; 3],
    positions: &Tensor,
    params: &AttentionParams,
    [y, dy]: [&Tensor; 2],
) -> Result<AttentionGradient, KernelError> {
    let check = Check("attention_backward");
    check_operands(check, [q, k, v], positions, params)?;
    // Integers have no gradient.
    check.float("k", k)?;
    let want = [q.dim(0), q.dim(1), v.dim(2)];
    for (name, operand) in [("y", y), ("dy", dy)] {
        check.shape(name, operand, &want, || format!("q {:?} with v {:?}", q.shape(), v.shape()))?;
        check.float(name, operand)?;
        check.same_device(name, operand.device(), q.device())?;
    }
    let wide = [("q", q), ("k", k), ("v", v), ("y", y), ("dy", dy)].map(|(name, x)| check.widened(name, x));
    let (dtype, [q, k, v, y, dy]) = (dy.dtype(), wide);
    let operands = Operands { q: q?, k: k?, v: v?, y: y?, dy: dy?, positions };
    let AttentionGradient { dq, dk, dv } = match operands.q.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, &operands, params, gpu::PAIRS)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => operands.backward(cpu, params)?,
    };
    Ok(AttentionGradient { dq: dq.cast(dtype)?, dk: dk.cast(dtype)?, dv: dv.cast(dtype)? })
}

/// The operands, which are f32 and were checked.
struct Operands<'a> {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    dy: Tensor,
    positions: &'a Tensor,
}

impl Operands<'_> {
    /// The gradients in f32, all 0.
    fn zeros(&self) -> Result<AttentionGradient, KernelError> {
        let [dq, dk, dv] = [&self.q, &self.k, &self.v]
            .map(|like| Tensor::allocate_zeros(like.shape(), DType::F32, like.device()));
        Ok(AttentionGradient { dq: dq?, dk: dk?, dv: dv? })
    }

    fn backward(&self, cpu: &Cpu, params: &AttentionParams) -> Result<AttentionGradient, KernelError> {
        let Self { q, k, v, y, dy, positions } = self;
        let problem = cpu::Problem {
            q: q.as_slice()?,
            k: k.as_slice()?,
            v: v.as_slice()?,
            dy: dy.as_slice()?,
            positions: positions.as_slice()?,
            params,
            group: q.dim(1) / k.dim(0),
            heads: k.dim(0),
            capacity: k.dim(1),
            width: q.dim(2),
            value_width: v.dim(2),
        };
        let mut out = self.zeros()?;
        let AttentionGradient { dq, dk, dv } = &mut out;
        problem.backward(cpu, y.as_slice()?, [dq.as_mut_slice()?, dk.as_mut_slice()?, dv.as_mut_slice()?]);
        Ok(out)
    }
}
