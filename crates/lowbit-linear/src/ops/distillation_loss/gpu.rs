//! The loss on a GPU: a cube, or a plane of one, takes a token (`gpu/rows.rs` chooses).
//!
//! It goes through both rows of logits three times (greatest, sums, results) and writes one: 28
//! bytes a logit, of which the caches keep what a row of usual length has. Units sum every `n`th
//! vector each, and then each other's sums.

#![allow(unsafe_code)] // Launches.

use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, ln};
use crate::gpu::rows::{self, Maximum, Rows, Sum};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The rows of both models.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Logits<V: Size> {
    student: Box<[Vector<u32, V>]>,
    teacher: Box<[Vector<u32, V>]>,
}

/// The number of rows, their width in vectors, and the bits of 1 / temperature.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    count: u32,
    vectors: u32,
    inverse: u32,
}

/// The numbers that make a softmax of logits: `e^(x / temperature - most) / sum`.
#[derive(CubeType, Clone, Copy)]
pub(in crate::ops) struct Softmax {
    pub most: f32,
    pub sum: f32,
}

#[kernel]
fn distillation_loss<V: Size>(
    logits: &Logits<V>,
    dkl: &[f32],
    kl: &mut [f32],
    dlogits: &mut [Vector<u32, V>],
    sizes: Sizes,
    #[comptime] config: Rows,
) {
    let vector = comptime!(config.vector);
    let row = rows::row(config);
    let inverse = f32::reinterpret(sizes.inverse);
    let first = row * sizes.vectors as usize;
    // Units past the last row have an empty row: they only take part in the sums.
    let known = row < sizes.count as usize;
    let end = select(known, sizes.vectors as usize, 0usize);
    let student = softmax::<V>(&logits.student, first, end, inverse, config);
    let teacher = softmax::<V>(&logits.teacher, first, end, inverse, config);
    let shift = (ln(teacher.sum) + teacher.most) - (ln(student.sum) + student.most);
    let mut weight = 0.0f32;
    if known {
        weight = dkl[row] * inverse;
    }
    let mut zs = Array::<f32>::new(vector);
    let mut us = Array::<f32>::new(vector);
    let mut divergence = 0.0f32;
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(logits.student[first + i], &mut zs, 0usize, vector, FloatType::F32);
        unpack::<u32, V>(logits.teacher[first + i], &mut us, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            let (z, u) = (zs[j] * inverse, us[j] * inverse);
            let q = exp(z - student.most) / student.sum;
            let p = exp(u - teacher.most) / teacher.sum;
            zs[j] = weight * (q - p);
            // Not 0 times infinity. By bits, so that a NaN is not below anything on any device.
            let none = (u32::reinterpret(p) & 0x7fff_ffffu32) < 0x0080_0000u32;
            divergence += select(none, 0.0f32.runtime(), p * ((u - z) - shift));
        }
        dlogits[first + i] = pack::<u32, V>(&zs, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config));
    }
    let divergence = rows::reduce::<f32, Sum>(divergence, config);
    if known && rows::lane_in_row(config) == 0 {
        kl[row] = divergence;
    }
}

/// Of the row of `end` vectors from vector `first` of x on, for all units that share it. Of a row
/// whose logits are all -inf the sum is 0.
#[cube]
pub(in crate::ops) fn softmax<V: Size>(
    x: &[Vector<u32, V>],
    first: usize,
    end: usize,
    inverse: f32,
    #[comptime] config: Rows,
) -> Softmax {
    let vector = comptime!(config.vector);
    let mut values = Array::<f32>::new(vector);
    let mut most = f32::reinterpret(0xff80_0000u32);
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut values, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            most = max(most, values[j]);
        }
        i += comptime!(rows::lanes_per_row(config));
    }
    // A NaN does not always reach the greatest, but the sum.
    let most = finite_or_zero(rows::reduce::<f32, Maximum>(most, config) * inverse);
    let mut sum = 0.0f32;
    let mut i = rows::lane_in_row(config);
    while i < end {
        unpack::<u32, V>(x[first + i], &mut values, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            sum += exp(values[j] * inverse - most);
        }
        i += comptime!(rows::lanes_per_row(config));
    }
    Softmax { most, sum: rows::reduce::<f32, Sum>(sum, config) }
}

/// `most`, or 0 where nothing is greater than -inf, which minus itself would be NaN.
#[cube]
pub(in crate::ops) fn finite_or_zero(most: f32) -> f32 {
    select(u32::reinterpret(most) == 0xff80_0000u32, 0.0f32.runtime(), most)
}

fn compiled(target: &Target, rows: Rows) -> Kernel<DistillationLoss<'static>> {
    DistillationLoss::kernel(target, rows.units, rows.vector, rows)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For narrow and wide rows, and each vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let sizes = [(1, 8192, 4), (999, 8192, 4), (999, 128, 4), (3, 70, 1)];
    let sizes = sizes.into_iter().filter(|(.., vector)| *vector <= target.vector());
    sizes
        .map(|(count, width, vector)| compiled(target, Rows::new(target, [count, width], vector)).code())
        .collect()
}

/// Fills `kl` and `dlogits`; everything was checked, and is f32.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    [student, teacher, dkl]: [&Tensor; 3],
    temperature: f32,
    [kl, dlogits]: [&Tensor; 2],
) -> Result<(), KernelError> {
    let (count, width) = (student.dim(0), student.dim(1));
    let most = rows::VECTOR;
    let vector = rows::vector(gpu.target(), most, width, &[student, teacher, dlogits]);
    let rows = Rows::new(gpu.target(), [count, width], vector);
    check.index(student.len())?;
    let arguments = DistillationLoss {
        logits: LogitsArgs { student: student.buffer()?, teacher: teacher.buffer()? },
        dkl: dkl.buffer()?,
        kl: kl.buffer()?,
        dlogits: dlogits.buffer()?,
        sizes: Sizes {
            count: check.index(count)?,
            vectors: check.index(width / vector)?,
            inverse: (1.0 / temperature).to_bits(),
        },
    };
    // SAFETY: all are `count` rows, of `width` logits or one number.
    unsafe { gpu.launch(compiled(gpu.target(), rows), rows.cubes(count), arguments) }
}
