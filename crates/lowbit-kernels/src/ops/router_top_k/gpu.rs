//! The choice of experts on a GPU: a plane a token, which finds one expert after the other. The next is the greatest of
//! those that come after the last one in order, so that nothing need be crossed out.

use super::RouterParams;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::gpu::math::{exp, sigmoid};
use crate::gpu::ptx;
use crate::gpu::rows::{self, Greatest, Least, Rows, Sum, reduce};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    rows: Rows,
    dtype: FloatType,
    normalize: bool,
    /// Experts that a unit keeps in registers, or 0 where they are too many.
    each: usize,
    /// Whether there is a shared expert.
    shared: bool,
    /// Whether a plane reduces integers in one instruction.
    redux: bool,
    /// Whether a unit has one slot at the most, so that it keeps its weight until their sum is known.
    few: bool,
}

/// Experts that a unit can keep.
const MOST: usize = 16;

#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn route<X: Int>(
    logits: &[X],
    shared: &[X],
    ids: &mut [u32],
    weights: &mut [f32],
    tokens: u32,
    experts: u32,
    top_k: u32,
    #[comptime] shape: Shape,
) {
    let stride = comptime!(rows::stride(shape.rows));
    let unit = rows::place(shape.rows);
    let row = rows::row(shape.rows);
    // Units past the last token do its work too, and do not write.
    let token = min(row, tokens as usize - 1);
    let mine = row < tokens as usize;
    let (experts, top_k) = (experts as usize, top_k as usize);
    let first = token * (top_k + comptime!(shape.shared as usize));
    let mut last = Choice { key: u32::MAX.runtime(), id: 0u32.runtime() };
    let (mut greatest, mut sum, mut kept) = (0.0f32.runtime(), 0.0f32.runtime(), 0.0f32.runtime());
    let mut bad = false.runtime();
    let mut keys = Array::<u32>::new(comptime!(shape.each.max(1)));
    #[unroll]
    for j in 0..comptime!(shape.each) {
        let i = unit + j * stride;
        keys[j] = select(
            i < experts,
            key(read(logits, token * experts + min(i, experts - 1), shape.dtype)),
            0u32.runtime(),
        );
    }
    for slot in 0..top_k {
        let best = best(&keys, logits, (token, experts), slot == 0, &last, shape);
        last.key = greatest_of(best.key, shape);
        last.id = least_of(select(best.key == last.key, best.id, u32::MAX.runtime()), shape);
        let logit = of_key(last.key);
        if slot == 0 {
            bad = last.key >= comptime!(INFINITE) || last.key <= comptime!(NOTHING);
            greatest = logit;
            if comptime!(!shape.normalize) {
                let mut part = 0.0f32;
                let mut i = unit;
                while i < experts {
                    part += exp(read(logits, token * experts + i, shape.dtype) - greatest);
                    i += stride;
                }
                sum = reduce::<f32, Sum>(part, shape.rows);
            }
        }
        let weight = exp(logit - greatest);
        if comptime!(shape.normalize) {
            sum += weight;
        }
        if mine && unit == slot % stride {
            ids[first + slot] = select(bad, 0u32.runtime(), last.id);
            if comptime!(shape.few) {
                kept = weight;
            } else {
                weights[first + slot] = weight;
            }
        }
    }
    // Each by the unit that has it.
    let mut slot = unit;
    while mine && slot < top_k {
        if comptime!(!shape.few) {
            kept = weights[first + slot];
        }
        weights[first + slot] = select(bad, f32::reinterpret(0x7fc0_0000u32), kept / sum);
        slot += stride;
    }
    if comptime!(shape.shared) && mine && unit == 0 {
        ids[first + top_k] = experts as u32;
        weights[first + top_k] = sigmoid(read(shared, token, shape.dtype));
    }
}

/// An expert, and the key of its logit.
#[derive(CubeType)]
struct Choice {
    key: u32,
    id: u32,
}

/// The best of a unit's experts for a token: of those that come after the last one, or of all if this is the first.
#[cube]
fn best<X: Int>(
    keys: &Array<u32>,
    logits: &[X],
    of: (usize, usize),
    first: bool,
    last: &Choice,
    #[comptime] shape: Shape,
) -> Choice {
    let (token, experts) = of;
    let stride = comptime!(rows::stride(shape.rows));
    let unit = rows::place(shape.rows);
    let mut best = Choice { key: 0u32.runtime(), id: u32::MAX.runtime() };
    if comptime!(shape.each > 0) {
        #[unroll]
        for j in 0..comptime!(shape.each) {
            let id = (unit + j * stride) as u32;
            let after = first || keys[j] < last.key || (keys[j] == last.key && id > last.id);
            if after && keys[j] > best.key {
                best.key = keys[j];
                best.id = id;
            }
        }
    } else {
        let mut i = unit;
        while i < experts {
            let id = i as u32;
            let key = key(read(logits, token * experts + i, shape.dtype));
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

/// The greatest of what the units of a token have.
#[cube]
fn greatest_of(key: u32, #[comptime] shape: Shape) -> u32 {
    if comptime!(shape.redux) { ptx::greatest(key) } else { reduce::<u32, Greatest>(key, shape.rows) }
}

/// The least of it.
#[cube]
fn least_of(id: u32, #[comptime] shape: Shape) -> u32 {
    if comptime!(shape.redux) { ptx::least(id) } else { reduce::<u32, Least>(id, shape.rows) }
}

/// A plane a token, and a few of them a cube.
fn rows(plane: Option<usize>) -> Rows {
    match plane {
        Some(plane @ ..32) => Rows { units: plane, plane, rows: 1, vector: 1, once: false },
        Some(plane) => Rows { units: 2 * plane, plane, rows: 2, vector: 1, once: false },
        None => Rows { units: 64, plane: 0, rows: 1, vector: 1, once: false },
    }
}

fn kernel(
    target: &Target,
    experts: usize,
    dtype: FloatType,
    shared: bool,
    RouterParams { top_k, normalize }: RouterParams,
) -> Box<dyn CubeKernel> {
    let rows = rows(target.plane());
    let each = Some(experts.div_ceil(rows::stride(rows))).filter(|&each| each <= MOST).unwrap_or(0);
    let few = top_k <= rows::stride(rows);
    let shape = Shape { rows, dtype, normalize, each, shared, redux: target.tensor_cores(), few };
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    with_storage!(dtype, X => Box::new(route::Route::<X>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), buffer(), (), (), (), shape,
    )))
}

/// Each type, normalised or not, with a shared expert or without.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]);
    let experts = [64, 256, 4096].into_iter().cycle();
    let kernel = |((dtype, normalize), experts)| {
        let params = RouterParams { top_k: experts / 32, normalize };
        kernel(target, experts, dtype, normalize, params)
    };
    all.zip(experts).map(kernel).collect()
}

/// See [`super::router_top_k`]; everything was checked.
pub(super) fn router_top_k(
    op: Check,
    gpu: &Gpu,
    logits: &Tensor,
    shared: Option<&Tensor>,
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
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), experts, op.float("logits", logits)?, shared.is_some(), params),
        cubes: rows(gpu.target().plane()).cubes(tokens),
        // Where there is no shared expert, nothing is read of it.
        buffers: vec![logits.memory()?, shared.unwrap_or(logits).memory()?, ids.memory()?, weights.memory()?],
        scalars: vec![op.index(tokens)?, op.index(experts)?, op.index(params.top_k)?],
    })?;
    Ok((ids, weights))
}
