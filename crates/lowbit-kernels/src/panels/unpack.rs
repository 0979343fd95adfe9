//! From panels to what products multiply: a byte per code, an f32 per scale.

use super::{Layout, ROWS, SPAN, SUPERBLOCK};
use crate::simd::Simd;
use lowbit_formats::{CODEBOOK, Codes, E4M3, E8M0, FloatType, Minifloat, Scales};
use std::ops::Range;

/// Panels that are unpacked side by side.
pub(crate) const PANELS: usize = 2;
/// Values of each row that are unpacked at a time: with a few rows of x they stay in the first-level cache.
pub(crate) const CHUNK: usize = 256;
// A chunk of a format with superblocks has one scale of scales per row.
const _: () = assert!(CHUNK == SUPERBLOCK);

/// e2m1's values are halves of integers from -12 to 12: unpacked, 12 is added.
pub(super) const E2M1_ZERO: i32 = 12;
/// The codebook's values are from -127 to 113: unpacked, 128 is added.
pub(super) const CODEBOOK_ZERO: i32 = 128;

const E2M1_TABLE: [u8; 16] = {
    // 0, 0.5, 1, 1.5, 2, 3, 4 and 6, then their negatives.
    const DOUBLED: [i32; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut table = [0; 16];
    let mut i = 0;
    while i < 8 {
        table[i] = (E2M1_ZERO + DOUBLED[i]) as u8;
        table[i + 8] = (E2M1_ZERO - DOUBLED[i]) as u8;
        i += 1;
    }
    table
};

const CODEBOOK_TABLE: [u8; 16] = {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (CODEBOOK_ZERO + CODEBOOK[i] as i32) as u8;
        i += 1;
    }
    table
};

/// Up to [`CHUNK`] values of each row of [`PANELS`] panels: `value = (code - zero) * scale + bias`.
#[repr(C, align(64))]
pub(crate) struct Chunk {
    /// `[panel][quad][row][4]`
    pub codes: [[[u8; 4 * ROWS]; CHUNK / 4]; PANELS],
    /// `[panel][group][row]`, a group as [`Layout::group`] says
    pub scales: [[[f32; ROWS]; CHUNK / 16]; PANELS],
    /// `[panel][group][row]`
    pub biases: [[[f32; ROWS]; CHUNK / 16]; PANELS],
}

impl Chunk {
    /// Zeros, so that a panel that is not there adds nothing.
    pub fn new() -> Box<Self> {
        Box::new(Self {
            codes: [[[0; 4 * ROWS]; CHUNK / 4]; PANELS],
            scales: [[[0.0; ROWS]; CHUNK / 16]; PANELS],
            biases: [[[0.0; ROWS]; CHUNK / 16]; PANELS],
        })
    }
}

/// The components of a weight in panels.
#[derive(Clone, Copy)]
pub(crate) struct Unpack<'a> {
    pub layout: Layout,
    pub parts: [&'a [u8]; 3],
}

/// Bytes that codes are asked for ahead of their use: processors' own prefetchers stop at pages.
const AHEAD: usize = 2048;

impl Unpack<'_> {
    /// Unpacks the values from `k` on, a multiple of [`CHUNK`], of `count` panels from `panel` on: as many as a chunk or the
    /// rows have.
    #[inline(always)]
    pub fn unpack<S: Simd>(&self, simd: S, panel: usize, count: usize, k: usize, chunk: &mut Chunk) {
        let spans = k / SPAN..self.layout.spans().min((k + CHUNK) / SPAN);
        for at in 0..count {
            let len = spans.len() * SPAN;
            self.scales(simd, panel + at, k, len, (&mut chunk.scales[at], &mut chunk.biases[at]));
        }
        let codes = &mut chunk.codes[..count];
        match (self.layout.scheme.codes, self.layout.scheme.bits) {
            (Codes::E2M1, _) => self.lookup(simd, panel, spans, &E2M1_TABLE, codes),
            (Codes::Codebook, _) => self.lookup(simd, panel, spans, &CODEBOOK_TABLE, codes),
            (_, 2) => self.codes::<S, 2>(simd, panel, spans, codes),
            (_, 3) => self.codes::<S, 3>(simd, panel, spans, codes),
            (_, 4) => self.codes::<S, 4>(simd, panel, spans, codes),
            (_, 5) => self.codes::<S, 5>(simd, panel, spans, codes),
            (_, 6) => self.codes::<S, 6>(simd, panel, spans, codes),
            (_, 7) => self.codes::<S, 7>(simd, panel, spans, codes),
            (_, 8) => self.codes::<S, 8>(simd, panel, spans, codes),
            (_, bits) => unreachable!("no format has codes of {bits} bits"),
        }
    }

    /// Panels take turns span by span: memory is read faster from several places than from one.
    #[inline(always)]
    fn codes<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        panel: usize,
        spans: Range<usize>,
        out: &mut [[[u8; 4 * ROWS]; CHUNK / 4]],
    ) {
        let panel_bytes = self.layout.bytes()[0];
        for span in spans.clone() {
            for (at, out) in out.iter_mut().enumerate() {
                let first = (panel + at) * panel_bytes + span * BITS * 64;
                for line in 0..BITS {
                    simd.prefetch(self.parts[0], first + line * 64 + AHEAD);
                }
                let packed = self.parts[0][first..].as_chunks().0.first_chunk().expect("a span");
                let quads = (span - spans.start) * 8;
                split::<BITS>(packed, out[quads..].first_chunk_mut().expect("a span"));
            }
        }
    }

    #[inline(always)]
    fn lookup<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        spans: Range<usize>,
        table: &[u8; 16],
        out: &mut [[[u8; 4 * ROWS]; CHUNK / 4]],
    ) {
        let quads = spans.len() * 8;
        self.codes::<S, 4>(simd, panel, spans, out);
        for codes in out.iter_mut().flat_map(|out| &mut out[..quads]) {
            simd.lookup(table, codes);
        }
    }

    /// Cuts the scales of `chunk` to 22 significant bits, as [`Layout::long_scales`] says.
    #[inline(always)]
    pub fn cut_scales(&self, chunk: &mut Chunk) {
        for scale in chunk.scales.as_flattened_mut().as_flattened_mut() {
            *scale = f32::from_bits(scale.to_bits() & !3);
        }
    }

    /// The scales and biases of `len` values from `k` on.
    #[inline(always)]
    fn scales<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        k: usize,
        len: usize,
        (scales, biases): (&mut [[f32; ROWS]], &mut [[f32; ROWS]]),
    ) {
        let [_, scale_bytes, bias_bytes] = self.layout.bytes();
        let stored = &self.parts[1][panel * scale_bytes..][..scale_bytes];
        let extra = &self.parts[2][panel * bias_bytes..][..bias_bytes];
        let shift = self.layout.group().trailing_zeros();
        let (group, groups) = (k >> shift, len >> shift);
        match self.layout.scheme.scales {
            Scales::One => scales[..groups].fill([1.0; ROWS]),
            Scales::Group { float, size, biased } => {
                // Groups of 64 and 128 are several of 32.
                let shift = size.trailing_zeros() - shift;
                let first = |i: usize| ((group + i) >> shift) * ROWS * float.size();
                for (i, scale) in scales[..groups].iter_mut().enumerate() {
                    widen(simd, float, &stored[first(i)..], scale);
                }
                if biased {
                    for (i, bias) in biases[..groups].iter_mut().enumerate() {
                        widen(simd, float, &extra[first(i)..], bias);
                    }
                }
            }
            Scales::E8M0 { infinite } => {
                let codes = stored.as_chunks::<ROWS>().0;
                for (scale, codes) in scales.iter_mut().zip(&codes[group..][..groups]) {
                    for (scale, &code) in scale.iter_mut().zip(codes) {
                        *scale = half_power(code, infinite);
                    }
                }
            }
            Scales::E4M3 => {
                let codes = stored.as_chunks::<ROWS>().0;
                // A row may end within a span.
                for (scale, codes) in scales.iter_mut().zip(codes[group..].iter().take(groups)) {
                    for (scale, &code) in scale.iter_mut().zip(codes) {
                        // e2m1's values come doubled.
                        *scale = E4M3::decode(code) * 0.5;
                    }
                }
            }
            Scales::Super { .. } => {
                let codes = &stored.as_chunks::<ROWS>().0[group..][..groups];
                let d = super_scale(simd, extra, k / SUPERBLOCK);
                for (scale, codes) in scales.iter_mut().zip(codes) {
                    *scale = multiply(&d, codes, |code| f32::from(code as i8));
                }
            }
            Scales::SuperWithMinima { size: 16 } => {
                let codes = &stored.as_chunks::<ROWS>().0[group..][..groups];
                let [d, min] = super_scales(simd, extra, k / SUPERBLOCK);
                for ((scale, bias), codes) in scales.iter_mut().zip(biases).zip(codes) {
                    *scale = multiply(&d, codes, |code| f32::from(code & 15));
                    *bias = multiply(&min, codes, |code| -f32::from(code >> 4));
                }
            }
            Scales::SuperWithMinima { .. } => {
                let pairs = &stored.as_chunks::<ROWS>().0.as_chunks::<2>().0[group..][..groups];
                let [d, min] = super_scales(simd, extra, k / SUPERBLOCK);
                for ((scale, bias), pair) in scales.iter_mut().zip(biases).zip(pairs) {
                    *scale = multiply(&d, &pair[0], f32::from);
                    *bias = multiply(&min, &pair[1], |code| -f32::from(code));
                }
            }
        }
    }

    /// The values of row `row % ROWS` of a panel, `out` as long as the row, exactly as the format decodes them.
    #[inline(always)]
    pub fn row<S: Simd>(&self, simd: S, (panel, lane): (usize, usize), chunk: &mut Chunk, out: &mut [f32]) {
        let (zero, group, biased) = (self.layout.zero(), self.layout.group(), self.layout.biased());
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            self.unpack(simd, panel, 1, i * CHUNK, chunk);
            for (g, out) in out.chunks_mut(group).enumerate() {
                let (scale, bias) = (chunk.scales[0][g][lane], chunk.biases[0][g][lane]);
                for (q, out) in out.chunks_mut(4).enumerate() {
                    let codes = &chunk.codes[0][g * group / 4 + q][4 * lane..];
                    for (out, &code) in out.iter_mut().zip(codes) {
                        let value = (i32::from(code) - zero) as f32 * scale;
                        *out = if biased { value + bias } else { value };
                    }
                }
            }
        }
    }
}

/// A superblock's f16s, one per row.
#[inline(always)]
fn super_scale<S: Simd>(simd: S, stored: &[u8], index: usize) -> [f32; ROWS] {
    let mut out = [0.0; ROWS];
    widen(simd, FloatType::F16, &stored[index * ROWS * 2..], &mut out);
    out
}

/// A superblock's scale and what multiplies its minima.
#[inline(always)]
fn super_scales<S: Simd>(simd: S, stored: &[u8], block: usize) -> [[f32; ROWS]; 2] {
    [super_scale(simd, stored, 2 * block), super_scale(simd, stored, 2 * block + 1)]
}

/// `by * value(code)` of each row.
#[inline(always)]
fn multiply(by: &[f32; ROWS], codes: &[u8; ROWS], value: impl Fn(u8) -> f32) -> [f32; ROWS] {
    let mut out = [0.0; ROWS];
    for ((out, by), &code) in out.iter_mut().zip(by).zip(codes) {
        *out = by * value(code);
    }
    out
}

/// A float per row.
#[inline(always)]
fn widen<S: Simd>(simd: S, float: FloatType, stored: &[u8], out: &mut [f32; ROWS]) {
    let stored = &stored[..ROWS * float.size()];
    for at in (0..ROWS).step_by(S::LANES) {
        let v = match float {
            FloatType::F32 => simd.load(&bytemuck::cast_slice(stored)[at..]),
            FloatType::F16 => simd.load_f16(&bytemuck::cast_slice(stored)[at..]),
            FloatType::BF16 => simd.load_bf16(&bytemuck::cast_slice(stored)[at..]),
        };
        simd.store(v, &mut out[at..]);
    }
}

/// Half of what e8m0's `code` means, since e2m1's values come doubled.
#[inline(always)]
fn half_power(code: u8, infinite: bool) -> f32 {
    match u32::from(code) {
        255 if infinite => E8M0::decode(code),
        // 2^-127 and 2^-128 are subnormal.
        code @ 0..=1 => f32::from_bits(1 << (21 + code)),
        code => f32::from_bits((code - 1) << 23),
    }
}

/// The codes of a span from its bit planes. Quads are written out one by one: their shifts are constants then, which take a
/// third of the instructions of shifts by variables.
#[inline(always)]
fn split<const BITS: usize>(packed: &[[u8; 64]; BITS], out: &mut [[u8; 64]; 8]) {
    out[0] = quad::<BITS, 0>(packed);
    out[1] = quad::<BITS, 1>(packed);
    out[2] = quad::<BITS, 2>(packed);
    out[3] = quad::<BITS, 3>(packed);
    out[4] = quad::<BITS, 4>(packed);
    out[5] = quad::<BITS, 5>(packed);
    out[6] = quad::<BITS, 6>(packed);
    out[7] = quad::<BITS, 7>(packed);
}

/// The codes of quad `Q`.
#[inline(always)]
fn quad<const BITS: usize, const Q: usize>(packed: &[[u8; 64]; BITS]) -> [u8; 64] {
    let mut codes = [0; 64];
    plane::<BITS, Q, 8>(packed, &mut codes);
    plane::<BITS, Q, 4>(packed, &mut codes);
    plane::<BITS, Q, 2>(packed, &mut codes);
    plane::<BITS, Q, 1>(packed, &mut codes);
    codes
}

/// Adds to the codes of quad `Q` those bits that lie in the bit plane of `WIDTH` bits, if there is one.
#[inline(always)]
fn plane<const BITS: usize, const Q: usize, const WIDTH: usize>(
    packed: &[[u8; 64]; BITS],
    codes: &mut [u8; 64],
) {
    if BITS & WIDTH == 0 {
        return;
    }
    // It starts at the vector and at the bit where the wider ones end.
    let at = BITS & !(2 * WIDTH - 1);
    // By value: LLVM must assume that what is written overlaps what a reference is to.
    let bits = packed[at + Q * WIDTH / 8];
    let mask = (0xffu16 >> (8 - WIDTH)) as u8;
    for (code, bits) in codes.iter_mut().zip(bits) {
        *code |= (bits >> (Q * WIDTH % 8) & mask) << at;
    }
}
