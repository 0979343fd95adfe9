#![allow(unsafe_code)] // Intrinsics; a value of the type proves that the processor has them.
use super::{E4M3_BITS, Kernel, Simd};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Eight lanes: AVX2, FMA and F16C, and AVX-VNNI if so said.
#[derive(Clone, Copy, Debug)]
pub struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// `None` when this processor lacks any of them.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        found.then_some(Self(()))
    }

    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn run<const VNNI: bool, K: Kernel>(simd: Avx2<VNNI>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn run_vnni<const VNNI: bool, K: Kernel>(simd: Avx2<VNNI>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where `detect` found the features.
        unsafe { if VNNI { run_vnni(self, kernel) } else { run(self, kernel) } }
    }
}

/// In lane i: `sum[i]`, and both of its 16-bit integers of `pairs`.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
unsafe fn add_pairs(sum: __m256i, pairs: __m256i) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))) }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    const WIDE_DOT4: bool = VNNI;
    const DOT4_OFFSET: i32 = if VNNI { 0 } else { 128 };
    const SHORT_SUMS: bool = !VNNI;
    type V = __m256;
    type I = __m256i;

    #[inline]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8], offset: usize) {
        // SAFETY: every x86-64 processor has the instruction, and it faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(offset).cast()) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> __m256 {
        let x: &[f32; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> __m256 {
        let x: &[f16; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> __m256 {
        let x: &[bf16; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> __m256 {
        let x: &[u8; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> __m256 {
        let x: &[u8; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_e8m0(self, x: &[u8]) -> __m256 {
        let x: &[u8; 8] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe {
            let exponents = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(x.as_ptr().cast())));
            // 2^-127 is subnormal.
            _mm256_castsi256_ps(_mm256_max_epi32(exponents, _mm256_set1_epi32(1 << 22)))
        }
    }

    #[inline(always)]
    fn store(self, v: __m256, y: &mut [f32]) {
        let y: &mut [f32; 8] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }

    #[inline(always)]
    fn scale_exp2(self, a: __m256, n: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            // Two factors, because 2^n itself may not be a normal number.
            let n = _mm256_cvtps_epi32(n);
            let low = _mm256_srai_epi32::<1>(n);
            let power =
                |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
            _mm256_mul_ps(_mm256_mul_ps(a, power(low)), power(_mm256_sub_epi32(n, low)))
        }
    }

    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }

    #[inline(always)]
    fn max_lane(self, v: __m256) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_epi32(x) }
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8]) -> __m256i {
        let x: &[u8; 32] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_bytes(self, bytes: __m256i, y: &mut [u8]) {
        let y: &mut [u8; 32] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm256_storeu_si256(y.as_mut_ptr().cast(), bytes) }
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    fn move_bits(self, bytes: __m256i, up: i32, mask: u8) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe {
            let by = _mm_cvtsi32_si128(up.abs());
            let moved = if up < 0 { _mm256_srl_epi32(bytes, by) } else { _mm256_sll_epi32(bytes, by) };
            _mm256_and_si256(moved, _mm256_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], codes: __m256i) -> __m256i {
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, codes)
        }
    }

    #[inline(always)]
    fn dot4<const NARROW: bool>(self, sum: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe {
            if VNNI {
                return _mm256_dpbusd_avx_epi32(sum, u, s);
            }
            // Two products of bytes below 128 fit 16 bits, and those of magnitudes up to 128, one
            // of them with the other's sign.
            let pairs = if NARROW {
                _mm256_maddubs_epi16(u, s)
            } else {
                let signed = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
                _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(s, signed))
            };
            add_pairs(sum, pairs)
        }
    }

    #[inline(always)]
    fn begin_short_sum(self, start: __m256i) -> __m256i {
        if VNNI { start } else { self.splat_i32(0) }
    }

    #[inline(always)]
    fn short_dot4(self, sum: __m256i, u: __m256i, s: __m256i) -> __m256i {
        if VNNI {
            return self.dot4::<true>(sum, u, s);
        }
        // SAFETY: `self` proves the features.
        unsafe { _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, s)) }
    }

    #[inline(always)]
    fn end_short_sum(self, start: __m256i, sum: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        if VNNI { sum } else { unsafe { add_pairs(start, sum) } }
    }

    #[inline(always)]
    fn store_low_bytes(self, v: __m256, y: &mut [u8]) {
        let y: &mut [u8; 8] = y.first_chunk_mut().expect("a byte per lane");
        // SAFETY: `self` proves the features; the array is half of what is left in the vector.
        unsafe {
            let low = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0xff));
            let words = _mm_packs_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_storel_epi64(y.as_mut_ptr().cast(), _mm_packus_epi16(words, words));
        }
    }

    #[inline(always)]
    fn f32_from_bits(self, bits: __m256i) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_castsi256_ps(bits) }
    }

    #[inline(always)]
    fn byte<const I: u32>(self, bytes: __m256i) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            let byte = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(8 * I as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(byte, _mm256_set1_epi32(0xff)))
        }
    }

    #[inline(always)]
    fn e4m3<const I: u32>(self, bytes: __m256i) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe {
            let top = _mm256_sll_epi32(bytes, _mm_cvtsi32_si128(24 - 8 * I as i32));
            let bits = _mm256_and_si256(_mm256_srai_epi32::<4>(top), _mm256_set1_epi32(E4M3_BITS as i32));
            _mm256_castsi256_ps(bits)
        }
    }

    #[inline(always)]
    fn sum_each(self, v: &[__m256]) -> __m256 {
        let v: &[__m256; 8] = v.first_chunk().expect("a vector per lane");
        // SAFETY: `self` proves the features.
        unsafe {
            // `fours[i]`: in each half, the sums of that half of v[4 i ..][..4].
            let mut fours = [_mm256_setzero_ps(); 2];
            for (i, four) in fours.iter_mut().enumerate() {
                let v = &v[4 * i..];
                *four = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
            }
            let low = _mm256_permute2f128_ps::<0x20>(fours[0], fours[1]);
            let high = _mm256_permute2f128_ps::<0x31>(fours[0], fours[1]);
            _mm256_add_ps(low, high)
        }
    }
}
