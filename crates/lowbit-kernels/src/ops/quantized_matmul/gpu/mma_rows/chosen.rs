//! Rows of x that choose their batch of the weight, several to most batches: experts of many tokens. Each cube has a batch,
//! and looks through all ids for the rows that chose it: that takes a trip to the cache, where sorting them first would take
//! a launch, and its first step of the weight is on its way before the ids are there.

use super::super::super::{CHECK, policy};
use super::super::integers::ONES;
use super::super::mat_vec::Place;
use super::super::share::{Rows, listed};
use super::shape::{STEP, Shape};
use super::{kernel, supports as supports_layout};
use crate::gpu::compile::Target;
use crate::gpu::layout::{Layout, RUN};
use crate::gpu::ptx::address;
use crate::gpu::{CUBES, Dispatch, Gpu};
use crate::{KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The most ids that cubes look through: what they keep of each has 16 bits.
pub(crate) const MOST: usize = 4096;
/// Ids that a unit loads at once, at the most.
const TOGETHER: usize = 16;

/// The place of this cube: its rows are still to be found. One past the last of `experts` batches has what chose none of
/// them.
#[cube]
pub(super) fn place(experts: u32) -> Place {
    let batch = CUBE_POS_Y as usize;
    let known = batch < experts as usize;
    let initial = select(known, 0.0f32, f32::reinterpret(0x7fc0_0000u32));
    Place { t0: 0usize.runtime(), count: 0usize.runtime(), x_row: 0usize.runtime(), batch, known, initial }
}

/// Finds the rows of y that chose this cube's batch, in any order, and says how many there are.
#[cube]
pub(super) fn find(
    ids: &[u32],
    len: u32,
    experts: u32,
    found: &mut Shared<[u16]>,
    #[comptime] shape: Shape,
) -> usize {
    let units = comptime!(shape.units());
    let together = comptime!(shape.ids.div_ceil(shape.units()).min(TOGETHER));
    let count = Shared::<[Atomic<u32>]>::new_slice(1usize);
    if UNIT_POS_X == 0 {
        count[0].store(0u32);
    }
    sync_cube();
    let mut first = UNIT_POS_X;
    while first < len {
        let mut batches = Array::<u32>::new(together);
        #[unroll]
        for i in 0..together {
            batches[i] = ids[min(first + comptime!((i * units) as u32), len - 1u32) as usize];
        }
        #[unroll]
        for i in 0..together {
            let at = first + comptime!((i * units) as u32);
            if at < len && min(batches[i], experts) == CUBE_POS_Y {
                found[count[0].fetch_add(1u32) as usize] = u16::cast_from(at);
            }
        }
        first += comptime!((together * units) as u32);
    }
    sync_cube();
    count[0].load() as usize
}

/// The rows from the `first`-th of `all` that were found on, as many as a cube takes. `share` rows of y have the same row
/// of x.
#[cube]
pub(super) fn rows(
    found: &Shared<[u16]>,
    first: usize,
    all: usize,
    share: u32,
    list: &mut Shared<[u32]>,
    #[comptime] shape: Shape,
) -> Rows {
    let count = min(all - first, shape.columns);
    let unit = UNIT_POS_X as usize;
    if unit < count {
        let row = u32::cast_from(found[first + unit]);
        list[unit] = listed(row, row / share);
    }
    sync_cube();
    Rows { count, run: 0usize.runtime(), y: 0usize.runtime(), list: address(&*list) }
}

/// Whether a device has this for `ids` rows of x of `dtype` that choose among `experts` batches of a weight.
pub(crate) fn supports(
    target: &Target,
    weight: &QuantizedTensor,
    dtype: FloatType,
    (experts, ids): (usize, usize),
) -> bool {
    ids <= MOST && experts < CUBES && supports_layout(target, Layout::of(weight.format()), dtype)
}

/// `y[t, n] = sum over k of x[t / share, k] * weight[ids[t], n, k]`, where [`supports`] says so: rows of `x` are whole
/// runs.
pub(crate) fn multiply(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    (ids, share): (&Tensor, usize),
    y: &Tensor,
) -> Result<(), KernelError> {
    let index = |value: usize| CHECK.index(value);
    let (dtype, result) = (CHECK.float("x", x)?, CHECK.float("y", y)?);
    let (n, runs) = (weight.n(), weight.k().div_ceil(RUN));
    let (m, experts) = (ids.len(), weight.rows() / n);
    let layout = Layout::of(weight.format());
    let policy::Cut { columns, tiles, strips, splits, chunk } =
        policy::mma_rows_chosen((n, (runs * RUN).div_ceil(STEP)));
    let shape = Shape {
        layout,
        dtype,
        result,
        columns,
        tiles,
        strips,
        splits,
        chunk,
        whole: (runs * RUN).is_multiple_of(STEP),
        ids: m.next_power_of_two().max(512),
        overlaps: gpu.target().overlaps(),
    };
    let shape = shape.fitting(gpu.target().shared_memory());
    // The planes of scales have two elements a run at most, and codes no less.
    index(weight.rows() * runs * (layout.bits / layout.vector()).max(2))?;
    index(m * runs * RUN)?;
    index(y.len())?;
    let planes = weight.components();
    // What a layout does not have is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    // The weight's planes may be read while the launch before runs.
    gpu.launch_early(
        3,
        Dispatch {
            kernel: kernel(gpu.target(), shape),
            cubes: [index(n.div_ceil(shape.rows()))?, index(experts + 1)?, 1],
            buffers: vec![
                component(0)?,
                component(1)?,
                component(2)?,
                x.memory()?,
                ids.memory()?,
                y.memory()?,
            ],
            scalars: vec![
                index(n)?,
                index(runs)?,
                index(experts)?,
                1,
                index(experts)?,
                index(m)?,
                index(share)?,
                ONES,
            ],
        },
    )
}
