//! The loss on a GPU: a cube, or a plane of one, takes a token (`gpu/rows.rs` chooses).
//!
//! Each unit copies its vectors of the logits to the gradient, and marks there the known tokens
//! among them with -inf: what is left are the logits of the rest, whose softmax it then takes as
//! the dense loss does. No unit reads what another one has written, so nothing waits for memory. In
//! the end each overwrites its vectors with the rest's gradients, and its known tokens with theirs.
//! That is 24 bytes a logit, and each unit reads all ids of its token twice: 128 are few beside its
//! share of a vocabulary.

#![allow(unsafe_code)] // Launches.

use super::TopKTargets;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::math::{exp, ln};
use crate::gpu::rows::{self, Maximum, Rows, Sum};
use crate::ops::Check;
use crate::ops::distillation_loss::gpu::{finite_or_zero, softmax};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The teacher's targets, and each token's weight.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Targets {
    ids: Box<[u32]>,
    ln_p: Box<[f32]>,
    ln_rest: Box<[f32]>,
    dkl: Box<[f32]>,
}

/// The number of rows, their width in vectors, K, and the bits of 1 / temperature.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    count: u32,
    vectors: u32,
    k: u32,
    inverse: u32,
}

/// A token's known ids: `k` of them from `first_id` on, and its logits from vector `first` on.
#[derive(CubeType, Clone, Copy)]
struct Row {
    first: usize,
    first_id: usize,
    k: usize,
    vectors: usize,
}

#[kernel]
fn distillation_loss_top_k<V: Size>(
    logits: &[Vector<u32, V>],
    targets: &Targets,
    kl: &mut [f32],
    dlogits: &mut [Vector<u32, V>],
    sizes: Sizes,
    #[comptime] config: Rows,
) {
    let vector = comptime!(config.vector);
    let row = rows::row(config);
    let inverse = f32::reinterpret(sizes.inverse);
    let known = row < sizes.count as usize;
    // Units past the last row have an empty row: they only take part in the sums.
    let at = Row {
        first: row * sizes.vectors as usize,
        first_id: row * sizes.k as usize,
        k: select(known, sizes.k as usize, 0usize),
        vectors: select(known, sizes.vectors as usize, 0usize),
    };
    let mut i = rows::lane_in_row(config);
    while i < at.vectors {
        dlogits[at.first + i] = logits[at.first + i];
        i += comptime!(rows::lanes_per_row(config));
    }
    // A unit's own known tokens are no longer among the rest.
    let mut values = Array::<f32>::new(vector);
    let mut bad = false.runtime();
    let mut t = 0usize.runtime();
    while t < at.k {
        let id = targets.ids[at.first_id + t] as usize;
        bad = bad || id >= at.vectors * vector;
        if t > 0 {
            bad = bad || id <= targets.ids[at.first_id + t - 1] as usize;
        }
        if is_mine(id, at.vectors, config) {
            unpack::<u32, V>(dlogits[at.first + id / vector], &mut values, 0usize, vector, FloatType::F32);
            put(&mut values, id, f32::reinterpret(0xff80_0000u32), vector);
            dlogits[at.first + id / vector] = pack::<u32, V>(&values, 0usize, vector, FloatType::F32);
        }
        t += 1;
    }
    let rest = softmax::<V>(&*dlogits, at.first, at.vectors, inverse, config);
    // Of a sum without terms the greatest logit says nothing.
    let never = f32::reinterpret(0xff80_0000u32);
    let no_rest = u32::reinterpret(rest.sum) == 0u32;
    let most_known = greatest_known::<V>(logits, targets, &at, inverse, config);
    let most = finite_or_zero(max(select(no_rest, never, rest.most), most_known));
    let mut sum = 0.0f32;
    let mut t = rows::lane_in_row(config);
    while t < at.k {
        sum += exp(student::<V>(logits, targets, &at, t, config) * inverse - most);
        t += comptime!(rows::lanes_per_row(config));
    }
    let sum = rows::reduce::<f32, Sum>(sum, config);
    let ln_sum = ln(sum + select(no_rest, 0.0f32.runtime(), rest.sum * exp(rest.most - most)));
    let mut weight = 0.0f32;
    let mut ln_rest = 0.0f32;
    if known {
        weight = targets.dkl[row] * inverse;
        ln_rest = targets.ln_rest[row];
    }
    let ln_q_rest = select(no_rest, never, ((rest.most - most) - ln_sum) + ln(rest.sum));
    let p_rest = exp(ln_rest);
    let share = weight * (exp(ln_q_rest) - p_rest) / rest.sum;
    let share = select(no_rest, 0.0f32.runtime(), share);
    let mut i = rows::lane_in_row(config);
    while i < at.vectors {
        unpack::<u32, V>(dlogits[at.first + i], &mut values, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            values[j] = share * exp(values[j] * inverse - rest.most);
        }
        dlogits[at.first + i] = pack::<u32, V>(&values, 0usize, vector, FloatType::F32);
        i += comptime!(rows::lanes_per_row(config));
    }
    let mut divergence = 0.0f32;
    let mut t = 0usize.runtime();
    while t < at.k {
        let id = targets.ids[at.first_id + t] as usize;
        if is_mine(id, at.vectors, config) {
            let ln_p = targets.ln_p[at.first_id + t];
            let ln_q = (student::<V>(logits, targets, &at, t, config) * inverse - most) - ln_sum;
            let p = exp(ln_p);
            divergence += product(p, ln_p - ln_q);
            unpack::<u32, V>(dlogits[at.first + id / vector], &mut values, 0usize, vector, FloatType::F32);
            put(&mut values, id, weight * (exp(ln_q) - p), vector);
            dlogits[at.first + id / vector] = pack::<u32, V>(&values, 0usize, vector, FloatType::F32);
        }
        t += 1;
    }
    let divergence = rows::reduce::<f32, Sum>(divergence, config) + product(p_rest, ln_rest - ln_q_rest);
    if known && rows::lane_in_row(config) == 0 {
        kl[row] = select(bad, f32::reinterpret(0x7fc0_0000u32), divergence);
    }
}

/// True if this unit has the vector with the logit of token `id`.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn is_mine(id: usize, vectors: usize, #[comptime] config: Rows) -> bool {
    let index = id / comptime!(config.vector);
    index < vectors && index % comptime!(rows::lanes_per_row(config)) == rows::lane_in_row(config)
}

/// Replaces the value of token `id` in its vector.
#[cube]
fn put(values: &mut Array<f32>, id: usize, value: f32, #[comptime] vector: usize) {
    #[unroll]
    for j in 0..vector {
        values[j] = select(id % vector == j, value, values[j]);
    }
}

/// The student's logit of known token `t`; -inf for an id outside of the vocabulary.
#[cube]
fn student<V: Size>(
    logits: &[Vector<u32, V>],
    targets: &Targets,
    at: &Row,
    t: usize,
    #[comptime] config: Rows,
) -> f32 {
    let vector = comptime!(config.vector);
    let id = targets.ids[at.first_id + t] as usize;
    let mut x = f32::reinterpret(0xff80_0000u32);
    if id < at.vectors * vector {
        let mut values = Array::<f32>::new(vector);
        unpack::<u32, V>(logits[at.first + id / vector], &mut values, 0usize, vector, FloatType::F32);
        #[unroll]
        for j in 0..vector {
            x = select(id % vector == j, values[j], x);
        }
    }
    x
}

/// The greatest of the known tokens' logits over the temperature, for all units that share the row.
#[cube]
fn greatest_known<V: Size>(
    logits: &[Vector<u32, V>],
    targets: &Targets,
    at: &Row,
    inverse: f32,
    #[comptime] config: Rows,
) -> f32 {
    let mut most = f32::reinterpret(0xff80_0000u32);
    let mut t = rows::lane_in_row(config);
    while t < at.k {
        most = max(most, student::<V>(logits, targets, at, t, config));
        t += comptime!(rows::lanes_per_row(config));
    }
    rows::reduce::<f32, Maximum>(most, config) * inverse
}

/// `p * difference`, and 0 where p is 0 or subnormal: not 0 times infinity. By bits, so that a NaN
/// is not below anything on any device.
#[cube]
fn product(p: f32, difference: f32) -> f32 {
    let none = (u32::reinterpret(p) & 0x7fff_ffffu32) < 0x0080_0000u32;
    select(none, 0.0f32.runtime(), p * difference)
}

fn compiled(target: &Target, rows: Rows) -> Kernel<DistillationLossTopK<'static>> {
    DistillationLossTopK::kernel(target, rows.units, rows.vector, rows)
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

/// Fills `kl` and `dlogits`; everything was checked but the ids, and is f32.
pub(super) fn launch(
    check: Check,
    gpu: &Gpu,
    (student, targets, dkl): (&Tensor, &TopKTargets, &Tensor),
    temperature: f32,
    [kl, dlogits]: [&Tensor; 2],
) -> Result<(), KernelError> {
    let (count, width, k) = (student.dim(0), student.dim(1), targets.ids.dim(1));
    let vector = rows::vector(gpu.target(), rows::VECTOR, width, &[student, dlogits]);
    let rows = Rows::new(gpu.target(), [count, width], vector);
    check.index(student.len().max(targets.ids.len()))?;
    // Without known tokens nothing is read of these, and they get a placeholder buffer.
    let [ids, ln_p] = if k == 0 { [dkl; 2] } else { [&targets.ids, &targets.ln_p] };
    let arguments = DistillationLossTopK {
        logits: student.buffer()?,
        targets: TargetsArgs {
            ids: ids.buffer()?,
            ln_p: ln_p.buffer()?,
            ln_rest: targets.ln_rest.buffer()?,
            dkl: dkl.buffer()?,
        },
        kl: kl.buffer()?,
        dlogits: dlogits.buffer()?,
        sizes: Sizes {
            count: check.index(count)?,
            vectors: check.index(width / vector)?,
            k: check.index(k)?,
            inverse: (1.0 / temperature).to_bits(),
        },
    };
    // SAFETY: logits and dlogits are `count` rows of `width`, ids and ln_p of `k`, the others of
    // one number; an id from `width` on reads and writes nothing.
    unsafe { gpu.launch(compiled(gpu.target(), rows), rows.cubes(count), arguments) }
}
