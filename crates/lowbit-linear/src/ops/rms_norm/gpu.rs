//! RMSNorm on a GPU, plain and gated: `y = x / sqrt(mean(x^2) + eps) * weight`, times `silu(gate)`
//! where there is a gate.
//!
//! One cube, or one plane of a cube, takes a row (`gpu/rows.rs` chooses): it sums the row's
//! squares, then scales the row. All arithmetic is f32; y is rounded once. The order of the sums is
//! the same for every launch of one shape: change it and results change in their last bits.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::math::{reciprocal, silu};
use crate::gpu::rows::{self, RowSizes, Rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The compile-time configuration of a kernel. y has x's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormConfig {
    rows: Rows,
    x: FloatType,
    gate: Option<FloatType>,
}

/// `eps` is the bits of an f32, `weight` is f32, and `gate` is read only where the config has its
/// type.
#[kernel]
fn rms_norm<X: Int, G: Int, V: Size>(
    x: &[Vector<X, V>],
    gate: &[Vector<G, V>],
    weight: &[Vector<u32, V>],
    y: &mut [Vector<X, V>],
    sizes: RowSizes,
    eps: u32,
    #[comptime] config: NormConfig,
) {
    let vector = comptime!(config.rows.vector);
    let row = rows::row(config.rows);
    let vectors = sizes.vectors as usize;
    let first = row * vectors;
    // Units past the last row have an empty row: they only take part in the sum.
    let end = select(row < sizes.count as usize, vectors, 0usize);
    let mut values = Array::<f32>::new(vector);
    let width = f32::cast_from((vectors * vector) as u32);
    let xs = rows::preload::<X, V>(x, first, end, config.rows);
    let weights = rows::preload::<u32, V>(weight, 0usize, end, config.rows);
    let mut gates = Vector::<G, V>::new(G::from_int(0));
    if comptime!(config.gate.is_some()) {
        gates = rows::preload::<G, V>(gate, first, end, config.rows);
    }
    let mean = rows::sum_of_squares::<X, V>(xs, x, first, end, config.x, config.rows) / width;
    let scale = reciprocal((mean + f32::reinterpret(eps)).sqrt());
    let mut factors = Array::<f32>::new(vector);
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        let xs = rows::preloaded_or_load::<X, V>(xs, x, first + i, config.rows);
        unpack::<X, V>(xs, &mut values, 0usize, vector, config.x);
        let weights = rows::preloaded_or_load::<u32, V>(weights, weight, i, config.rows);
        unpack::<u32, V>(weights, &mut factors, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            values[j] = values[j] * scale * factors[j];
        }
        if comptime!(config.gate.is_some()) {
            let float = comptime!(config.gate.unwrap_or(FloatType::F32));
            let gates = rows::preloaded_or_load::<G, V>(gates, gate, first + i, config.rows);
            unpack::<G, V>(gates, &mut factors, 0usize, vector, float);
            #[unroll]
            for j in 0..vector {
                values[j] *= silu(factors[j]);
            }
        }
        y[first + i] = pack::<X, V>(&values, 0usize, vector, config.x);
        i += comptime!(rows::lanes_per_row(config.rows));
    }
}

fn compiled(target: &Target, config: NormConfig) -> Kernel<RmsNorm<'static>> {
    let gate = config.gate.unwrap_or(FloatType::F32);
    with_storage!(config.x, X => with_storage!(gate, G => {
        RmsNorm::kernel::<X, G>(target, config.rows.units, config.rows.vector, config)
    }))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Kernels of both ops for narrow and wide rows, each vector length, and each type of each operand.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let longest = rows::LONGEST.min(target.vector());
    for (count, width, vector) in [(1, 4096, longest), (999, 4096, longest), (999, 128, 4), (1, 70, 1)] {
        let rows = Rows::new(target, [count, width], vector);
        for (x, gate) in
            [(F32, None), (F16, None), (BF16, None), (BF16, Some(F32)), (F32, Some(BF16)), (F16, Some(F16))]
        {
            kernels.push(compiled(target, NormConfig { rows, x, gate }).code());
        }
    }
    kernels
}

/// See [`super::rms_norm`] and [`super::gated_rms_norm`]; everything was checked.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    gate: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    let weight = weight.cast(DType::F32)?;
    let (width, count) = (weight.len(), x.len() / weight.len());
    let rows = Rows::of(gpu.target(), [count, width], &[x, &weight, gate.unwrap_or(x)]);
    let gate_type = gate.map(|gate| check.float("gate", gate)).transpose()?;
    let config = NormConfig { rows, x: check.float("x", x)?, gate: gate_type };
    check.index(x.len())?;
    let arguments = RmsNorm {
        x: x.buffer()?,
        // Without a gate, a placeholder.
        gate: gate.unwrap_or(&weight).buffer()?,
        weight: weight.buffer()?,
        y: y.buffer()?,
        sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / rows.vector)? },
        eps: eps.to_bits(),
    };
    // SAFETY: x, y and a gate are `count` rows of `width` elements, the weight is one; the op
    // checked their shapes.
    unsafe { gpu.launch(compiled(gpu.target(), config), rows.cubes(count), arguments)? };
    Ok(y)
}
