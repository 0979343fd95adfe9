//! The product on the CPU, of one weight or of many experts at once: rows of x are cut into
//! [`Group`]s, groups into tasks, and each task runs the kernel that [`policy`](super::policy)
//! chooses.

#[cfg(any(test, target_arch = "x86_64"))]
mod bf16;
mod inner;
mod int8;
mod minifloat;
mod outer;
mod panels;
pub(super) mod rows;

use super::input::PLAN;
use super::policy::{self, MC, Variant};
use crate::ops::glu::Gate;
use crate::{Cpu, QuantizedTensor};
use lowbit_formats::with_codec;
use outer::Packed;
use panels::Epilogue;
use rows::{Rows, WeightRows};
use std::borrow::Cow;
use std::fmt::Display;
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

/// A task's rows of x.
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
    y: PieceRows<'a>,
}

/// A piece of a result, row by row.
pub(super) enum PieceRows<'a> {
    /// Nothing has to be allocated for a piece of a single row.
    One(&'a mut [f32]),
    Several(Vec<&'a mut [f32]>),
}

impl<'a> PieceRows<'a> {
    pub fn each(&mut self) -> &mut [&'a mut [f32]] {
        match self {
            Self::One(row) => std::slice::from_mut(row),
            Self::Several(rows) => rows,
        }
    }
}

/// The weight, or the two weights, that a group's rows are multiplied with.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    One(&'a QuantizedTensor),
    /// Two of one shape that have [`panels_in_turn`](QuantizedTensor::panels_in_turn): the result
    /// is `glu(x up^T, x gate^T)`.
    Glu {
        gate: &'a QuantizedTensor,
        up: &'a QuantizedTensor,
        by: Gate,
    },
}

impl<'a> Weight<'a> {
    /// The one that says the shape.
    pub fn first(&self) -> &'a QuantizedTensor {
        match self {
            Self::One(weight) | Self::Glu { gate: weight, .. } => weight,
        }
    }
}

/// A weight and the groups of rows that it multiplies.
pub(crate) struct Product<'a> {
    pub weight: Weight<'a>,
    pub groups: Vec<Group<'a>>,
}

/// `y[m, n] = sum over k of x[m, k] * weight[weight_row + n, k]` in every group of all `products`.
/// Rows that several weights in panels read are rounded once.
pub(crate) fn matmul_groups(cpu: &Arc<Cpu>, products: Vec<Product<'_>>) {
    let mut repacked = Vec::new();
    for Product { weight, groups } in products {
        let (panels, epilogue) = match weight {
            Weight::One(weight) => (weight.panels(), Epilogue::Store),
            Weight::Glu { gate, up, by } => {
                (Some(gate.panels_in_turn(up).expect("two weights of one layout")), Epilogue::Glu(by))
            }
        };
        let weight = weight.first();
        let (n, k) = (weight.n(), weight.k());
        match panels {
            _ if n == 0 => {}
            Some(weight) => repacked.push(panels::Product { weight, epilogue, n, groups }),
            None => with_codec!(weight.format(), codec => {
                let rows = WeightRows { codec, parts: weight.parts(), rows: weight.rows(), k };
                run(cpu, &rows, (n, k), groups);
            }),
        }
    }
    in_panels(cpu, repacked);
}

/// `y = glu(x up^T, x gate^T) down^T` for `m` rows, which are [`in_tiles`](policy::in_tiles). All
/// weights are one matrix each, in panels, and those of gate and up are
/// [in turn](QuantizedTensor::panels_in_turn).
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn gated_mlp(
    cpu: &Arc<Cpu>,
    (x, m): (&[f32], usize),
    ([gate, up, down], by): ([&QuantizedTensor; 3], Gate),
    y: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = cpu.isa().tiles() {
        let gate_up = gate.panels_in_turn(up).expect("two weights of one layout");
        let down = down.panels().expect("a weight in panels");
        return bf16::Bf16(amx).gated_mlp(cpu, (x, m), ([gate_up, down], by), y);
    }
    unreachable!("a unit for tiles was found");
}

/// Groups of many rows in tiles of bf16, where there is a unit for them, the others in integers, or
/// in f32 where codes are floats.
fn in_panels(cpu: &Arc<Cpu>, products: Vec<panels::Product<'_>>) {
    let in_tiles = |m: usize| policy::in_tiles(cpu.isa(), m);
    for panels::Product { weight, n, groups, .. } in &products {
        let other = if weight.layout.minifloat() { "Minifloat" } else { "Int8" };
        let kernel = |m: usize| if in_tiles(m) { "Bf16" } else { other };
        log::trace!(target: PLAN, "{}", explain(groups, (*n, weight.layout.k()), kernel));
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = cpu.isa().tiles() {
        let split = |panels::Product { weight, epilogue, n, groups }| {
            let (many, few) = groups.into_iter().partition(|group: &Group<'_>| in_tiles(group.y.len() / n));
            let product = |groups| panels::Product { weight, epilogue, n, groups };
            (product(many), product(few))
        };
        let (many, few) = products.into_iter().map(split).unzip();
        panels::run(cpu, &bf16::Bf16(amx), many);
        return without_tiles(cpu, few);
    }
    without_tiles(cpu, products);
}

fn without_tiles(cpu: &Arc<Cpu>, products: Vec<panels::Product<'_>>) {
    let (floats, integers) = products.into_iter().partition(|product| product.weight.layout.minifloat());
    panels::run(cpu, &minifloat::Minifloat, floats);
    panels::run(cpu, &int8::Int8, integers);
}

fn run(cpu: &Cpu, weight: &dyn Rows, (n, k): (usize, usize), groups: Vec<Group<'_>>) {
    let isa = cpu.isa();
    let padded_k = k.next_multiple_of(rows::STEP);
    log::trace!(target: PLAN, "{}", explain(&groups, (n, k), |m| format!("{:?}", policy::variant(m, isa.lanes()))));
    let mut operands = Vec::with_capacity(groups.len());
    let mut tasks = Vec::new();
    let (count, mut work) = (groups.len(), 0usize);
    for (index, group) in groups.into_iter().enumerate() {
        let m = group.y.len() / n;
        operands.push(match policy::variant(m, isa.lanes()) {
            Variant::Outer => Operand::Packed(Packed::new(cpu, group.x, m, k)),
            _ => Operand::Rows(pad(group.x, m, k, padded_k)),
        });
        work = work.saturating_add(policy::work(m, n, k));
        let strip = policy::strip(m, n, k, count, cpu.threads());
        cut(group.y, n, MC, strip, |first_m, first_n, y| {
            tasks.push(Task { group: index, m: first_m, weight_row: group.weight_row + first_n, y });
        });
    }
    cpu.for_each_of(work, tasks, |Task { group, m, weight_row, mut y }| match &operands[group] {
        Operand::Packed(x) => outer::run(isa, weight, weight_row, (x, m), y.each()),
        Operand::Rows(x) => {
            let y = y.each();
            let x = &x[m * padded_k..][..y.len() * padded_k];
            match y {
                [y] => weight.dot(isa, weight_row, x, y),
                y => inner::run(isa, weight, weight_row, x, y),
            }
        }
    });
}

/// The sizes of a product, and which kernel each of its groups, of `m` rows, takes.
fn explain<K: Display>(groups: &[Group<'_>], (n, k): (usize, usize), kernel: impl Fn(usize) -> K) -> String {
    let one = |group: &Group<'_>| {
        let m = group.y.len() / n;
        format!("m={m} n={n} k={k}: {}", kernel(m))
    };
    groups.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Cuts `y`, `[m, n]`, into pieces of at most `height` rows and `strip` columns.
pub(super) fn cut<'a>(
    y: &'a mut [f32],
    n: usize,
    height: usize,
    strip: usize,
    mut piece: impl FnMut(usize, usize, PieceRows<'a>),
) {
    if y.len() == n {
        let pieces = y.chunks_mut(strip).enumerate();
        return pieces.for_each(|(index, y)| piece(0, index * strip, PieceRows::One(y)));
    }
    for (block, y) in y.chunks_mut(height * n).enumerate() {
        let mut rows: Vec<_> = y.chunks_mut(n).map(|row| row.chunks_mut(strip)).collect();
        for first_n in (0..n).step_by(strip) {
            let columns = rows.iter_mut().map(|row| row.next().expect("every row has the same strips"));
            piece(block * height, first_n, PieceRows::Several(columns.collect()));
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
