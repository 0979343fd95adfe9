//! Codes of 8 bits with scales in f16, as pairs of 16-bit floats: `code / 128 * scale`.

use crate::gpu::cuda::ptx::{pack, permute, register};
use crate::gpu::float::widen;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Two scales, of which the lower halves of `low` and `high` are the bits, as [`code_pair`] takes
/// them.
#[cube]
pub(super) fn scale_pair(low: u32, high: u32, #[comptime] dtype: FloatType) -> u32 {
    if comptime!(dtype == FloatType::F16) {
        permute(low, high, 0x5410u32)
    } else {
        let (low, high) = (widen(low, FloatType::F16), widen(high, FloatType::F16));
        pack(low * comptime!(1.0f32 / 128.0), high * comptime!(1.0f32 / 128.0), dtype)
    }
}

/// Two of a word's four codes times their scales: those at bytes `first` and `second`, the first in
/// the lower half. The product is rounded, and in bf16 the scale is too.
#[cube]
pub(super) fn code_pair(
    word: u32,
    scales: u32,
    #[comptime] first: usize,
    #[comptime] second: usize,
    #[comptime] dtype: FloatType,
) -> u32 {
    let pair: u32;
    let (word, scales) = (register(word), register(scales));
    if comptime!(dtype == FloatType::F16) {
        // A byte at the end of 8 is 8 + byte / 128; a code has 128 taken off.
        let biased = register(word ^ 0x8080_8080u32);
        gpu_asm!(
            "{{ .reg .b32 t, z; mov.b32 z, 0x48484848; prmt.b32 t, {biased}, z, {which}; mov.b32 z, 0x48804880; \
             sub.rn.f16x2 t, t, z; mul.rn.f16x2 {pair}, t, {scales}; }}",
            pair = out(_) pair, biased = in(_) biased, scales = in(_) scales, which = const 0x4040 | second << 8 | first,
            options(pure, nomem),
        );
    } else {
        // Of a code c, 7 bits at the end of 128 are c modulo 128 more; with its sign bit alone, 128
        // is
        // 256. Products by fma have the same results, and exist before Hopper.
        gpu_asm!(
            "{{ .reg .b32 t, s, z; mov.b32 z, 0x43434343; prmt.b32 t, {word}, z, {which}; and.b32 s, t, 0xff80ff80; \
             and.b32 t, t, 0xff7fff7f; mov.b32 z, 0xbf80bf80; fma.rn.bf16x2 t, s, z, t; mov.b32 z, 0x80008000; \
             fma.rn.bf16x2 {pair}, t, {scales}, z; }}",
            pair = out(_) pair, word = in(_) word, scales = in(_) scales, which = const 0x4040 | second << 8 | first,
            options(pure, nomem),
        );
    }
    pair
}
