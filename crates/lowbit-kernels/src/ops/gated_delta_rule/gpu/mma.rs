//! What a warp's tensor cores are asked for, in PTX: products of 16-bit tiles, summed in f32 (compute capability 8.0).
//!
//! Tiles are `[16, 16]` in memory that units share, and `[16, 8]` where they are sums; unit `u` of a warp has the places
//! `(u / 4 + 8 i, 2 (u % 4) + j)` of a sum, `[i][j]` with `i` and `j` below 2. Two sums side by side, rounded and packed,
//! are a left operand.

// `| 0` reads what PTX gave: handed on as it is, the next PTX would get its address.
#![allow(clippy::identity_op)]

use crate::gpu::ptx;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The address of shared memory that these functions take.
#[cube]
pub(super) fn address(shared: &[u32]) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 p; cvta.to.shared.u64 p, {from}; cvt.u32.u64 {to}, p; }}",
        to = out(_) address, from = in(_) shared.as_ptr(),
    );
    address | 0u32
}

/// Starts copying vector `at` of `from` to `to`; zeros instead where it is not `there`.
#[cube]
pub(super) fn copy(to: u32, from: &[Vector<u32, Const<4>>], at: usize, there: bool) {
    let size = select(there, 16u32, 0u32);
    let at = at as u32;
    gpu_asm!(
        "{{ .reg .u64 p, o; cvta.to.global.u64 p, {from}; mul.wide.u32 o, {at}, 16; add.u64 p, p, o; \
         cp.async.cg.shared.global [{to}], [p], 16, {size}; }}",
        to = in(_) to, from = in(_) from.as_ptr(), at = in(_) at, size = in(_) size,
    );
}

/// Ends a group of copies.
#[cube]
pub(super) fn commit() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits for the unit's own copies, all but the last `groups` groups.
#[cube]
pub(super) fn wait(#[comptime] groups: usize) {
    gpu_asm!("cp.async.wait_group {groups};", groups = const groups);
}

/// Four 8 x 8 tiles of 16 bits, whose rows are where the eights of units say; unit `u` gets elements `2 (u % 4)` and the
/// next of row `u / 4` of each.
#[cube]
pub(super) fn tiles(row: u32) -> Vector<u32, Const<4>> {
    let tiles: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {to}, [{from}];",
        to = out(_) tiles, from = in(_) row, options(readonly),
    );
    tiles
}

/// The same of the tiles' transposes.
#[cube]
pub(super) fn transposed_tiles(row: u32) -> Vector<u32, Const<4>> {
    let tiles: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {to}, [{from}];",
        to = out(_) tiles, from = in(_) row, options(readonly),
    );
    tiles
}

/// Four floats of shared memory.
#[cube]
pub(super) fn four(at: u32) -> Vector<f32, Const<4>> {
    let values: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared.v4.f32 {to}, [{from}];", to = out(_) values, from = in(_) at, options(readonly));
    values
}

/// Two floats of shared memory.
#[cube]
pub(super) fn two(at: u32) -> Vector<f32, Const<2>> {
    let values: Vector<f32, Const<2>>;
    gpu_asm!("ld.shared.v2.f32 {to}, [{from}];", to = out(_) values, from = in(_) at, options(readonly));
    values
}

/// Four words of shared memory.
#[cube]
pub(super) fn words(at: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!("ld.shared.v4.u32 {to}, [{from}];", to = out(_) words, from = in(_) at, options(readonly));
    words
}

/// Writes `words[first..first + 4]` to shared memory.
#[cube]
pub(super) fn put(at: u32, words: &Array<u32>, #[comptime] first: usize) {
    let w0 = words[first];
    let w1 = words[comptime!(first + 1)];
    let w2 = words[comptime!(first + 2)];
    let w3 = words[comptime!(first + 3)];
    gpu_asm!(
        "st.shared.v4.u32 [{to}], {{{w0},{w1},{w2},{w3}}};",
        to = in(_) at, w0 = in(_) w0, w1 = in(_) w1, w2 = in(_) w2, w3 = in(_) w3,
    );
}

/// An 8 x 8 tile's transpose.
#[cube]
pub(super) fn transposed(tile: u32) -> u32 {
    let to: u32;
    gpu_asm!(
        "movmatrix.sync.aligned.m8n8.trans.b16 {to}, {from};",
        to = out(_) to, from = in(_) tile, options(nomem),
    );
    to | 0u32
}

/// Two floats rounded to 16 bits each, `low` in the lower half.
#[cube]
pub(super) fn pack(low: f32, high: f32, #[comptime] dtype: FloatType) -> u32 {
    ptx::pack(low, high, dtype) | 0u32
}
