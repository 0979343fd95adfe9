//! A unit subtracts for a token.

#![allow(unsafe_code)] // Launches.

use super::CHECK;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::launch::{Kernel, kernel};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

#[kernel]
fn cache_places(positions: &[u32], first: &[u32], y: &mut [u32], count: u32) {
    let mut i = ABSOLUTE_POS;
    while i < count as usize {
        y[i] = positions[i] - first[0];
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled(target: &Target) -> Kernel<CachePlaces<'static>> {
    CachePlaces::kernel(target, UNITS)
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of the op.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    vec![compiled(target).code()]
}

/// Fills `y`; everything was checked.
pub(super) fn launch(gpu: &Gpu, positions: &Tensor, first: &Tensor, y: &Tensor) -> Result<(), KernelError> {
    if y.is_empty() {
        return Ok(());
    }
    let arguments = CachePlaces {
        positions: positions.buffer()?,
        first: first.buffer()?,
        y: y.buffer()?,
        count: CHECK.index(y.len())?,
    };
    // SAFETY: y has a place for each position, and first has an element.
    unsafe { gpu.launch(compiled(gpu.target()), cubes(y.len()), arguments) }
}
