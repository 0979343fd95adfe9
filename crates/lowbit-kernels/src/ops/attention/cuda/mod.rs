//! Attention on NVIDIA's tensor cores (compute capability 8.0), for f16 and bf16.
//!
//! | file | holds |
//! |---|---|
//! | `config.rs` | what the kernel is compiled for |
//! | `tile.rs` | the kernel: query rows through tiles of keys, and how those get into shared memory |
//! | `sums.rs` | the online softmax and the sums that a plane keeps in registers |

#![allow(unsafe_code)] // Launches.

mod config;
mod sums;
mod tile;

pub(super) use config::{MAX_SCALE, TileConfig};

use super::CHECK;
use super::gpu::{Call, Output};
use crate::KernelError;
use crate::gpu::compile::Target;
use crate::gpu::launch::Kernel;
use std::f32::consts::LOG2_E;
use tile::AttentionTile;

pub(super) fn compiled(target: &Target, config: TileConfig) -> Kernel<AttentionTile<'static>> {
    AttentionTile::kernel(target, config.units(), config)
}

/// Launches the kernel, `splits` cubes per key head and block of rows.
pub(super) fn launch(call: &Call, config: TileConfig, splits: usize, out: Output) -> Result<(), KernelError> {
    let blocks = call.rows().div_ceil(config.rows());
    let cubes = [call.heads()?, CHECK.index(blocks)?, CHECK.index(splits)?];
    let arguments = AttentionTile {
        inputs: call.inputs()?,
        y: out.y.buffer()?,
        scales: out.scales.buffer()?,
        sizes: call.sizes()?,
        scale: (call.params.scale * LOG2_E).to_bits(),
    };
    // SAFETY: the sizes are the tensors', and D and Dv multiples of 16; positions beyond the capacity see no keys, and rows
    // past the last are not stored. Each split has its part of y and its scales.
    unsafe { call.gpu.launch(compiled(call.gpu.target(), config), cubes, arguments) }
}
