//! The gradients of [`router_top_k()`](super::router_top_k()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::{RouterParams, RouterScores};
use crate::ops::Check;
use crate::simd::math;
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("router_top_k_backward");

/// The gradients of [`router_top_k()`](super::router_top_k()).
#[derive(Clone, Debug)]
pub struct RouterTopKGradient {
    /// `[T, E]`.
    pub dlogits: Tensor,
    /// `[T, 1]`, where there is a shared expert.
    pub dshared: Option<Tensor>,
}

/// The gradients by the logits, for the experts that were chosen: the choice itself is a constant.
/// With `dp[e]` the dweights of expert e, 0 where it was not chosen, `p` the softmax over all
/// experts, or over the chosen ones when `normalize`, `s` the sigmoids, and `n` the sum of the
/// chosen ones plus `sum_eps`:
///
/// ```text
/// dlogits[t, e] = scale * p[e] * (dp[e] - sum over f of p[f] * dp[f])
/// dlogits[t, e] = scale * s[e] * (1 - s[e]) / n * (dp[e] - sum over f of s[f] / n * dp[f])   normalised
/// dlogits[t, e] = scale * s[e] * (1 - s[e]) * dp[e]                                          or not
/// dshared[t]    = sigmoid(shared[t]) * (1 - sigmoid(shared[t])) * dweights[t, top_k]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `logits`, `shared`, `ids` | as in [`router_top_k()`](super::router_top_k()) | |
/// | `dweights` | as `ids` | f32 |
/// | `dlogits`, `dshared` | `[T, E]`, `[T, 1]` | f32 |
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that do
/// not fit; [`KernelError::Id`] for an id that is no expert's, which on a GPU is no error: its
/// token's dlogits are NaN.
pub fn router_top_k_backward(
    logits: &Tensor,
    shared: Option<&Tensor>,
    params: RouterParams,
    ids: &Tensor,
    dweights: &Tensor,
) -> Result<RouterTopKGradient, KernelError> {
    let check = CHECK;
    let [tokens, experts] = super::check(check, logits, shared, params)?;
    let slots = params.top_k + usize::from(shared.is_some());
    check.shape("ids", ids, &[tokens, slots], || format!("logits {:?} with {params:?}", logits.shape()))?;
    check.shape("dweights", dweights, ids.shape(), || "ids".into())?;
    check.dtype("dweights", dweights, DType::F32)?;
    for (name, operand) in [("ids", ids), ("dweights", dweights)] {
        check.same_device(name, operand.device(), logits.device())?;
    }
    // The shared expert's is behind the others.
    check.ids("ids", ids, experts + usize::from(shared.is_some()))?;
    let logits = check.widened("logits", logits)?;
    let shared = shared.map(|shared| check.widened("shared", shared)).transpose()?;
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, [&logits, ids, dweights], shared.as_ref(), params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => backward(cpu, [&logits, ids, dweights], shared, params),
    }
}

/// On the CPU; logits and the shared expert's are f32.
fn backward(
    cpu: &Cpu,
    [logits, ids, dweights]: [&Tensor; 3],
    shared: Option<Tensor>,
    params: RouterParams,
) -> Result<RouterTopKGradient, KernelError> {
    let (experts, slots) = (logits.dim(1), ids.dim(1));
    let mut dlogits = Tensor::allocate_zeros(logits.shape(), DType::F32, logits.device())?;
    let (logits, ids, dweights) =
        (logits.as_slice::<f32>()?, ids.as_slice::<u32>()?, dweights.as_slice::<f32>()?);
    if let Some(index) = ids.chunks(slots).position(|ids| ids[..params.top_k].contains(&(experts as u32))) {
        return Err(CHECK.value(
            "ids",
            format!("{experts} in row {index}"),
            "that is the shared expert's, which comes last",
        ));
    }
    cpu.for_each_rows(dlogits.as_mut_slice()?, experts, 16 * experts, |first, rows| {
        for (t, row) in (first..).zip(rows.chunks_exact_mut(experts)) {
            let chosen = ids[t * slots..].iter().take(params.top_k).map(|&id| id as usize);
            let chosen: Vec<(usize, f32)> = chosen.zip(dweights[t * slots..].iter().copied()).collect();
            let logits = &logits[t * experts..(t + 1) * experts];
            match params.scores {
                RouterScores::Softmax => of_softmax(logits, &chosen, params.normalize, row),
                RouterScores::Sigmoid => of_sigmoids(logits, &chosen, params, row),
            }
            row.iter_mut().for_each(|dlogit| *dlogit *= params.scale);
        }
    });
    let dshared = shared.map(|mut dshared| {
        for (t, x) in dshared.as_mut_slice::<f32>()?.iter_mut().enumerate() {
            // 1 - sigmoid(x) is sigmoid(-x), which keeps its digits.
            *x = math::sigmoid(*x) * math::sigmoid(-*x) * dweights[t * slots + params.top_k];
        }
        Ok::<_, KernelError>(dshared)
    });
    Ok(RouterTopKGradient { dlogits, dshared: dshared.transpose()? })
}

/// One token's dlogits with sigmoids, which are zero; `chosen` are experts and their dweights.
fn of_sigmoids(logits: &[f32], chosen: &[(usize, f32)], params: RouterParams, dlogits: &mut [f32]) {
    let score = |e: usize| math::sigmoid(logits[e]);
    let (sum, along) = match params.normalize {
        false => (1.0, 0.0),
        true => {
            let sum = chosen.iter().map(|&(e, _)| score(e)).sum::<f32>() + params.sum_eps;
            (sum, chosen.iter().map(|&(e, dp)| score(e) / sum * dp).sum())
        }
    };
    for &(e, dp) in chosen {
        // 1 - sigmoid(x) is sigmoid(-x), which keeps its digits.
        dlogits[e] = score(e) * math::sigmoid(-logits[e]) / sum * (dp - along);
    }
}

/// The same with softmax.
fn of_softmax(logits: &[f32], chosen: &[(usize, f32)], normalize: bool, dlogits: &mut [f32]) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    let exp = |e: usize| math::exp(logits[e] - max);
    let sum: f32 = match normalize {
        true => chosen.iter().map(|&(e, _)| exp(e)).sum(),
        false => (0..logits.len()).map(exp).sum(),
    };
    let along: f32 = chosen.iter().map(|&(e, dp)| exp(e) / sum * dp).sum();
    if !normalize {
        dlogits.iter_mut().enumerate().for_each(|(e, dlogit)| *dlogit = -(exp(e) / sum * along));
    }
    for &(e, dp) in chosen {
        dlogits[e] = exp(e) / sum * (dp - along);
    }
}
