//! The interface of a weight to the kernels. Only this file is compiled for every format.

use crate::simd::{Isa, Kernel, Simd};
use lowbit_formats::{Codec, MAX_RUN, Parts};

/// Values of a row that a panel holds: a whole number of runs of every format.
pub(in crate::ops::quantized_matmul) const KC: usize = 512;
/// Rows of x are padded to a multiple of this: whole vectors, and whole runs of
/// [`lowbit_formats::Float`].
pub(in crate::ops::quantized_matmul) const STEP: usize = 32;
const _: () = assert!(KC.is_multiple_of(MAX_RUN) && KC.is_multiple_of(STEP));

/// Decoded values of consecutive rows.
pub(in crate::ops::quantized_matmul) type Panel = [[f32; KC]];

/// The rows of a weight, whatever its format.
pub(in crate::ops::quantized_matmul) trait Rows: Sync {
    /// Decodes the values from `k` on (a multiple of [`KC`]) of the rows from `row` on. Past the
    /// end of a row the panel is zero up to a multiple of [`STEP`] and untouched after that.
    fn decode(&self, isa: Isa, row: usize, k: usize, panel: &mut Panel);

    /// `y[n] = sum over k of x[k] * weight[row + n, k]`; `x` is padded with zeros to a multiple of
    /// [`STEP`].
    fn dot(&self, isa: Isa, row: usize, x: &[f32], y: &mut [f32]);
}

/// A weight of one format.
pub(in crate::ops::quantized_matmul) struct WeightRows<'a, C> {
    pub codec: C,
    pub parts: Parts<'a>,
    pub rows: usize,
    pub k: usize,
}

impl<C: Codec> WeightRows<'_, C> {
    /// Bytes that a run takes in the first component.
    fn run_bytes(&self) -> usize {
        self.parts[0].len() / (self.rows * self.k / C::RUN).max(1)
    }

    /// Asks for a run's bytes in the first component, by far the largest: a line for every 64
    /// values, since a count known to the compiler costs less than the right one.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, offset: usize) {
        for line in 0..(C::RUN / 64).max(1) {
            simd.prefetch(self.parts[0], offset + line * 64);
        }
    }
}

impl<C: Codec> Rows for WeightRows<'_, C> {
    fn decode(&self, isa: Isa, row: usize, k: usize, panel: &mut Panel) {
        isa.dispatch(Decode { weight: self, row, first: k, panel });
    }

    fn dot(&self, isa: Isa, row: usize, x: &[f32], y: &mut [f32]) {
        isa.dispatch(Dot { weight: self, row, x, y });
    }
}

struct Decode<'a, 'w, C> {
    weight: &'a WeightRows<'w, C>,
    row: usize,
    first: usize,
    panel: &'a mut Panel,
}

impl<C: Codec> Kernel for Decode<'_, '_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeightRows { codec, parts, k, .. } = self.weight;
        let len = (k - self.first).min(KC);
        let (run_bytes, height) = (self.weight.run_bytes(), self.panel.len());
        for (i, out) in self.panel.iter_mut().enumerate() {
            let row = codec.row(parts, self.row + i, *k);
            // Whole runs apart from a last short one: a length known to the compiler is what
            // vectorises.
            let mut runs = out[..len].chunks_exact_mut(C::RUN);
            let mut index = self.first / C::RUN;
            // The panel after this one, most likely: further along the rows, or the rows below.
            let next = if self.first + KC < *k {
                (self.row + i) * k + self.first + KC
            } else {
                (self.row + height + i) * k
            };
            let ahead = (next / C::RUN - index) * run_bytes;
            for out in &mut runs {
                self.weight.prefetch(simd, ahead + index * run_bytes);
                codec.decode(row, index, out);
                index += 1;
            }
            let rest = runs.into_remainder();
            if !rest.is_empty() {
                codec.decode(row, index, rest);
            }
            out[len..len.next_multiple_of(STEP)].fill(0.0);
        }
    }
}

struct Dot<'a, 'w, C> {
    weight: &'a WeightRows<'w, C>,
    row: usize,
    x: &'a [f32],
    y: &'a mut [f32],
}

/// Bytes that the first component is fetched ahead of its use: processors' own prefetchers stop at
/// pages.
const AHEAD: usize = 2048;

/// Sums that a dot product keeps apart, so that they do not wait for each other.
const SUMS: usize = 4;

impl<C: Codec> Kernel for Dot<'_, '_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeightRows { codec, parts, k, .. } = self.weight;
        let run_bytes = self.weight.run_bytes();
        for (n, y) in self.y.iter_mut().enumerate() {
            let row = codec.row(parts, self.row + n, *k);
            let ahead = (self.row + n) * (k / C::RUN) * run_bytes + AHEAD;
            let mut sums = [simd.splat(0.0); SUMS];
            // Zeros past the end of a short last run.
            let mut run = [0.0; MAX_RUN];
            let run = &mut run[..C::RUN];
            for (i, x) in self.x.chunks_exact(C::RUN).enumerate() {
                self.weight.prefetch(simd, ahead + i * run_bytes);
                let len = k - i * C::RUN;
                if len >= C::RUN {
                    codec.decode(row, i, run);
                } else {
                    codec.decode(row, i, &mut run[..len]);
                    run[len..].fill(0.0);
                }
                for (j, (w, x)) in run.chunks_exact(S::LANES).zip(x.chunks_exact(S::LANES)).enumerate() {
                    sums[j % SUMS] = simd.mul_add(simd.load(w), simd.load(x), sums[j % SUMS]);
                }
            }
            *y = simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])));
        }
    }
}
