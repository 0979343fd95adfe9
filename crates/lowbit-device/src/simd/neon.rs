#![allow(unsafe_code)] // Intrinsics; a value of the type proves that the processor has them.
use super::{E4M3_BITS, Kernel, Simd};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

/// NEON alone: dot products of bytes by widening multiplies.
pub const BASE: u8 = 0;
/// With `sdot`, which multiplies signed bytes.
pub const DOTPROD: u8 = 1;
/// With `usdot` besides, which multiplies unsigned bytes by signed ones.
pub const I8MM: u8 = 2;

/// Eight lanes in two registers: NEON and, by `LEVEL`, what multiplies bytes. An integer product's
/// tile wants 16 rows of a weight in two vectors, hence pairs.
#[derive(Clone, Copy, Debug)]
pub struct Neon<const LEVEL: u8>(());

impl<const LEVEL: u8> Neon<LEVEL> {
    /// `None` when this processor lacks any of them.
    pub fn detect() -> Option<Self> {
        let found = is_aarch64_feature_detected!("neon")
            && (LEVEL < DOTPROD || is_aarch64_feature_detected!("dotprod"))
            && (LEVEL < I8MM || is_aarch64_feature_detected!("i8mm"));
        found.then_some(Self(()))
    }

    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "neon")]
        fn run<const LEVEL: u8, K: Kernel>(simd: Neon<LEVEL>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        #[inline(never)]
        #[target_feature(enable = "neon,dotprod")]
        fn run_dotprod<const LEVEL: u8, K: Kernel>(simd: Neon<LEVEL>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        #[inline(never)]
        #[target_feature(enable = "neon,dotprod,i8mm")]
        fn run_i8mm<const LEVEL: u8, K: Kernel>(simd: Neon<LEVEL>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where `detect` found the features.
        unsafe {
            match LEVEL {
                I8MM => run_i8mm(self, kernel),
                DOTPROD => run_dotprod(self, kernel),
                _ => run(self, kernel),
            }
        }
    }
}

// Intrinsics for these came to stable Rust after the oldest version that the project promises.

/// In lane i: `sum[i]` and the products of bytes 4i to 4i + 3, both signed.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: only registers are read and written, and the function has the instruction's feature.
    unsafe {
        asm!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`sdot`], the bytes of `u` unsigned.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn usdot(mut sum: int32x4_t, u: int8x16_t, s: int8x16_t) -> int32x4_t {
    // SAFETY: only registers are read and written, and the function has the instruction's feature.
    unsafe {
        asm!("usdot {sum:v}.4s, {u:v}.16b, {s:v}.16b", sum = inout(vreg) sum, u = in(vreg) u, s = in(vreg) s,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`sdot`], of products whose sums of two fit 16 bits: any but those of two -128.
#[inline]
#[target_feature(enable = "neon")]
fn widening_dot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
    vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(a, b)))
}

/// Eight f16, widened.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(x: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high);
    // SAFETY: only registers are read and written, and every aarch64 processor with NEON has the
    // instructions.
    unsafe {
        asm!("fcvtl {low:v}.4s, {x:v}.4h", "fcvtl2 {high:v}.4s, {x:v}.8h",
            low = out(vreg) low, high = lateout(vreg) high, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    [low, high]
}

impl<const LEVEL: u8> Simd for Neon<LEVEL> {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const WIDE_DOT4: bool = LEVEL >= I8MM;
    const DOT4_OFFSET: i32 = if LEVEL >= I8MM { 0 } else { 128 };
    type V = [float32x4_t; 2];
    type I = [int32x4_t; 2];

    #[inline]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8], offset: usize) {
        let line = bytes.as_ptr().addr().wrapping_add(offset);
        // SAFETY: every aarch64 processor has the instruction, and it faults at no address.
        unsafe {
            asm!("prfm pldl1keep, [{line}]", line = in(reg) line, options(nomem, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vdupq_n_f32(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::V {
        let x: &[f32; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { [vld1q_f32(x.as_ptr()), vld1q_f32(x[4..].as_ptr())] }
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> Self::V {
        let x: &[f16; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe { widen_f16(vld1q_u16(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> Self::V {
        let x: &[bf16; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe {
            let bits = vld1q_u16(x.as_ptr().cast());
            let widen = |bits| vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits));
            [widen(vmovl_u16(vget_low_u16(bits))), widen(vmovl_high_u16(bits))]
        }
    }

    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> Self::V {
        let x: &[u8; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe {
            let x = vmovl_u8(vld1_u8(x.as_ptr()));
            [vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_high_u16(x))]
        }
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> Self::V {
        let x: &[u8; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe {
            let x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(x.as_ptr())));
            [vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))]
        }
    }

    #[inline(always)]
    fn store(self, v: Self::V, y: &mut [f32]) {
        let y: &mut [f32; 8] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe {
            vst1q_f32(y.as_mut_ptr(), v[0]);
            vst1q_f32(y[4..].as_mut_ptr(), v[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // Not `fmax` or `fmaxnm`, which treat both operands' NaN alike.
        self.select_lt(b, a, a, b)
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        self.select_lt(a, b, a, b)
    }

    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe {
            [vbslq_f32(vcltq_f32(a[0], b[0]), x[0], y[0]), vbslq_f32(vcltq_f32(a[1], b[1]), x[1], y[1])]
        }
    }

    #[inline(always)]
    fn scale_exp2(self, a: Self::V, n: Self::V) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe {
            // Two factors, because 2^n itself may not be a normal number.
            let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
            let scale = |a, n| {
                let n = vcvtq_s32_f32(n);
                let low = vshrq_n_s32::<1>(n);
                vmulq_f32(vmulq_f32(a, power(low)), power(vsubq_s32(n, low)))
            };
            [scale(a[0], n[0]), scale(a[1], n[1])]
        }
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { vaddvq_f32(vaddq_f32(v[0], v[1])) }
    }

    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { vmaxvq_f32(vmaxq_f32(v[0], v[1])) }
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I {
        // SAFETY: `self` proves the features.
        unsafe { [vdupq_n_s32(x); 2] }
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8]) -> Self::I {
        let x: &[u8; 32] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { [vld1q_u8(x.as_ptr()), vld1q_u8(x[16..].as_ptr())].map(|x| vreinterpretq_s32_u8(x)) }
    }

    #[inline(always)]
    fn store_bytes(self, bytes: Self::I, y: &mut [u8]) {
        let y: &mut [u8; 32] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe {
            vst1q_u8(y.as_mut_ptr(), vreinterpretq_u8_s32(bytes[0]));
            vst1q_u8(y[16..].as_mut_ptr(), vreinterpretq_u8_s32(bytes[1]));
        }
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: `self` proves the features.
        unsafe { [vorrq_s32(a[0], b[0]), vorrq_s32(a[1], b[1])] }
    }

    #[inline(always)]
    fn move_bits(self, bytes: Self::I, up: i32, mask: u8) -> Self::I {
        bytes.map(|bytes| {
            // SAFETY: `self` proves the features.
            unsafe {
                let moved = vshlq_u8(vreinterpretq_u8_s32(bytes), vdupq_n_s8(up as i8));
                vreinterpretq_s32_u8(vandq_u8(moved, vdupq_n_u8(mask)))
            }
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], codes: Self::I) -> Self::I {
        codes.map(|codes| {
            // SAFETY: `self` proves the features; the array is a whole vector.
            unsafe { vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_s32(codes))) }
        })
    }

    #[inline(always)]
    fn dot4<const NARROW: bool>(self, sum: Self::I, u: Self::I, s: Self::I) -> Self::I {
        let dot = |sum, u, s| {
            // SAFETY: `self` proves the features.
            unsafe {
                let (u, s) = (vreinterpretq_s8_s32(u), vreinterpretq_s8_s32(s));
                if LEVEL >= I8MM {
                    return usdot(sum, u, s);
                }
                // With its highest bit flipped, an unsigned byte is the signed one that is 128
                // less.
                let u = if NARROW { u } else { veorq_s8(u, vdupq_n_s8(-128)) };
                if LEVEL >= DOTPROD { sdot(sum, u, s) } else { widening_dot(sum, u, s) }
            }
        };
        [dot(sum[0], u[0], s[0]), dot(sum[1], u[1], s[1])]
    }

    #[inline(always)]
    fn f32_from_bits(self, bits: Self::I) -> Self::V {
        // SAFETY: `self` proves the features.
        unsafe { [vreinterpretq_f32_s32(bits[0]), vreinterpretq_f32_s32(bits[1])] }
    }

    #[inline(always)]
    fn byte<const I: u32>(self, bytes: Self::I) -> Self::V {
        bytes.map(|bytes| {
            // SAFETY: `self` proves the features.
            unsafe {
                let down = vdupq_n_s32(-(8 * I as i32));
                let low = vandq_u32(vshlq_u32(vreinterpretq_u32_s32(bytes), down), vdupq_n_u32(0xff));
                vcvtq_f32_u32(low)
            }
        })
    }

    #[inline(always)]
    fn e4m3<const I: u32>(self, bytes: Self::I) -> Self::V {
        bytes.map(|bytes| {
            // SAFETY: `self` proves the features.
            unsafe {
                let top = vshlq_s32(bytes, vdupq_n_s32(24 - 8 * I as i32));
                let bits = vreinterpretq_u32_s32(vshrq_n_s32::<4>(top));
                vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(E4M3_BITS)))
            }
        })
    }

    #[inline(always)]
    fn sum_each(self, v: &[Self::V]) -> Self::V {
        let v: &[Self::V; 8] = v.first_chunk().expect("a vector per lane");
        // SAFETY: `self` proves the features.
        unsafe {
            let fours = v.map(|v| vaddq_f32(v[0], v[1]));
            let [a, b, c, d, e, f, g, h] = fours;
            let pairs = [vpaddq_f32(a, b), vpaddq_f32(c, d), vpaddq_f32(e, f), vpaddq_f32(g, h)];
            [vpaddq_f32(pairs[0], pairs[1]), vpaddq_f32(pairs[2], pairs[3])]
        }
    }
}
