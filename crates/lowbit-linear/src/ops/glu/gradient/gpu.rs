//! Both gradients on a GPU, in one launch: element by element, or row by row (`gpu/rows.rs`) where
//! a row has one gate.

#![allow(unsafe_code)] // Launches.

use super::super::gpu::{Exact, factor, factor_slope, value, value_slope};
use super::{Gate, widths};
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::rows::{self, RowSizes, Rows, Sum};
use crate::ops::Check;
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

/// The compile-time configuration of the kernel of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Elements {
    by: Gate,
    /// True if rows of the gate are longer than those of x.
    longer: bool,
    vector: usize,
}

/// A gate per element: those of x are the last columns of the gate, and the others have gradient 0.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn glu_backward<V: Size>(
    operands: &Operands<V>,
    dx: &mut [Vector<u32, V>],
    dgate: &mut [Vector<u32, V>],
    sizes: Sizes,
    #[comptime] config: Elements,
) {
    let vector = comptime!(config.vector);
    let (width, columns) = (sizes.width as usize, sizes.columns as usize);
    let unread = columns - width;
    let mut xs = Array::<f32>::new(vector);
    let mut gates = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let mut at = i;
        let mut read = true;
        if comptime!(config.longer) {
            let (row, column) = (i / columns, i % columns);
            at = row * width + (column - unread);
            read = column >= unread;
        }
        let mut gradient = Vector::<u32, V>::new(0u32);
        if read {
            unpack::<u32, V>(operands.x[at], &mut xs, 0usize, vector, FloatType::F32);
            unpack::<u32, V>(operands.gate[i], &mut gates, 0usize, vector, FloatType::F32);
            unpack::<u32, V>(operands.dy[at], &mut dys, 0usize, vector, FloatType::F32);
            #[unroll]
            for j in 0..vector {
                let (x, dy) = (xs[j], dys[j]);
                xs[j] = factor_slope(dy * value(x, config.by), gates[j], config.by);
                dys[j] = value_slope(dy * factor::<Exact>(gates[j], config.by), x, config.by);
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
fn glu_backward_rows<V: Size>(
    operands: &RowOperands<V>,
    dx: &mut [Vector<u32, V>],
    dgate: &mut [f32],
    sizes: RowSizes,
    #[comptime] by: Gate,
    #[comptime] config: Rows,
) {
    let vector = comptime!(config.vector);
    let row = rows::row(config);
    let first = row * sizes.vectors as usize;
    // Units past the last row have an empty row: they only take part in the sum.
    let known = row < sizes.count as usize;
    let end = select(known, sizes.vectors as usize, 0usize);
    let mut of_x = 0.0f32;
    let mut of_gate = 0.0f32;
    if known {
        let gate = operands.gate[row];
        of_x = factor::<Exact>(gate, by);
        of_gate = factor_slope(1.0f32.runtime(), gate, by);
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
            along = fma(value(xs[j], by), dys[j], along);
            dys[j] = value_slope(dys[j] * of_x, xs[j], by);
        }
        dx[first + i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config));
    }
    let along = rows::reduce::<f32, Sum>(along, config);
    if known && rows::lane_in_row(config) == 0 {
        dgate[row] = along * of_gate;
    }
}

fn of_elements(target: &Target, config: Elements) -> Kernel<GluBackward<'static>> {
    GluBackward::kernel(target, UNITS, config.vector, config)
}

fn of_rows(target: &Target, by: Gate, rows: Rows) -> Kernel<GluBackwardRows<'static>> {
    GluBackwardRows::kernel(target, rows.units, rows.vector, by, rows)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Of elements for each vector length, and of narrow and wide rows by one gate.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for vector in [1, rows::VECTOR].into_iter().filter(|&vector| vector <= target.vector()) {
        for by in Gate::ALL {
            for longer in [false, true] {
                kernels.push(of_elements(target, Elements { by, longer, vector }).code());
            }
        }
        for (by, size) in [
            (Gate::Sigmoid, [1, 4096]),
            (Gate::Sigmoid, [999, 4096]),
            (Gate::Sigmoid, [999, 128]),
            (Gate::SwigluOai, [999, 128]),
        ] {
            kernels.push(of_rows(target, by, Rows::new(target, size, vector)).code());
        }
    }
    kernels
}

/// `[dx, dgate]` of `[x, gate, dy]`, which are f32 and not empty; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [x, gate, dy]: [&Tensor; 3],
    by: Gate,
) -> Result<[Tensor; 2], KernelError> {
    let [width, columns] = widths(x, gate);
    let new = |x: &Tensor| Tensor::allocate(x.shape(), DType::F32, x.device());
    let (dx, dgate, target) = (new(x)?, new(gate)?, gpu.target());
    check.index(x.len())?;
    if columns < width {
        let count = gate.len();
        let vector = rows::vector(target, rows::VECTOR, width, &[x, dy]);
        let rows = Rows::new(target, [count, width], vector);
        let arguments = GluBackwardRows {
            operands: RowOperandsArgs { x: x.buffer()?, gate: gate.buffer()?, dy: dy.buffer()? },
            dx: dx.buffer()?,
            dgate: dgate.buffer()?,
            sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / vector)? },
        };
        // SAFETY: x, dy and dx are `count` rows of `width` elements, each with one gate.
        unsafe { gpu.launch(of_rows(target, by, rows), rows.cubes(count), arguments)? };
        return Ok([dx, dgate]);
    }
    let longer = columns > width;
    let [width, columns] = if longer { [width, columns] } else { [x.len(); 2] };
    // Both sizes are multiples of the vector.
    let [of_x, of_gate] =
        [width, columns].map(|size| rows::vector(target, rows::VECTOR, size, &[x, gate, dy]));
    let vector = of_x.min(of_gate);
    let config = Elements { by, longer, vector };
    let len = gate.len() / vector;
    let arguments = GluBackward {
        operands: OperandsArgs { x: x.buffer()?, gate: gate.buffer()?, dy: dy.buffer()? },
        dx: dx.buffer()?,
        dgate: dgate.buffer()?,
        sizes: Sizes {
            len: check.index(len)?,
            width: check.index(width / vector)?,
            columns: check.index(columns / vector)?,
        },
    };
    // SAFETY: x, dy and dx are rows of `width` elements, the gate and its gradient as many of
    // `columns`, which is no less.
    unsafe { gpu.launch(of_elements(target, config), cubes(len), arguments)? };
    Ok([dx, dgate])
}
