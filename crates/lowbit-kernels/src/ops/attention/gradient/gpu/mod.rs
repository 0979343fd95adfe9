//! The gradients on a GPU: f32, without atomics or shared memory.
//!
//! | kernel | computes, for each key head | reads and writes |
//! |---|---|---|
//! | `spans` | the keys that each span of query rows sees | positions |
//! | `scores`, twice | `q k^T`, and `dy v^T` | writes two numbers per pair |
//! | `softmax` | of these p, and `scale ds` | reads two numbers per pair, one of them three times, and writes two |
//! | `queries` | `dq = ds k` | reads one per pair for every 32 columns |
//! | `keys`, twice | parts of `dk = ds^T q` and `dv = p^T dy` | likewise |
//! | `sum`, twice | dk and dv from their parts | |
//!
//! A pair is a query row (a token and one of the query heads of a key head) and a key, and its
//! numbers go through memory: for as many tokens at a time as have [`PAIRS`] of them, so that a
//! large device's cache holds much of it. The floor is `6 pairs D + 4 pairs Dv` operations, about
//! half of them for a prompt, since units leave out keys that no row of their span sees; memory's
//! is `36 pairs` bytes. A unit computes 8 x 4 results in registers, with 12 loads of 16 bytes,
//! which the first-level cache has to serve, for 128 multiplications.

#![allow(unsafe_code)] // Launches.

mod products;
mod softmax;

use super::{AttentionGradient, Operands};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::copy::{Columns, UNITS, cubes};
use crate::gpu::launch::LaunchArgs;
use crate::gpu::rows::{self, Rows, VECTOR};
use crate::ops::Check;
use crate::ops::attention::AttentionParams;
use crate::ops::attention::gpu::operands::Softcap;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;
use products::{
    AttentionBackwardKeys, AttentionBackwardQueries, AttentionBackwardScores, AttentionBackwardSum, CUBE,
    CUBE_COLUMNS, CUBE_ROWS, EACH_ROWS,
};
use softmax::{AttentionBackwardSoftmax, AttentionBackwardSpans, Params};

const CHECK: Check = Check("attention_backward");

/// Pairs of a query row and a key that are in memory at once: two tensors of 64 MiB.
pub(super) const PAIRS: usize = 1 << 24;
/// Query rows that are left out together where they see none of a unit's keys.
const SPAN: usize = 16;
/// Units that the results of `keys` occupy: each result's rows are split until there are so many.
const BUSY: usize = 1 << 16;
/// Spans below which rows are not split further.
const FEWEST: usize = 4;

/// A block of tokens, whose query rows are counted by token, then by head, for each key head.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// The block's first token.
    first: u32,
    /// Query rows per key head, and with those that fill the last span.
    rows: u32,
    padded: u32,
    /// Key heads.
    heads: u32,
    /// Keys per key head.
    capacity: u32,
    /// Vectors from one query row's pairs to the next's.
    columns: u32,
}

/// Of rows of q, k, v or dy.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Widths {
    elements: u32,
    /// With zeros up to whole ones.
    vectors: u32,
}

/// The place of query row `row` of a block among the rows of q and y.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn row_of_token(sizes: &Sizes, head: usize, row: usize, #[comptime] group: usize) -> usize {
    ((sizes.first as usize + row / group) * sizes.heads as usize + head) * group + row % group
}

/// The gradients, in f32. `pairs` is how many are in memory at once, at least those of a token.
pub(super) fn backward(
    gpu: &Gpu,
    operands: &Operands<'_>,
    params: &AttentionParams,
    pairs: usize,
) -> Result<AttentionGradient, KernelError> {
    let Operands { q, k, v, y, dy, positions } = operands;
    let AttentionGradient { dq, dk, dv } = operands.zeros()?;
    if q.is_empty() || k.is_empty() || v.is_empty() {
        return Ok(AttentionGradient { dq, dk, dv });
    }
    let (tokens, heads, capacity) = (q.dim(0), k.dim(0), k.dim(1));
    let widths = |x: &Tensor| {
        let vectors = x.dim(2).div_ceil(VECTOR);
        Ok::<_, KernelError>(Widths { elements: CHECK.index(x.dim(2))?, vectors: CHECK.index(vectors)? })
    };
    let (width, value_width) = (widths(q)?, widths(v)?);
    let [q, k, v, y, dy] = [q, k, v, y, dy].map(|x| whole_vectors(gpu, x));
    let group = dq.dim(1) / heads;
    // Whole blocks of a unit's keys.
    let columns = capacity.next_multiple_of(EACH_ROWS);
    let per_block = (pairs / (heads * group * columns)).clamp(1, tokens);
    let padded = (per_block * group).next_multiple_of(SPAN);
    let scratch = || Tensor::allocate(&[heads, padded, columns], DType::F32, dq.device());
    let call = Call {
        gpu,
        operands: Operands { q: q?, k: k?, v: v?, y: y?, dy: dy?, positions },
        params,
        group,
        width,
        value_width,
        spans: Tensor::allocate(&[padded / SPAN, 4], DType::U32, dq.device())?,
        weights: scratch()?,
        gradients: scratch()?,
    };
    let Operands { q, k, v, y, dy, .. } = &call.operands;
    for x in [q, k, v, y, dy, &call.weights] {
        CHECK.index(x.len())?;
    }
    for first in (0..tokens).step_by(per_block) {
        let rows = per_block.min(tokens - first) * group;
        let sizes = Sizes {
            first: CHECK.index(first)?,
            rows: CHECK.index(rows)?,
            padded: CHECK.index(rows.next_multiple_of(SPAN))?,
            heads: CHECK.index(heads)?,
            capacity: CHECK.index(capacity)?,
            columns: CHECK.index(columns / VECTOR)?,
        };
        call.spans(sizes)?;
        call.scores([q, k], &call.weights, width, sizes)?;
        call.scores([dy, v], &call.gradients, value_width, sizes)?;
        call.softmax(sizes)?;
        call.queries(&dq, sizes)?;
        call.keys([&call.gradients, q], &dk, width, sizes)?;
        call.keys([&call.weights, dy], &dv, value_width, sizes)?;
    }
    Ok(AttentionGradient { dq, dk, dv })
}

/// Rows of x with zeros up to whole vectors: x itself where kernels can load its rows so.
fn whole_vectors(gpu: &Gpu, x: &Tensor) -> Result<Tensor, KernelError> {
    let (rows, width) = (x.dim(0) * x.dim(1), x.dim(2));
    let (_, start) = x.memory()?;
    if width.is_multiple_of(VECTOR) && start.is_multiple_of(16) {
        return Ok(x.clone());
    }
    let pitch = width.next_multiple_of(VECTOR);
    let y = Tensor::allocate(&[x.dim(0), x.dim(1), pitch], DType::F32, x.device())?;
    let columns = |buffer, width: usize| Columns { buffer, pitch: 4 * width, start: 0, len: 4 * width };
    gpu.copy_columns(columns(x.buffer()?, width), columns(y.buffer()?, pitch), rows)?;
    Ok(y)
}

/// The operands in whole vectors, and what is in memory between two kernels.
struct Call<'a> {
    gpu: &'a Gpu,
    operands: Operands<'a>,
    params: &'a AttentionParams,
    /// Query heads per key head.
    group: usize,
    width: Widths,
    value_width: Widths,
    spans: Tensor,
    /// Scores, then weights; and their gradients. `[Hkv, padded, columns]`.
    weights: Tensor,
    gradients: Tensor,
}

impl Call<'_> {
    fn softmax_params(&self) -> Params {
        let window = self.params.sliding_window.and_then(|window| window.try_into().ok()).unwrap_or(u32::MAX);
        let ahead = self.params.look_ahead.try_into().unwrap_or(u32::MAX);
        Params { window, ahead, scale: self.params.scale.to_bits() }
    }

    fn spans(&self, sizes: Sizes) -> Result<(), KernelError> {
        let arguments = AttentionBackwardSpans {
            positions: self.operands.positions.buffer()?,
            spans: self.spans.buffer()?,
            sizes,
            params: self.softmax_params(),
        };
        let kernel = AttentionBackwardSpans::kernel(self.gpu.target(), UNITS, self.group);
        // SAFETY: there is a span for every 16 of the padded rows, each with a row of a token of
        // the block.
        unsafe { self.gpu.launch(kernel, cubes(sizes.padded as usize / SPAN), arguments) }
    }

    /// `out[g, row, j] = x[row] . k[g, j]` of rows of `width`, where a row of the span sees a key
    /// of the unit.
    fn scores(
        &self,
        [x, k]: [&Tensor; 2],
        out: &Tensor,
        width: Widths,
        sizes: Sizes,
    ) -> Result<(), KernelError> {
        let cubes = product_cubes(sizes.heads, [sizes.rows, sizes.capacity]);
        let arguments = AttentionBackwardScores {
            x: x.buffer()?,
            k: k.buffer()?,
            spans: self.spans.buffer()?,
            out: out.buffer()?,
            sizes,
            vectors: width.vectors,
        };
        let kernel = AttentionBackwardScores::kernel(self.gpu.target(), CUBE, self.group);
        // SAFETY: x has the block's rows, k the heads' keys, out their pairs, and `padded` rows end
        // with a span.
        unsafe { self.gpu.launch(kernel, cubes, arguments) }
    }

    fn softmax(&self, sizes: Sizes) -> Result<(), KernelError> {
        let (count, columns) = ((sizes.heads * sizes.padded) as usize, sizes.columns as usize * VECTOR);
        let config = Rows::new(self.gpu.target(), [count, columns], VECTOR);
        let arguments = AttentionBackwardSoftmax {
            y: self.operands.y.buffer()?,
            dy: self.operands.dy.buffer()?,
            positions: self.operands.positions.buffer()?,
            weights: self.weights.buffer()?,
            gradients: self.gradients.buffer()?,
            sizes,
            vectors: self.value_width.vectors,
            params: self.softmax_params(),
        };
        let kernel = softmax::compiled(self.gpu.target(), self.group, Softcap::of(self.params), config);
        // SAFETY: the two have `count` rows, and y and dy the block's.
        unsafe { self.gpu.launch(kernel, config.cubes(count), arguments) }
    }

    fn queries(&self, dq: &Tensor, sizes: Sizes) -> Result<(), KernelError> {
        let arguments = AttentionBackwardQueries {
            gradients: self.gradients.buffer()?,
            k: self.operands.k.buffer()?,
            spans: self.spans.buffer()?,
            positions: self.operands.positions.buffer()?,
            dq: dq.buffer()?,
            sizes,
            widths: self.width,
        };
        let kernel = AttentionBackwardQueries::kernel(self.gpu.target(), CUBE, self.group);
        let cubes = product_cubes(sizes.heads, [sizes.rows, self.width.elements]);
        // SAFETY: as of the scores; dq has the block's rows.
        unsafe { self.gpu.launch(kernel, cubes, arguments) }
    }

    /// Adds to `out` the sums of the rows of x, of `widths`, times `pairs`, by key.
    fn keys(
        &self,
        [pairs, x]: [&Tensor; 2],
        out: &Tensor,
        widths: Widths,
        sizes: Sizes,
    ) -> Result<(), KernelError> {
        let spans = sizes.padded as usize / SPAN;
        let units = [(sizes.capacity, EACH_ROWS), (widths.elements, VECTOR)];
        let units = units.iter().map(|(size, each)| (*size as usize).div_ceil(*each)).product::<usize>();
        let splits = (BUSY / (sizes.heads as usize * units)).clamp(1, spans.div_ceil(FEWEST));
        let per_split = spans.div_ceil(splits);
        let parts = Tensor::allocate(&[splits, out.len()], DType::F32, out.device())?;
        CHECK.index(parts.len())?;
        let splits = CHECK.index(splits)?;
        let arguments = AttentionBackwardKeys {
            pairs: pairs.buffer()?,
            x: x.buffer()?,
            spans: self.spans.buffer()?,
            parts: parts.buffer()?,
            sizes,
            widths,
            splits,
            per_split: CHECK.index(per_split)?,
        };
        let kernel = AttentionBackwardKeys::kernel(self.gpu.target(), CUBE, self.group);
        let cubes_of_parts = product_cubes(splits * sizes.heads, [sizes.capacity, widths.elements]);
        // SAFETY: as of the scores; there are `splits` parts of `out`.
        unsafe { self.gpu.launch(kernel, cubes_of_parts, arguments)? };
        let len = CHECK.index(out.len())?;
        let arguments = AttentionBackwardSum { parts: parts.buffer()?, out: out.buffer()?, len, splits };
        let kernel = AttentionBackwardSum::kernel(self.gpu.target(), UNITS);
        // SAFETY: `out` and each of the parts have `len` elements.
        unsafe { self.gpu.launch(kernel, cubes(out.len()), arguments) }
    }
}

/// Cubes for `count` products of rows and columns.
fn product_cubes(count: u32, [rows, columns]: [u32; 2]) -> [u32; 3] {
    let tiles = (rows as usize).div_ceil(CUBE_ROWS) * (columns as usize).div_ceil(CUBE_COLUMNS);
    rows::cubes(count as usize * tiles)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// For one query head per key head, and for groups that are and are not a power of two.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let softcap = Softcap::of(&AttentionParams { softcap: Some(50.0), ..AttentionParams::causal(1.0) });
    let of_group = |group| {
        let rows = Rows::new(target, [512 * group, 512], VECTOR);
        vec![
            AttentionBackwardSpans::kernel(target, UNITS, group).code(),
            AttentionBackwardScores::kernel(target, CUBE, group).code(),
            softmax::compiled(target, group, None, rows).code(),
            softmax::compiled(target, group, softcap, rows).code(),
            AttentionBackwardQueries::kernel(target, CUBE, group).code(),
            AttentionBackwardKeys::kernel(target, CUBE, group).code(),
        ]
    };
    let sum = AttentionBackwardSum::kernel(target, UNITS).code();
    [1, 4, 7].into_iter().flat_map(of_group).chain([sum]).collect()
}
