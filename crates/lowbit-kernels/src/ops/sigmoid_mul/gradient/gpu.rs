//! Both gradients on a GPU, in one launch: element by element, or row by row (`gpu/rows.rs`) where a row has one gate.

#![allow(unsafe_code)] // Launches.

use super::widths;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::sigmoid;
use crate::gpu::rows::{self, RowSizes, Rows, Sum};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Operands<V: Size> {
    x: Box<[Vector<u32, V>]>,
    gate: Box<[Vector<u32, V>]>,
    dy: Box<[Vector<u32, V>]>,
}

/// In vectors: all gates, a row of x, and a row of gates.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    len: u32,
    width: u32,
    columns: u32,
}

/// A gate per element: those of x are the last columns of the gate, and the others have gradient 0.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn sigmoid_mul_backward<V: Size>(
    operands: &Operands<V>,
    dx: &mut [Vector<u32, V>],
    dgate: &mut [Vector<u32, V>],
    sizes: Sizes,
    #[comptime] vector: usize,
) {
    let (width, columns) = (sizes.width as usize, sizes.columns as usize);
    let unread = columns - width;
    let mut xs = Array::<f32>::new(vector);
    let mut gates = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let (row, column) = (i / columns, i % columns);
        let mut gradient = Vector::<u32, V>::new(0u32);
        if column >= unread {
            let at = row * width + (column - unread);
            unpack::<u32, V>(operands.x[at], &mut xs, 0usize, vector, FloatType::F32);
            unpack::<u32, V>(operands.gate[i], &mut gates, 0usize, vector, FloatType::F32);
            unpack::<u32, V>(operands.dy[at], &mut dys, 0usize, vector, FloatType::F32);
            #[unroll]
            for j in 0..vector {
                // 1 - s is sigmoid(-gate), which keeps its digits.
                let s = sigmoid(gates[j]);
                xs[j] = dys[j] * xs[j] * s * sigmoid(-gates[j]);
                dys[j] *= s;
            }
            dx[at] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
            gradient = pack::<u32, V>(&xs, 0usize, vector, FloatType::F32);
        }
        dgate[i] = gradient;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct RowOperands<V: Size> {
    x: Box<[Vector<u32, V>]>,
    gate: Box<[f32]>,
    dy: Box<[Vector<u32, V>]>,
}

/// A gate per row.
#[kernel]
fn sigmoid_mul_backward_rows<V: Size>(
    operands: &RowOperands<V>,
    dx: &mut [Vector<u32, V>],
    dgate: &mut [f32],
    sizes: RowSizes,
    #[comptime] config: Rows,
) {
    let vector = comptime!(config.vector);
    let row = rows::row(config);
    let first = row * sizes.vectors as usize;
    // Units past the last row have an empty row: they only take part in the sum.
    let known = row < sizes.count as usize;
    let end = select(known, sizes.vectors as usize, 0usize);
    let mut s = 0.0f32;
    let mut slope = 0.0f32;
    if known {
        let gate = operands.gate[row];
        s = sigmoid(gate);
        slope = s * sigmoid(-gate);
    }
    let mut xs = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut along = 0.0f32;
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(operands.x[first + i], &mut xs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(operands.dy[first + i], &mut dys, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            along = fma(xs[j], dys[j], along);
            dys[j] *= s;
        }
        dx[first + i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config));
    }
    let along = rows::reduce::<f32, Sum>(along, config);
    if known && rows::lane_in_row(config) == 0 {
        dgate[row] = along * slope;
    }
}

fn of_elements(target: &Target, vector: usize) -> Kernel<SigmoidMulBackward<'static>> {
    SigmoidMulBackward::kernel(target, UNITS, vector, vector)
}

fn of_rows(target: &Target, rows: Rows) -> Kernel<SigmoidMulBackwardRows<'static>> {
    SigmoidMulBackwardRows::kernel(target, rows.units, rows.vector, rows)
}

#[cfg(test)]
inventory::submit!(crate::gpu::tests::Kernels(kernels));

/// Of elements and of narrow and wide rows, for each vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let fits = |vector: &usize| *vector <= target.vector();
    let mut kernels = Vec::new();
    for vector in [1, rows::VECTOR].into_iter().filter(fits) {
        kernels.push(of_elements(target, vector).code());
        for [count, width] in [[1, 4096], [999, 4096], [999, 128]] {
            kernels.push(of_rows(target, Rows::new(target, [count, width], vector)).code());
        }
    }
    kernels
}

/// `[dx, dgate]` of `[x, gate, dy]`, which are f32 and not empty; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [x, gate, dy]: [&Tensor; 3],
) -> Result<[Tensor; 2], KernelError> {
    let [width, columns] = widths(x, gate);
    let new = |x: &Tensor| Tensor::allocate(x.shape(), DType::F32, x.device());
    let (dx, dgate, target) = (new(x)?, new(gate)?, gpu.target());
    check.index(x.len())?;
    if columns < width {
        let count = gate.len();
        let vector = rows::vector(target, rows::VECTOR, width, &[x, dy]);
        let rows = Rows::new(target, [count, width], vector);
        let arguments = SigmoidMulBackwardRows {
            operands: RowOperandsArgs { x: x.buffer()?, gate: gate.buffer()?, dy: dy.buffer()? },
            dx: dx.buffer()?,
            dgate: dgate.buffer()?,
            sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / vector)? },
        };
        // SAFETY: x, dy and dx are `count` rows of `width` elements, each with one gate.
        unsafe { gpu.launch(of_rows(target, rows), rows.cubes(count), arguments)? };
        return Ok([dx, dgate]);
    }
    // Both sizes are multiples of the vector.
    let [of_x, of_gate] =
        [width, columns].map(|size| rows::vector(target, rows::VECTOR, size, &[x, gate, dy]));
    let vector = of_x.min(of_gate);
    let len = gate.len() / vector;
    let arguments = SigmoidMulBackward {
        operands: OperandsArgs { x: x.buffer()?, gate: gate.buffer()?, dy: dy.buffer()? },
        dx: dx.buffer()?,
        dgate: dgate.buffer()?,
        sizes: Sizes {
            len: check.index(len)?,
            width: check.index(width / vector)?,
            columns: check.index(columns / vector)?,
        },
    };
    // SAFETY: x, dy and dx are rows of `width` elements, the gate and its gradient as many of `columns`, which is no less.
    unsafe { gpu.launch(of_elements(target, vector), cubes(len), arguments)? };
    Ok([dx, dgate])
}
