//! The product on the CPU, of one weight or of many experts at once: rows of x are cut into [`Group`]s, groups into
//! tasks, and each task runs the kernel that [`policy`](super::policy) chooses.

#[cfg(any(test, target_arch = "x86_64"))]
mod bf16;
mod inner;
mod int8;
mod outer;
mod rows;

use super::input::PLAN;
use super::policy::{self, MC, Variant};
use crate::panels::Unpack;
use crate::{Cpu, QuantizedTensor};
use lowbit_formats::with_codec;
use outer::Packed;
use rows::{Rows, WeightRows};
use std::borrow::Cow;
use std::sync::Arc;

/// Rows of x that meet the same `N` rows of a weight.
pub(crate) struct Group<'a> {
    /// The first of the weight's rows, counted over all leading dimensions.
    pub weight_row: usize,
    /// `[m, K]`
    pub x: &'a [f32],
    /// `[m, N]`
    pub y: &'a mut [f32],
}

/// What a task reads of its group.
enum Operand<'a> {
    /// `[m, k]` as given, zeros added up to a whole number of vectors.
    Rows(Cow<'a, [f32]>),
    Packed(Packed),
}

/// A piece of one group's result.
struct Task<'a> {
    group: usize,
    /// The first row of x, and the first row of the weight.
    m: usize,
    weight_row: usize,
    /// The piece, row by row.
    y: Vec<&'a mut [f32]>,
}

/// `y[m, n] = sum over k of x[m, k] * weight[weight_row + n, k]` in every group.
pub(crate) fn matmul_groups(cpu: &Arc<Cpu>, weight: &QuantizedTensor, groups: Vec<Group<'_>>) {
    if weight.n() == 0 {
        return;
    }
    if let Some(panels) = weight.panels() {
        return in_panels(cpu, panels, (weight.n(), weight.k()), groups);
    }
    with_codec!(weight.format(), codec => {
        run(cpu, &WeightRows { codec, parts: weight.parts(), rows: weight.rows(), k: weight.k() }, (weight.n(), weight.k()), groups)
    })
}

/// Groups of many rows in tiles of bf16, where there is a unit for them, the others in integers.
fn in_panels(cpu: &Arc<Cpu>, weight: Unpack<'_>, (n, k): (usize, usize), groups: Vec<Group<'_>>) {
    let in_tiles = |group: &Group<'_>| policy::in_tiles(cpu.isa(), group.y.len() / n);
    let explain = |group: &Group<'_>| {
        let kernel = if in_tiles(group) { "Bf16" } else { "Int8" };
        format!("m={} n={n} k={k}: {kernel}", group.y.len() / n)
    };
    log::trace!(target: PLAN, "{}", groups.iter().map(explain).collect::<Vec<_>>().join("; "));
    let (many, few): (Vec<_>, Vec<_>) = groups.into_iter().partition(in_tiles);
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = cpu.isa().tiles() {
        bf16::run(cpu, amx, weight, n, many);
        return int8::run(cpu, weight, n, few);
    }
    debug_assert!(many.is_empty(), "no unit multiplies tiles");
    int8::run(cpu, weight, n, few);
}

fn run(cpu: &Cpu, weight: &dyn Rows, (n, k): (usize, usize), groups: Vec<Group<'_>>) {
    let isa = cpu.isa();
    let padded_k = k.next_multiple_of(rows::STEP);
    log::trace!(target: PLAN, "{}", explain(&groups, (n, k), isa.lanes()));
    let mut operands = Vec::with_capacity(groups.len());
    let mut tasks = Vec::new();
    let count = groups.len();
    for (index, group) in groups.into_iter().enumerate() {
        let m = group.y.len() / n;
        operands.push(match policy::variant(m, isa.lanes()) {
            Variant::Outer => Operand::Packed(Packed::new(cpu, group.x, m, k)),
            _ => Operand::Rows(pad(group.x, m, k, padded_k)),
        });
        let strip = policy::strip(m, n, k, count, cpu.threads());
        cut(group.y, n, MC, strip, |first_m, first_n, y| {
            tasks.push(Task { group: index, m: first_m, weight_row: group.weight_row + first_n, y });
        });
    }
    cpu.for_each(tasks, |mut task| match &operands[task.group] {
        Operand::Packed(x) => outer::run(isa, weight, task.weight_row, (x, task.m), &mut task.y),
        Operand::Rows(x) => {
            let x = &x[task.m * padded_k..][..task.y.len() * padded_k];
            match &mut task.y[..] {
                [y] => weight.dot(isa, task.weight_row, x, y),
                y => inner::run(isa, weight, task.weight_row, x, y),
            }
        }
    });
}

/// The sizes of a product, and how each of its groups is computed.
fn explain(groups: &[Group<'_>], (n, k): (usize, usize), lanes: usize) -> String {
    let variant = |group: &Group<'_>| {
        let m = group.y.len() / n;
        format!("m={m} n={n} k={k}: {:?}", policy::variant(m, lanes))
    };
    groups.iter().map(variant).collect::<Vec<_>>().join("; ")
}

/// Cuts `y`, `[m, n]`, into pieces of at most `height` rows and `strip` columns.
fn cut<'a>(
    y: &'a mut [f32],
    n: usize,
    height: usize,
    strip: usize,
    mut piece: impl FnMut(usize, usize, Vec<&'a mut [f32]>),
) {
    for (block, y) in y.chunks_mut(height * n).enumerate() {
        let mut rows: Vec<_> = y.chunks_mut(n).map(|row| row.chunks_mut(strip)).collect();
        for first_n in (0..n).step_by(strip) {
            let columns = rows.iter_mut().map(|row| row.next().expect("every row has the same strips"));
            piece(block * height, first_n, columns.collect());
        }
    }
}

fn pad(x: &[f32], m: usize, k: usize, padded_k: usize) -> Cow<'_, [f32]> {
    if k == padded_k {
        return Cow::Borrowed(x);
    }
    let mut padded = vec![0.0; m * padded_k];
    for (padded, x) in padded.chunks_exact_mut(padded_k).zip(x.chunks_exact(k)) {
        padded[..k].copy_from_slice(x);
    }
    Cow::Owned(padded)
}
