//! Both gradients on a GPU, in one launch.

#![allow(unsafe_code)] // Launches.

use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{sigmoid, silu};
use crate::gpu::{Gpu, rows};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Operands<V: Size> {
    gate: Box<[Vector<u32, V>]>,
    up: Box<[Vector<u32, V>]>,
    dy: Box<[Vector<u32, V>]>,
}

/// `len` vectors of f32.
#[kernel]
fn silu_mul_backward<V: Size>(
    operands: &Operands<V>,
    dgate: &mut [Vector<u32, V>],
    dup: &mut [Vector<u32, V>],
    len: u32,
    #[comptime] vector: usize,
) {
    let mut gates = Array::<f32>::new(vector);
    let mut ups = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        unpack::<u32, V>(operands.gate[i], &mut gates, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(operands.up[i], &mut ups, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(operands.dy[i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            ups[j] = dys[j] * ups[j] * silu_slope(gates[j]);
            dys[j] *= silu(gates[j]);
        }
        dgate[i] = pack::<u32, V>(&ups, 0usize, vector, FloatType::F32);
        dup[i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The derivative of silu: `s * (1 + x * (1 - s))` with `s = 1 / (1 + e^-x)`.
#[cube]
pub(in crate::ops) fn silu_slope(x: f32) -> f32 {
    // 1 - s is sigmoid(-x), which keeps its digits.
    sigmoid(x) * fma(x, sigmoid(-x), 1.0f32)
}

fn compiled(target: &Target, vector: usize) -> Kernel<SiluMulBackward<'static>> {
    SiluMulBackward::kernel(target, UNITS, vector, vector)
}

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(kernels));

/// For each vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let vectors = [1, rows::VECTOR].into_iter().filter(|&vector| vector <= target.vector());
    vectors.map(|vector| compiled(target, vector).code()).collect()
}

/// `[dgate, dup]` of `[gate, up, dy]`, all f32; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [gate, up, dy]: [&Tensor; 3],
) -> Result<[Tensor; 2], KernelError> {
    let new = || Tensor::allocate(gate.shape(), DType::F32, gate.device());
    let (dgate, dup) = (new()?, new()?);
    if gate.is_empty() {
        return Ok([dgate, dup]);
    }
    let vector = rows::vector(gpu.target(), rows::VECTOR, gate.len(), &[gate, up, dy]);
    let len = gate.len() / vector;
    let arguments = SiluMulBackward {
        operands: OperandsArgs { gate: gate.buffer()?, up: up.buffer()?, dy: dy.buffer()? },
        dgate: dgate.buffer()?,
        dup: dup.buffer()?,
        len: check.index(len)?,
    };
    // SAFETY: all have one shape.
    unsafe { gpu.launch(compiled(gpu.target(), vector), cubes(len), arguments)? };
    Ok([dgate, dup])
}
