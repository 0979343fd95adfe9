use super::{E4M3_BITS, Kernel, Simd};
use crate::cast::Float;
use half::{bf16, f16};

/// `N` lanes, a power of two, in plain Rust: what the compiler makes of them on the target's
/// baseline.
#[derive(Clone, Copy, Debug)]
pub struct Lanes<const N: usize>;

/// The path of last resort, and the twin that tests compare the others with.
pub type Portable = Lanes<8>;

/// One lane: what is left over when a kernel's columns do not fill a vector, by the same code.
pub type Scalar = Lanes<1>;

impl<const N: usize> Simd for Lanes<N> {
    const LANES: usize = N;
    const REGISTERS: usize = 8;
    const WIDE_DOT4: bool = true;
    type V = [f32; N];
    type I = [[u8; 4]; N];

    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; N] {
        [x; N]
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> [f32; N] {
        *x.first_chunk().expect("a whole vector")
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> [f32; N] {
        x.first_chunk::<N>().expect("a whole vector").map(Float::widen)
    }

    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> [f32; N] {
        x.first_chunk::<N>().expect("a whole vector").map(Float::widen)
    }

    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> [f32; N] {
        x.first_chunk::<N>().expect("a whole vector").map(f32::from)
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> [f32; N] {
        x.first_chunk::<N>().expect("a whole vector").map(|x| f32::from(x as i8))
    }

    #[inline(always)]
    fn store(self, v: [f32; N], y: &mut [f32]) {
        *y.first_chunk_mut().expect("a whole vector") = v;
    }

    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        // Two roundings: without FMA in the baseline, `f32::mul_add` is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select_lt(self, a: [f32; N], b: [f32; N], x: [f32; N], y: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn scale_exp2(self, a: [f32; N], n: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| {
            // Two factors, because 2^n itself may not be a normal number. Wrapping, for the NaN
            // lanes' sake.
            let n = n[i] as i32;
            let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn sum(self, mut v: [f32; N]) -> f32 {
        let mut half = N / 2;
        while half > 0 {
            (0..half).for_each(|i| v[i] += v[i + half]);
            half /= 2;
        }
        v[0]
    }

    #[inline(always)]
    fn max_lane(self, v: [f32; N]) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [[u8; 4]; N] {
        [x.to_le_bytes(); N]
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8]) -> [[u8; 4]; N] {
        *x.as_chunks().0.first_chunk().expect("a whole vector")
    }

    #[inline(always)]
    fn store_bytes(self, bytes: [[u8; 4]; N], y: &mut [u8]) {
        *y.as_chunks_mut().0.first_chunk_mut().expect("a whole vector") = bytes;
    }

    #[inline(always)]
    fn or(self, a: [[u8; 4]; N], b: [[u8; 4]; N]) -> [[u8; 4]; N] {
        std::array::from_fn(|i| (u32::from_ne_bytes(a[i]) | u32::from_ne_bytes(b[i])).to_ne_bytes())
    }

    #[inline(always)]
    fn move_bits(self, bytes: [[u8; 4]; N], up: i32, mask: u8) -> [[u8; 4]; N] {
        bytes.map(|bytes| {
            let bits = u32::from_le_bytes(bytes);
            let moved = if up < 0 { bits >> -up } else { bits << up };
            (moved & u32::from_le_bytes([mask; 4])).to_le_bytes()
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], codes: [[u8; 4]; N]) -> [[u8; 4]; N] {
        codes.map(|codes| codes.map(|code| table[usize::from(code & 15)]))
    }

    #[inline(always)]
    fn dot4<const NARROW: bool>(self, sum: [[u8; 4]; N], u: [[u8; 4]; N], s: [[u8; 4]; N]) -> [[u8; 4]; N] {
        let product = |i: usize, j: usize| i32::from(u[i][j]) * i32::from(s[i][j] as i8);
        std::array::from_fn(|i| {
            let products = product(i, 0) + product(i, 1) + product(i, 2) + product(i, 3);
            i32::from_le_bytes(sum[i]).wrapping_add(products).to_le_bytes()
        })
    }

    #[inline(always)]
    fn f32_from_bits(self, bits: [[u8; 4]; N]) -> [f32; N] {
        bits.map(f32::from_le_bytes)
    }

    #[inline(always)]
    fn byte<const I: u32>(self, bytes: [[u8; 4]; N]) -> [f32; N] {
        bytes.map(|bytes| f32::from(bytes[I as usize]))
    }

    #[inline(always)]
    fn e4m3<const I: u32>(self, bytes: [[u8; 4]; N]) -> [f32; N] {
        bytes.map(|bytes| f32::from_bits((i32::from(bytes[I as usize] as i8) << 20) as u32 & E4M3_BITS))
    }

    #[inline(always)]
    fn sum_each(self, v: &[[f32; N]]) -> [f32; N] {
        v.first_chunk::<N>().expect("a vector per lane").map(|v| self.sum(v))
    }
}
