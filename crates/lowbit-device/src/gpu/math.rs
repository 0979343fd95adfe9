//! Functions that devices compute too roughly or each in its own way: Vulkan leaves an exponential
//! two units of the last place for every unit of its argument, and a sine of far angles no digit.
//! Polynomials, as [`crate::simd::math`] has them. A device may still flush subnormal numbers to
//! zero.

use crate::simd::math::{TANH_SERIES, TANH_SMALL};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// `e^x`, within 1 ulp; 0 below -103.98, infinity above 88.73, NaN for NaN. As the CPU's, step by
/// step.
#[cube]
pub fn exp(x: f32) -> f32 {
    let given = x;
    let x = select(x < -104.0f32, -104.0f32.runtime(), x);
    let x = select(x > 89.0f32, 89.0f32.runtime(), x);
    // Adding 1.5 * 2^23 rounds to a whole number. Its bits are taken: a compiler may find that
    // subtracting cancels.
    let sum = fma(x, comptime!(std::f32::consts::LOG2_E).runtime(), 12_582_912.0f32);
    let whole = i32::reinterpret(sum) - 0x4b40_0000;
    // Ln 2 in two parts, the first of 9 bits. Its product with n is exact, and an integer until the
    // end: a compiler may find that the parts have a sum.
    let r = x - f32::cast_from(whole * 355) * comptime!(1.0f32 / 512.0).runtime();
    let n = f32::cast_from(whole);
    let r = fma(n, 2.121_944_4e-4f32, r);
    let mut fit = fma(r, 1.381_459_9e-3f32, 8.368_717e-3f32);
    fit = fma(fit, r, 4.166_839e-2f32);
    fit = fma(fit, r, 1.666_652_1e-1f32);
    fit = fma(fit, r, 4.999_999_4e-1f32);
    let power = fma(r * r, fit, r) + 1.0f32;
    // In two steps: 2^n alone may be subnormal, or infinite.
    let half = whole >> 1;
    unless_nan(given, power * exp2(half) * exp2(whole - half))
}

/// `y`, or NaN where `x` is NaN. Of the bits: NVIDIA's compiler for Vulkan (580.159) takes a
/// comparison of floats for one of numbers, and makes of two ways to choose by it the one that
/// loses a NaN.
#[cube]
pub fn unless_nan(x: f32, y: f32) -> f32 {
    let nan = f32::reinterpret(0x7fc0_0000u32);
    select((u32::reinterpret(x) & 0x7fff_ffffu32) > 0x7f80_0000u32, nan, y)
}

/// The factor of a norm: `1 / length` for a length from 0, and NaN for an infinite one. Zero would
/// hide from everything after it that a sum of squares overflowed. Of the bits, as [`unless_nan`].
#[cube]
pub fn reciprocal(length: f32) -> f32 {
    let nan = f32::reinterpret(0x7fc0_0000u32);
    select(u32::reinterpret(length) >= 0x7f80_0000u32, nan, 1.0f32 / length)
}

/// `2^n` for `n` from -126 to 127.
#[cube]
fn exp2(n: i32) -> f32 {
    f32::reinterpret(u32::cast_from(n + 127) << 23u32)
}

/// `1 / (1 + e^-x)`, within 2.5 ulp.
#[cube]
pub fn sigmoid(x: f32) -> f32 {
    // e^-|x| does not overflow, and keeps the digits of small results.
    let e = exp(select(x < 0.0f32, x, -x));
    select(x < 0.0f32, e, 1.0f32.runtime()) / (1.0f32 + e)
}

/// `x / (1 + e^-x)`, within 3.5 ulp of the result or of 2^-119.
#[cube]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `tanh(x)`: the CPU's, step by step, as devices' own is rougher and may overflow.
#[cube]
pub fn tanh(x: f32) -> f32 {
    let magnitude = select(x < 0.0f32, -x, x);
    let e = exp(-2.0f32 * magnitude);
    let large = (1.0f32 - e) / (1.0f32 + e);
    let large = select(x < 0.0f32, -large, large);
    let square = x * x;
    let mut series = fma(square, comptime!(TANH_SERIES[0]).runtime(), comptime!(TANH_SERIES[1]).runtime());
    series = fma(series, square, comptime!(TANH_SERIES[2]).runtime());
    series = fma(series, square, comptime!(TANH_SERIES[3]).runtime());
    let small = fma(series * square, x, x);
    unless_nan(x, select(magnitude < comptime!(TANH_SMALL).runtime(), small, large))
}

/// `ln(1 + e^x)`, without overflow.
#[cube]
pub fn softplus(x: f32) -> f32 {
    let tail = exp(select(x < 0.0f32, x, -x));
    // ln(1 + t) = 2 atanh(t / (2 + t)).
    select(x < 0.0f32, 0.0f32.runtime(), x) + 2.0f32 * atanh(tail / (2.0f32 + tail))
}

/// `atanh(s)` for s from -1/3 to 1/3: `(atanh(s) / s - 1) / s^2` by a polynomial in s^2.
#[cube]
fn atanh(s: f32) -> f32 {
    let z = s * s;
    let mut fit = fma(z, 0.116_121_65f32, 0.108_532_88f32);
    fit = fma(fit, z, 0.142_961_79f32);
    fit = fma(fit, z, 0.199_998_53f32);
    fit = fma(fit, z, 0.333_333_34f32);
    fma(s * z, fit, s)
}

/// `ln(x)` of a normal number above 0, within 2 ulp of the result or of `2^-24`; NaN for NaN.
#[cube]
pub fn ln(x: f32) -> f32 {
    // x = m 2^n with m from sqrt(1/2) to sqrt(2), and ln(m) = 2 atanh((m - 1) / (m + 1)).
    let offset = u32::reinterpret(x) - comptime!(std::f32::consts::FRAC_1_SQRT_2.to_bits()).runtime();
    let n = i32::reinterpret(offset) >> 23;
    let m = f32::reinterpret(u32::reinterpret(x) - u32::reinterpret(n << 23));
    let of_m = 2.0f32 * atanh((m - 1.0f32) / (m + 1.0f32));
    unless_nan(x, fma(f32::cast_from(n), comptime!(std::f32::consts::LN_2).runtime(), of_m))
}

/// The first 128 bits of `1 / 2 pi`, from the first after the point on.
const TURN: [u32; 4] = [0x28be_60db, 0x9391_054a, 0x7f09_d5f4, 0x7d4d_3770];

/// Sine and cosine of `angle` from 0 to 2^32, within 2^-23.
#[cube]
pub fn sin_cos(angle: f32) -> (f32, f32) {
    let bits = u32::reinterpret(angle);
    let exponent = i32::cast_from(bits >> 23u32) - 127;
    let mantissa = (bits & 0x7f_ffffu32) | 0x80_0000u32;
    // angle / 2 pi = mantissa * 2^(exponent - 23) / 2 pi. Whole turns do not count, so that 64 bits
    // of 2^(exponent - 23) / 2 pi after its point are enough.
    let (high, low) = turn_bits(exponent - 23);
    let turn = mantissa * high + mantissa.mul_hi(low);
    let quarter = (turn + 0x2000_0000u32) >> 30u32;
    let rest = i32::cast_from(turn - (quarter << 30u32));
    // Small angles keep their digits.
    let small = angle < comptime!(std::f32::consts::FRAC_PI_4).runtime();
    let quarter = select(small, 0u32.runtime(), quarter);
    let r = select(small, angle, f32::cast_from(rest) * comptime!(std::f32::consts::TAU / 4_294_967_296.0));
    let z = r * r;
    let mut fit = fma(z, 2.724_962e-6f32, -1.984_008_4e-4f32);
    fit = fma(fit, z, 8.333_332e-3f32);
    fit = fma(fit, z, -1.666_666_7e-1f32);
    let sine = fma(r * z, fit, r);
    let mut fit = fma(z, 2.454_769e-5f32, -1.388_830_2e-3f32);
    fit = fma(fit, z, 4.166_666_5e-2f32);
    let cosine = fma(z * z, fit, fma(z, -0.5f32, 1.0f32));
    let odd = (quarter & 1u32) == 1u32;
    let sin = select(odd, cosine, sine);
    let cos = select(odd, sine, cosine);
    (select((quarter & 2u32) == 2u32, -sin, sin), select(((quarter + 1u32) & 2u32) == 2u32, -cos, cos))
}

/// 64 bits after the point of `2^shift / 2 pi`, for a shift up to 31.
#[cube]
fn turn_bits(shift: i32) -> (u32, u32) {
    let [a, b, c] = comptime!([TURN[0], TURN[1], TURN[2]]);
    let (a, b, c) = (a.runtime(), b.runtime(), c.runtime());
    let mut high = a;
    let mut low = b;
    if shift > 0 {
        let left = u32::cast_from(shift);
        high = (a << left) | (b >> (32u32 - left));
        low = (b << left) | (c >> (32u32 - left));
    } else if shift < 0 {
        // By 31 at most: smaller angles are not reduced.
        let right = min(u32::cast_from(-shift), 31u32);
        high = a >> right;
        low = (b >> right) | (a << (32u32 - right));
    }
    (high, low)
}
