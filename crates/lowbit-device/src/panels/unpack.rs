//! From panels to what products multiply: a byte per code, an f32 per scale.

use super::bits::{Bits, Piece};
use super::{Layout, QUADS, ROWS, SPAN, SUPERBLOCK};
use crate::simd::{Kernel, Simd};
use lowbit_formats::{Codebook, Codes, E4M3, FloatType, Minifloat, Scales};
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

/// Panels that are unpacked side by side.
pub const PANELS: usize = 2;
/// Values of each row that are unpacked at a time: with a few rows of x they stay in the
/// first-level cache.
pub const CHUNK: usize = 256;
// A chunk of a format with superblocks has one scale of scales per row.
const _: () = assert!(CHUNK == SUPERBLOCK);

/// e2m1's values are halves of integers from -12 to 12: unpacked, 12 is added.
pub(super) const E2M1_ZERO: i32 = 12;
/// Unpacked, a codebook's entries have their greatest magnitude added.
pub(super) const fn codebook_zero(codebook: Codebook) -> i32 {
    codebook.greatest() as i32
}

pub(super) const E2M1_TABLE: [u8; 16] = {
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

/// Of each of [`Codebook::ALL`], at its number.
pub(super) static CODEBOOK_TABLES: [[u8; 16]; Codebook::ALL.len()] = {
    let (mut tables, mut book) = ([[0; 16]; Codebook::ALL.len()], 0);
    while book < tables.len() {
        let (codebook, mut i) = (Codebook::ALL[book], 0);
        assert!(codebook as usize == book);
        while i < 16 {
            tables[book][i] = (codebook_zero(codebook) + codebook.entries()[i] as i32) as u8;
            i += 1;
        }
        book += 1;
    }
    tables
};

/// Up to [`CHUNK`] values of each row of [`PANELS`] panels: `value = (code - zero) * scale + bias`.
#[repr(C, align(64))]
pub struct Chunk {
    /// `[panel][quad][row][4]`
    pub codes: [[[u8; 4 * ROWS]; CHUNK / 4]; PANELS],
    /// Each panel's.
    pub panels: [PanelScales; PANELS],
}

/// The scales and biases of up to [`CHUNK`] values of each row of a panel.
#[repr(C, align(64))]
pub struct PanelScales {
    /// `[group][row]`, a group as [`Layout::group`] says
    pub scales: [[f32; ROWS]; CHUNK / 16],
    /// `[group][row]`
    pub biases: [[f32; ROWS]; CHUNK / 16],
}

impl PanelScales {
    /// Zeros.
    #[allow(clippy::new_without_default)] // A constant.
    pub const fn new() -> Self {
        Self { scales: [[0.0; ROWS]; CHUNK / 16], biases: [[0.0; ROWS]; CHUNK / 16] }
    }

    /// Cuts the scales to 22 significant bits, as [`Layout::long_scales`] says.
    #[inline(always)]
    pub fn cut(&mut self) {
        for scale in self.scales.as_flattened_mut() {
            *scale = f32::from_bits(scale.to_bits() & !3);
        }
    }
}

impl Chunk {
    /// Zeros, so that a panel that is not there adds nothing.
    pub fn new() -> Box<Self> {
        Box::new(Self {
            codes: [[[0; 4 * ROWS]; CHUNK / 4]; PANELS],
            panels: [const { PanelScales::new() }; PANELS],
        })
    }
}

/// The components of a weight in panels.
#[derive(Clone, Copy)]
pub struct Unpack<'a> {
    /// The places of its parts.
    pub layout: Layout,
    parts: [&'a [u8]; 3],
    /// Those of a second weight of this layout, whose panels are the odd ones.
    odd: Option<[&'a [u8]; 3]>,
    /// [`Layout::bytes`], which takes divisions: too slow for every span.
    bytes: [usize; 3],
    /// Of a chunk's scales and biases.
    chunk_bytes: [usize; 2],
}

/// Bytes that codes are asked for ahead of their use: processors' own prefetchers stop at pages.
const AHEAD: usize = 2048;

/// `$body` with the constant `$BITS`, the width of the codes of `$layout`.
#[macro_export]
macro_rules! with_bits {
    ($layout:expr, $BITS:ident => $body:expr) => {
        $crate::with_bits!($layout, $BITS => $body, 2 3 4 5 6 8)
    };
    ($layout:expr, $BITS:ident => $body:expr, $($bits:literal)*) => {
        match $layout.bits() {
            $($bits => {
                const $BITS: usize = $bits;
                $body
            })*
            bits => unreachable!("no format has codes of {bits} bits"),
        }
    };
}
pub use with_bits;

impl<'a> Unpack<'a> {
    /// Of a weight's codes, scales and biases.
    pub fn new(layout: Layout, parts: [&'a [u8]; 3]) -> Self {
        let bytes = layout.bytes();
        let values = (layout.spans() * SPAN).max(1);
        let chunk_bytes = [bytes[1], bytes[2]].map(|bytes| bytes * CHUNK / values);
        Self { layout, parts, odd: None, bytes, chunk_bytes }
    }

    /// This weight and `other` as one, whose panels are those of both in turn; `None` where they
    /// lie in different ways.
    pub fn in_turn(self, other: Self) -> Option<Self> {
        (self.layout == other.layout).then_some(Self { odd: Some(other.parts), ..self })
    }

    /// The components of the weight that panel `panel` is of, and which of that weight's panels it
    /// is.
    #[inline(always)]
    fn place(&self, panel: usize) -> (&[&'a [u8]; 3], usize) {
        match &self.odd {
            None => (&self.parts, panel),
            Some(odd) => (if panel.is_multiple_of(2) { &self.parts } else { odd }, panel / 2),
        }
    }

    /// Unpacks the values from `k` on, a multiple of [`CHUNK`], of `count` panels from `panel` on:
    /// as many as a chunk or the rows have.
    #[inline(always)]
    pub fn unpack<S: Simd>(&self, simd: S, panel: usize, count: usize, k: usize, chunk: &mut Chunk) {
        for (at, scales) in chunk.panels[..count].iter_mut().enumerate() {
            self.unpack_scales(simd, panel + at, k, scales);
        }
        self.unpack_codes(simd, panel, count, k, chunk);
    }

    /// The part of [`unpack`](Self::unpack) that unpacks the codes.
    #[inline(always)]
    pub fn unpack_codes<S: Simd>(&self, simd: S, panel: usize, count: usize, k: usize, chunk: &mut Chunk) {
        let (spans, codes) = (self.spans(k), &mut chunk.codes[..count]);
        with_bits!(self.layout, BITS => self.codes::<S, BITS>(simd, panel, spans, codes));
    }

    /// The codes of the chunk that is unpacked after the one that starts with value `k`, where
    /// [`PANELS`] panels are gone through side by side.
    #[inline(always)]
    pub fn next_codes(&self, panel: usize, k: usize) -> &'a [u8] {
        let (next, span_bytes) = (k + CHUNK, self.layout.bits() * 64);
        let (panel, k) = if next < self.layout.k() { (panel, next) } else { (panel + PANELS, 0) };
        let (parts, panel) = self.place(panel);
        let codes = parts[0].get(panel * self.bytes[0] + k / SPAN * span_bytes..).unwrap_or_default();
        &codes[..codes.len().min(CHUNK / SPAN * span_bytes)]
    }

    /// The spans of the chunk that starts with value `k`.
    #[inline(always)]
    pub fn spans(&self, k: usize) -> Range<usize> {
        k / SPAN..self.layout.spans().min((k + CHUNK) / SPAN)
    }

    /// The packed codes of a panel's spans.
    #[inline(always)]
    pub fn packed<const BITS: usize>(&self, panel: usize, spans: Range<usize>) -> &'a [[[u8; 64]; BITS]] {
        let (parts, panel) = self.place(panel);
        let panel = &parts[0][panel * self.bytes[0]..][..self.bytes[0]];
        &panel.as_chunks::<64>().0.as_chunks().0[spans]
    }

    /// The codes of one span of a panel, quad by quad, of the rows from `row` on: a vector of them.
    // The kernels of tiles read them.
    #[inline(always)]
    pub fn span<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        (panel, row): (usize, usize),
        span: usize,
    ) -> [S::I; QUADS] {
        let packed = &self.packed::<BITS>(panel, span..span + 1)[0];
        if row == 0 {
            ask_ahead::<S, BITS>(simd, packed, 0..QUADS);
        }
        let [a, b, c, d] = half_span::<S, BITS, 0>(simd, self.layout.table(), packed, row);
        let [e, f, g, h] = half_span::<S, BITS, 4>(simd, self.layout.table(), packed, row);
        [a, b, c, d, e, f, g, h]
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
        let (count, table) = (out.len().min(PANELS), self.layout.table());
        let mut packed: [&[[[u8; 64]; BITS]]; PANELS] = [&[]; PANELS];
        for (at, packed) in packed[..count].iter_mut().enumerate() {
            *packed = self.packed(panel + at, spans.clone());
        }
        for span in 0..spans.len() {
            for (packed, out) in packed[..count].iter().zip(&mut *out) {
                let packed = &packed[span];
                let out: &mut [[u8; 64]; QUADS] = out[span * QUADS..].first_chunk_mut().expect("a span");
                ask_ahead::<S, BITS>(simd, packed, 0..QUADS);
                for row in (0..ROWS).step_by(S::LANES) {
                    store_half(simd, &half_span::<S, BITS, 0>(simd, table, packed, row), row, &mut out[..4]);
                    store_half(simd, &half_span::<S, BITS, 4>(simd, table, packed, row), row, &mut out[4..]);
                }
            }
        }
    }

    /// Unpacks the scales and biases of a panel's values from `k` on, a multiple of [`CHUNK`].
    #[inline(always)]
    pub fn unpack_scales<S: Simd>(&self, simd: S, panel: usize, k: usize, out: &mut PanelScales) {
        simd.call(UnpackScales { weight: self, panel, k, out });
    }

    /// The values of row `row % ROWS` of a panel, `out` as long as the row, exactly as the format
    /// decodes them.
    #[inline(always)]
    pub fn row<S: Simd>(&self, simd: S, (panel, lane): (usize, usize), chunk: &mut Chunk, out: &mut [f32]) {
        let (zero, group, biased) = (self.layout.zero(), self.layout.group(), self.layout.biased());
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            self.unpack(simd, panel, 1, i * CHUNK, chunk);
            for (g, out) in out.chunks_mut(group).enumerate() {
                let panel = &chunk.panels[0];
                let (scale, bias) = (panel.scales[g][lane], panel.biases[g][lane]);
                for (q, out) in out.chunks_mut(4).enumerate() {
                    let codes = &chunk.codes[0][g * group / 4 + q][4 * lane..];
                    for (out, &code) in out.iter_mut().zip(codes) {
                        if self.layout.minifloat() {
                            // Of halves of scales.
                            *out = 2.0 * E4M3::decode(code) * scale;
                            continue;
                        }
                        let value = (i32::from(code) - zero) as f32 * scale;
                        *out = if biased { value + bias } else { value };
                    }
                }
            }
        }
    }
}

/// [`Unpack::unpack_scales`].
struct UnpackScales<'a> {
    weight: &'a Unpack<'a>,
    panel: usize,
    k: usize,
    out: &'a mut PanelScales,
}

impl Kernel for UnpackScales<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { weight, panel, k, out: PanelScales { scales, biases } } = self;
        let len = weight.spans(k).len() * SPAN;
        let [_, scale_bytes, bias_bytes] = weight.bytes;
        let (parts, panel) = weight.place(panel);
        // Those of the chunk after next.
        for ((stored, panel_bytes), chunk) in
            parts[1..].iter().zip(&weight.bytes[1..]).zip(weight.chunk_bytes)
        {
            for line in (0..chunk).step_by(64) {
                simd.prefetch(stored, panel * panel_bytes + chunk * (k / CHUNK + 2) + line);
            }
        }
        let stored = &parts[1][panel * scale_bytes..][..scale_bytes];
        let extra = &parts[2][panel * bias_bytes..][..bias_bytes];
        let shift = weight.layout.group().trailing_zeros();
        let (group, groups) = (k >> shift, len >> shift);
        match weight.layout.scheme.scales {
            Scales::One => scales[..groups].fill([1.0; ROWS]),
            Scales::Group { float, size, biased } => {
                // Groups of 64 and 128 are several of 32.
                let shift = size.trailing_zeros() - shift;
                let first = (group >> shift) * ROWS * float.size();
                widen(simd, float, &stored[first..], 1 << shift, &mut scales[..groups]);
                if matches!(weight.layout.scheme.codes, Codes::E2M1 | Codes::E4M3) {
                    // As those of microscaled formats.
                    scales[..groups].iter_mut().flatten().for_each(|scale| *scale *= 0.5);
                }
                if biased {
                    widen(simd, float, &extra[first..], 1 << shift, &mut biases[..groups]);
                }
            }
            Scales::E8M0 { infinite } => {
                let codes = stored.as_chunks::<ROWS>().0;
                for (scale, codes) in scales.iter_mut().zip(&codes[group..][..groups]) {
                    half_powers(simd, codes, infinite, scale);
                }
            }
            Scales::E4M3 => {
                let codes = stored.as_chunks::<ROWS>().0;
                // A row may end within a span.
                for (scale, codes) in scales.iter_mut().zip(codes[group..].iter().take(groups)) {
                    halves_of_e4m3(simd, codes, scale);
                }
            }
            Scales::Super { .. } => {
                let codes = &stored.as_chunks::<ROWS>().0[group..][..groups];
                let mut d = super_scale(simd, extra, k / SUPERBLOCK);
                if let Codes::Codebook(codebook) = weight.layout.scheme.codes {
                    d = d.map(|d| d * codebook.unit());
                }
                for (scale, codes) in scales.iter_mut().zip(codes) {
                    multiply::<S, true>(simd, &d, codes, scale);
                }
            }
            Scales::SuperWithMinima { size: 16 } => {
                let codes = &stored.as_chunks::<ROWS>().0[group..][..groups];
                let [d, min] = super_scales(simd, extra, k / SUPERBLOCK);
                for ((scale, bias), codes) in scales.iter_mut().zip(biases).zip(codes) {
                    multiply::<S, false>(simd, &d, &codes.map(|code| code & 15), scale);
                    multiply::<S, false>(simd, &min, &codes.map(|code| code >> 4), bias);
                }
            }
            Scales::SuperWithMinima { .. } => {
                let pairs = &stored.as_chunks::<ROWS>().0.as_chunks::<2>().0[group..][..groups];
                let [d, min] = super_scales(simd, extra, k / SUPERBLOCK);
                for ((scale, bias), pair) in scales.iter_mut().zip(biases).zip(pairs) {
                    multiply::<S, false>(simd, &d, &pair[0], scale);
                    multiply::<S, false>(simd, &min, &pair[1], bias);
                }
            }
        }
    }
}

/// A superblock's f16s, one per row.
#[inline(always)]
fn super_scale<S: Simd>(simd: S, stored: &[u8], index: usize) -> [f32; ROWS] {
    let mut out = [[0.0; ROWS]];
    widen(simd, FloatType::F16, &stored[index * ROWS * 2..], 1, &mut out);
    out[0]
}

/// A superblock's scale, and the negative of what multiplies its minima.
#[inline(always)]
fn super_scales<S: Simd>(simd: S, stored: &[u8], block: usize) -> [[f32; ROWS]; 2] {
    [super_scale(simd, stored, 2 * block), super_scale(simd, stored, 2 * block + 1).map(|min| -min)]
}

/// `out = by * code` of each row, `SIGNED` codes two's complements. In vectors: LLVM takes plain
/// loops apart row by row, not group by group, and then scatters what it computed.
#[inline(always)]
fn multiply<S: Simd, const SIGNED: bool>(
    simd: S,
    by: &[f32; ROWS],
    codes: &[u8; ROWS],
    out: &mut [f32; ROWS],
) {
    for at in (0..ROWS).step_by(S::LANES) {
        let code = if SIGNED { simd.load_i8(&codes[at..]) } else { simd.load_u8(&codes[at..]) };
        simd.store(simd.mul(simd.load(&by[at..]), code), &mut out[at..]);
    }
}

/// A float per row of each group; `count` groups share them, 1, 2 or 4.
#[inline(always)]
fn widen<S: Simd>(simd: S, float: FloatType, stored: &[u8], count: usize, out: &mut [[f32; ROWS]]) {
    /// A loop for each type and count: inside of one, choosing would take longer than loading.
    macro_rules! by {
        ($load:ident) => {
            match count {
                1 => by!($load, 1),
                2 => by!($load, 2),
                4 => by!($load, 4),
                count => unreachable!("no format has scales for {count} groups of 32"),
            }
        };
        ($load:ident, $count:literal) => {{
            let stored = bytemuck::cast_slice(&stored[..out.len().div_ceil($count) * ROWS * float.size()]);
            let mut stored = stored.chunks_exact(ROWS);
            let (whole, rest) = out.as_chunks_mut::<$count>();
            for (out, stored) in whole.iter_mut().zip(&mut stored) {
                for at in (0..ROWS).step_by(S::LANES) {
                    store_in_each(simd, simd.$load(&stored[at..]), out, at);
                }
            }
            // A row may end within what shares a scale.
            if let Some(stored) = stored.next() {
                for at in (0..ROWS).step_by(S::LANES) {
                    store_in_each(simd, simd.$load(&stored[at..]), rest, at);
                }
            }
        }};
    }
    match float {
        FloatType::F32 => by!(load),
        FloatType::F16 => by!(load_f16),
        FloatType::BF16 => by!(load_bf16),
    }
}

#[inline(always)]
fn store_in_each<S: Simd>(simd: S, v: S::V, out: &mut [[f32; ROWS]], at: usize) {
    for out in out {
        simd.store(v, &mut out[at..]);
    }
}

/// Halves of what e8m0's `codes` mean, since e2m1's values come doubled (and e4m3's are doubled for
/// that reason).
#[inline(always)]
fn half_powers<S: Simd>(simd: S, codes: &[u8; ROWS], infinite: bool, out: &mut [f32; ROWS]) {
    // The last code may mean infinity.
    let greatest = simd.splat(if infinite { f32::INFINITY } else { 2f32.powi(127) });
    for at in (0..ROWS).step_by(S::LANES) {
        let half = simd.mul(simd.load_e8m0(&codes[at..]), simd.splat(0.5));
        simd.store(simd.min(half, greatest), &mut out[at..]);
    }
}

/// Halves of what e4m3's `codes` mean. Its bits, in the places of f16's, are 2^-8 of that.
#[inline(always)]
fn halves_of_e4m3<S: Simd>(simd: S, codes: &[u8; ROWS], out: &mut [f32; ROWS]) {
    let mut bits = [0; ROWS];
    for (bits, &code) in bits.iter_mut().zip(codes) {
        let code = u16::from(code);
        *bits = (code << 8 & 0x8000) | (code << 7 & 0x3f80);
    }
    let magnitudes = codes.map(|code| code & 127);
    for at in (0..ROWS).step_by(S::LANES) {
        let v = simd.mul(simd.load_f16(&bytemuck::cast_slice(&bits)[at..]), simd.splat(128.0));
        // The greatest magnitude is NaN.
        let magnitude = simd.load_u8(&magnitudes[at..]);
        let v = simd.select_lt(magnitude, simd.splat(126.5), v, simd.splat(f32::NAN));
        simd.store(v, &mut out[at..]);
    }
}

/// Asks for the lines 2 KiB ahead of those that these quads of a span lie in.
#[inline(always)]
pub fn ask_ahead<S: Simd, const BITS: usize>(simd: S, packed: &[[u8; 64]; BITS], quads: Range<usize>) {
    for line in quads.start * BITS / 8..quads.end * BITS / 8 {
        simd.prefetch(packed.as_flattened(), line * 64 + AHEAD);
    }
    if BITS == 8 {
        // LLVM puts off what nothing waits for, and so many lines asked for together have to wait
        // for each other.
        compiler_fence(Ordering::SeqCst);
    }
}

/// The codes of four quads of a span, `FIRST` and those after it, or what `table` has for them: of
/// the rows from `row` on, a vector of them. Quads are written out one by one, so that by how much
/// they are shifted is known to the compiler.
#[inline(always)]
pub fn half_span<S: Simd, const BITS: usize, const FIRST: usize>(
    simd: S,
    table: Option<&[u8; 16]>,
    packed: &[[u8; 64]; BITS],
    row: usize,
) -> [S::I; 4] {
    let mut codes = [
        quad::<S, BITS>(simd, packed, (FIRST, row)),
        quad::<S, BITS>(simd, packed, (FIRST + 1, row)),
        quad::<S, BITS>(simd, packed, (FIRST + 2, row)),
        quad::<S, BITS>(simd, packed, (FIRST + 3, row)),
    ];
    if let Some(table) = table {
        // Not by `map`, which is not inlined.
        for codes in &mut codes {
            *codes = simd.lookup(table, *codes);
        }
    }
    codes
}

/// Writes these rows of half a span.
#[inline(always)]
fn store_half<S: Simd>(simd: S, codes: &[S::I; 4], row: usize, out: &mut [[u8; 64]]) {
    for (&codes, out) in codes.iter().zip(out) {
        simd.store_bytes(codes, &mut out[4 * row..]);
    }
}

/// The codes of a quad, of the rows from `row` on. (No closures: those are not always inlined, and
/// then know no vectors.)
#[inline(always)]
fn quad<S: Simd, const BITS: usize>(simd: S, packed: &[[u8; 64]; BITS], (quad, row): (usize, usize)) -> S::I {
    let [first, second, third] = Bits::<BITS>::PIECES[quad];
    let mut codes = piece(simd, packed, first, row);
    if second.width > 0 {
        codes = simd.or(codes, piece(simd, packed, second, row));
    }
    if third.width > 0 {
        codes = simd.or(codes, piece(simd, packed, third, row));
    }
    codes
}

/// A piece of a quad's codes, where it belongs in them.
#[inline(always)]
fn piece<S: Simd, const BITS: usize>(simd: S, packed: &[[u8; 64]; BITS], piece: Piece, row: usize) -> S::I {
    let bytes = simd.load_bytes(&packed[piece.vector][4 * row..]);
    if BITS == 8 {
        return bytes;
    }
    simd.move_bits(bytes, piece.to as i32 - piece.at as i32, piece.mask() << piece.to)
}
