//! AMX's arithmetic in plain Rust.

use super::{Ahead, Block, Pairs, Start, Sums, TILE, TileKernel, TileUnit, Tiles, steps};
use crate::simd::{Isa, Kernel, Lanes, Simd};
use half::bf16;

/// A unit that every processor has. Tests multiply with it, and compare the others with it bit for
/// bit.
#[derive(Clone, Copy, Debug)]
pub struct Model;

impl TileUnit for Model {
    fn dispatch<K: TileKernel>(self, isa: Isa, kernel: K) -> K::Output {
        struct Modelled<K>(K);
        impl<K: TileKernel> Kernel for Modelled<K> {
            type Output = K::Output;
            #[inline(always)]
            fn run<S: Simd>(self, simd: S) -> K::Output {
                self.0.run(simd, &mut Model)
            }
        }
        // Vectors of two widths: with every instruction set the tests would take the compiler twice
        // as long.
        #[cfg(target_arch = "x86_64")]
        if let Isa::Avx512(simd) = isa {
            return simd.run(Modelled(kernel));
        }
        let _ = isa;
        Modelled(kernel).run(Lanes::<8>)
    }
}

impl Tiles for Model {
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        a: [&[Pairs]; M],
        b: [&[Pairs]; N],
        c: &mut Block,
        start: Start,
        _: Ahead<'_>,
    ) {
        let steps = steps(&a, &b);
        for (a, c) in a.iter().zip(c) {
            for (b, c) in b.iter().zip(c) {
                if start == Start::Zero {
                    *c = Sums([[0.0; TILE]; TILE]);
                }
                for step in 0..steps {
                    product(&a[step], &b[step], c);
                }
            }
        }
    }
}

/// TDPBF16PS.
fn product(a: &Pairs, b: &Pairs, c: &mut Sums) {
    for (a, c) in a.0.iter().zip(&mut c.0) {
        let mut sums = [[0.0; 2]; TILE];
        for (a, b) in a.iter().zip(&b.0) {
            for (sums, b) in sums.iter_mut().zip(b) {
                for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
                    *sum = flush(widen(a).mul_add(widen(b), *sum));
                }
            }
        }
        for (c, [first, second]) in c.iter_mut().zip(sums) {
            *c = flush(flush(*c) + flush(first + second));
        }
    }
}

fn widen(x: bf16) -> f32 {
    flush(f32::from_bits(u32::from(x.to_bits()) << 16))
}

/// Zero of the same sign in place of a subnormal.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
