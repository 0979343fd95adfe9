//! Integers in the order of floats, for kernels that choose the greatest of some.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The key of infinity; NaN is above it.
pub const INFINITE: u32 = 0xff80_0000;
/// The key of -infinity.
pub const NOTHING: u32 = 0x007f_ffff;

/// A number that is in the order of floats; NaN is greatest, and zeros are equal.
#[cube]
pub fn key(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    // Not by adding 0, which drivers may leave out.
    let bits = select(bits == 0x8000_0000u32, 0u32, bits);
    let ordered = select(bits >> 31u32 == 1u32, !bits, bits | 0x8000_0000u32);
    select((bits & 0x7fff_ffffu32) > 0x7f80_0000u32, 0xffff_ffffu32.runtime(), ordered)
}

/// The float of a key.
#[cube]
pub fn of_key(key: u32) -> f32 {
    f32::reinterpret(select(key >> 31u32 == 1u32, key & 0x7fff_ffffu32, !key))
}
