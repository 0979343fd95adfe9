//! The gradients on a GPU: a unit takes one head through a block of tokens, so that neighbours read
//! neighbouring heads, and leaves what its tokens add to the parameters' gradients as a row; these
//! rows are summed afterwards.

#![allow(unsafe_code)] // Launches.

use super::{CHECK, DeltaGatesGradient};
use crate::gpu::launch::{LaunchArgs, kernel};
use crate::gpu::math::{exp, sigmoid, softplus};
use crate::gpu::{Gpu, rows};
use crate::ops::sum_rows;
use crate::ops::sum_rows::ROWS;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// Units of a cube: few, since heads are few too, and all multiprocessors are to have a cube.
const UNITS: usize = 64;

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Inputs {
    a: Box<[f32]>,
    b: Box<[f32]>,
    a_log: Box<[f32]>,
    dt_bias: Box<[f32]>,
    dlog_decay: Box<[f32]>,
    dbeta: Box<[f32]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    tokens: u32,
    heads: u32,
    /// Heads of all blocks of tokens.
    len: u32,
}

/// `of_log` and `of_bias` are the parts of `da_log` and `ddt_bias` by block, `[blocks, Hv]`.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn delta_gates_backward(
    inputs: &Inputs,
    da: &mut [f32],
    db: &mut [f32],
    of_log: &mut [f32],
    of_bias: &mut [f32],
    sizes: Sizes,
) {
    let (i, heads) = (ABSOLUTE_POS, sizes.heads as usize);
    if i < sizes.len as usize {
        let head = i % heads;
        let (rate, dt_bias) = (-exp(inputs.a_log[head]), inputs.dt_bias[head]);
        let mut token = i / heads * ROWS;
        let end = min(token + ROWS, sizes.tokens as usize);
        let mut log_sum = 0.0f32;
        let mut bias_sum = 0.0f32;
        while token < end {
            let at = token * heads + head;
            let x = inputs.a[at] + dt_bias;
            let dx = rate * inputs.dlog_decay[at];
            let da_i = sigmoid(x) * dx;
            da[at] = da_i;
            bias_sum += da_i;
            log_sum += softplus(x) * dx;
            let b = inputs.b[at];
            // 1 - sigmoid(b) is sigmoid(-b), which keeps its digits.
            db[at] = sigmoid(b) * sigmoid(-b) * inputs.dbeta[at];
            token += 1;
        }
        of_log[i] = log_sum;
        of_bias[i] = bias_sum;
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(|target| {
    vec![DeltaGatesBackward::kernel(target, UNITS).code()]
}));

/// See [`super::delta_gates_backward`]; everything was checked, and is f32.
pub(super) fn backward(
    gpu: &Gpu,
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    [dlog_decay, dbeta]: [&Tensor; 2],
) -> Result<DeltaGatesGradient, KernelError> {
    let (tokens, heads) = (a.dim(0), a.dim(1));
    let new = |rows: usize| Tensor::allocate(&[rows, heads], DType::F32, a.device());
    let blocks = tokens.div_ceil(ROWS);
    let (da, db, of_log, of_bias) = (new(tokens)?, new(tokens)?, new(blocks)?, new(blocks)?);
    if !a.is_empty() {
        CHECK.index(a.len())?;
        let arguments = DeltaGatesBackward {
            inputs: InputsArgs {
                a: a.buffer()?,
                b: b.buffer()?,
                a_log: a_log.buffer()?,
                dt_bias: dt_bias.buffer()?,
                dlog_decay: dlog_decay.buffer()?,
                dbeta: dbeta.buffer()?,
            },
            da: da.buffer()?,
            db: db.buffer()?,
            of_log: of_log.buffer()?,
            of_bias: of_bias.buffer()?,
            sizes: Sizes {
                tokens: CHECK.index(tokens)?,
                heads: CHECK.index(heads)?,
                len: CHECK.index(of_log.len())?,
            },
        };
        let cubes = rows::cubes(of_log.len().div_ceil(UNITS));
        let kernel = DeltaGatesBackward::kernel(gpu.target(), UNITS);
        // SAFETY: the op checked that all have as many tokens and heads; units past the last block
        // do nothing.
        unsafe { gpu.launch(kernel, cubes, arguments)? };
    }
    let (da_log, ddt_bias) = (sum_rows(&of_log)?, sum_rows(&of_bias)?);
    Ok(DeltaGatesGradient { da, db, da_log, ddt_bias })
}
