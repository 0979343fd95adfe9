//! Norms on a GPU: a cube or a plane a row.

use crate::gpu::compile::{Target, buffer};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::math::{reciprocal, silu};
use crate::gpu::rows::{self, Rows};
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
    x: FloatType,
    gate: Option<FloatType>,
    y: FloatType,
}

/// `y = x / sqrt(mean(x^2) + eps) * weight`, times `silu(gate)` where there is one; rows of `vectors` vectors.
#[cube(launch_unchecked)]
fn norm<X: Int, G: Int, Y: Int, V: Size>(
    x: &[Vector<X, V>],
    gate: &[Vector<G, V>],
    weight: &[Vector<u32, V>],
    y: &mut [Vector<Y, V>],
    count: u32,
    vectors: u32,
    eps: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.rows.vector);
    let row = rows::row(shape.rows);
    let vectors = vectors as usize;
    let first = row * vectors;
    // Units past the last row have nothing to do but come to the sum.
    let end = select(row < count as usize, vectors, 0usize);
    let mut values = Array::<f32>::new(vector);
    let width = f32::cast_from((vectors * vector) as u32);
    let xs = rows::ahead::<X, V>(x, first, end, shape.rows);
    let weights = rows::ahead::<u32, V>(weight, 0usize, end, shape.rows);
    let mut gates = Vector::<G, V>::new(G::from_int(0));
    if comptime!(shape.gate.is_some()) {
        gates = rows::ahead::<G, V>(gate, first, end, shape.rows);
    }
    let mean = rows::squares::<X, V>(xs, x, first, end, shape.x, shape.rows) / width;
    let scale = reciprocal((mean + f32::reinterpret(eps)).sqrt());
    let mut factors = Array::<f32>::new(vector);
    let mut i = rows::place(shape.rows);
    while i < end {
        let xs = rows::again::<X, V>(xs, x, first + i, shape.rows);
        unpack::<X, V>(xs, &mut values, 0usize, vector, shape.x);
        let weights = rows::again::<u32, V>(weights, weight, i, shape.rows);
        unpack::<u32, V>(weights, &mut factors, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            values[j] = values[j] * scale * factors[j];
        }
        if comptime!(shape.gate.is_some()) {
            let float = comptime!(shape.gate.unwrap_or(FloatType::F32));
            let gates = rows::again::<G, V>(gates, gate, first + i, shape.rows);
            unpack::<G, V>(gates, &mut factors, 0usize, vector, float);
            #[unroll]
            for j in 0..vector {
                values[j] *= silu(factors[j]);
            }
        }
        y[first + i] = pack::<Y, V>(&values, 0usize, vector, shape.y);
        i += comptime!(rows::stride(shape.rows));
    }
}

fn kernel(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(shape.rows.units as u32);
    let gate = shape.gate.unwrap_or(FloatType::F32);
    with_storage!(shape.x, X => with_storage!(gate, G => with_storage!(shape.y, Y => {
        Box::new(norm::Norm::<X, G, Y>::new(
            settings, properties, registers, buffer(), buffer(), buffer(), buffer(), (), (), (), shape.rows.vector,
            shape,
        ))
    })))
}

/// The kernels of both ops: narrow and wide rows, each way to load, and each type of each operand.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for (x, gate, y) in [
            (F32, None, BF16),
            (F16, None, F16),
            (BF16, Some(F32), BF16),
            (F32, Some(BF16), F32),
            (F16, Some(F16), F32),
        ] {
            kernels.push(kernel(target, Shape { rows, x, gate, y }));
        }
    }
    kernels
}

/// See [`super::rms_norm`] and [`super::gated_rms_norm`]; everything was checked.
pub(super) fn rms_norm(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    (eps, dtype): (f32, FloatType),
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), dtype.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let weight = weight.cast(DType::F32)?;
    let (width, count) = (weight.len(), x.len() / weight.len());
    let rows = Rows::of(gpu.target(), [count, width], &[x, &weight, gate.unwrap_or(x)]);
    let gate_type = gate.map(|gate| check.float("gate", gate)).transpose()?;
    let shape = Shape { rows, x: check.float("x", x)?, gate: gate_type, y: dtype };
    check.index(x.len())?;
    gpu.launch(Dispatch {
        kernel: kernel(gpu.target(), shape),
        cubes: rows.cubes(count),
        // Without a gate, anything may stand for it.
        buffers: vec![x.memory()?, gate.unwrap_or(&weight).memory()?, weight.memory()?, y.memory()?],
        scalars: vec![check.index(count)?, check.index(width / rows.vector)?, eps.to_bits()],
    })?;
    Ok(y)
}
