//! A plane chooses a token's experts one after the other, each the greatest of those after the last in order.

use super::RouterParams;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Cubes along y: Vulkan promises no more.
const CUBES: usize = 65535;

#[cube(launch_unchecked)]
fn route<L: Int>(
    logits: &[L],
    ids: &mut [u32],
    weights: &mut [f32],
    tokens: u32,
    experts: u32,
    top_k: u32,
    #[comptime] dtype: FloatType,
    #[comptime] normalize: bool,
) {
    let token = CUBE_POS_Z as usize * comptime!(CUBES) + CUBE_POS_Y as usize;
    if token < tokens as usize {
        let row = token * experts as usize;
        let place = token * top_k as usize;
        let mut most = 0u32.runtime();
        let mut last_key = 0xffff_ffffu32.runtime();
        let mut last_id = 0u32.runtime();
        let mut sum = 0.0f32.runtime();
        for slot in 0..top_k as usize {
            let mut best = 0u32.runtime();
            let mut best_id = 0xffff_ffffu32.runtime();
            let mut id = UNIT_POS_X;
            while id < experts {
                let own = key(read(logits, row + id as usize, dtype));
                let after = slot == 0 || own < last_key || (own == last_key && id > last_id);
                if after && own > best {
                    best = own;
                    best_id = id;
                }
                id += CUBE_DIM_X;
            }
            last_key = plane_max(best);
            last_id = plane_min(select(best == last_key, best_id, 0xffff_ffffu32.runtime()));
            if slot == 0 {
                most = last_key;
            }
            let weight = (of_key(last_key) - of_key(most)).exp();
            sum += weight;
            let right = most < INFINITE && most > NOTHING;
            if UNIT_POS_X == 0 {
                ids[place + slot] = select(right, last_id, 0u32);
                weights[place + slot] = select(right, weight, f32::reinterpret(0x7fc0_0000u32));
            }
        }
        if comptime!(!normalize) {
            sum = 0.0f32;
            let mut id = UNIT_POS_X;
            while id < experts {
                sum += (read(logits, row + id as usize, dtype) - of_key(most)).exp();
                id += CUBE_DIM_X;
            }
            sum = plane_sum(sum);
        }
        if UNIT_POS_X == 0 {
            for slot in 0..top_k as usize {
                weights[place + slot] /= sum;
            }
        }
    }
}

fn kernel(target: &Target, dtype: FloatType, normalize: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(target.smallest_plane().min(32) as u32);
    with_storage!(dtype, L => Box::new(route::Route::<L>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), (), dtype, normalize,
    )))
}

/// Every kernel of the op.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let variants = crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]);
    variants.map(|(dtype, normalize)| kernel(target, dtype, normalize)).collect()
}

/// See [`super::router_top_k`]; shapes were checked.
pub(super) fn router_top_k(
    gpu: &Gpu,
    logits: &Tensor,
    params: RouterParams,
) -> Result<(Tensor, Tensor), KernelError> {
    let op = Check("router_top_k");
    let (tokens, experts) = (logits.dim(0), logits.dim(1));
    let new = |dtype| Tensor::allocate(&[tokens, params.top_k], dtype, &Device::Gpu(gpu.clone()));
    let (ids, weights) = (new(DType::U32)?, new(DType::F32)?);
    if tokens == 0 {
        return Ok((ids, weights));
    }
    op.index(logits.len())?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), op.float("logits", logits)?, params.normalize),
        cubes: [1, op.index(tokens.min(CUBES))?, op.index(tokens.div_ceil(CUBES))?],
        buffers: vec![logits.memory()?, ids.memory()?, weights.memory()?],
        scalars: vec![op.index(tokens)?, op.index(experts)?, op.index(params.top_k)?],
    })?;
    Ok((ids, weights))
}
