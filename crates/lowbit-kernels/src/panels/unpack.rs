//! From panels to what products multiply: a byte per code, an f32 per scale.

use super::{Layout, ROWS, SPAN, SUPERBLOCK};
use crate::simd::Simd;
use lowbit_formats::{CODEBOOK, Codes, E4M3, E8M0, FloatType, Minifloat, Scales};

/// Panels that are unpacked side by side.
pub(crate) const PANELS: usize = 2;
/// Values of each row that are unpacked at a time: with a few rows of x they stay in the first-level cache.
pub(crate) const CHUNK: usize = 256;

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
const AHEAD: usize = 4096;

impl Unpack<'_> {
    /// Unpacks the values from `k` on, a multiple of [`CHUNK`], of `panel` into place `at` of `chunk`: as many as a chunk or
    /// the row has.
    #[inline(always)]
    pub fn unpack<S: Simd>(&self, simd: S, panel: usize, k: usize, chunk: &mut Chunk, at: usize) {
        let spans = k / SPAN..self.layout.spans().min((k + CHUNK) / SPAN);
        self.scales(panel, k, spans.len() * SPAN, &mut chunk.scales[at], &mut chunk.biases[at]);
        let codes = &mut chunk.codes[at];
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

    #[inline(always)]
    fn codes<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        panel: usize,
        spans: std::ops::Range<usize>,
        out: &mut [[u8; 4 * ROWS]],
    ) {
        let first = panel * self.layout.bytes()[0] + spans.start * BITS * 64;
        let packed = &self.parts[0][first..][..spans.len() * BITS * 64];
        for (span, (packed, out)) in
            packed.chunks_exact(BITS * 64).zip(out.as_chunks_mut::<8>().0).enumerate()
        {
            for line in 0..BITS {
                simd.prefetch(self.parts[0], first + (span * BITS + line) * 64 + AHEAD);
            }
            split::<BITS>(packed.as_chunks().0.first_chunk().expect("a span"), out);
        }
    }

    #[inline(always)]
    fn lookup<S: Simd>(
        &self,
        simd: S,
        panel: usize,
        spans: std::ops::Range<usize>,
        table: &[u8; 16],
        out: &mut [[u8; 4 * ROWS]],
    ) {
        let quads = spans.len() * 8;
        self.codes::<S, 4>(simd, panel, spans, out);
        for codes in &mut out[..quads] {
            simd.lookup(table, codes);
        }
    }

    /// Cuts the scales in place `at` of `chunk` to 22 significant bits, as [`Layout::long_scales`] says.
    #[inline(always)]
    pub fn cut_scales(&self, chunk: &mut Chunk, at: usize) {
        for scale in chunk.scales[at].as_flattened_mut() {
            *scale = f32::from_bits(scale.to_bits() & !3);
        }
    }

    /// The scales and biases of `len` values from `k` on.
    #[inline(always)]
    fn scales(
        &self,
        panel: usize,
        k: usize,
        len: usize,
        scales: &mut [[f32; ROWS]; CHUNK / 16],
        biases: &mut [[f32; ROWS]; CHUNK / 16],
    ) {
        let [_, scale_bytes, bias_bytes] = self.layout.bytes();
        let stored = &self.parts[1][panel * scale_bytes..][..scale_bytes];
        let extra = &self.parts[2][panel * bias_bytes..][..bias_bytes];
        let (group, groups) = (k / self.layout.group(), len / self.layout.group());
        match self.layout.scheme.scales {
            Scales::One => scales[..groups].fill([1.0; ROWS]),
            Scales::Group { float, size, biased } => {
                // Groups of 128 are two of 64.
                let repeat = size / self.layout.group();
                for (scale, i) in scales.iter_mut().zip(group..group + groups) {
                    float.widen(&stored[i / repeat * ROWS * float.size()..], scale);
                }
                if biased {
                    for (bias, i) in biases.iter_mut().zip(group..group + groups) {
                        float.widen(&extra[i / repeat * ROWS * float.size()..], bias);
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
            Scales::Super { size } => {
                let codes = stored.as_chunks::<ROWS>().0;
                for (i, (out, codes)) in scales.iter_mut().zip(&codes[group..][..groups]).enumerate() {
                    let block = super_scale(extra, (group + i) / (SUPERBLOCK / size));
                    for ((out, &code), block) in out.iter_mut().zip(codes).zip(block) {
                        *out = block * f32::from(code as i8);
                    }
                }
            }
            Scales::SuperWithMinima { size } => {
                let pairs = stored.as_chunks::<ROWS>().0;
                for (i, (scale, bias)) in scales.iter_mut().zip(biases).take(groups).enumerate() {
                    let block = 2 * ((group + i) / (SUPERBLOCK / size));
                    let (d, min) = (super_scale(extra, block), super_scale(extra, block + 1));
                    let (codes, minima, shift) = match size {
                        16 => (&pairs[group + i], &pairs[group + i], 4),
                        _ => (&pairs[2 * (group + i)], &pairs[2 * (group + i) + 1], 0),
                    };
                    let mask = if shift == 4 { 15 } else { 63 };
                    for lane in 0..ROWS {
                        scale[lane] = d[lane] * f32::from(codes[lane] & mask);
                        bias[lane] = -(min[lane] * f32::from(minima[lane] >> shift));
                    }
                }
            }
        }
    }

    /// The values of row `row % ROWS` of a panel, `out` as long as the row, exactly as the format decodes them.
    #[inline(always)]
    pub fn row<S: Simd>(&self, simd: S, (panel, lane): (usize, usize), chunk: &mut Chunk, out: &mut [f32]) {
        let (zero, group, biased) = (self.layout.zero(), self.layout.group(), self.layout.biased());
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            self.unpack(simd, panel, i * CHUNK, chunk, 0);
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
fn super_scale(stored: &[u8], index: usize) -> [f32; ROWS] {
    let mut out = [0.0; ROWS];
    FloatType::F16.widen(&stored[index * ROWS * 2..], &mut out);
    out
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

/// The codes of a span from its planes.
#[inline(always)]
fn split<const BITS: usize>(packed: &[[u8; 64]; BITS], out: &mut [[u8; 64]; 8]) {
    let mut from = 0;
    if BITS == 8 {
        *out = std::array::from_fn(|q| packed[q % BITS]);
        return;
    }
    if BITS & 4 != 0 {
        plane::<4, BITS>(packed, from, 0, out);
        from += 4;
    }
    if BITS & 2 != 0 {
        plane::<2, BITS>(packed, from, from, out);
        from += 2;
    }
    if BITS & 1 != 0 {
        plane::<1, BITS>(packed, from, from, out);
    }
}

/// Adds a plane of `WIDTH` bits, whose vectors start at `from`, to the codes, from bit `shift` on.
#[inline(always)]
fn plane<const WIDTH: usize, const BITS: usize>(
    packed: &[[u8; 64]; BITS],
    from: usize,
    shift: usize,
    out: &mut [[u8; 64]; 8],
) {
    let mask = ((1u16 << WIDTH) - 1) as u8;
    for (q, out) in out.iter_mut().enumerate() {
        let (vector, right) = (&packed[(from + q * WIDTH / 8) % BITS], q * WIDTH % 8);
        for (out, &bits) in out.iter_mut().zip(vector) {
            let code = (bits >> right & mask) << shift;
            *out = if shift == 0 { code } else { *out | code };
        }
    }
}
