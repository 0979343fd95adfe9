//! [`super::philox`] in kernels.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The higher half of a product; not every device has integers of 64 bits.
#[cube]
fn high(a: u32, b: u32) -> u32 {
    let (a_low, a_high) = (a & 0xffffu32, a >> 16u32);
    let (b_low, b_high) = (b & 0xffffu32, b >> 16u32);
    let middle = a_high * b_low + (a_low * b_low >> 16u32);
    let other = a_low * b_high + (middle & 0xffffu32);
    a_high * b_high + (middle >> 16u32) + (other >> 16u32)
}

/// Uniform in `[0, 1)`: the first 24 bits of what the CPU draws for this step and seed.
#[cube]
pub(super) fn uniform(step: u32, seed_low: u32, seed_high: u32) -> f32 {
    let mut a = step;
    let mut b = 0u32.runtime();
    let mut c = 0u32.runtime();
    let mut d = 0u32.runtime();
    let mut k0 = seed_low;
    let mut k1 = seed_high;
    #[unroll]
    for _ in 0..10 {
        let p_high = high(a, 0xd251_1f53u32);
        let p_low = a * 0xd251_1f53u32;
        let q_high = high(c, 0xcd9e_8d57u32);
        let q_low = c * 0xcd9e_8d57u32;
        a = q_high ^ b ^ k0;
        b = q_low;
        c = p_high ^ d ^ k1;
        d = p_low;
        k0 += 0x9e37_79b9u32;
        k1 += 0xbb67_ae85u32;
    }
    f32::cast_from(a >> 8u32) * comptime!(1.0f32 / 16_777_216.0)
}
