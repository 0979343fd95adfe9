#![allow(unsafe_code)] // Intrinsics; a value of the type proves that the processor has them.
use super::{E4M3_BITS, Kernel, Simd};
use half::{bf16, f16};
use std::arch::{asm, x86_64::*};

/// Sixteen lanes: AVX-512 F, BW, DQ, VL, VBMI and VNNI, over AVX2, FMA and F16C, and AVX512-BF16 if
/// so said.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    /// `None` when this processor lacks any of them.
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!BF16 || is_x86_feature_detected!("avx512bf16"));
        found.then_some(Self(()))
    }

    /// Runs `kernel` compiled for these instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,f16c")]
        fn run<const BF16: bool, K: Kernel>(simd: Avx512<BF16>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        #[inline(never)]
        #[target_feature(
            enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16,avx2,fma,f16c"
        )]
        fn run_bf16<const BF16: bool, K: Kernel>(simd: Avx512<BF16>, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where `detect` found the features.
        unsafe { if BF16 { run_bf16(self, kernel) } else { run(self, kernel) } }
    }
}

impl Avx512<true> {
    /// The same without AVX512-BF16, for kernels that gain nothing by it: they are then compiled
    /// once for both.
    pub(super) fn without_bf16(self) -> Avx512<false> {
        Avx512(())
    }
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    const WIDE_DOT4: bool = true;
    type V = __m512;
    type I = __m512i;

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
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        let x: &[f32; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> __m512 {
        let x: &[f16; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> __m512 {
        let x: &[bf16; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is half a vector.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> __m512 {
        let x: &[u8; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> __m512 {
        let x: &[u8; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_e8m0(self, x: &[u8]) -> __m512 {
        let x: &[u8; 16] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe {
            let exponents = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())));
            // 2^-127 is subnormal.
            _mm512_castsi512_ps(_mm512_max_epi32(exponents, _mm512_set1_epi32(1 << 22)))
        }
    }

    #[inline(always)]
    fn store(self, v: __m512, y: &mut [f32]) {
        let y: &mut [f32; 16] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }

    #[inline(always)]
    fn scale_exp2(self, a: __m512, n: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_scalef_ps(a, n) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_reduce_add_ps(v) }
    }

    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_reduce_max_ps(v) }
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    fn load_bytes(self, x: &[u8]) -> __m512i {
        let x: &[u8; 64] = x.first_chunk().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_bytes(self, bytes: __m512i, y: &mut [u8]) {
        let y: &mut [u8; 64] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features; the array is a whole vector.
        unsafe { _mm512_storeu_si512(y.as_mut_ptr().cast(), bytes) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn move_bits(self, bytes: __m512i, up: i32, mask: u8) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe {
            let by = _mm_cvtsi32_si128(up.abs());
            let moved = if up < 0 { _mm512_srl_epi32(bytes, by) } else { _mm512_sll_epi32(bytes, by) };
            _mm512_and_si512(moved, _mm512_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], codes: __m512i) -> __m512i {
        // SAFETY: `self` proves the features; the array is a quarter of a vector.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes) }
    }

    #[inline(always)]
    fn dot4<const NARROW: bool>(self, sum: __m512i, u: __m512i, s: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_dpbusd_epi32(sum, u, s) }
    }

    #[inline(always)]
    fn store_low_bytes(self, v: __m512, y: &mut [u8]) {
        let y: &mut [u8; 16] = y.first_chunk_mut().expect("a byte per lane");
        // SAFETY: `self` proves the features; the array is what the conversion gives.
        unsafe { _mm_storeu_si128(y.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }

    #[inline(always)]
    fn f32_from_bits(self, bits: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_castsi512_ps(bits) }
    }

    #[inline(always)]
    fn byte<const I: u32>(self, bytes: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let byte = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(8 * I as i32));
            let byte = if I == 3 { byte } else { _mm512_and_si512(byte, _mm512_set1_epi32(0xff)) };
            _mm512_cvtepi32_ps(byte)
        }
    }

    #[inline(always)]
    fn twice(self, v: __m512) -> [__m512; 2] {
        const ORDER: [[u32; 16]; 2] = {
            let mut order = [[0; 16]; 2];
            let mut i = 0;
            while i < 32 {
                order[i / 16][i % 16] = i as u32 / 2;
                i += 1;
            }
            order
        };
        // SAFETY: `self` proves the features; the arrays are whole vectors.
        ORDER.map(|order| unsafe { _mm512_permutexvar_ps(_mm512_loadu_si512(order.as_ptr().cast()), v) })
    }

    #[inline(always)]
    fn byte_pairs<const FIRST: usize>(self, bytes: __m512i) -> [__m512; 2] {
        // SAFETY: `self` proves the features.
        unsafe {
            self.pairs::<FIRST, 0>(bytes, _mm512_setzero_si512()).map(|pairs| _mm512_cvtepi32_ps(pairs))
        }
    }

    #[inline(always)]
    fn byte_fractions<const FIRST: usize>(self, bytes: __m512i) -> [__m512; 2] {
        // SAFETY: `self` proves the features. In bits 16 to 22 of an f32 of 1/2, a number below 128
        // counts 256ths.
        unsafe {
            let half = _mm512_set1_epi32(0x3f00_0000);
            self.pairs::<FIRST, 2>(bytes, half).map(|pairs| _mm512_castsi512_ps(pairs))
        }
    }

    #[inline(always)]
    fn e4m3<const I: u32>(self, bytes: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe {
            let top = _mm512_sll_epi32(bytes, _mm_cvtsi32_si128(24 - 8 * I as i32));
            let bits = _mm512_and_si512(_mm512_srai_epi32::<4>(top), _mm512_set1_epi32(E4M3_BITS as i32));
            _mm512_castsi512_ps(bits)
        }
    }

    #[inline(always)]
    fn store_bf16_pairs(self, first: __m512, second: __m512, y: &mut [[bf16; 2]]) {
        if !BF16 {
            return super::round_pairs(self, first, second, y);
        }
        let y: &mut [[bf16; 2]; 16] = y.first_chunk_mut().expect("a whole vector");
        // Lane i of `first`, then lane i of `second`.
        const ORDER: [u16; 32] = {
            let mut order = [0; 32];
            let mut i = 0;
            while i < 32 {
                order[i] = (i / 2 + i % 2 * 16) as u16;
                i += 1;
            }
            order
        };
        // SAFETY: `self` proves the features, AVX512-BF16 among them; the arrays are whole vectors,
        // and so are 32 bf16.
        unsafe {
            let halves: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(second, first));
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            _mm512_storeu_si512(y.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, halves));
        }
    }

    #[inline(always)]
    fn store_bf16(self, v: __m512, y: &mut [bf16]) {
        if !BF16 {
            return super::round(self, v, y);
        }
        let y: &mut [bf16; 16] = y.first_chunk_mut().expect("a whole vector");
        // SAFETY: `self` proves the features, AVX512-BF16 among them; `y` has 16 elements.
        unsafe {
            let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(v));
            _mm256_storeu_si256(y.as_mut_ptr().cast(), rounded);
        }
    }

    #[inline(always)]
    fn store_two_bf16(self, v: [__m512; 2], y: &mut [bf16]) {
        let y: &mut [bf16; 32] = y.first_chunk_mut().expect("two vectors");
        if !BF16 {
            let (first, second) = y.split_at_mut(16);
            super::round(self, v[0], first);
            return super::round(self, v[1], second);
        }
        // SAFETY: `self` proves the features, AVX512-BF16 among them; `y` has 32 elements.
        unsafe {
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(v[1], v[0]));
            _mm512_storeu_si512(y.as_mut_ptr().cast(), rounded);
        }
    }

    #[inline(always)]
    fn transpose(self, tile: &mut [[u32; 16]; 16]) {
        // SAFETY: `self` proves the features; the rows are whole vectors.
        unsafe {
            let mut a = [_mm512_setzero_si512(); 16];
            let mut b = a;
            for (a, row) in a.iter_mut().zip(tile.iter()) {
                *a = _mm512_loadu_si512(row.as_ptr().cast());
            }
            // Within each 128 bits: pairs of elements, then of pairs. After that, `a[4 * i + c]`
            // has column `4 * q + c` of rows `4 * i` to `4 * i + 3` in quarter q.
            for i in 0..8 {
                b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
            }
            for i in 0..4 {
                for c in 0..2 {
                    a[4 * i + 2 * c] = _mm512_unpacklo_epi64(b[4 * i + c], b[4 * i + 2 + c]);
                    a[4 * i + 2 * c + 1] = _mm512_unpackhi_epi64(b[4 * i + c], b[4 * i + 2 + c]);
                }
            }
            // Quarters.
            for c in 0..4 {
                for half in 0..2 {
                    let (x, y) = (a[8 * half + c], a[8 * half + 4 + c]);
                    b[4 * c + 2 * half] = _mm512_shuffle_i32x4::<0x88>(x, y);
                    b[4 * c + 2 * half + 1] = _mm512_shuffle_i32x4::<0xdd>(x, y);
                }
            }
            for c in 0..4 {
                for odd in 0..2 {
                    // Quarters 0 and 2 of both, or 1 and 3.
                    let (x, y) = (b[4 * c + odd], b[4 * c + 2 + odd]);
                    let columns = (_mm512_shuffle_i32x4::<0x88>(x, y), _mm512_shuffle_i32x4::<0xdd>(x, y));
                    _mm512_storeu_si512(tile[4 * odd + c].as_mut_ptr().cast(), columns.0);
                    _mm512_storeu_si512(tile[4 * odd + 8 + c].as_mut_ptr().cast(), columns.1);
                }
            }
        }
    }

    #[inline(always)]
    fn sum_each(self, v: &[__m512]) -> __m512 {
        let v: &[__m512; 16] = v.first_chunk().expect("a vector per lane");
        // SAFETY: `self` proves the features.
        unsafe {
            // Each step puts halves of two vectors side by side and adds them up. `pairs[i]`: in
            // each quarter, v[2 i]'s and v[2 i + 1]'s two halves of it in turn.
            let mut pairs = [_mm512_setzero_ps(); 8];
            for (i, pair) in pairs.iter_mut().enumerate() {
                let (a, b) = (v[2 * i], v[2 * i + 1]);
                *pair = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            // `fours[i]`: in each quarter, the sums of that quarter of v[4 i ..][..4].
            let mut fours = [_mm512_setzero_ps(); 4];
            for (i, four) in fours.iter_mut().enumerate() {
                let (a, b) = (_mm512_castps_pd(pairs[2 * i]), _mm512_castps_pd(pairs[2 * i + 1]));
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                *four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            }
            // Quarters 0, 2, then 1, 3 of a and of b: what is left of each vector's four quarters
            // is two.
            let halves = |a, b| {
                let (low, high) = (
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
                );
                _mm512_add_ps(low, high)
            };
            halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]))
        }
    }
}

impl<const BF16: bool> Avx512<BF16> {
    /// `into`, and in byte `TO` of its lanes bytes `FIRST` and `FIRST + 1` of each lane of `bytes`,
    /// as [`Simd::byte_pairs`] orders them.
    #[inline(always)]
    fn pairs<const FIRST: usize, const TO: usize>(self, bytes: __m512i, into: __m512i) -> [__m512i; 2] {
        const { assert!(FIRST < 3 && TO < 4) };
        let from: [[u8; 64]; 2] = const {
            let mut from = [[0; 64]; 2];
            let mut i = 0;
            while i < 32 {
                from[i / 16][i % 16 * 4 + TO] = (i / 2 * 4 + FIRST + i % 2) as u8;
                i += 1;
            }
            from
        };
        // SAFETY: `self` proves the features; the arrays are whole vectors.
        from.map(|from| unsafe {
            let from = _mm512_loadu_si512(from.as_ptr().cast());
            permuted(into, 0x1111_1111_1111_1111 << TO, from, bytes)
        })
    }
}

/// `into`, and where `mask` says so the bytes of `bytes` that `from` says: what LLVM makes of the
/// intrinsic is VPERMT2B, of three operations instead of one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn permuted(mut into: __m512i, mask: u64, from: __m512i, bytes: __m512i) -> __m512i {
    // SAFETY: the function has the instruction, which reads and writes these registers alone.
    unsafe {
        asm!(
            "vpermb {into}{{{mask}}}, {from}, {bytes}",
            into = inout(zmm_reg) into,
            mask = in(kreg) mask,
            from = in(zmm_reg) from,
            bytes = in(zmm_reg) bytes,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    into
}
