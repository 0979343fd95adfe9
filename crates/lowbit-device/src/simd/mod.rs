//! Vectors of f32 and of bytes for kernels that are written once and compiled for each instruction
//! set.
//!
//! A kernel implements [`Kernel`], generic over [`Simd`]; [`Isa::dispatch`] runs it with the
//! instruction set whose presence the [`Isa`] value proves. Everything marked `#[inline(always)]`
//! below the kernel's `run` is compiled with that instruction set, plain loops included: so the
//! format decoders are vectorised.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod peak;
mod portable;
pub mod slices;
pub mod tiles;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::{Lanes, Scalar};
#[cfg(target_arch = "x86_64")]
pub use tiles::Amx;

use crate::cast::Float;
use half::{bf16, f16};

/// A vector type and its operations. A value of an implementing type proves that the processor has
/// them.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Lanes per vector.
    const LANES: usize;
    /// Vectors that the register file holds, which a kernel's tile must fit.
    const REGISTERS: usize;
    /// True if [`Simd::dot4`] is as fast for any unsigned bytes as for those below 128.
    const WIDE_DOT4: bool;
    /// The number that `dot4::<false>` subtracts from each unsigned byte: 128 where the processor
    /// only multiplies signed bytes. The caller adds it, times the sum of the signed bytes, to the
    /// sum's start. 0 where `WIDE_DOT4`.
    const DOT4_OFFSET: i32 = 0;
    /// True if [`Simd::short_dot4`] takes fewer instructions than [`Simd::dot4`].
    const SHORT_SUMS: bool = false;
    /// `LANES` f32.
    type V: Copy;
    /// `LANES` i32, or four bytes for each of them.
    type I: Copy;

    /// Runs `kernel` in a function of its own, compiled for these instructions. A kernel that has
    /// many variants calls them by this: a function with all of them inside takes the compiler
    /// minutes.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    /// Asks for the cache line `offset` bytes after the start of `bytes`, past their end or not; a
    /// hint.
    #[inline(always)]
    fn prefetch(self, bytes: &[u8], offset: usize) {
        let _ = (bytes, offset);
    }
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// The first `LANES` elements.
    ///
    /// # Panics
    /// When there are fewer.
    fn load(self, x: &[f32]) -> Self::V;
    /// The first `LANES` elements, widened exactly. A NaN may be made quiet.
    ///
    /// # Panics
    /// When there are fewer.
    fn load_f16(self, x: &[f16]) -> Self::V;
    /// The first `LANES` elements, widened exactly.
    ///
    /// # Panics
    /// When there are fewer.
    fn load_bf16(self, x: &[bf16]) -> Self::V;
    /// The first `LANES` elements as numbers.
    ///
    /// # Panics
    /// When there are fewer.
    fn load_u8(self, x: &[u8]) -> Self::V;
    /// The first `LANES` elements as two's complements.
    ///
    /// # Panics
    /// When there are fewer.
    fn load_i8(self, x: &[u8]) -> Self::V;
    /// The powers of two `2^(x - 127)` of the first `LANES` elements; of 255 infinity.
    ///
    /// # Panics
    /// When there are fewer.
    #[inline(always)]
    fn load_e8m0(self, x: &[u8]) -> Self::V {
        self.scale_exp2(self.splat(1.0), self.add(self.load_u8(x), self.splat(-127.0)))
    }
    /// Writes the first `LANES` elements.
    ///
    /// # Panics
    /// When there are fewer.
    fn store(self, v: Self::V, y: &mut [f32]);
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the processor can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The greater of each lane; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The lesser of each lane; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` in the lanes where `a < b`, else `y`.
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// `a * 2^n` for whole numbers `n` from -252 to 254, into the subnormals and up to infinity.
    fn scale_exp2(self, a: Self::V, n: Self::V) -> Self::V;
    /// The sum of all lanes.
    fn sum(self, v: Self::V) -> f32;
    /// The greatest lane.
    fn max_lane(self, v: Self::V) -> f32;
    /// Lane i is the sum of the lanes of `v[i]`: one vector for `LANES` sums, by fewer instructions
    /// than as many [`sum`](Self::sum)s.
    ///
    /// # Panics
    /// When there are not `LANES` vectors.
    fn sum_each(self, v: &[Self::V]) -> Self::V;

    /// All lanes `x`.
    fn splat_i32(self, x: i32) -> Self::I;
    /// The first `4 * LANES` bytes.
    ///
    /// # Panics
    /// When there are fewer.
    fn load_bytes(self, x: &[u8]) -> Self::I;
    /// Writes the first `4 * LANES` bytes.
    ///
    /// # Panics
    /// When there are fewer.
    fn store_bytes(self, bytes: Self::I, y: &mut [u8]);
    /// The bits that either has.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// The bits of each byte moved up by `up` places, or down where it is negative, and masked with
    /// `mask`, which must exclude bits moved in from other bytes. Both must be constants.
    fn move_bits(self, bytes: Self::I, up: i32, mask: u8) -> Self::I;
    /// Each byte, which is below 16, becomes the table's element.
    fn lookup(self, table: &[u8; 16], codes: Self::I) -> Self::I;
    /// In lane i: `sum[i] + u[4i] * s[4i] + .. + u[4i + 3] * s[4i + 3]`, of unsigned bytes `u` and
    /// signed bytes `s`, none of which is -128. `NARROW` promises that no byte of `u` is above 127;
    /// without it, [`Simd::DOT4_OFFSET`] is subtracted from each.
    fn dot4<const NARROW: bool>(self, sum: Self::I, u: Self::I, s: Self::I) -> Self::I;
    /// The start of a short sum of [`Simd::short_dot4`]s, in 16 bits where that is faster, which
    /// [`Simd::end_short_sum`] adds to `start`. The number of products times the greatest of their
    /// bytes `u` must not be above 128.
    #[inline(always)]
    fn begin_short_sum(self, start: Self::I) -> Self::I {
        start
    }
    /// As `dot4::<true>`, in a short sum.
    #[inline(always)]
    fn short_dot4(self, sum: Self::I, u: Self::I, s: Self::I) -> Self::I {
        self.dot4::<true>(sum, u, s)
    }
    /// The result of a short sum, with the `start` that it was begun with.
    #[inline(always)]
    fn end_short_sum(self, start: Self::I, sum: Self::I) -> Self::I {
        let _ = start;
        sum
    }
    /// Writes the lowest byte of each lane's bits to the first `LANES` elements.
    ///
    /// # Panics
    /// When there are fewer.
    #[inline(always)]
    fn store_low_bytes(self, v: Self::V, y: &mut [u8]) {
        let mut lanes = [0.0; MAX_LANES];
        self.store(v, &mut lanes);
        for (y, x) in y[..Self::LANES].iter_mut().zip(lanes) {
            *y = x.to_bits() as u8;
        }
    }
    /// The f32 of these bits.
    fn f32_from_bits(self, bits: Self::I) -> Self::V;
    /// Byte `I` of each lane, unsigned.
    fn byte<const I: u32>(self, bytes: Self::I) -> Self::V;
    /// Byte `I` of each lane as an e4m3, times 2^-120: its bits in the places of an f32's,
    /// subnormals too. An e4m3's NaN becomes a number.
    fn e4m3<const I: u32>(self, bytes: Self::I) -> Self::V;
    /// Each lane of `v` twice: lanes 2i and 2i + 1 of the two vectors are lane i.
    #[inline(always)]
    fn twice(self, v: Self::V) -> [Self::V; 2] {
        let mut lanes = [0.0; MAX_LANES];
        self.store(v, &mut lanes);
        load_two(self, |i| lanes[i / 2])
    }
    /// Bytes `FIRST` and `FIRST + 1` of each lane, unsigned: lanes 2i and 2i + 1 of the two vectors
    /// are from lane i.
    #[inline(always)]
    fn byte_pairs<const FIRST: usize>(self, bytes: Self::I) -> [Self::V; 2] {
        let mut lanes = [0.0; MAX_LANES];
        self.store(self.f32_from_bits(bytes), &mut lanes);
        load_two(self, |i| f32::from(lanes[i / 2].to_ne_bytes()[FIRST + i % 2]))
    }
    /// As [`Simd::byte_pairs`], but `(128 + byte) / 256` of bytes below 128.
    #[inline(always)]
    fn byte_fractions<const FIRST: usize>(self, bytes: Self::I) -> [Self::V; 2] {
        self.byte_pairs::<FIRST>(bytes).map(|v| self.mul_add(v, self.splat(1.0 / 256.0), self.splat(0.5)))
    }
    /// Element i of `y` becomes lane i of both, each rounded to the nearest bf16, ties to even.
    /// Subnormals may become zero.
    ///
    /// # Panics
    /// When `y` has fewer than `LANES` elements.
    #[inline(always)]
    fn store_bf16_pairs(self, first: Self::V, second: Self::V, y: &mut [[bf16; 2]]) {
        round_pairs(self, first, second, y);
    }
    /// Writes the first `LANES` elements, each rounded to the nearest bf16, ties to even.
    /// Subnormals may become zero.
    ///
    /// # Panics
    /// When there are fewer.
    #[inline(always)]
    fn store_bf16(self, v: Self::V, y: &mut [bf16]) {
        round(self, v, y);
    }
    /// [`Simd::store_bf16`] of two vectors, one after the other.
    #[inline(always)]
    fn store_two_bf16(self, v: [Self::V; 2], y: &mut [bf16]) {
        let (first, second) = y.split_at_mut(Self::LANES);
        self.store_bf16(v[0], first);
        self.store_bf16(v[1], second);
    }
    /// Element `[i][j]` becomes element `[j][i]`.
    #[inline(always)]
    fn transpose(self, tile: &mut [[u32; 16]; 16]) {
        let rows = *tile;
        for (column, out) in tile.iter_mut().enumerate() {
            for (x, row) in out.iter_mut().zip(&rows) {
                *x = row[column];
            }
        }
    }

    /// Up to `LANES` elements, the other lanes `fill`.
    #[inline(always)]
    fn load_partial(self, x: &[f32], fill: f32) -> Self::V {
        let mut lanes = [fill; MAX_LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// Writes as many lanes as `y` has elements, at most `LANES`.
    #[inline(always)]
    fn store_partial(self, v: Self::V, y: &mut [f32]) {
        if y.len() == Self::LANES {
            return self.store(v, y);
        }
        let mut lanes = [0.0; MAX_LANES];
        self.store(v, &mut lanes);
        y.copy_from_slice(&lanes[..y.len()]);
    }
}

/// Two vectors, of whose lanes the i-th is `lane(i)`.
#[inline(always)]
fn load_two<S: Simd>(simd: S, lane: impl Fn(usize) -> f32) -> [S::V; 2] {
    let lanes: [f32; 2 * MAX_LANES] = std::array::from_fn(lane);
    [simd.load(&lanes), simd.load(&lanes[S::LANES..])]
}

/// An e4m3's bits where an f32 has its sign, the lower half of its exponent and the upper part of
/// its mantissa.
const E4M3_BITS: u32 = 0x87f0_0000;

/// [`Simd::store_bf16`] where the processor has no instruction for it.
#[inline(always)]
fn round<S: Simd>(simd: S, v: S::V, y: &mut [bf16]) {
    let mut lanes = [0.0; MAX_LANES];
    simd.store(v, &mut lanes);
    for (y, x) in y[..S::LANES].iter_mut().zip(lanes) {
        *y = bf16::narrow(x);
    }
}

/// [`Simd::store_bf16_pairs`] where the processor has no instruction for it.
#[inline(always)]
fn round_pairs<S: Simd>(simd: S, first: S::V, second: S::V, y: &mut [[bf16; 2]]) {
    let mut values = [[0.0; MAX_LANES]; 2];
    for (v, values) in [first, second].into_iter().zip(&mut values) {
        simd.store(v, values);
    }
    for (i, y) in y[..S::LANES].iter_mut().enumerate() {
        *y = [bf16::from_f32(values[0][i]), bf16::from_f32(values[1][i])];
    }
}

/// Lanes of the widest vector.
pub const MAX_LANES: usize = 16;

/// A computation to be compiled for every instruction set.
pub trait Kernel {
    /// The type of its result.
    type Output;
    /// Mark implementations `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Isa {
    /// The target's baseline.
    Portable(portable::Portable),
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2<false>),
    /// AVX-VNNI besides.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(avx2::Avx2<true>),
    /// AVX-512 F, BW, DQ, VL, VBMI and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<false>),
    /// AVX512-BF16 and AMX's tiles of bf16 besides.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon<{ neon::BASE }>),
    /// The dot products of signed bytes besides (Armv8.2).
    #[cfg(target_arch = "aarch64")]
    NeonDotprod(neon::Neon<{ neon::DOTPROD }>),
    /// And those of unsigned by signed bytes (Armv8.6).
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(neon::Neon<{ neon::I8MM }>),
}

impl Isa {
    /// The best that this processor has.
    pub fn detect() -> Self {
        Self::all().pop().expect("the portable one is always there")
    }

    /// All that this processor has, best last.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Portable(portable::Lanes)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(avx2::Avx2::detect().map(Self::Avx2));
            all.extend(avx2::Avx2::detect().map(Self::Avx2Vnni));
            all.extend(avx512::Avx512::detect().map(Self::Avx512));
            all.extend(Amx::detect().map(Self::Amx));
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.extend(neon::Neon::detect().map(Self::Neon));
            all.extend(neon::Neon::detect().map(Self::NeonDotprod));
            all.extend(neon::Neon::detect().map(Self::NeonI8mm));
        }
        all
    }

    /// The one of this name among those that this processor has.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|isa| isa.name() == name)
    }

    /// Its name, as `--isa` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(_) => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod(_) => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm(_) => "neon-i8mm",
        }
    }

    /// Lanes per vector.
    pub fn lanes(self) -> usize {
        self.vectors().0
    }

    /// Vectors that the register file holds.
    pub fn registers(self) -> usize {
        self.vectors().1
    }

    /// [`Simd::LANES`] and [`Simd::REGISTERS`].
    fn vectors(self) -> (usize, usize) {
        struct Vectors;
        impl Kernel for Vectors {
            type Output = (usize, usize);
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> (usize, usize) {
                (S::LANES, S::REGISTERS)
            }
        }
        self.dispatch(Vectors)
    }

    /// True if it has a unit that multiplies tiles of bf16.
    pub fn has_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.tiles().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// Its unit that multiplies tiles of bf16, if it has one.
    #[cfg(target_arch = "x86_64")]
    pub fn tiles(self) -> Option<Amx> {
        match self {
            Self::Amx(amx) => Some(amx),
            _ => None,
        }
    }

    /// Runs `kernel` compiled for this instruction set; kernels that multiply tiles run by
    /// `tiles::TileUnit`. Not `#[inline]`: each unit of code that calls it would compile the
    /// portable kernel again.
    pub fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(amx) => amx.simd().without_bf16().run(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => simd.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod(simd) => simd.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm(simd) => simd.run(kernel),
        }
    }
}

#[cfg(test)]
mod tests;
