//! The limits of the processor's own instructions: loops that touch registers alone and memory
//! alone.
use super::{Isa, Kernel, Simd};
use std::time::Instant;

/// Operations per second of one thread's fused multiply-adds: of each loop as many as its vectors,
/// the best of all.
pub fn f32_operations_per_second(isa: Isa) -> f64 {
    // A sum waits for itself: processors need 4 to 10 at once, and a portable vector is several
    // registers.
    let rates =
        [isa.dispatch(MultiplyAdd::<4>), isa.dispatch(MultiplyAdd::<8>), isa.dispatch(MultiplyAdd::<12>)];
    rates.into_iter().fold(0.0, f64::max)
}

/// `v = v * a + b` again and again, in `N` vectors: operations per second.
struct MultiplyAdd<const N: usize>;

impl<const N: usize> Kernel for MultiplyAdd<N> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        const TURNS: usize = 100_000;
        let (a, b) = std::hint::black_box((0.5, 1.0));
        let (a, b) = (simd.splat(a), simd.splat(b));
        let mut v: [S::V; N] = std::array::from_fn(|i| simd.splat(i as f32));
        let start = Instant::now();
        for _ in 0..TURNS {
            for v in &mut v {
                *v = simd.mul_add(*v, a, b);
            }
        }
        let total = v.into_iter().map(|v| simd.sum(v)).sum::<f32>();
        std::hint::black_box(total);
        (TURNS * N * S::LANES * 2) as f64 / start.elapsed().as_secs_f64()
    }
}

/// As [`f32_operations_per_second`], of dot products of bytes.
pub fn int8_operations_per_second(isa: Isa) -> f64 {
    let rates = [isa.dispatch(DotBytes::<4>), isa.dispatch(DotBytes::<8>), isa.dispatch(DotBytes::<12>)];
    rates.into_iter().fold(0.0, f64::max)
}

/// Sums of products of bytes, of which one is below 16, again and again, in `N` vectors: operations
/// per second.
struct DotBytes<const N: usize>;

impl<const N: usize> Kernel for DotBytes<N> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        const TURNS: i32 = 10_000;
        // As many as a short sum has.
        const STEPS: i32 = 8;
        // Other operands for each product: what is the same is computed once.
        let s: [S::I; N] =
            std::array::from_fn(|i| simd.splat_i32(std::hint::black_box(0x0102_0304 + i as i32)));
        let mut sums = [simd.splat_i32(0); N];
        let start = Instant::now();
        for turn in 0..TURNS {
            let mut short = sums.map(|sum| simd.begin_short_sum(sum));
            for step in 0..STEPS {
                let u = simd.splat_i32((turn * STEPS + step) & 0x0f0f_0f0f);
                for (short, &s) in short.iter_mut().zip(&s) {
                    *short = simd.short_dot4(*short, u, s);
                }
            }
            for (sum, short) in sums.iter_mut().zip(short) {
                *sum = simd.end_short_sum(*sum, short);
            }
        }
        let total = sums.into_iter().map(|sum| simd.sum(simd.f32_from_bits(sum))).sum::<f32>();
        std::hint::black_box(total);
        ((TURNS * STEPS) as usize * N * S::LANES * 8) as f64 / start.elapsed().as_secs_f64()
    }
}

/// As [`f32_operations_per_second`], of products of tiles of bf16; `None` without a unit that
/// multiplies them.
pub fn bf16_operations_per_second(isa: Isa) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return isa.tiles().map(super::tiles::operations_per_second);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        None
    }
}

/// Sums all numbers, reading this many parts of them at the same time and asking for each part's
/// lines so many bytes ahead; 0 leaves that to the processor.
pub struct Read<'a, const STREAMS: usize, const AHEAD: usize>(pub &'a [f32]);

impl<const STREAMS: usize, const AHEAD: usize> Kernel for Read<'_, STREAMS, AHEAD> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        const LINE: usize = 64 / size_of::<f32>();
        let stream = self.0.len() / STREAMS;
        let streams: [&[f32]; STREAMS] = std::array::from_fn(|i| &self.0[i * stream..][..stream]);
        let mut sums = [simd.splat(0.0); STREAMS];
        for at in (0..stream - stream % LINE).step_by(LINE) {
            for (sum, stream) in sums.iter_mut().zip(&streams) {
                let line = &stream[at..][..LINE];
                if AHEAD > 0 {
                    simd.prefetch(bytemuck::cast_slice(line), AHEAD);
                }
                for lanes in line.chunks_exact(S::LANES) {
                    *sum = simd.add(*sum, simd.load(lanes));
                }
            }
        }
        sums.into_iter().map(|sum| simd.sum(sum)).sum()
    }
}
