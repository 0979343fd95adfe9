//! The gradients on a GPU: dx and dgate row by row (`gpu/rows.rs`), then dweight, which is a sum
//! over rows, in blocks of rows as [`sum_rows`](crate::ops::sum_rows()) has them. The first launch
//! leaves each row's factor for the second, which reads x and dy again instead of what would be as
//! large.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::UNITS;
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{reciprocal, silu};
use crate::gpu::rows::{self, RowSizes, Rows, Sum};
use crate::ops::Check;
use crate::ops::glu::gpu::silu_slope;
use crate::ops::sum_rows;
use crate::ops::sum_rows::{ROWS, gpu::BlockSizes};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GradientConfig {
    rows: Rows,
    gated: bool,
}

/// The gate is read only where the config says that there is one.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Operands<V: Size> {
    x: Box<[Vector<u32, V>]>,
    gate: Box<[Vector<u32, V>]>,
    weight: Box<[Vector<u32, V>]>,
    dy: Box<[Vector<u32, V>]>,
}

/// Fills dx, dgate where there is a gate, and each row's `1 / sqrt(mean(x^2) + eps)`; `eps` is the
/// bits of an f32.
#[kernel]
fn rms_norm_backward<V: Size>(
    operands: &Operands<V>,
    dx: &mut [Vector<u32, V>],
    dgate: &mut [Vector<u32, V>],
    scales: &mut [f32],
    sizes: RowSizes,
    eps: u32,
    #[comptime] config: GradientConfig,
) {
    let vector = comptime!(config.rows.vector);
    let row = rows::row(config.rows);
    let vectors = sizes.vectors as usize;
    let first = row * vectors;
    // Units past the last row have an empty row: they only take part in the sums.
    let known = row < sizes.count as usize;
    let end = select(known, vectors, 0usize);
    let mut xs = Array::<f32>::new(vector);
    let mut dys = Array::<f32>::new(vector);
    let mut weights = Array::<f32>::new(vector);
    let mut gates = Array::<f32>::new(vector);
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        load::<V>(operands, first, i, &mut xs, &mut dys, &mut weights, &mut gates, config);
        #[unroll]
        for j in 0..vector {
            squares = fma(xs[j], xs[j], squares);
            products = fma(xs[j], dz(weights[j], dys[j], gates[j], config.gated), products);
        }
        i += comptime!(rows::lanes_per_row(config.rows));
    }
    let width = f32::cast_from((vectors * vector) as u32);
    let mean = rows::reduce::<f32, Sum>(squares, config.rows) / width;
    let scale = reciprocal((mean + f32::reinterpret(eps)).sqrt());
    let along = rows::reduce::<f32, Sum>(products, config.rows) / width * scale * scale;
    if known && rows::lane_in_row(config.rows) == 0 {
        scales[row] = scale;
    }
    let mut i = rows::lane_in_row(config.rows);
    while i < end {
        load::<V>(operands, first, i, &mut xs, &mut dys, &mut weights, &mut gates, config);
        #[unroll]
        for j in 0..vector {
            let of_gate = dys[j] * (xs[j] * scale * weights[j]);
            dys[j] = scale * (dz(weights[j], dys[j], gates[j], config.gated) - xs[j] * along);
            if comptime!(config.gated) {
                gates[j] = of_gate * silu_slope(gates[j]);
            }
        }
        dx[first + i] = pack::<u32, V>(&dys, 0usize, vector, FloatType::F32);
        if comptime!(config.gated) {
            dgate[first + i] = pack::<u32, V>(&gates, 0usize, vector, FloatType::F32);
        }
        i += comptime!(rows::lanes_per_row(config.rows));
    }
}

/// Loads vector `i` of a row that starts at vector `first`.
#[cube]
fn load<V: Size>(
    operands: &Operands<V>,
    first: usize,
    i: usize,
    xs: &mut Array<f32>,
    dys: &mut Array<f32>,
    weights: &mut Array<f32>,
    gates: &mut Array<f32>,
    #[comptime] config: GradientConfig,
) {
    let vector = comptime!(config.rows.vector);
    unpack::<u32, V>(operands.x[first + i], xs, 0usize, vector, FloatType::F32);
    unpack::<u32, V>(operands.dy[first + i], dys, 0usize, vector, FloatType::F32);
    unpack::<u32, V>(operands.weight[i], weights, 0usize, vector, FloatType::F32);
    if comptime!(config.gated) {
        unpack::<u32, V>(operands.gate[first + i], gates, 0usize, vector, FloatType::F32);
    }
}

/// The gradient of the norm before its weight.
#[cube]
fn dz(weight: f32, dy: f32, gate: f32, #[comptime] gated: bool) -> f32 {
    if comptime!(gated) { weight * (dy * silu(gate)) } else { weight * dy }
}

/// The operands of dweight's terms, row by row: `dy * x * r`, times `silu(gate)`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Terms {
    x: Box<[f32]>,
    gate: Box<[f32]>,
    dy: Box<[f32]>,
    scales: Box<[f32]>,
}

/// The sums of dweight's terms over each block of rows, a unit for each column of one.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn rms_norm_backward_weight(terms: &Terms, sums: &mut [f32], sizes: BlockSizes, #[comptime] gated: bool) {
    let (i, width) = (ABSOLUTE_POS, sizes.width as usize);
    if i < sizes.len as usize {
        let column = i % width;
        let mut row = i / width * ROWS;
        let end = min(row + ROWS, sizes.rows as usize);
        let mut sum = 0.0f32;
        while row < end {
            let at = row * width + column;
            let mut dy = terms.dy[at];
            if comptime!(gated) {
                dy *= silu(terms.gate[at]);
            }
            sum += dy * (terms.x[at] * terms.scales[row]);
            row += 1;
        }
        sums[i] = sum;
    }
}

fn of_rows(target: &Target, config: GradientConfig) -> Kernel<RmsNormBackward<'static>> {
    RmsNormBackward::kernel(target, config.rows.units, config.rows.vector, config)
}

fn of_weight(target: &Target, gated: bool) -> Kernel<RmsNormBackwardWeight<'static>> {
    RmsNormBackwardWeight::kernel(target, UNITS, gated)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// With a gate and without, for narrow and wide rows and each vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let mut kernels = Vec::new();
    for gated in [false, true] {
        kernels.push(of_weight(target, gated).code());
        for (count, width, vector) in [(1, 4096, 4), (999, 4096, 4), (999, 128, 4), (1, 70, 1)] {
            if vector <= target.vector() {
                let rows = Rows::new(target, [count, width], vector);
                kernels.push(of_rows(target, GradientConfig { rows, gated }).code());
            }
        }
    }
    kernels
}

/// The norm's operands, and the gradient of its result: f32 tensors that are not empty.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub x: &'a Tensor,
    pub gate: Option<&'a Tensor>,
    pub weight: &'a Tensor,
    pub eps: f32,
    pub dy: &'a Tensor,
}

impl Norm<'_> {
    /// `(dx, dgate, dweight)`; everything was checked.
    pub fn backward(self, check: Check, gpu: &Gpu) -> Result<(Tensor, Option<Tensor>, Tensor), KernelError> {
        let (device, width) = (self.x.device(), self.weight.len());
        let count = self.x.len() / width;
        let new = |shape: &[usize]| Tensor::allocate(shape, DType::F32, device);
        let (dx, scales) = (new(self.x.shape())?, new(&[count])?);
        let dgate = self.gate.map(|gate| new(gate.shape())).transpose()?;
        self.rows(check, gpu, [&dx, &scales], dgate.as_ref())?;
        let (sizes, gated) = (BlockSizes::new(check, count, width)?, self.gate.is_some());
        let sums = new(&[count.div_ceil(ROWS), width])?;
        let arguments = RmsNormBackwardWeight {
            terms: TermsArgs {
                x: self.x.buffer()?,
                gate: self.gate.unwrap_or(self.x).buffer()?,
                dy: self.dy.buffer()?,
                scales: scales.buffer()?,
            },
            sums: sums.buffer()?,
            sizes,
        };
        // SAFETY: x, a gate and dy are `count` rows of `width` elements, each with a scale, and
        // there is a row of sums for each block.
        unsafe { gpu.launch(of_weight(gpu.target(), gated), sizes.cubes(), arguments)? };
        Ok((dx, dgate, sum_rows(&sums)?))
    }

    /// Fills dx, each row's scale, and dgate.
    fn rows(
        self,
        check: Check,
        gpu: &Gpu,
        [dx, scales]: [&Tensor; 2],
        dgate: Option<&Tensor>,
    ) -> Result<(), KernelError> {
        let Norm { x, gate, weight, eps, dy } = self;
        let (width, count) = (weight.len(), scales.len());
        let vector = rows::vector(gpu.target(), rows::VECTOR, width, &[x, weight, dy, gate.unwrap_or(x)]);
        let rows = Rows::new(gpu.target(), [count, width], vector);
        // Without a gate, its gradient is a placeholder of one vector.
        let none = Tensor::allocate(&[rows::VECTOR], DType::F32, x.device())?;
        let arguments = RmsNormBackward {
            operands: OperandsArgs {
                x: x.buffer()?,
                gate: gate.unwrap_or(x).buffer()?,
                weight: weight.buffer()?,
                dy: dy.buffer()?,
            },
            dx: dx.buffer()?,
            dgate: dgate.unwrap_or(&none).buffer()?,
            scales: scales.buffer()?,
            sizes: RowSizes { count: check.index(count)?, vectors: check.index(width / vector)? },
            eps: eps.to_bits(),
        };
        check.index(x.len())?;
        let config = GradientConfig { rows, gated: gate.is_some() };
        // SAFETY: all but the weight, the scales and a placeholder are `count` rows of `width`
        // elements; the weight is one, and a row has one scale.
        unsafe { gpu.launch(of_rows(gpu.target(), config), rows.cubes(count), arguments) }
    }
}
