//! Sampling on a GPU, without a sort: the least logit that is kept is searched for, four bits of it a launch, and the
//! token is found by sums over blocks of ids and then within a block.
//!
//! Logits are compared as *keys*: integers in the logits' order. A cube is a plane and has a block of ids.

use super::SampleParams;
use super::next::DecodeState;
use super::random::uniform;
use super::search::{self, draw};
use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{read, with_storage};
use crate::gpu::key::{INFINITE, NOTHING, key, of_key};
use crate::gpu::{Dispatch, Gpu};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// Blocks that ids are cut into.
pub(super) const BLOCKS: usize = 128;
/// The greatest of all blocks' keys.
#[cube]
pub(super) fn greatest(keys: &[u32]) -> u32 {
    let mut most = 0u32;
    let mut i = UNIT_POS_X as usize;
    while i < BLOCKS {
        most = max(most, keys[i]);
        i += CUBE_DIM_X as usize;
    }
    plane_max(most)
}

/// Logits as f32, those in the history penalised, and each block's greatest key.
#[cube(launch_unchecked)]
fn prepare<L: Int>(
    logits: &[L],
    history: &[u32],
    penalised: &mut [f32],
    keys: &mut [u32],
    len: u32,
    block: u32,
    window: u32,
    penalty: u32,
    #[comptime] dtype: FloatType,
    #[comptime] repeats: bool,
) {
    let first = CUBE_POS_X * block;
    let end = min(first + block, len);
    let mut most = 0u32;
    let mut i = first + UNIT_POS_X;
    while i < end {
        let mut x = read(logits, i as usize, dtype);
        if comptime!(repeats) {
            let mut seen = 0u32;
            for place in 0..window as usize {
                if history[place] == i {
                    seen = 1u32;
                }
            }
            let factor = f32::reinterpret(penalty);
            let less = select(x < 0.0f32, x * factor, x / factor);
            x = select(seen == 1u32, less, x);
        }
        penalised[i as usize] = x;
        most = max(most, key(x));
        i += CUBE_DIM_X;
    }
    let most = plane_max(most);
    if UNIT_POS_X == 0 {
        keys[CUBE_POS_X as usize] = most;
    }
}

/// What the last kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Choice {
    /// The greatest.
    Greedy,
    /// One of those that the search has kept.
    Drawn,
}

/// Finds the token and takes it up: one plane.
#[cube(launch_unchecked)]
fn choose(
    logits: &[f32],
    keys: &[u32],
    weights: &[f32],
    counts: &[u32],
    token: &mut [u32],
    position: &mut [u32],
    step: &mut [u32],
    history: &mut [u32],
    len: u32,
    block: u32,
    window: u32,
    used: u32,
    top_k: u32,
    temperature: u32,
    seed_low: u32,
    seed_high: u32,
    #[comptime] choice: Choice,
) {
    let most = greatest(keys);
    let mut id = 0xffff_ffffu32.runtime();
    if most < INFINITE && most > NOTHING {
        if comptime!(choice == Choice::Greedy) {
            id = first_greatest(logits, keys, most, len, block);
        } else {
            let place = uniform(step[0], seed_low, seed_high);
            let scale = (of_key(most), f32::reinterpret(temperature));
            id = draw(logits, weights, counts, scale, place, len, block, top_k);
        }
    }
    if UNIT_POS_X == 0 {
        let done = step[0];
        if window > 0 {
            history[((used + done) % window) as usize] = id;
        }
        token[0] = id;
        step[0] = done + 1u32;
        position[0] += 1u32;
    }
}

/// The lowest id whose key is `most`.
#[cube]
fn first_greatest(logits: &[f32], keys: &[u32], most: u32, len: u32, block: u32) -> u32 {
    let mut found = 0xffff_ffffu32.runtime();
    let mut i = UNIT_POS_X;
    while i < comptime!(BLOCKS as u32) {
        if keys[i as usize] == most {
            found = min(found, i);
        }
        i += CUBE_DIM_X;
    }
    let first = plane_min(found) * block;
    let end = min(first + block, len);
    let mut id = 0xffff_ffffu32.runtime();
    let mut i = first + UNIT_POS_X;
    while i < end {
        if key(logits[i as usize]) == most {
            id = min(id, i);
        }
        i += CUBE_DIM_X;
    }
    plane_min(id)
}

fn prepare_kernel(target: &Target, dtype: FloatType, repeats: bool) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(units(target));
    let [logits, history, penalised, keys] = [buffer(), buffer(), buffer(), buffer()];
    with_storage!(dtype, L => Box::new(prepare::Prepare::<L>::new(
        settings, properties, registers, logits, history, penalised, keys, (), (), (), (), dtype, repeats,
    )))
}

fn choose_kernel(target: &Target, choice: Choice) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(units(target));
    let [logits, keys, weights, counts] = [buffer(), buffer(), buffer(), buffer()];
    let [token, position, step, history] = [buffer(), buffer(), buffer(), buffer()];
    Box::new(choose::Choose::new(
        settings,
        properties,
        registers,
        logits,
        keys,
        weights,
        counts,
        token,
        position,
        step,
        history,
        (),
        (),
        (),
        (),
        (),
        (),
        (),
        (),
        choice,
    ))
}

/// Units of a cube: they run in step on every device of this kind.
pub(super) fn units(target: &Target) -> u32 {
    target.smallest_plane().min(32) as u32
}

/// Every kernel of the op.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = search::kernels(target);
    for dtype in crate::ops::testing::FLOATS {
        kernels.extend([false, true].map(|repeats| prepare_kernel(target, dtype, repeats)));
    }
    kernels.extend([Choice::Greedy, Choice::Drawn].map(|choice| choose_kernel(target, choice)));
    kernels
}

/// The logits as kernels share them.
pub(super) struct Prepared {
    /// f32 `[V]`.
    pub logits: Tensor,
    /// u32 `[BLOCKS]`.
    pub keys: Tensor,
    pub len: u32,
    pub block: u32,
}

/// See [`super::sample_next`]; everything was checked.
pub(super) fn sample_next(
    gpu: &Gpu,
    logits: &Tensor,
    state: &DecodeState,
    params: &SampleParams,
) -> Result<(), KernelError> {
    let check = Check("sample");
    let device = Device::Gpu(gpu.clone());
    let dtype = check.float("logits", logits)?;
    let len = check.index(logits.len())?;
    let block = len.div_ceil(BLOCKS as u32);
    let [token, position, step, history] = state.tensors();
    let (window, used) = state.ring();
    let repeats = params.repetition_penalty != 1.0 && window > 0;
    let prepared = Prepared {
        logits: Tensor::allocate(&[logits.len()], DType::F32, &device)?,
        keys: Tensor::allocate(&[BLOCKS], DType::U32, &device)?,
        len,
        block,
    };
    gpu.launch(Dispatch {
        kernel: prepare_kernel(gpu.target(), dtype, repeats),
        cubes: [BLOCKS as u32, 1, 1],
        buffers: vec![
            logits.memory()?,
            history.memory()?,
            prepared.logits.memory()?,
            prepared.keys.memory()?,
        ],
        scalars: vec![len, block, window as u32, params.repetition_penalty.to_bits()],
    })?;
    let (choice, weights, counts) = match params.temperature {
        // Without a draw there are no weights, and anything may stand for them.
        0.0 => (Choice::Greedy, prepared.keys.clone(), prepared.keys.clone()),
        _ => {
            let kept = search::search(gpu, &prepared, params)?;
            (Choice::Drawn, kept.weights, kept.counts)
        }
    };
    gpu.launch(Dispatch {
        kernel: choose_kernel(gpu.target(), choice),
        cubes: [1, 1, 1],
        buffers: vec![
            prepared.logits.memory()?,
            prepared.keys.memory()?,
            weights.memory()?,
            counts.memory()?,
            token.memory()?,
            position.memory()?,
            step.memory()?,
            history.memory()?,
        ],
        scalars: vec![
            len,
            block,
            window as u32,
            used as u32,
            search::top_k(params, len),
            params.temperature.to_bits(),
            params.seed as u32,
            (params.seed >> 32) as u32,
        ],
    })
}
