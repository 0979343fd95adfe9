//! The gradients on a GPU. One plane per token goes through its logits three times (greatest, sum,
//! results), as when the experts were chosen; a shared expert's gate is one number per token.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, RouterTopKGradient};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, sigmoid};
use crate::gpu::rows::{self, Maximum, Rows, Sum, reduce};
use crate::ops::router_top_k::gpu::rows as planes;
use crate::ops::router_top_k::{RouterParams, RouterScores};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Config {
    rows: Rows,
    normalize: bool,
    scores: RouterScores,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    tokens: u32,
    experts: u32,
    top_k: u32,
    /// Ids per token: `top_k`, and one more where there is a shared expert.
    slots: u32,
    /// The bits of f32s.
    sum_eps: u32,
    scale: u32,
}

#[kernel]
fn router_top_k_backward(
    logits: &[f32],
    ids: &[u32],
    dweights: &[f32],
    dlogits: &mut [f32],
    sizes: Sizes,
    #[comptime] config: Config,
) {
    let stride = comptime!(rows::lanes_per_row(config.rows));
    let lane = rows::lane_in_row(config.rows);
    let token = rows::row(config.rows);
    let known = token < sizes.tokens as usize;
    // Units past the last token have no experts: they only take part in the reductions.
    let experts = select(known, sizes.experts as usize, 0usize);
    let top_k = select(known, sizes.top_k as usize, 0usize);
    let (first, chosen) = (token * sizes.experts as usize, token * sizes.slots as usize);
    let mut greatest = f32::reinterpret(0xff80_0000u32);
    let mut i = lane;
    if comptime!(config.scores == RouterScores::Softmax) {
        while i < experts {
            greatest = max(greatest, logits[first + i]);
            i += stride;
        }
        greatest = reduce::<f32, Maximum>(greatest, config.rows);
    }
    // Of the chosen experts alone: their sum, and that of their gradients.
    let mut of_chosen = 0.0f32;
    let mut along = 0.0f32;
    let mut wrong = 0u32;
    let mut slot = lane;
    while slot < top_k {
        let id = ids[chosen + slot];
        if id < sizes.experts {
            let e = score(logits[first + id as usize], greatest, config.scores);
            of_chosen += e;
            along += e * dweights[chosen + slot];
        } else {
            wrong = 1u32;
        }
        slot += stride;
    }
    let mut sum = of_chosen;
    if comptime!(!config.normalize && config.scores == RouterScores::Softmax) {
        sum = 0.0f32;
        let mut i = lane;
        while i < experts {
            sum += exp(logits[first + i] - greatest);
            i += stride;
        }
    }
    sum = reduce::<f32, Sum>(sum, config.rows);
    if comptime!(config.scores == RouterScores::Sigmoid) {
        sum += f32::reinterpret(sizes.sum_eps);
    }
    along = reduce::<f32, Sum>(along, config.rows) / sum;
    if comptime!(!config.normalize && config.scores == RouterScores::Sigmoid) {
        sum = 1.0f32;
        along = 0.0f32;
    }
    let scale = f32::reinterpret(sizes.scale);
    let wrong = reduce::<u32, Maximum>(wrong, config.rows);
    let mut i = lane;
    while i < experts {
        let logit = logits[first + i];
        let mut p = score(logit, greatest, config.scores) / sum;
        if comptime!(config.scores == RouterScores::Sigmoid) {
            p *= sigmoid(-logit);
        }
        let mut dlogit = 0.0f32;
        if comptime!(!config.normalize && config.scores == RouterScores::Softmax) {
            dlogit = -(p * along);
        }
        for slot in 0..top_k {
            if ids[chosen + slot] as usize == i {
                dlogit = p * (dweights[chosen + slot] - along);
            }
        }
        dlogits[first + i] = select(wrong == 0u32, dlogit * scale, f32::reinterpret(0x7fc0_0000u32));
        i += stride;
    }
}

/// The term of a logit in the sum that divides weights.
#[cube]
fn score(logit: f32, greatest: f32, #[comptime] scores: RouterScores) -> f32 {
    if comptime!(scores == RouterScores::Softmax) { exp(logit - greatest) } else { sigmoid(logit) }
}

/// `dshared[t] = sigmoid'(shared[t]) * dweights[t, slots - 1]`.
#[kernel]
fn router_top_k_backward_shared(shared: &[f32], dweights: &[f32], dshared: &mut [f32], sizes: Sizes) {
    let mut t = ABSOLUTE_POS;
    while t < sizes.tokens as usize {
        let x = shared[t];
        // 1 - sigmoid(x) is sigmoid(-x), which keeps its digits.
        dshared[t] = sigmoid(x) * sigmoid(-x) * dweights[t * sizes.slots as usize + sizes.top_k as usize];
        t += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target, params: RouterParams) -> (Kernel<RouterTopKBackward<'static>>, Rows) {
    let rows = planes(target.plane());
    let config = Config { rows, normalize: params.normalize, scores: params.scores };
    (RouterTopKBackward::kernel(target, rows.units, config), rows)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let scores = [RouterScores::Softmax, RouterScores::Sigmoid];
    let all = scores.into_iter().flat_map(|scores| [false, true].map(|normalize| (scores, normalize)));
    let code = |(scores, normalize)| {
        compiled(target, RouterParams { scores, ..RouterParams::softmax(1, normalize) }).0.code()
    };
    all.map(code).chain([RouterTopKBackwardShared::kernel(target, UNITS).code()]).collect()
}

/// See [`super::router_top_k_backward`]; everything was checked, and logits and the shared expert's
/// are f32.
pub(super) fn backward(
    gpu: &Gpu,
    [logits, ids, dweights]: [&Tensor; 3],
    shared: Option<&Tensor>,
    params: RouterParams,
) -> Result<RouterTopKGradient, KernelError> {
    let (tokens, experts) = (logits.dim(0), logits.dim(1));
    let new = |like: &Tensor| Tensor::allocate(like.shape(), like.dtype(), like.device());
    let (dlogits, dshared) = (new(logits)?, shared.map(new).transpose()?);
    if tokens == 0 {
        return Ok(RouterTopKGradient { dlogits, dshared });
    }
    CHECK.index(logits.len())?;
    CHECK.index(ids.len())?;
    let sizes = Sizes {
        tokens: CHECK.index(tokens)?,
        experts: CHECK.index(experts)?,
        top_k: CHECK.index(params.top_k)?,
        slots: CHECK.index(ids.dim(1))?,
        sum_eps: params.sum_eps.to_bits(),
        scale: params.scale.to_bits(),
    };
    let arguments = RouterTopKBackward {
        logits: logits.buffer()?,
        ids: ids.buffer()?,
        dweights: dweights.buffer()?,
        dlogits: dlogits.buffer()?,
        sizes,
    };
    let (kernel, rows) = compiled(gpu.target(), params);
    // SAFETY: the sizes are the tensors', planes past the last token write nothing, and ids that
    // are no expert's read nothing.
    unsafe { gpu.launch(kernel, rows.cubes(tokens), arguments)? };
    if let (Some(shared), Some(dshared)) = (shared, &dshared) {
        let arguments = RouterTopKBackwardShared {
            shared: shared.buffer()?,
            dweights: dweights.buffer()?,
            dshared: dshared.buffer()?,
            sizes,
        };
        let kernel = RouterTopKBackwardShared::kernel(gpu.target(), UNITS);
        // SAFETY: both have a number for each token, and dweights a row.
        unsafe { gpu.launch(kernel, cubes(tokens), arguments)? };
    }
    Ok(RouterTopKGradient { dlogits, dshared })
}
