//! PTX that kernels for CUDA's tensor cores share: addresses of shared memory, 16-bit floats in
//! pairs, and products of tiles (compute capability 8.0); barriers and bulk copies into shared
//! memory (9.0).

pub mod attention;
pub mod wgmma;

use crate::gpu::compile::overlaps;
use crate::gpu::layout::{Codes, Layout};
use cubecl_core as cubecl;
use cubecl_core::ir::DeviceProperties;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// A float type's name in instructions.
pub fn name(dtype: FloatType) -> &'static str {
    match dtype {
        FloatType::F32 => "tf32",
        FloatType::F16 => "f16",
        FloatType::BF16 => "bf16",
    }
}

/// The 32-bit address of shared memory.
#[cube]
pub fn address<E: CubePrimitive>(memory: &Shared<[E]>) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 p; cvta.to.shared.u64 p, {memory}; cvt.u32.u64 {address}, p; }}",
        address = out(_) address, memory = in(_) memory.as_ptr(), options(nomem),
    );
    address
}

/// A value in a register: variables and other statements' results would go into a statement by
/// their address.
#[allow(clippy::identity_op)]
#[cube]
pub fn register(value: u32) -> u32 {
    value | 0u32
}

/// A value in a register that keeps it: the compiler would compute again what takes few
/// instructions, for every use.
#[cube]
pub fn kept(value: u32) -> u32 {
    let kept: u32;
    let value = register(value);
    gpu_asm!("mov.u32 {kept}, {value};", kept = out(_) kept, value = in(_) value);
    kept
}

/// Elements of 32 bits, `offset` bytes past `at` in shared memory. The offset is a part of the
/// instruction: an index that is computed takes instructions of its own.
#[cube]
pub fn shared<E: Scalar, N: Size>(
    at: u32,
    #[comptime] offset: usize,
    #[comptime] size: usize,
) -> Vector<E, N> {
    let values: Vector<E, N>;
    gpu_asm!(
        "ld.shared{size}.b32 {values}, [{at}+{offset}];",
        values = out(_) values, at = in(_) at, offset = const offset, size = const vector(size), options(nomem),
    );
    values
}

/// An integer of 1, 2 or 4 bytes, `offset` bytes past `at` in shared memory.
#[cube]
pub fn shared_integer(at: u32, #[comptime] offset: usize, #[comptime] bytes: usize) -> u32 {
    let value: u32;
    gpu_asm!(
        "ld.shared.u{bits} {value}, [{at}+{offset}];",
        value = out(_) value, at = in(_) at, offset = const offset, bits = const 8 * bytes, options(nomem),
    );
    value
}

/// 1, 2 or 4 words, `offset` bytes past `at` in shared memory.
#[cube]
pub fn shared_words(at: u32, #[comptime] offset: usize, #[comptime] count: usize) -> Array<u32> {
    let mut words = Array::<u32>::new(count);
    if comptime!(count == 1) {
        words[0] = shared::<u32, Const<1>>(at, offset, 1usize).extract(0usize);
    } else if comptime!(count == 2) {
        let pair = shared::<u32, Const<2>>(at, offset, 2usize);
        words[0] = pair.extract(0usize);
        words[1] = pair.extract(1usize);
    } else {
        let four = shared::<u32, Const<4>>(at, offset, 4usize);
        #[unroll]
        for i in 0..4usize {
            words[i] = four.extract(i);
        }
    }
    words
}

/// The address of vector `at` of `from`.
#[allow(clippy::identity_op)]
#[cube]
pub fn pointer<N: Size>(from: &[Vector<u32, N>], at: u32, #[comptime] size: usize) -> u64 {
    let pointer: u64;
    gpu_asm!(
        "mad.wide.u32 {pointer}, {at}, {bytes}, {from};",
        pointer = out(_) pointer, at = in(_) at, from = in(_) from.as_ptr(), bytes = const 4 * size,
        options(pure, nomem),
    );
    pointer | 0u64
}

/// The vector that is `offset` vectors past a [`pointer`].
#[cube]
pub fn global<N: Size>(pointer: u64, #[comptime] offset: usize, #[comptime] size: usize) -> Vector<u32, N> {
    let values: Vector<u32, N>;
    gpu_asm!(
        "ld.global{size}.b32 {values}, [{pointer}+{offset}];",
        values = out(_) values, pointer = in(_) pointer, offset = const 4 * size * offset,
        size = const vector(size), options(nomem),
    );
    values
}

/// A vector's elements in the names of loads.
fn vector(size: usize) -> String {
    if size == 1 { String::new() } else { format!(".v{size}") }
}

/// Two values rounded to a 16-bit float, the first in the lower half.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] dtype: FloatType) -> u32 {
    let pair: u32;
    gpu_asm!(
        "cvt.rn.{ty}x2.f32 {pair}, {high}, {low};",
        pair = out(_) pair, high = in(_) high, low = in(_) low, ty = const name(dtype), options(pure, nomem),
    );
    pair
}

/// The bits of 2^m with m bits of mantissa, and of a small integer added to it, twice each.
fn integers(layout: Layout, dtype: FloatType) -> (u32, u32) {
    let Codes::Integer { zero } = layout.codes else { return (0, 0) };
    let bits = if dtype == FloatType::F16 { 0x6400 } else { 0x4300 };
    (bits * 0x1_0001, (bits + zero) * 0x1_0001)
}

/// Subtraction and multiplication of pairs of floats.
#[derive(Clone, Copy)]
struct PairArithmetic {
    dtype: FloatType,
    /// By `fma`, with the same results: before Hopper there is nothing else for bf16.
    fused: bool,
}

impl PairArithmetic {
    fn new(dtype: FloatType, properties: &DeviceProperties) -> Self {
        Self { dtype, fused: dtype == FloatType::BF16 && !overlaps(properties) }
    }

    /// Takes the pair of bits `zero` off `t`. Uses `z` and `o`.
    fn subtract(self, zero: u32) -> String {
        let ty = name(self.dtype);
        if self.fused {
            let negative = zero | 0x8000_8000;
            format!("mov.b32 z, {negative}; mov.b32 o, 0x3f803f80; fma.rn.{ty}x2 t, t, o, z;")
        } else {
            format!("mov.b32 z, {zero}; sub.rn.{ty}x2 t, t, z;")
        }
    }

    /// The instruction that multiplies two operands, and what follows them: -0, which changes no
    /// product.
    fn multiply(self) -> (String, &'static str) {
        let ty = name(self.dtype);
        if self.fused {
            (format!("mov.b32 z, 0x80008000; fma.rn.{ty}x2"), ", z")
        } else {
            (format!("mul.rn.{ty}x2"), "")
        }
    }
}

/// Codes at the lowest places of the halves of a word, times their scale, with their bias added.
#[cube]
pub fn scaled(
    word: u32,
    scale: u32,
    bias: u32,
    #[comptime] layout: Layout,
    #[comptime] dtype: FloatType,
) -> u32 {
    let packed: u32;
    let properties = comptime::device_properties();
    let arithmetic = comptime!(PairArithmetic::new(dtype, &properties));
    if comptime!(layout.biased()) {
        gpu_asm!(
            "{{ .reg .b32 t, z, o; lop3.b32 t, {word}, {mask}, {integers}, 0xEA; {subtract} \
             fma.rn.{ty}x2 {packed}, t, {scale}, {bias}; }}",
            packed = out(_) packed, word = in(_) word, scale = in(_) scale, bias = in(_) bias,
            subtract = const arithmetic.subtract(integers(layout, dtype).1),
            mask = const ((1u32 << layout.bits) - 1) * 0x1_0001, integers = const integers(layout, dtype).0,
            ty = const name(dtype), options(pure, nomem),
        );
    } else {
        gpu_asm!(
            "{{ .reg .b32 t, z, o; lop3.b32 t, {word}, {mask}, {integers}, 0xEA; {subtract} \
             {multiply} {packed}, t, {scale}{last}; }}",
            packed = out(_) packed, word = in(_) word, scale = in(_) scale,
            subtract = const arithmetic.subtract(integers(layout, dtype).1),
            multiply = const arithmetic.multiply().0, last = const arithmetic.multiply().1,
            mask = const ((1u32 << layout.bits) - 1) * 0x1_0001, integers = const integers(layout, dtype).0,
            options(pure, nomem),
        );
    }
    packed
}

/// `1 / (1 + e^-x)`, within 2^-17 of the result or 2^-119: enough for 16 bits, and a quarter of the
/// instructions of [`sigmoid`](crate::gpu::math::sigmoid).
#[cube]
pub fn sigmoid(x: f32) -> f32 {
    let sigmoid: f32;
    let from = x * comptime!(-std::f32::consts::LOG2_E);
    gpu_asm!(
        "{{ .reg .f32 e; ex2.approx.ftz.f32 e, {from}; add.ftz.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 {sigmoid}, e; }}",
        sigmoid = out(_) sigmoid, from = in(_) from, options(pure, nomem),
    );
    sigmoid
}

/// Four of the eight bytes of `low` and `high`: those that the lowest four nibbles of `which`
/// number.
#[cube]
pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    let bytes: u32;
    let (low, high, which) = (register(low), register(high), register(which));
    gpu_asm!(
        "prmt.b32 {bytes}, {low}, {high}, {which};",
        bytes = out(_) bytes, low = in(_) low, high = in(_) high, which = in(_) which, options(pure, nomem),
    );
    bytes
}

/// The two e4m3 in the lower half of `codes` as f16, from compute capability 8.9 on.
#[cube]
pub fn e4m3_pair(codes: u32) -> u32 {
    let pair: u32;
    let codes = register(codes);
    gpu_asm!(
        "{{ .reg .b16 c; cvt.u16.u32 c, {codes}; cvt.rn.f16x2.e4m3x2 {pair}, c; }}",
        pair = out(_) pair, codes = in(_) codes, options(pure, nomem),
    );
    pair
}

/// `left - right`, by whichever pipe has less to do: the compiler would make a mask of what masks
/// cancel.
#[cube]
pub fn subtract(left: u32, right: u32) -> u32 {
    let difference: u32;
    let (left, right) = (register(left), register(right));
    gpu_asm!(
        "sub.u32 {difference}, {left}, {right};",
        difference = out(_) difference, left = in(_) left, right = in(_) right, options(pure, nomem),
    );
    difference
}

/// The differences of two pairs of f16.
#[cube]
pub fn subtract_halves(left: u32, right: u32) -> u32 {
    let pair: u32;
    let (left, right) = (register(left), register(right));
    gpu_asm!(
        "sub.rn.f16x2 {pair}, {left}, {right};",
        pair = out(_) pair, left = in(_) left, right = in(_) right, options(pure, nomem),
    );
    pair
}

/// The greatest of what a plane's units have, for all of them.
#[cube]
pub fn greatest(x: u32) -> u32 {
    let y: u32;
    let x = register(x);
    gpu_asm!("redux.sync.max.u32 {y}, {x}, 0xffffffff;", y = out(_) y, x = in(_) x);
    y
}

/// The least of what a plane's units have, for all of them.
#[cube]
pub fn least(x: u32) -> u32 {
    let y: u32;
    let x = register(x);
    gpu_asm!("redux.sync.min.u32 {y}, {x}, 0xffffffff;", y = out(_) y, x = in(_) x);
    y
}

/// `sums[at..at + 4] += left right`, of a left operand of 16 by 16 in `left[tile..tile + 4]` and
/// the halves of a right one of 16 by 8 along the depth.
#[cube]
pub fn multiply(
    left: &Array<u32>,
    #[comptime] tile: usize,
    right0: u32,
    right1: u32,
    sums: &mut Array<f32>,
    #[comptime] at: usize,
    #[comptime] dtype: FloatType,
) {
    let a0 = left[tile];
    let a1 = left[comptime!(tile + 1)];
    let a2 = left[comptime!(tile + 2)];
    let a3 = left[comptime!(tile + 3)];
    let c0 = sums[at];
    let c1 = sums[comptime!(at + 1)];
    let c2 = sums[comptime!(at + 2)];
    let c3 = sums[comptime!(at + 3)];
    let d: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {d}, {{{a0},{a1},{a2},{a3}}}, {{{b0},{b1}}}, \
         {{{c0},{c1},{c2},{c3}}};",
        ty = const name(dtype), a0 = in(_) a0, a1 = in(_) a1, a2 = in(_) a2, a3 = in(_) a3, b0 = in(_) right0,
        b1 = in(_) right1, c0 = in(_) c0, c1 = in(_) c1, c2 = in(_) c2, c3 = in(_) c3, d = out(_) d,
        options(pure, nomem),
    );
    #[unroll]
    for i in 0..4usize {
        sums[comptime!(at + i)] = d.extract(i);
    }
}

/// Makes a barrier that `units` units arrive at.
#[cube]
pub fn barrier(at: u32, #[comptime] units: usize) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{at}], {units};", at = in(_) at, units = const units);
}

/// Lets copies see the barriers.
#[cube]
pub fn publish() {
    gpu_asm!("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;");
}

/// Four planes give up all but `count` registers per unit, which others then
/// [take](take_registers).
#[cube]
pub fn leave_registers(#[comptime] count: usize) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {count};", count = const count);
}

/// Four planes wait until they have `count` registers per unit.
#[cube]
pub fn take_registers(#[comptime] count: usize) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {count};", count = const count);
}

/// Lets tensor cores and bulk copies see what this unit has written to shared memory, or knows to
/// have been written.
#[cube]
pub fn show_writes() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// The first `units` units that come to meeting point `point` meet.
#[cube]
pub fn meet(point: u32, #[comptime] units: usize) {
    gpu_asm!("bar.sync {point}, {units};", point = in(_) point, units = const units);
}

/// Arrives at a barrier.
#[cube]
pub fn arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", barrier = in(_) barrier);
}

/// A plane arrives at a barrier, once.
#[cube]
pub fn arrive_once(barrier: u32) {
    gpu_asm!(
        "{{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [{barrier}]; }}",
        barrier = in(_) barrier, options(nomem),
    );
}

/// Arrives at a barrier that then waits for copies of `bytes` bytes, too.
#[cube]
pub fn expect(barrier: u32, bytes: u32) {
    gpu_asm!(
        "{{ .reg .pred p; elect.sync _|p, 0xffffffff; \
         @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes}; }}",
        barrier = in(_) barrier, bytes = in(_) bytes,
    );
}

/// Begins a copy of `bytes` bytes, from byte `from * unit` of `data` on, that completes at
/// `barrier`.
#[cube]
pub fn copy<E: CubePrimitive>(
    data: &[E],
    from: u32,
    #[comptime] unit: u32,
    to: u32,
    bytes: u32,
    barrier: u32,
) {
    let (from, to) = (register(from), register(to));
    gpu_asm!(
        "{{ .reg .pred p; .reg .u64 a; mad.wide.u32 a, {from}, {unit}, {data}; elect.sync _|p, 0xffffffff; \
         @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [a], {bytes}, [{barrier}]; }}",
        from = in(_) from, unit = const unit, data = in(_) data.as_ptr(), to = in(_) to, bytes = in(_) bytes,
        barrier = in(_) barrier,
    );
}

/// Waits for the `phase`-th completion at a barrier, counted by parity.
#[cube]
pub fn wait(barrier: u32, phase: u32) {
    let phase = register(phase);
    gpu_asm!(
        "{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {phase}; @!p bra AGAIN; }}",
        barrier = in(_) barrier, phase = in(_) phase,
    );
}

// Compute capability 8.0: asynchronous copies of 16 bytes, and tiles of 8 by 8 values of 16 bits.
// Unit `l` of a plane has the places `(l / 4, 2 (l % 4))` and `(l / 4, 2 (l % 4) + 1)` of a tile.

/// Begins a copy of the 16 bytes that are the `from`-th of `x` to address `to` of shared memory.
#[cube]
pub fn copy_vector<E: CubePrimitive>(x: &[E], from: u32, to: u32) {
    gpu_asm!(
        "{{ .reg .u64 a; mad.wide.u32 a, {from}, 16, {x}; cp.async.cg.shared.global [{to}], [a], 16; }}",
        from = in(_) from, to = in(_) to, x = in(_) x.as_ptr(), options(nomem),
    );
}

/// The same of the vector that is `offset` vectors past a [`pointer`], to `to_offset` bytes past
/// `to`. Offsets are a part of the instruction.
#[allow(clippy::identity_op)]
#[cube]
pub fn copy_from(pointer: u64, #[comptime] offset: usize, to: u32, #[comptime] to_offset: usize) {
    // A mutable variable would be handed over by its address.
    let (pointer, to) = (pointer | 0u64, register(to));
    gpu_asm!(
        "cp.async.cg.shared.global [{to}+{to_offset}], [{pointer}+{offset}], 16;",
        to = in(_) to, to_offset = const to_offset, pointer = in(_) pointer, offset = const 16 * offset,
        options(nomem),
    );
}

/// The same, of zeros where the vector is not `there`.
#[cube]
pub fn copy_vector_or_zeros(x: &[Vector<u32, Const<4>>], from: u32, to: u32, there: bool) {
    let size = select(there, 16u32, 0u32);
    gpu_asm!(
        "{{ .reg .u64 p, o; cvta.to.global.u64 p, {x}; mul.wide.u32 o, {from}, 16; add.u64 p, p, o; \
         cp.async.cg.shared.global [{to}], [p], 16, {size}; }}",
        to = in(_) to, x = in(_) x.as_ptr(), from = in(_) from, size = in(_) size, options(nomem),
    );
}

/// Arrives at a barrier when all of this unit's [copies](copy_vector()) so far have ended.
#[cube]
pub fn arrive_with_copies(barrier: u32) {
    gpu_asm!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];", barrier = in(_) barrier);
}

/// Ends a group of this unit's [copies](copy_vector()).
#[cube]
pub fn end_copy_group() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits for this unit's [groups of copies](end_copy_group()), all but the last `groups`.
#[cube]
pub fn wait_copy_groups(#[comptime] groups: usize) {
    gpu_asm!("cp.async.wait_group {groups};", groups = const groups);
}

/// Waits for all of this unit's [copies](copy_vector()).
#[cube]
pub fn wait_copies() {
    gpu_asm!("cp.async.wait_all;");
}

/// A plane loads 4 tiles, `offset` bytes past the rows' addresses: unit `l` names row `l % 8` of
/// tile `l / 8`. Each tile is transposed where `transposed`.
#[cube]
pub fn load_tiles(
    row: u32,
    #[comptime] offset: usize,
    #[comptime] transposed: bool,
) -> Vector<u32, Const<4>> {
    let tiles: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {tiles}, [{row}+{offset}];",
        tiles = out(_) tiles, row = in(_) row, offset = const offset,
        trans = const if transposed { ".trans" } else { "" }, options(nomem),
    );
    tiles
}

/// A plane's tile, transposed.
#[cube]
pub fn transpose_tile(tile: u32) -> u32 {
    let transposed: u32;
    let tile = register(tile);
    gpu_asm!(
        "movmatrix.sync.aligned.m8n8.trans.b16 {transposed}, {tile};",
        transposed = out(_) transposed, tile = in(_) tile, options(nomem),
    );
    register(transposed)
}

/// Writes `words[first..first + 4]` to shared memory.
#[cube]
pub fn store_words(to: u32, words: &Array<u32>, #[comptime] first: usize) {
    let w0 = words[first];
    let w1 = words[comptime!(first + 1)];
    let w2 = words[comptime!(first + 2)];
    let w3 = words[comptime!(first + 3)];
    gpu_asm!(
        "st.shared.v4.u32 [{to}], {{{w0},{w1},{w2},{w3}}};",
        to = in(_) to, w0 = in(_) w0, w1 = in(_) w1, w2 = in(_) w2, w3 = in(_) w3,
    );
}

/// Writes a word to shared memory, `offset` bytes past `to`.
#[cube]
pub fn store_word(to: u32, #[comptime] offset: usize, word: u32) {
    let word = register(word);
    gpu_asm!("st.shared.u32 [{to}+{offset}], {word};", to = in(_) to, offset = const offset, word = in(_) word);
}

/// `a b + c` as [`multiply`] computes it, of operands that are vectors.
#[cube]
pub fn mma(
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
#[cube]
pub fn exp2(x: f32) -> f32 {
    let bits: u32;
    gpu_asm!(
        "{{ .reg .f32 p; ex2.approx.ftz.f32 p, {x}; mov.b32 {bits}, p; }}",
        bits = out(_) bits, x = in(_) x, options(pure, nomem),
    );
    f32::reinterpret(register(bits))
}
