//! The choice of experts on a GPU: one plane per token finds one expert after the other.
//!
//! Experts are ordered by their logits, greatest first, and among equals by their ids. The next
//! expert is the first of those that come after the last one in this order, so that chosen experts
//! need not be marked.

#![allow(unsafe_code)] // Launches.

use super::{RouterParams, RouterScores};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::cuda::ptx;
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, sigmoid, unless_nan};
use crate::gpu::rows::{self, Maximum, Minimum, Rows, Sum, reduce};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RouterConfig {
    rows: Rows,
    dtype: FloatType,
    normalize: bool,
    scores: RouterScores,
    /// True if a bias takes part in the choice.
    bias: bool,
    /// True if experts are chosen in some of their groups alone.
    groups: bool,
    /// Experts per unit, whose logits stay in registers; 0 where they are too many for that.
    experts_per_unit: usize,
    /// True if there is a shared expert.
    shared: bool,
    /// True if a plane reduces integers in one instruction.
    redux: bool,
    /// True if no unit writes more than one slot: it then keeps its weight in a register until the
    /// sum is known.
    one_slot: bool,
}

/// The most experts whose logits a unit keeps in registers.
const MAX_EXPERTS_PER_UNIT: usize = 16;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    tokens: u32,
    experts: u32,
    top_k: u32,
    /// Experts of a group.
    group_size: u32,
    topk_group: u32,
    /// The bits of f32s.
    sum_eps: u32,
    scale: u32,
}

/// The experts of a token.
#[derive(CubeType)]
struct TokenExperts {
    token: usize,
    experts: usize,
    group_size: usize,
    /// The groups that are chosen from: a bit for each.
    groups: u32,
}

/// `shared` is the logit of the shared expert of each token, if there is one.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn router_top_k_select<X: Int>(
    logits: &[X],
    bias: &[f32],
    shared: &[X],
    ids: &mut [u32],
    weights: &mut [f32],
    sizes: Sizes,
    #[comptime] config: RouterConfig,
) {
    let stride = comptime!(rows::lanes_per_row(config.rows));
    let unit = rows::lane_in_row(config.rows);
    let row = rows::row(config.rows);
    // Units past the last token do its work too, and do not write.
    let token = min(row, sizes.tokens as usize - 1);
    let writes = row < sizes.tokens as usize;
    let (experts, top_k) = (sizes.experts as usize, sizes.top_k as usize);
    let first = token * (top_k + comptime!(config.shared as usize));
    let mut last = Choice { key: u32::MAX.runtime(), id: 0u32.runtime() };
    let (mut greatest, mut sum, mut kept) = (0.0f32.runtime(), 0.0f32.runtime(), 0.0f32.runtime());
    let mut bad = false.runtime();
    let group_size = sizes.group_size as usize;
    let mut of = TokenExperts { token, experts, group_size, groups: u32::MAX.runtime() };
    if comptime!(config.groups) {
        of.groups = best_groups(logits, bias, &of, sizes.topk_group as usize, config);
    }
    let keys = load_keys(logits, bias, &of, config);
    for slot in 0..top_k {
        let best = best_of_unit(&keys, (logits, bias), &of, slot == 0, &last, config);
        last.key = greatest_of(best.key, config);
        last.id = least_of(select(best.key == last.key, best.id, u32::MAX.runtime()), config);
        let logit = of_key(last.key);
        if slot == 0 {
            bad = last.key >= comptime!(INFINITE) || last.key <= comptime!(NOTHING);
            greatest = logit;
            if comptime!(!config.normalize) {
                sum = total(logits, &of, greatest, config);
            }
        }
        let weight = if comptime!(config.scores == RouterScores::Softmax) {
            exp(logit - greatest)
        } else {
            let id = min(last.id as usize, experts - 1);
            sigmoid(read(logits, token * experts + id, config.dtype))
        };
        if comptime!(config.normalize) {
            sum += weight;
        }
        if writes && unit == slot % stride {
            ids[first + slot] = select(bad, 0u32.runtime(), last.id);
            if comptime!(config.one_slot) {
                kept = weight;
            } else {
                weights[first + slot] = weight;
            }
        }
    }
    if comptime!(config.normalize && config.scores == RouterScores::Sigmoid) {
        sum += f32::reinterpret(sizes.sum_eps);
    }
    // Each weight is divided by the unit that wrote it.
    let mut slot = unit;
    while writes && slot < top_k {
        if comptime!(!config.one_slot) {
            kept = weights[first + slot];
        }
        weights[first + slot] =
            select(bad, f32::reinterpret(0x7fc0_0000u32), kept / sum * f32::reinterpret(sizes.scale));
        slot += stride;
    }
    if comptime!(config.shared) && writes && unit == 0 {
        ids[first + top_k] = experts as u32;
        weights[first + top_k] = sigmoid(read(shared, token, config.dtype));
    }
}

/// The keys of a unit's experts for a token, where they stay in registers.
#[cube]
fn load_keys<X: Int>(
    logits: &[X],
    bias: &[f32],
    of: &TokenExperts,
    #[comptime] config: RouterConfig,
) -> Array<u32> {
    let experts = of.experts;
    let stride = comptime!(rows::lanes_per_row(config.rows));
    let unit = rows::lane_in_row(config.rows);
    let mut keys = Array::<u32>::new(comptime!(config.experts_per_unit.max(1)));
    #[unroll]
    for j in 0..comptime!(config.experts_per_unit) {
        let i = unit + j * stride;
        keys[j] =
            select(i < experts, key(choice(logits, bias, of, min(i, experts - 1), config)), 0u32.runtime());
    }
    keys
}

/// The value that expert `i` of a token is chosen by: its logit, or its score plus its bias, and
/// -inf in a group that is not chosen.
#[cube]
fn choice<X: Int>(
    logits: &[X],
    bias: &[f32],
    of: &TokenExperts,
    i: usize,
    #[comptime] config: RouterConfig,
) -> f32 {
    let mut value = read(logits, of.token * of.experts + i, config.dtype);
    if comptime!(config.scores == RouterScores::Sigmoid) {
        let mut score = sigmoid(value);
        if comptime!(config.bias) {
            score += bias[i];
        }
        let infinite = (u32::reinterpret(value) & 0x7fff_ffffu32) == 0x7f80_0000u32;
        value = select(infinite, value, score);
    }
    if comptime!(config.groups) {
        let chosen = (of.groups >> (i / of.group_size) as u32) & 1u32;
        value = select(chosen == 1u32, value, f32::reinterpret(0xff80_0000u32));
    }
    value
}

/// The groups that a token's experts are chosen in, a bit for each: one after the other, as experts
/// are found.
#[cube]
fn best_groups<X: Int>(
    logits: &[X],
    bias: &[f32],
    of: &TokenExperts,
    topk_group: usize,
    #[comptime] config: RouterConfig,
) -> u32 {
    let stride = comptime!(rows::lanes_per_row(config.rows));
    let n_group = of.experts / of.group_size;
    let mut last = Choice { key: u32::MAX.runtime(), id: 0u32.runtime() };
    let mut groups = 0u32.runtime();
    for slot in 0..topk_group {
        let mut best = Choice { key: 0u32.runtime(), id: u32::MAX.runtime() };
        let mut group = rows::lane_in_row(config.rows);
        while group < n_group {
            let id = group as u32;
            let key = key(value_of_group(logits, bias, of, group, config));
            let after = slot == 0 || key < last.key || (key == last.key && id > last.id);
            if after && key > best.key {
                best.key = key;
                best.id = id;
            }
            group += stride;
        }
        last.key = greatest_of(best.key, config);
        last.id = least_of(select(best.key == last.key, best.id, u32::MAX.runtime()), config);
        groups |= 1u32 << (last.id & 31u32);
    }
    groups
}

/// The value that a group is chosen by: the sum of the two greatest values of its experts, with
/// softmax the greatest one.
#[cube]
fn value_of_group<X: Int>(
    logits: &[X],
    bias: &[f32],
    of: &TokenExperts,
    group: usize,
    #[comptime] config: RouterConfig,
) -> f32 {
    let start = group * of.group_size;
    let (mut first, mut second) = (f32::reinterpret(0xff80_0000u32), f32::reinterpret(0xff80_0000u32));
    let mut bad = 0.0f32.runtime();
    for j in 0..of.group_size {
        let x = choice(logits, bias, of, start + j, config);
        // NaN is no maximum: it stays NaN in the sum.
        bad = unless_nan(x, bad);
        second = select(x > first, first, select(x > second, x, second));
        first = select(x > first, x, first);
    }
    if comptime!(config.scores == RouterScores::Softmax) { first + bad } else { first + second + bad }
}

/// The divisor of weights where that is not their own sum: with softmax the sum of
/// `exp(logit - greatest)` over all experts of a token.
#[cube]
fn total<X: Int>(logits: &[X], of: &TokenExperts, greatest: f32, #[comptime] config: RouterConfig) -> f32 {
    let mut total = 1.0f32.runtime();
    if comptime!(config.scores == RouterScores::Softmax) {
        let mut part = 0.0f32;
        let mut i = rows::lane_in_row(config.rows);
        while i < of.experts {
            part += exp(read(logits, of.token * of.experts + i, config.dtype) - greatest);
            i += comptime!(rows::lanes_per_row(config.rows));
        }
        total = reduce::<f32, Sum>(part, config.rows);
    }
    total
}

/// An expert, and the key of its logit.
#[derive(CubeType)]
struct Choice {
    key: u32,
    id: u32,
}

/// The first of a unit's experts for a token, in order: of those that come after the last one, or
/// of all if it is the `first` choice.
#[cube]
fn best_of_unit<X: Int>(
    keys: &Array<u32>,
    values: (&[X], &[f32]),
    of: &TokenExperts,
    first: bool,
    last: &Choice,
    #[comptime] config: RouterConfig,
) -> Choice {
    let (logits, bias) = values;
    let stride = comptime!(rows::lanes_per_row(config.rows));
    let unit = rows::lane_in_row(config.rows);
    let mut best = Choice { key: 0u32.runtime(), id: u32::MAX.runtime() };
    if comptime!(config.experts_per_unit > 0) {
        #[unroll]
        for j in 0..comptime!(config.experts_per_unit) {
            let id = (unit + j * stride) as u32;
            let after = first || keys[j] < last.key || (keys[j] == last.key && id > last.id);
            if after && keys[j] > best.key {
                best.key = keys[j];
                best.id = id;
            }
        }
    } else {
        let mut i = unit;
        while i < of.experts {
            let id = i as u32;
            let key = key(choice(logits, bias, of, i, config));
            let after = first || key < last.key || (key == last.key && id > last.id);
            if after && key > best.key {
                best.key = key;
                best.id = id;
            }
            i += stride;
        }
    }
    best
}

/// The greatest key that units of a token have.
#[cube]
fn greatest_of(key: u32, #[comptime] config: RouterConfig) -> u32 {
    if comptime!(config.redux) { ptx::greatest(key) } else { reduce::<u32, Maximum>(key, config.rows) }
}

/// The least id that units of a token have.
#[cube]
fn least_of(id: u32, #[comptime] config: RouterConfig) -> u32 {
    if comptime!(config.redux) { ptx::least(id) } else { reduce::<u32, Minimum>(id, config.rows) }
}

/// One plane per token, and a few of them per cube.
pub(super) fn rows(plane: Option<usize>) -> Rows {
    match plane {
        Some(plane @ ..32) => Rows { units: plane, plane, rows: 1, vector: 1, preloads: false },
        Some(plane) => Rows { units: 2 * plane, plane, rows: 2, vector: 1, preloads: false },
        None => Rows { units: 64, plane: 0, rows: 1, vector: 1, preloads: false },
    }
}

impl RouterConfig {
    fn new(
        target: &Target,
        experts: usize,
        dtype: FloatType,
        [bias, shared]: [bool; 2],
        RouterParams { top_k, normalize, scores, n_group, topk_group, .. }: RouterParams,
    ) -> Self {
        let rows = rows(target.plane());
        let units = rows::lanes_per_row(rows);
        let per_unit = Some(experts.div_ceil(units)).filter(|&count| count <= MAX_EXPERTS_PER_UNIT);
        Self {
            rows,
            dtype,
            normalize,
            scores,
            bias,
            groups: topk_group < n_group,
            experts_per_unit: per_unit.unwrap_or(0),
            shared,
            redux: target.tensor_cores(),
            one_slot: top_k <= units,
        }
    }
}

fn compiled(target: &Target, config: RouterConfig) -> Kernel<RouterTopKSelect<'static>> {
    with_storage!(config.dtype, X => RouterTopKSelect::kernel::<X>(target, config.rows.units, config))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each type, normalised or not, with a shared expert or without.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]);
    let experts = [64, 256, 4096].into_iter().cycle();
    let code = |((dtype, normalize), experts)| {
        let params = RouterParams::softmax(experts / 32, normalize);
        compiled(target, RouterConfig::new(target, experts, dtype, [false, normalize], params)).code()
    };
    let of_sigmoids = [(128, true), (4096, false)].map(|(experts, normalize)| {
        let n_group = if normalize { 8 } else { 1 };
        let params = RouterParams { n_group, ..RouterParams::sigmoid(8, normalize, 1e-20) };
        let config = RouterConfig::new(target, experts, FloatType::BF16, [normalize, false], params);
        compiled(target, config).code()
    });
    let params = RouterParams { n_group: 8, topk_group: 3, ..RouterParams::softmax(6, false) };
    let of_groups = compiled(target, RouterConfig::new(target, 160, FloatType::BF16, [false; 2], params));
    all.zip(experts).map(code).chain(of_sigmoids).chain([of_groups.code()]).collect()
}

/// See [`super::router_top_k`]; everything was checked.
pub(super) fn router_top_k(
    op: Check,
    gpu: &Gpu,
    logits: &Tensor,
    [bias, shared]: [Option<&Tensor>; 2],
    params: RouterParams,
) -> Result<(Tensor, Tensor), KernelError> {
    let (tokens, experts) = (logits.dim(0), logits.dim(1));
    let chosen = [tokens, params.top_k + usize::from(shared.is_some())];
    let ids = Tensor::allocate(&chosen, DType::U32, logits.device())?;
    let weights = Tensor::allocate(&chosen, DType::F32, logits.device())?;
    if tokens == 0 {
        return Ok((ids, weights));
    }
    op.index(logits.len())?;
    let dtype = op.float("logits", logits)?;
    let some = [bias.is_some(), shared.is_some()];
    let config = RouterConfig::new(gpu.target(), experts, dtype, some, params);
    let arguments = RouterTopKSelect {
        logits: logits.buffer()?,
        // Unused operands get a placeholder buffer.
        bias: bias.unwrap_or(&weights).buffer()?,
        shared: shared.unwrap_or(logits).buffer()?,
        ids: ids.buffer()?,
        weights: weights.buffer()?,
        sizes: Sizes {
            tokens: op.index(tokens)?,
            experts: op.index(experts)?,
            top_k: op.index(params.top_k)?,
            group_size: op.index(experts / params.n_group)?,
            topk_group: op.index(params.topk_group)?,
            sum_eps: params.sum_eps.to_bits(),
            scale: params.scale.to_bits(),
        },
    };
    // SAFETY: the sizes are the tensors', and planes past the last token write nothing.
    unsafe { gpu.launch(compiled(gpu.target(), config), config.rows.cubes(tokens), arguments)? };
    Ok((ids, weights))
}
