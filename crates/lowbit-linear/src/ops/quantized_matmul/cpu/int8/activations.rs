//! Rows of x, rounded to 8 bits.

use super::super::panels::{heights, tallest};
use super::row;
use super::tile::MAGIC;
use crate::Cpu;
use crate::buffer::Buffer;
use crate::ops::quantized_matmul::X_GROUP;
use crate::panels::{CHUNK, Layout};
use crate::simd::{Kernel, Simd};
use std::sync::Arc;

/// x `[m, k]` in 8 bits: `x[m, 4q + i] = codes[m, q][i] * scales[m, g]`, each group g with the
/// scale that makes its greatest magnitude 127. Rows lie in tiles, as [`heights`] cuts them:
/// `[tile][..][row of the tile]`.
pub(in super::super) struct Activations {
    /// The fields of all tiles, one after the other.
    words: Buffer,
    m: usize,
    tallest: usize,
    /// True if all rows are multiplied as the weight is read: `m` is then with rows of anything, as
    /// [`row::padded`] says.
    few: bool,
    /// Values per row with padding, and per group.
    k: usize,
    group: usize,
}

/// A few rows, or a chunk of them.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// The number of rows.
    pub height: usize,
    /// Four values, `[k / 4][row]`; past the end of a row zeros up to a whole span.
    pub codes: &'a [u32],
    /// The initial values of integer sums, so that they end as the bits of
    /// `MAGIC + sum of (weight code - zero) * code`; `[group][row]`
    pub starts: &'a [i32],
    /// `[group][row]`
    pub scales: &'a [f32],
    /// `scale * sum of codes`, `[group][row]`
    pub sums: &'a [f32],
    /// Bytes from here to the next tile.
    pub stride: usize,
}

impl Activations {
    pub fn new(cpu: &Arc<Cpu>, x: &[f32], m: usize, layout: &Layout) -> Self {
        let isa = cpu.isa();
        let (k, group) = (layout.k().next_multiple_of(X_GROUP), layout.group());
        let rows = m;
        let most = row::most_rows(isa.registers(), isa.lanes());
        let few = row::padded(m, most);
        let (m, tallest) = few.map_or((m, tallest(isa.registers())), |padded| (padded, most));
        let words = m * (k / 4 + 3 * (k / group));
        let words = Buffer::any(words * size_of::<u32>(), cpu).expect("memory for x in 8 bits");
        let mut all = Self { words, m, tallest, few: few.is_some(), k, group };
        if k == 0 {
            return all;
        }
        let (zero, narrow) = (layout.zero(), layout.narrow());
        let tiles = all.tiles_mut();
        cpu.for_each_of(m * k / VALUES, tiles, |tile| {
            let x = &x[tile.row * layout.k()..rows.min(tile.row + tile.height) * layout.k()];
            isa.dispatch(Round { x, zero, narrow, k: layout.k(), group, tile });
        });
        all
    }

    /// The tiles, if all rows are multiplied as the weight is read.
    #[inline(always)]
    pub(super) fn few(&self) -> Option<impl Iterator<Item = (usize, usize)> + Clone> {
        self.few.then(|| heights(0..self.m, self.tallest))
    }

    /// Words that a row takes of codes, and of each other field.
    fn row_words(&self) -> (usize, usize) {
        (self.k / 4, self.k / self.group)
    }

    /// All tiles, to be filled.
    fn tiles_mut(&mut self) -> Vec<TileMut<'_>> {
        let (quads, groups) = self.row_words();
        let heights = heights(0..self.m, self.tallest);
        let mut words: &mut [u32] = bytemuck::cast_slice_mut(self.words.bytes_mut());
        let mut take = |count: usize| words.split_off_mut(..count).expect("words of a tile");
        let tile = |(row, height)| TileMut {
            row,
            height,
            codes: take(height * quads),
            starts: bytemuck::cast_slice_mut(take(height * groups)),
            scales: bytemuck::cast_slice_mut(take(height * groups)),
            sums: bytemuck::cast_slice_mut(take(height * groups)),
        };
        heights.map(tile).collect()
    }

    /// The rows of one of [`heights`]: its first one, and how many there are.
    #[inline(always)]
    pub(super) fn tile(&self, (row, height): (usize, usize)) -> Tile<'_> {
        let (quads, groups) = self.row_words();
        let words: &[u32] = bytemuck::cast_slice(self.words.bytes());
        let words = &words[row * (quads + 3 * groups)..][..height * (quads + 3 * groups)];
        let (codes, rest) = words.split_at(height * quads);
        let (starts, rest) = rest.split_at(height * groups);
        let (scales, sums) = rest.split_at(height * groups);
        Tile {
            height,
            codes,
            starts: bytemuck::cast_slice(starts),
            scales: bytemuck::cast_slice(scales),
            sums: bytemuck::cast_slice(sums),
            stride: size_of_val(words),
        }
    }
}

impl<'a> Tile<'a> {
    /// The values from `k` on, a multiple of [`CHUNK`], of a tile of whole rows in groups of
    /// `group`.
    #[inline(always)]
    pub fn chunk(&self, k: usize, group: usize) -> Self {
        let height = self.height;
        let len = CHUNK.min(self.codes.len() * 4 / height - k);
        let groups = k / group * height..(k + len) / group * height;
        Self {
            codes: &self.codes[k / 4 * height..][..len / 4 * height],
            starts: &self.starts[groups.clone()],
            scales: &self.scales[groups.clone()],
            sums: &self.sums[groups],
            ..*self
        }
    }
}

/// Values that a thread rounds in a nanosecond, about.
const VALUES: usize = 4;

struct TileMut<'a> {
    row: usize,
    height: usize,
    codes: &'a mut [u32],
    starts: &'a mut [i32],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

/// Rounds the rows of a tile that there are.
struct Round<'a> {
    x: &'a [f32],
    /// The weight's, as [`Layout`] says.
    zero: i32,
    narrow: bool,
    k: usize,
    group: usize,
    tile: TileMut<'a>,
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.tile.height {
            8 => self.parts::<S, 8>(simd),
            4 => self.parts::<S, 4>(simd),
            2 => self.parts::<S, 2>(simd),
            _ => self.parts::<S, 1>(simd),
        }
    }
}

impl Round<'_> {
    #[inline(always)]
    fn parts<S: Simd, const M: usize>(self, simd: S) {
        match self.group {
            32 => self.rows::<S, M, 1>(simd),
            _ => self.rows::<S, M, 2>(simd),
        }
    }

    /// `PARTS` groups share a scale. Values that lie side by side are written at a time: a group of
    /// each of the `M` rows.
    #[inline(always)]
    fn rows<S: Simd, const M: usize, const PARTS: usize>(self, simd: S) {
        const QUADS: usize = X_GROUP / 4;
        let zero = if self.narrow { self.zero } else { self.zero - S::DOT4_OFFSET };
        let TileMut { codes, starts, scales, sums, .. } = self.tile;
        let codes = codes.as_chunks_mut::<M>().0.as_chunks_mut::<QUADS>().0.iter_mut();
        let starts = starts.as_chunks_mut::<M>().0.as_chunks_mut::<PARTS>().0.iter_mut();
        let scales = scales.as_chunks_mut::<M>().0.as_chunks_mut::<PARTS>().0.iter_mut();
        let sums = sums.as_chunks_mut::<M>().0.as_chunks_mut::<PARTS>().0.iter_mut();
        let groups = codes.zip(starts).zip(scales.zip(sums));
        let rows = self.x.len() / self.k;
        for (k, ((codes, starts), (scales, sums))) in (0..self.k).step_by(X_GROUP).zip(groups) {
            for row in 0..M.min(rows) {
                let x = &self.x[row * self.k + k..][..X_GROUP.min(self.k - k)];
                let mut padded = [0.0; X_GROUP];
                let x = match x.first_chunk() {
                    Some(x) => x,
                    None => {
                        padded[..x.len()].copy_from_slice(x);
                        &padded
                    }
                };
                let rounded = Rounded::<PARTS>::new(simd, x);
                // Written out: LLVM makes a scatter of the loop, which takes three times as long.
                let [a, b, c, d, e, f, g, h]: [u32; QUADS] = bytemuck::cast(rounded.codes);
                let [qa, qb, qc, qd, qe, qf, qg, qh] = codes;
                (qa[row], qb[row], qc[row], qd[row]) = (a, b, c, d);
                (qe[row], qf[row], qg[row], qh[row]) = (e, f, g, h);
                for (part, sum) in rounded.sums.into_iter().enumerate() {
                    starts[part][row] = MAGIC.to_bits() as i32 - zero * sum as i32;
                    scales[part][row] = rounded.scale;
                    sums[part][row] = rounded.scale * sum;
                }
            }
        }
    }
}

/// Values that share a scale, in 8 bits.
struct Rounded<const PARTS: usize> {
    codes: [u8; X_GROUP],
    /// NaN where a value is not finite.
    scale: f32,
    /// The sums of the codes of each part.
    sums: [f32; PARTS],
}

impl<const PARTS: usize> Rounded<PARTS> {
    #[inline(always)]
    fn new<S: Simd>(simd: S, values: &[f32; X_GROUP]) -> Self {
        /// Values up to this magnitude count as zero: the reciprocal of their scale could overflow.
        const SMALLEST: f32 = 1e-35;
        let zero = simd.splat(0.0);
        let mut greatest = zero;
        for values in values.chunks_exact(S::LANES) {
            let v = simd.load(values);
            greatest = simd.max(greatest, simd.max(v, simd.sub(zero, v)));
        }
        let greatest = simd.max_lane(greatest);
        let factor = if greatest > SMALLEST { 127.0 / greatest } else { 0.0 };
        let mut rounded = Self { codes: [0; X_GROUP], scale: greatest * (1.0 / 127.0), sums: [0.0; PARTS] };
        let (factor, magic) = (simd.splat(factor), simd.splat(MAGIC));
        let size = X_GROUP / PARTS;
        let parts = values.chunks_exact(size).zip(rounded.codes.chunks_exact_mut(size));
        for ((values, codes), sum) in parts.zip(&mut rounded.sums) {
            let mut total = zero;
            for (values, codes) in values.chunks_exact(S::LANES).zip(codes.chunks_exact_mut(S::LANES)) {
                // The last place of the sum is 1, so that its lowest bits are the integer.
                let code = simd.mul_add(simd.load(values), factor, magic);
                simd.store_low_bytes(code, codes);
                total = simd.add(total, simd.sub(code, magic));
            }
            *sum = simd.sum(total);
        }
        // NaN times anything is NaN, and so is infinity times the factor of 0 that it gives.
        if !rounded.sums.iter().all(|sum| sum.is_finite()) {
            rounded.scale = f32::NAN;
        }
        rounded
    }
}
