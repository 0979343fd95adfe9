//! Hopper's products of matrices by four planes together (`wgmma`), and its bulk copies into shared memory, as PTX.
//! Shared memory is touched by these alone, through 32-bit addresses.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// The accumulators are registers that one statement declares and others name: as operands they would be copied in
/// and out of each.
fn accumulators(rows: usize) -> String {
    (0..rows / 2).map(|i| format!("sum{i}")).collect::<Vec<_>>().join(", ")
}

fn zeros(rows: usize) -> String {
    (0..rows / 2).map(|i| format!("mov.f32 sum{i}, 0f00000000;")).collect::<Vec<_>>().join(" ")
}

fn name(dtype: FloatType) -> &'static str {
    match dtype {
        FloatType::F32 => "tf32",
        FloatType::F16 => "f16",
        FloatType::BF16 => "bf16",
    }
}

/// A value in a register: variables and other statements' results would go into a statement by their address.
#[allow(clippy::identity_op)]
#[cube]
pub(super) fn register(value: u32) -> u32 {
    value | 0u32
}

/// Declares the sums of a tile of 64 by `rows`, all zero. Once a kernel.
#[cube]
pub(super) fn begin(#[comptime] rows: usize) {
    gpu_asm!(
        ".reg .f32 sum<{count}>; {zeros}",
        count = const rows / 2, zeros = const zeros(rows), options(nomem),
    );
}

/// Sum `i` of this unit.
#[cube]
pub(super) fn sum(#[comptime] i: usize) -> f32 {
    let value: f32;
    gpu_asm!("mov.f32 {value}, sum{i};", value = out(_) value, i = const i, options(nomem));
    value
}

/// Begins the product of 64 by 16 values in registers with 16 by `rows` in shared memory at `tile`, after the one
/// before the last has ended.
#[cube]
pub(super) fn multiply(
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    tile: u32,
    #[comptime] rows: usize,
    #[comptime] dtype: FloatType,
) {
    // The lower half of the matrix's description: its address, and 128 bytes from 8 values along K to the next 8. The
    // upper half: 256 bytes from 8 rows to the next 8.
    let low = ((tile & 0x3ffffu32) >> 4u32) | 0x0008_0000u32;
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 h; .reg .b64 d; setp.eq.b32 p, 0, 0; mov.b32 h, 16; mov.b64 d, {{{low}, h}}; \
         wgmma.fence.sync.aligned; \
         wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{ty}.{ty} {{{sums}}}, {{{a0}, {a1}, {a2}, {a3}}}, d, p, 1, 1, 0; \
         wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; }}",
        low = in(_) low, a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3,
        rows = const rows, ty = const name(dtype), sums = const accumulators(rows), options(nomem),
    );
}

/// Waits for all products.
#[cube]
pub(super) fn finish() {
    gpu_asm!("wgmma.wait_group.sync.aligned 0;", options(nomem));
}

/// The 32-bit address of shared memory.
#[cube]
pub(super) fn address(memory: &Shared<[Vector<u32, Const<4>>]>) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 p; cvta.to.shared.u64 p, {memory}; cvt.u32.u64 {address}, p; }}",
        address = out(_) address, memory = in(_) memory.as_ptr(), options(nomem),
    );
    address
}

/// Makes a barrier that one unit arrives at.
#[cube]
pub(super) fn barrier(at: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{at}], 1;", at = in(_) at, options(nomem));
}

/// Lets copies see the barriers.
#[cube]
pub(super) fn publish() {
    gpu_asm!("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", options(nomem));
}

/// All units of the cube meet, in the order of the statements here.
#[cube]
pub(super) fn meet() {
    gpu_asm!("bar.sync 0;", options(nomem));
}

/// Begins a copy of `bytes` bytes, from vector `from` of `x` on, that completes at `barrier`.
#[cube]
pub(super) fn copy(x: &[Vector<u32, Const<4>>], from: u32, to: u32, barrier: u32, #[comptime] bytes: usize) {
    gpu_asm!(
        "{{ .reg .u64 a; mad.wide.u32 a, {from}, 16, {x}; \
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes}; \
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [a], {bytes}, [{barrier}]; }}",
        from = in(_) from, to = in(_) to, barrier = in(_) barrier, x = in(_) x.as_ptr(), bytes = const bytes,
        options(nomem),
    );
}

/// Waits for the `phase`-th completion at a barrier, counted by parity.
#[cube]
pub(super) fn wait(barrier: u32, phase: u32) {
    gpu_asm!(
        "{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {phase}; @!p bra AGAIN; }}",
        barrier = in(_) barrier, phase = in(_) phase, options(nomem),
    );
}

/// Two values rounded to `dtype`, the first in the lower half.
#[cube]
pub(super) fn pack(low: f32, high: f32, #[comptime] dtype: FloatType) -> u32 {
    let packed: u32;
    gpu_asm!(
        "cvt.rn.{ty}x2.f32 {packed}, {high}, {low};",
        packed = out(_) packed, high = in(_) high, low = in(_) low, ty = const name(dtype),
        options(pure, nomem),
    );
    packed
}
