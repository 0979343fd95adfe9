//! Hopper's products of matrices by four planes together (`wgmma`), and its bulk copies into shared
//! memory, as PTX. Shared memory is touched by these alone, through 32-bit addresses.

use super::{name, register};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The accumulators are registers that one statement declares and others name: as operands they
/// would be copied in and out of each.
fn accumulators(rows: usize) -> String {
    (0..rows / 2).map(|i| format!("sum{i}")).collect::<Vec<_>>().join(", ")
}

fn zeros(rows: usize) -> String {
    (0..rows / 2).map(|i| format!("mov.f32 sum{i}, 0f00000000;")).collect::<Vec<_>>().join(" ")
}

/// Declares the sums of a tile of 64 by `rows`, all zero. Once a kernel.
#[cube]
pub fn begin(#[comptime] rows: usize) {
    gpu_asm!(
        ".reg .f32 sum<{count}>; {zeros}",
        count = const rows / 2, zeros = const zeros(rows), options(nomem),
    );
}

/// Sum `i` of this unit.
#[cube]
pub fn sum(#[comptime] i: usize) -> f32 {
    let value: f32;
    gpu_asm!("mov.f32 {value}, sum{i};", value = out(_) value, i = const i, options(nomem));
    value
}

/// Adds the product of 64 by 16 values (or twice as many, for two `steps`) in registers with 16 by
/// `rows` in shared memory at `tile` to the sums. It has begun when this ends, and the one before
/// has ended.
///
/// One statement: between the fence and the product no register may be written.
#[cube]
pub fn multiply(
    pairs: &Array<u32>,
    tile: u32,
    #[comptime] steps: usize,
    #[comptime] rows: usize,
    #[comptime] dtype: FloatType,
) {
    // The lower half of the matrix's description: its address, and 128 bytes from 8 values along K
    // to the next 8. The upper half: 256 bytes from 8 rows to the next 8.
    let low = ((tile & 0x3ffffu32) >> 4u32) | 0x0008_0000u32;
    let a0 = register(pairs[0]);
    let a1 = register(pairs[1]);
    let a2 = register(pairs[2]);
    let a3 = register(pairs[3]);
    if comptime!(steps == 1) {
        gpu_asm!(
            "{{ .reg .pred p; .reg .b32 h; .reg .b64 d; setp.eq.b32 p, 0, 0; mov.b32 h, 16; mov.b64 d, {{{low}, h}}; \
             wgmma.fence.sync.aligned; \
             {product} {{{sums}}}, {{{a0}, {a1}, {a2}, {a3}}}, d, p, 1, 1, 0; \
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }}",
            low = in(_) low, a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3,
            product = const product(rows, dtype), sums = const accumulators(rows), options(nomem),
        );
    } else {
        let next = low + comptime!(rows as u32 * 2);
        let b0 = register(pairs[4]);
        let b1 = register(pairs[5]);
        let b2 = register(pairs[6]);
        let b3 = register(pairs[7]);
        gpu_asm!(
            "{{ .reg .pred p; .reg .b32 h; .reg .b64 d, e; setp.eq.b32 p, 0, 0; mov.b32 h, 16; \
             mov.b64 d, {{{low}, h}}; mov.b64 e, {{{next}, h}}; wgmma.fence.sync.aligned; \
             {product} {{{sums}}}, {{{a0}, {a1}, {a2}, {a3}}}, d, p, 1, 1, 0; \
             {product} {{{sums}}}, {{{b0}, {b1}, {b2}, {b3}}}, e, p, 1, 1, 0; \
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }}",
            low = in(_) low, a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3,
            next = in(_) next, b0 = in(_) b0, b1 = in(_) b1, b2 = in(_) b2, b3 = in(_) b3,
            product = const product(rows, dtype), sums = const accumulators(rows), options(nomem),
        );
    }
}

/// The instruction.
fn product(rows: usize, dtype: FloatType) -> String {
    let ty = name(dtype);
    format!("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{ty}.{ty}")
}

/// Waits for all products.
#[cube]
pub fn finish() {
    gpu_asm!("wgmma.wait_group.sync.aligned 0;", options(nomem));
}

/// Writes sum `i` of this unit to shared memory.
#[cube]
pub fn put(to: u32, #[comptime] i: usize) {
    gpu_asm!("st.shared.f32 [{to}], sum{i};", to = in(_) to, i = const i);
}

/// Adds what another unit has [put](put()) to sum `i`.
#[cube]
pub fn take(from: u32, #[comptime] i: usize) {
    gpu_asm!(
        "{{ .reg .f32 t; ld.shared.f32 t, [{from}]; add.rn.f32 sum{i}, sum{i}, t; }}",
        from = in(_) from, i = const i,
    );
}

/// A plane begins a copy of `bytes` bytes, from vector `from` of `x` on, that completes at
/// `barrier`: what [`expect`](super::expect) and [`copy`](super::copy()) do, by one election.
#[cube]
pub fn copy(x: &[Vector<u32, Const<4>>], from: u32, to: u32, barrier: u32, #[comptime] bytes: usize) {
    gpu_asm!(
        "{{ .reg .u64 a; .reg .pred p; mad.wide.u32 a, {from}, 16, {x}; elect.sync _|p, 0xffffffff; \
         @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes}; \
         @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [a], {bytes}, [{barrier}]; }}",
        from = in(_) from, to = in(_) to, barrier = in(_) barrier, x = in(_) x.as_ptr(), bytes = const bytes,
        options(nomem),
    );
}
