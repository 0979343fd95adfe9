//! Attention on NVIDIA's tensor cores (compute capability 8.0), for f16 and bf16.
//!
//! | file | holds |
//! |---|---|
//! | `step/` | a few query rows: steps after long and short texts |
//! | `config.rs` | the compile-time configuration of the tile kernel |
//! | `tile.rs` | query rows through tiles of keys, and how those get into shared memory |
//! | `sums.rs` | its online softmax and the sums that a plane keeps in registers |
//! | `wgmma/` | many query rows on Hopper |
//! | `rows.rs` | shared code: the keys that rows see, values that are not finite, storing rows |

#![allow(unsafe_code)] // Launches.

mod config;
mod rows;
mod step;
mod sums;
mod tile;
mod wgmma;

pub(super) use config::{MAX_SCALE, TileConfig};
pub(super) use step::StepConfig;
pub(super) use wgmma::{ROWS as WGMMA_ROWS, WgmmaConfig};

use super::CHECK;
use super::gpu::{Call, Output};
#[cfg(test)]
use super::policy::Choice;
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::launch::Kernel;
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use std::f32::consts::LOG2_E;
use step::AttentionStep;
use tile::AttentionTile;
use wgmma::AttentionWgmma;

fn compiled_step(target: &Target, config: StepConfig) -> Kernel<AttentionStep<'static>> {
    AttentionStep::kernel(target, config.units(), config)
}

fn compiled_tile(target: &Target, config: TileConfig) -> Kernel<AttentionTile<'static>> {
    AttentionTile::kernel(target, config.units(), config)
}

fn compiled_wgmma(target: &Target, config: WgmmaConfig) -> Kernel<AttentionWgmma<'static>> {
    AttentionWgmma::kernel(target, config.units(), config)
}

/// The kernel of a choice that is CUDA's own, to compile it.
#[cfg(test)]
pub(super) fn code(target: &Target, choice: Choice) -> Option<Box<dyn CubeKernel>> {
    match choice {
        Choice::Step(config) => Some(compiled_step(target, config).code()),
        Choice::Tile(config) => Some(compiled_tile(target, config).code()),
        Choice::Wgmma(config) => Some(compiled_wgmma(target, config).code()),
        Choice::CmmaTile(_) | Choice::Stream(_) => None,
    }
}

/// The arguments of all these kernels.
macro_rules! arguments {
    ($kernel:ident, $call:expr, $out:expr $(, $more:ident: $value:expr)*) => {
        $kernel {
            $($more: $value,)*
            inputs: $call.inputs()?,
            y: $out.y.buffer()?,
            scales: $out.scales.buffer()?,
            sizes: $call.sizes()?,
            // With the factor log2(e).
            scale: ($call.params.scale * LOG2_E).to_bits(),
        }
    };
}

/// Launches the kernel for a few query rows, `splits` cubes per key head and block of rows.
pub(super) fn launch_step(
    call: &Call,
    config: StepConfig,
    splits: usize,
    out: Output,
) -> Result<(), KernelError> {
    let cubes = match config.paged {
        // Rows of each token alone.
        true => [call.heads()?, CHECK.index(call.tokens())?, CHECK.index(splits)?],
        false => cubes(call, config.rows(), splits)?,
    };
    let (table, pool) = call.table();
    let arguments = arguments!(AttentionStep, call, out, table: table.buffer()?, pool: pool);
    // SAFETY: as for the tile kernel; D and Dv are sizes that it takes. A token's rows in pages are
    // no more than a cube's; positions within the capacity have a page in the table, and pages
    // beyond the pool are not read.
    unsafe { call.gpu.launch(compiled_step(call.gpu.target(), config), cubes, arguments) }
}

/// Launches the tile kernel, `splits` cubes per key head and block of rows.
pub(super) fn launch_tile(
    call: &Call,
    config: TileConfig,
    splits: usize,
    out: Output,
) -> Result<(), KernelError> {
    let cubes = cubes(call, config.rows(), splits)?;
    let arguments = arguments!(AttentionTile, call, out);
    // SAFETY: the sizes are the tensors', and D and Dv multiples of 16; positions beyond the
    // capacity see no keys, and rows past the last are not stored. Each split has its part of y and
    // its scales.
    unsafe { call.gpu.launch(compiled_tile(call.gpu.target(), config), cubes, arguments) }
}

/// Launches the kernel for Hopper, `splits` cubes per key head and block of rows.
pub(super) fn launch_wgmma(
    call: &Call,
    config: WgmmaConfig,
    splits: usize,
    out: Output,
) -> Result<(), KernelError> {
    let cubes = cubes(call, WGMMA_ROWS, splits)?;
    let arguments = arguments!(AttentionWgmma, call, out);
    // SAFETY: as for the tile kernel; D and Dv are sizes that it takes.
    unsafe { call.gpu.launch(compiled_wgmma(call.gpu.target(), config), cubes, arguments) }
}

/// Cubes for key heads, blocks of `rows` query rows and splits.
fn cubes(call: &Call, rows: usize, splits: usize) -> Result<[u32; 3], KernelError> {
    let blocks = call.rows().div_ceil(rows);
    Ok([call.heads()?, CHECK.index(blocks)?, CHECK.index(splits)?])
}
