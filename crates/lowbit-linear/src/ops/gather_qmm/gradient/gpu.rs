//! The gradients on a GPU. That of x is a forward product with transposed experts. That of the
//! weight brings the pairs of a token and an expert together by expert. Where there is a library of
//! dense products, it multiplies the rows of each expert, whose number the host has to wait for.
//! Elsewhere a kernel multiplies tiles of 64 x 64 in f32: `2 pairs N K` operations on
//! `pairs (N + K)` f32, each read by a cube for every 64 columns of the other side, and out of its
//! cache by 16 units.

#![allow(unsafe_code)] // Launches.

use super::padding::{Batch, NONE, Padding};
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::quantized_matmul::gradient::gpu::transposed_weight;
use crate::ops::quantized_matmul::gradient::library::{self, Matrices, Rows};
use crate::ops::{Check, add, combine_experts, gather_qmm};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::{DType, FloatType};

const CHECK: Check = Check("gather_qmm_backward");

/// `dx`, `[T, slots, K]` of dy's type.
pub(super) fn backward_x(
    gpu: &Gpu,
    dy: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    slots: usize,
) -> Result<Tensor, KernelError> {
    let (dtype, (n, k)) = (CHECK.float("dy", dy)?, (weight.n(), weight.k()));
    let [tokens, top_k] = [0, 1].map(|i| ids.dim(i));
    let shape = [tokens, slots, k];
    if dy.is_empty() || k == 0 {
        return Tensor::allocate_zeros(&shape, dtype.dtype(), dy.device());
    }
    let experts = weight.shape()[weight.shape().len() - 3];
    let products = weight.rows() / (experts * n);
    let (weights, dys) =
        (weight.reshape(&[products, experts, n, k])?, dy.reshape(&[products, tokens, top_k, n])?);
    let by_library =
        library::multiplies(gpu, dy, weight, dtype).then(|| ByExpert::new(ids, experts)).transpose()?;
    let mut dx: Option<Tensor> = None;
    for i in 0..products {
        let one = weights.slice(i, i + 1)?.reshape(&[experts, n, k])?;
        let dy = dys.rows(i, i + 1)?.reshape(&[tokens, top_k, n])?;
        let part = match &by_library {
            Some(by_expert) => by_expert.backward_x(gpu, &dy, &one, dtype)?,
            None => gather_qmm(&dy, &transposed_weight(gpu, &one, dtype)?, ids)?,
        };
        dx = Some(match dx {
            None => part,
            Some(sum) => add(&sum, &part)?,
        });
    }
    let dx = dx.expect("a weight that is not empty has a product");
    if slots == top_k {
        return Ok(dx);
    }
    let ones = Tensor::new(&vec![1f32; tokens * top_k], &[tokens, top_k], dy.device())?;
    combine_experts(&dx, &ones)?.reshape(&shape)
}

/// Pairs that are sorted together, by as many units.
const BLOCK: usize = 256;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct SortSizes {
    pairs: u32,
    experts: u32,
    blocks: u32,
}

/// A counting sort of pairs by expert, in three launches. This one finds each pair's place among
/// those of its block that chose the same expert, and how many of a block chose each: `counts` is
/// `[experts, blocks]`, zero before.
#[kernel]
fn gather_qmm_backward_count(ids: &[u32], places: &mut [u32], counts: &mut [u32], sizes: SortSizes) {
    let pair = ABSOLUTE_POS;
    if pair < sizes.pairs as usize && ids[pair] < sizes.experts {
        let id = ids[pair];
        let mut place = 0u32;
        let mut count = 0u32;
        let mut other = CUBE_POS * BLOCK;
        let end = min(other + BLOCK, sizes.pairs as usize);
        while other < end {
            if ids[other] == id {
                count += 1u32;
                place += select(other < pair, 1u32, 0u32);
            }
            other += 1;
        }
        places[pair] = place;
        if place == 0u32 {
            counts[(id * sizes.blocks) as usize + CUBE_POS] = count;
        }
    }
}

/// Makes of each block's count the number of pairs that chose the same expert in blocks before it,
/// and of `totals` those in all.
#[kernel]
fn gather_qmm_backward_scan(counts: &mut [u32], totals: &mut [u32], sizes: SortSizes) {
    if ABSOLUTE_POS < sizes.experts as usize {
        let mut sum = 0u32;
        for block in 0..sizes.blocks as usize {
            let at = ABSOLUTE_POS * sizes.blocks as usize + block;
            let count = counts[at];
            counts[at] = sum;
            sum += count;
        }
        totals[ABSOLUTE_POS] = sum;
    }
}

/// Puts the pairs in order: those of expert e are `order[starts[e]..starts[e + 1]]`. Pairs with an
/// id that is no expert's are left out.
#[kernel]
fn gather_qmm_backward_order(
    ids: &[u32],
    places: &[u32],
    counts: &[u32],
    totals: &[u32],
    starts: &mut [u32],
    order: &mut [u32],
    sizes: SortSizes,
) {
    let pair = ABSOLUTE_POS;
    // As many units as pairs, and one more than experts.
    let mut expert = pair as u32;
    if pair < sizes.pairs as usize {
        expert = ids[pair];
    }
    let start = sum_before(totals, min(expert, sizes.experts) as usize);
    if pair < sizes.pairs as usize && expert < sizes.experts {
        let before = counts[expert as usize * sizes.blocks as usize + pair / BLOCK];
        order[(start + before + places[pair]) as usize] = pair as u32;
    }
    if pair <= sizes.experts as usize {
        starts[pair] = sum_before(totals, pair);
    }
}

/// The number of pairs that chose an expert before expert `end`.
#[cube]
fn sum_before(totals: &[u32], end: usize) -> u32 {
    let mut sum = 0u32;
    let mut expert = 0usize;
    while expert < end {
        sum += totals[expert];
        expert += 1;
    }
    sum
}

/// Pairs by expert.
struct Sorted {
    order: Tensor,
    starts: Tensor,
}

fn sorted(gpu: &Gpu, ids: &Tensor, experts: usize) -> Result<Sorted, KernelError> {
    let (pairs, device) = (ids.len(), ids.device());
    let blocks = pairs.div_ceil(BLOCK);
    let new = |len: usize| Tensor::allocate(&[len], DType::U32, device);
    let (places, totals, starts, order) = (new(pairs)?, new(experts)?, new(experts + 1)?, new(pairs)?);
    let counts = Tensor::allocate_zeros(&[experts, blocks], DType::U32, device)?;
    CHECK.index(counts.len())?;
    let sizes = SortSizes {
        pairs: CHECK.index(pairs)?,
        experts: CHECK.index(experts)?,
        blocks: CHECK.index(blocks)?,
    };
    let count = GatherQmmBackwardCount {
        ids: ids.buffer()?,
        places: places.buffer()?,
        counts: counts.buffer()?,
        sizes,
    };
    let scan = GatherQmmBackwardScan { counts: counts.buffer()?, totals: totals.buffer()?, sizes };
    let put = GatherQmmBackwardOrder {
        ids: ids.buffer()?,
        places: places.buffer()?,
        counts: counts.buffer()?,
        totals: totals.buffer()?,
        starts: starts.buffer()?,
        order: order.buffer()?,
        sizes,
    };
    let cubes = |len: usize| rows::cubes(len.div_ceil(BLOCK));
    let target = gpu.target();
    // SAFETY: the sizes are the tensors', and units past the last pair and expert write nothing.
    unsafe {
        gpu.launch(GatherQmmBackwardCount::kernel(target, BLOCK), cubes(pairs), count)?;
        gpu.launch(GatherQmmBackwardScan::kernel(target, BLOCK), cubes(experts), scan)?;
        gpu.launch(GatherQmmBackwardOrder::kernel(target, BLOCK), cubes(pairs.max(experts + 1)), put)?;
    }
    Ok(Sorted { order, starts })
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct RowSizes {
    /// Vectors of all rows, and of one.
    len: u32,
    width: u32,
    /// Pairs before those that `order` counts, and pairs that have the same row.
    first: u32,
    share: u32,
}

/// `y[i] = x[(first + order[i]) / share]`, rows of whole vectors; words of `none` for [`NONE`].
#[kernel]
fn gather_qmm_backward_rows(
    x: &[Vector<u32, Const<4>>],
    order: &[u32],
    y: &mut [Vector<u32, Const<4>>],
    sizes: RowSizes,
    none: u32,
) {
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let (row, column) = (i / sizes.width as usize, i % sizes.width as usize);
        let pair = order[row];
        let mut vector = Vector::<u32, Const<4>>::new(none);
        if pair != NONE {
            vector = x[((sizes.first + pair) / sizes.share) as usize * sizes.width as usize + column];
        }
        y[i] = vector;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The rows of x, `[.., width]`, in this order of the pairs from pair `first` on; rows of the word
/// `none` for [`NONE`].
fn in_order(
    gpu: &Gpu,
    x: &Tensor,
    order: &Tensor,
    [first, share]: [usize; 2],
    none: u32,
) -> Result<Tensor, KernelError> {
    let rows = order.len();
    let y = Tensor::allocate(&[rows, x.dim(-1)], x.dtype(), x.device())?;
    let width = x.dim(-1) * x.dtype().size() / size_of::<[u32; 4]>();
    let sizes = RowSizes {
        len: CHECK.index(rows * width)?,
        width: CHECK.index(width)?,
        first: CHECK.index(first)?,
        share: CHECK.index(share)?,
    };
    let (from, to) = (x.buffer()?, y.buffer()?);
    let arguments = GatherQmmBackwardRows { x: from, order: order.buffer()?, y: to, sizes, none };
    let kernel = GatherQmmBackwardRows::kernel(gpu.target(), UNITS);
    // SAFETY: the order names rows of x alone, and y has a row for each.
    unsafe { gpu.launch(kernel, cubes(rows * width), arguments)? };
    Ok(y)
}

/// Pairs as the library takes them: see [`Padding`].
struct ByExpert {
    batches: Vec<Batch>,
    order: Tensor,
    places: Tensor,
}

impl ByExpert {
    /// Waits for the ids.
    fn new(ids: &Tensor, experts: usize) -> Result<Self, KernelError> {
        let device = ids.device();
        let Padding { batches, order, places } =
            Padding::new(ids.to_device(&device.host()?)?.as_slice()?, experts);
        let new = |rows: &[u32]| Tensor::new(rows, &[rows.len()], device);
        Ok(Self { order: new(&order)?, places: new(&places)?, batches })
    }

    /// The batches, and the first row of each.
    fn each(&self) -> impl Iterator<Item = (&Batch, usize)> {
        self.batches.iter().scan(0, |rows, batch| {
            let first = *rows;
            *rows += batch.experts.len() * batch.rows;
            Some((batch, first))
        })
    }

    /// `dx` of each pair, `[T, top_k, K]`: of `dy` `[T, top_k, N]` and one product's `weight`,
    /// `[E, N, K]`.
    fn backward_x(
        &self,
        gpu: &Gpu,
        dy: &Tensor,
        weight: &QuantizedTensor,
        dtype: FloatType,
    ) -> Result<Tensor, KernelError> {
        // In all types a word of NaN.
        const NAN: u32 = 0x7fc0_7fc0;
        let dy_rows = in_order(gpu, dy, &self.order, [0, 1], 0)?;
        let dx = Tensor::allocate(&[self.order.len(), weight.k()], dtype.dtype(), dy.device())?;
        let matrices = Matrices::new(gpu, weight, dtype)?;
        for (Batch { experts, rows }, first) in self.each() {
            matrices.backward_x(gpu, [&dy_rows, &dx], (first, *rows), experts.clone())?;
        }
        in_order(gpu, &dx, &self.places, [0, 1], NAN)?.reshape(&[dy.dim(0), dy.dim(1), weight.k()])
    }

    /// Writes all of the gradient `[P, E, N, K]`, of `x` whose rows `share` pairs have each.
    fn backward_weight(
        &self,
        gpu: &Gpu,
        ([x, dy], share, dtype): ([&Tensor; 2], usize, FloatType),
        (dweight, experts): (&Tensor, usize),
    ) -> Result<(), KernelError> {
        let (n, k, pairs) = (dy.dim(-1), x.dim(-1), self.places.len());
        let x = in_order(gpu, x, &self.order, [0, share], 0)?;
        for product in 0..dy.len() / (pairs * n) {
            let dy = in_order(gpu, dy, &self.order, [product * pairs, 1], 0)?;
            for (Batch { experts: some, rows: each }, first) in self.each() {
                let rows = Rows { x: &x, dy: &dy, dtype, first, each: *each, matrices: some.len() };
                let matrix = product * experts + some.start;
                library::backward_matrices(gpu, rows, 0..n, (dweight, matrix * n * k))?;
            }
        }
        Ok(())
    }
}

/// Rows and columns of a tile of a matrix, and the sides of the square of units that share it.
const TILE: usize = 64;
const SIDE: usize = 16;
/// Rows and columns of a unit.
const EACH: usize = TILE / SIDE;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct WeightSizes {
    n: u32,
    k: u32,
    experts: u32,
    /// Matrices of all products, and pairs of one.
    matrices: u32,
    pairs: u32,
    /// Pairs that have the same row of x.
    share: u32,
}

/// `dweight[p, e, n, k] = sum over the pairs of expert e of dy[p, pair, n] * x[pair / share, k]`,
/// in the order of the pairs: a cube a tile.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn gather_qmm_backward_weight(
    x: &[f32],
    dy: &[f32],
    order: &[u32],
    starts: &[u32],
    dweight: &mut [f32],
    sizes: WeightSizes,
) {
    let (n, k, share) = (sizes.n as usize, sizes.k as usize, sizes.share as usize);
    let across = (k + comptime!(TILE - 1)) / TILE;
    let down = (n + comptime!(TILE - 1)) / TILE;
    let (matrix, tile) = (CUBE_POS / (across * down), CUBE_POS % (across * down));
    let (n0, k0) = (tile / across * TILE, tile % across * TILE);
    // Cubes past the last matrix have no pairs, and write nothing.
    let known = matrix < sizes.matrices as usize;
    let mut first = 0usize;
    let mut end = 0usize;
    if known {
        first = starts[matrix % sizes.experts as usize] as usize;
        end = starts[matrix % sizes.experts as usize + 1] as usize;
    }
    let dy0 = matrix / sizes.experts as usize * sizes.pairs as usize;
    let row = n0 + UNIT_POS_X as usize / SIDE;
    let column = k0 + UNIT_POS_X as usize % SIDE;
    let mut sums = Array::<f32>::new(comptime!(EACH * EACH));
    #[unroll]
    for i in 0..comptime!(EACH * EACH) {
        sums[i] = 0.0;
    }
    while first < end {
        let pair = order[first] as usize;
        let (dy_row, x_row) = ((dy0 + pair) * n, pair / share * k);
        let mut left = Array::<f32>::new(EACH);
        #[unroll]
        for i in 0..EACH {
            // Rows and columns past the last are computed and not stored.
            left[i] = dy[dy_row + min(row + comptime!(i * SIDE), n - 1)];
        }
        #[unroll]
        for j in 0..EACH {
            let right = x[x_row + min(column + comptime!(j * SIDE), k - 1)];
            #[unroll]
            for i in 0..EACH {
                sums[i * EACH + j] = fma(left[i], right, sums[i * EACH + j]);
            }
        }
        first += 1;
    }
    #[unroll]
    for i in 0..EACH {
        #[unroll]
        for j in 0..EACH {
            let (at_n, at_k) = (row + comptime!(i * SIDE), column + comptime!(j * SIDE));
            if known && at_n < n && at_k < k {
                dweight[(matrix * n + at_n) * k + at_k] = sums[i * EACH + j];
            }
        }
    }
}

/// The gradient of all values of all experts of a weight `[.., E, N, K]`; x and dy are of one type.
pub(super) fn backward_weight(
    gpu: &Gpu,
    [x, dy]: [&Tensor; 2],
    weight: &QuantizedTensor,
    ids: &Tensor,
) -> Result<Tensor, KernelError> {
    let (n, k) = (weight.n(), weight.k());
    if x.is_empty() || dy.is_empty() {
        return Tensor::allocate_zeros(weight.shape(), DType::F32, dy.device());
    }
    let (experts, pairs) = (weight.shape()[weight.shape().len() - 3], ids.len());
    let matrices = weight.rows() / n;
    CHECK.index((weight.rows() * k).max(x.len()).max(dy.len()))?;
    let share = if x.dim(1) == 1 { ids.dim(1) } else { 1 };
    let dtype = CHECK.float("x", x)?;
    let dweight = Tensor::allocate(weight.shape(), DType::F32, dy.device())?;
    if library::takes(gpu, &[x, dy], dtype, &[n, k]) {
        let operands = ([x, dy], share, dtype);
        ByExpert::new(ids, experts)?.backward_weight(gpu, operands, (&dweight, experts))?;
        return Ok(dweight);
    }
    let (x, dy) = (x.cast(DType::F32)?, dy.cast(DType::F32)?);
    let Sorted { order, starts } = sorted(gpu, ids, experts)?;
    let sizes = WeightSizes {
        n: CHECK.index(n)?,
        k: CHECK.index(k)?,
        experts: CHECK.index(experts)?,
        matrices: CHECK.index(matrices)?,
        pairs: CHECK.index(pairs)?,
        share: CHECK.index(share)?,
    };
    let arguments = GatherQmmBackwardWeight {
        x: x.buffer()?,
        dy: dy.buffer()?,
        order: order.buffer()?,
        starts: starts.buffer()?,
        dweight: dweight.buffer()?,
        sizes,
    };
    let cubes = rows::cubes(matrices * n.div_ceil(TILE) * k.div_ceil(TILE));
    // SAFETY: the sizes are the tensors', and the order names pairs alone.
    unsafe { gpu.launch(weight_kernel(gpu.target()), cubes, arguments)? };
    Ok(dweight)
}

fn weight_kernel(target: &Target) -> Kernel<GatherQmmBackwardWeight<'static>> {
    GatherQmmBackwardWeight::kernel(target, SIDE * SIDE)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![
        GatherQmmBackwardCount::kernel(target, BLOCK).code(),
        GatherQmmBackwardScan::kernel(target, BLOCK).code(),
        GatherQmmBackwardOrder::kernel(target, BLOCK).code(),
        GatherQmmBackwardRows::kernel(target, UNITS).code(),
        weight_kernel(target).code(),
    ]
}
