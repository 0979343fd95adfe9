//! The gradient on a GPU: rows of dy that have the same id are a list, which one cube sums, in
//! their order.

#![allow(unsafe_code)] // Launches.

#[cfg(test)]
use crate::gpu::compile::Target;
use crate::gpu::launch::{LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

const CHECK: Check = Check("dequant_gather_backward");
const UNITS: usize = 256;
/// Behind the last of a list.
const END: u32 = u32::MAX;

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    /// Ids, rows of the table, and columns.
    len: u32,
    rows: u32,
    k: u32,
}

/// The next place with the same id, and which places are the first of theirs: `len` compares a
/// unit.
#[kernel]
fn dequant_gather_backward_lists(ids: &[u32], next: &mut [u32], first: &mut [u32], sizes: Sizes) {
    let (i, len) = (ABSOLUTE_POS, sizes.len as usize);
    if i < len {
        let id = ids[i];
        let mut after = i + 1;
        while after < len && ids[after] != id {
            after += 1;
        }
        next[i] = select(after < len, after as u32, END);
        let mut before = 0usize;
        while ids[before] != id {
            before += 1;
        }
        first[i] = select(before == i, 1u32, 0u32);
    }
}

/// `dvalues[id] = sum of dy[i]` over the list of an id: a cube a place, of which the first of a
/// list does it. An id that is none of the table's is left out.
#[kernel]
fn dequant_gather_backward_sum(
    ids: &[u32],
    next: &[u32],
    first: &[u32],
    dy: &[f32],
    dvalues: &mut [f32],
    sizes: Sizes,
) {
    let (place, k) = (CUBE_POS, sizes.k as usize);
    if place < sizes.len as usize {
        let id = ids[place];
        if first[place] == 1u32 && id < sizes.rows {
            let mut column = UNIT_POS_X as usize;
            while column < k {
                let mut sum = 0.0f32;
                let mut at = place as u32;
                while at != END {
                    sum += dy[at as usize * k + column];
                    at = next[at as usize];
                }
                dvalues[id as usize * k + column] = sum;
                column += UNITS;
            }
        }
    }
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![
        DequantGatherBackwardLists::kernel(target, UNITS).code(),
        DequantGatherBackwardSum::kernel(target, UNITS).code(),
    ]
}

/// The gradient of all values of a table of this shape; dy is f32.
pub(super) fn backward_values(
    gpu: &Gpu,
    ids: &Tensor,
    dy: &Tensor,
    [count, k]: [usize; 2],
) -> Result<Tensor, KernelError> {
    let dvalues = Tensor::allocate_zeros(&[count, k], DType::F32, dy.device())?;
    if dy.is_empty() {
        return Ok(dvalues);
    }
    let new = || Tensor::allocate(&[ids.len()], DType::U32, dy.device());
    let (next, first) = (new()?, new()?);
    CHECK.index(dy.len())?;
    let sizes = Sizes { len: CHECK.index(ids.len())?, rows: CHECK.index(count)?, k: CHECK.index(k)? };
    let lists = DequantGatherBackwardLists {
        ids: ids.buffer()?,
        next: next.buffer()?,
        first: first.buffer()?,
        sizes,
    };
    let sum = DequantGatherBackwardSum {
        ids: ids.buffer()?,
        next: next.buffer()?,
        first: first.buffer()?,
        dy: dy.buffer()?,
        dvalues: dvalues.buffer()?,
        sizes,
    };
    let target = gpu.target();
    // SAFETY: lists and dy have a row for each id, and ids that are none of the table's write
    // nothing.
    unsafe {
        let cubes = rows::cubes(ids.len().div_ceil(UNITS));
        gpu.launch(DequantGatherBackwardLists::kernel(target, UNITS), cubes, lists)?;
        gpu.launch(DequantGatherBackwardSum::kernel(target, UNITS), rows::cubes(ids.len()), sum)?;
    }
    Ok(dvalues)
}
