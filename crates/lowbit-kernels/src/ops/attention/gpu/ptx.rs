//! CUDA's own instructions for tiles of 16-bit floats, through 32-bit addresses of shared memory.

use crate::gpu::ptx::name;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Begins a copy of vector `from` of `x` to shared memory.
#[cube]
pub(super) fn copy(x: &[Vector<u32, Const<4>>], from: u32, to: u32) {
    gpu_asm!(
        "{{ .reg .u64 a; mad.wide.u32 a, {from}, 16, {x}; cp.async.cg.shared.global [{to}], [a], 16; }}",
        from = in(_) from, to = in(_) to, x = in(_) x.as_ptr(), options(nomem),
    );
}

/// Waits for this unit's copies.
#[cube]
pub(super) fn wait() {
    gpu_asm!("cp.async.wait_all;");
}

/// A plane's 4 tiles of 8 by 8 values, each lane naming a row; transposed for rows that are summed over.
#[cube]
pub(super) fn tiles(
    at: u32,
    #[comptime] offset: usize,
    #[comptime] transposed: bool,
) -> Vector<u32, Const<4>> {
    let values: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {values}, [{at}+{offset}];",
        values = out(_) values, at = in(_) at, offset = const offset,
        trans = const if transposed { ".trans" } else { "" }, options(nomem),
    );
    values
}

/// `a b + c` for tiles of 16 by 16, 16 by 8 and 16 by 8 values.
#[cube]
pub(super) fn multiply(
    a: Vector<u32, Const<4>>,
    b0: u32,
    b1: u32,
    c: Vector<f32, Const<4>>,
    #[comptime] dtype: FloatType,
) -> Vector<f32, Const<4>> {
    let sum: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {sum}, {a}, {{{b0}, {b1}}}, {c};",
        a = in(_) a, b0 = in(_) b0, b1 = in(_) b1, c = in(_) c, sum = out(_) sum, ty = const name(dtype),
        options(pure, nomem),
    );
    sum
}

/// `2^x`, within 2 units in the last place.
#[allow(clippy::identity_op)] // It is what copies the value.
#[cube]
pub(super) fn exp2(x: f32) -> f32 {
    let bits: u32;
    gpu_asm!(
        "{{ .reg .f32 p; ex2.approx.ftz.f32 p, {x}; mov.b32 {bits}, p; }}",
        bits = out(_) bits, x = in(_) x, options(pure, nomem),
    );
    // A value of its own: an asm's output is handed on by its address.
    f32::reinterpret(bits | 0u32)
}
