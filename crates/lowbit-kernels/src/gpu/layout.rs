//! How weights lie on a GPU. Every format becomes the same three planes, so that kernels know one way to load:
//!
//! ```text
//! codes   u32 [N, K/32 * bits]  each row one stream of codes, least significant bit first, as MLX affine has it
//! scales  [N, ..]               what a group of codes is multiplied with
//! biases  [N, ..]               what is added to a group; or, of superblocks, the scale of the scales
//! ```
//!
//! MLX's formats lie so already and are uploaded as they are. GGML's blocks are taken apart on the way: their 18, 34
//! or 210 bytes keep a GPU from loading 16 aligned bytes a unit. Rows are padded with zeros to whole runs of [`RUN`].

use lowbit_formats::{FloatType, Format, Parts};
use rayon::prelude::*;
use std::borrow::Cow;

/// Values that a unit decodes at a time.
pub(crate) const RUN: usize = 32;
/// Values of a K-quant's superblock.
const SUPERBLOCK: usize = 256;

/// What kernels know of a format at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    /// Bits a code.
    pub bits: usize,
    /// What codes mean.
    pub codes: Codes,
    /// What multiplies them.
    pub scales: Scales,
}

/// What codes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Codes {
    /// `code - zero`.
    Integer { zero: u32 },
    /// e2m1.
    E2M1,
    /// The codebook of IQ4_NL.
    Codebook,
    /// e4m3.
    E4M3,
    /// The bits of a float.
    Float(FloatType),
}

/// What multiplies codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    /// Nothing.
    One,
    /// A float a group, and another that is added.
    Group { float: FloatType, size: usize, biased: bool },
    /// `2^(code - 127)` a run; code 255 means infinity, or 2^128.
    E8M0 { infinite: bool },
    /// e4m3 for 16 values.
    E4M3,
    /// A signed byte for `size` values, times a float a superblock.
    Super { size: usize },
    /// 4 or 8 bits each of scale and minimum for `size` values, times two floats a superblock.
    SuperWithMinima { size: usize },
}

impl Layout {
    /// The layout of `format`.
    pub fn of(format: Format) -> Self {
        let block = |bits, zero, biased| Self {
            bits,
            codes: Codes::Integer { zero },
            scales: Scales::Group { float: FloatType::F16, size: 32, biased },
        };
        let superblock = |bits, zero, scales| Self { bits, codes: Codes::Integer { zero }, scales };
        match format {
            Format::Float(float) => {
                Self { bits: 8 * float.size(), codes: Codes::Float(float), scales: Scales::One }
            }
            Format::Affine { bits, group_size, scales: float, .. } => Self {
                bits: bits.into(),
                codes: Codes::Integer { zero: 0 },
                scales: Scales::Group { float, size: group_size.into(), biased: true },
            },
            Format::Mxfp4 => Self { bits: 4, codes: Codes::E2M1, scales: Scales::E8M0 { infinite: true } },
            Format::MXFP4 => Self { bits: 4, codes: Codes::E2M1, scales: Scales::E8M0 { infinite: false } },
            Format::Mxfp8 => Self { bits: 8, codes: Codes::E4M3, scales: Scales::E8M0 { infinite: true } },
            Format::Nvfp4 => Self { bits: 4, codes: Codes::E2M1, scales: Scales::E4M3 },
            Format::Q4_0 => block(4, 8, false),
            Format::Q4_1 => block(4, 0, true),
            Format::Q5_0 => block(5, 16, false),
            Format::Q5_1 => block(5, 0, true),
            Format::Q8_0 => block(8, 128, false),
            Format::Q2_K => superblock(2, 0, Scales::SuperWithMinima { size: 16 }),
            Format::Q3_K => superblock(3, 4, Scales::Super { size: 16 }),
            Format::Q4_K => superblock(4, 0, Scales::SuperWithMinima { size: 32 }),
            Format::Q5_K => superblock(5, 0, Scales::SuperWithMinima { size: 32 }),
            Format::Q6_K => superblock(6, 32, Scales::Super { size: 16 }),
            Format::IQ4_NL => Self { codes: Codes::Codebook, ..block(4, 0, false) },
            Format::IQ4_XS => Self { bits: 4, codes: Codes::Codebook, scales: Scales::Super { size: 32 } },
        }
    }

    /// Values of a run that share a scale.
    pub fn group(self) -> usize {
        self.group_within(RUN)
    }

    /// Values that share a scale, of so many that are taken together: one run or several.
    pub fn group_within(self, values: usize) -> usize {
        let size = match self.scales {
            Scales::One | Scales::E8M0 { .. } => RUN,
            Scales::E4M3 => 16,
            Scales::Group { size, .. } | Scales::Super { size } | Scales::SuperWithMinima { size } => size,
        };
        size.min(values)
    }

    /// Whether something is added to groups.
    pub fn biased(self) -> bool {
        matches!(self.scales, Scales::Group { biased: true, .. } | Scales::SuperWithMinima { .. })
    }

    /// Bytes an element of the planes of scales and biases; 4 where there are none.
    pub fn scale_sizes(self) -> (usize, usize) {
        match self.scales {
            Scales::One => (4, 4),
            Scales::Group { float, .. } => (float.size(), float.size()),
            Scales::E8M0 { .. } | Scales::E4M3 => (1, 4),
            Scales::Super { size } => (RUN / size, 2),
            Scales::SuperWithMinima { .. } => (2, 4),
        }
    }

    /// Elements of the planes of scales and of biases for `runs` runs of a row, a whole number of groups.
    pub fn elements(self, runs: usize) -> (usize, usize) {
        match self.scales {
            Scales::One => (0, 0),
            Scales::E8M0 { .. } => (runs, 0),
            Scales::E4M3 => (2 * runs, 0),
            Scales::Group { size, biased, .. } => {
                let groups = runs * RUN / size;
                (groups, if biased { groups } else { 0 })
            }
            Scales::Super { .. } | Scales::SuperWithMinima { .. } => (runs, runs / 8),
        }
    }

    /// How many words of codes one load moves: a run is a whole number of loads.
    pub fn vector(self) -> usize {
        1 << self.bits.trailing_zeros().min(2)
    }
}

/// The planes of `n` rows of `k` values.
pub(crate) fn planes<'a>(format: Format, parts: &Parts<'a>, n: usize, k: usize) -> [Cow<'a, [u8]>; 3] {
    if let Some(block) = Block::of(format) {
        return block.planes(parts[0]);
    }
    let padded = k.next_multiple_of(RUN);
    parts.map(|part| match k {
        _ if k == padded || part.is_empty() || n == 0 => Cow::Borrowed(part),
        // Whatever is not padded to a whole run lies a fixed number of bytes a block.
        _ => {
            let row = part.len() / n;
            let padding = vec![0; row / (k / format.block()) * (padded / format.block()) - row];
            Cow::Owned(part.chunks_exact(row).flat_map(|row| [row, &padding]).flatten().copied().collect())
        }
    })
}

/// How a GGML block of bytes is taken apart.
struct Block {
    values: usize,
    bytes: usize,
    bits: usize,
    /// Code i.
    code: fn(&[u8], usize) -> u8,
    /// Appends the block's scales.
    scales: fn(&[u8], &mut Vec<u8>),
    /// Appends the block's biases, or the scales of its scales.
    biases: fn(&[u8], &mut Vec<u8>),
}

impl Block {
    fn of(format: Format) -> Option<Self> {
        let block = |bytes, code, scales: fn(&[u8], &mut Vec<u8>)| Self {
            values: 32,
            bytes,
            bits: Layout::of(format).bits,
            code,
            scales,
            biases: |_, _| (),
        };
        let superblock = |bytes, code, scales, biases| Self {
            values: SUPERBLOCK,
            bytes,
            bits: Layout::of(format).bits,
            code,
            scales,
            biases,
        };
        let with_min: fn(&[u8], &mut Vec<u8>) = |block, out| out.extend(&block[2..4]);
        Some(match format {
            Format::Q4_0 | Format::IQ4_NL => block(18, |b, i| nibble(&b[2..], i), scale),
            Format::Q4_1 => Self { biases: with_min, ..block(20, |b, i| nibble(&b[4..], i), scale) },
            Format::Q5_0 => block(22, |b, i| nibble(&b[6..], i) | bit(&b[2..], i) << 4, scale),
            Format::Q5_1 => Self {
                biases: with_min,
                ..block(24, |b, i| nibble(&b[8..], i) | bit(&b[4..], i) << 4, scale)
            },
            Format::Q8_0 => block(34, |b, i| b[2 + i] ^ 0x80, scale),
            Format::MXFP4 => block(17, |b, i| nibble(&b[1..], i), |b, out| out.push(b[0])),
            Format::Q2_K => superblock(
                84,
                |b, i| pair(&b[16..], i),
                |b, out| out.extend(&b[..16]),
                |b, out| out.extend(&b[80..84]),
            ),
            Format::Q3_K => superblock(
                110,
                |b, i| pair(&b[32..], i) | (b[i % 32] >> (i / 32) & 1) << 2,
                |b, out| out.extend((0..16).map(|s| q3_scale(&b[96..108], s))),
                |b, out| out.extend(&b[108..110]),
            ),
            Format::Q4_K => {
                superblock(144, |b, i| half(&b[16..], i), |b, out| sub_scales(&b[4..16], out), scale_and_min)
            }
            Format::Q5_K => superblock(
                176,
                |b, i| half(&b[48..], i) | (b[16 + i % 32] >> (i / 32) & 1) << 4,
                |b, out| sub_scales(&b[4..16], out),
                scale_and_min,
            ),
            Format::Q6_K => superblock(
                210,
                |b, i| b[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15 | pair(&b[128..], i) << 4,
                |b, out| out.extend(&b[192..208]),
                |b, out| out.extend(&b[208..210]),
            ),
            Format::IQ4_XS => superblock(
                136,
                |b, i| nibble(&b[8 + i / 32 * 16..], i % 32),
                |b, out| out.extend((0..8).map(|s| iq4_xs_scale(b, s))),
                scale,
            ),
            Format::Float(_) | Format::Affine { .. } | Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => {
                return None;
            }
        })
    }

    fn planes(&self, bytes: &[u8]) -> [Cow<'static, [u8]>; 3] {
        /// Blocks that one task takes apart.
        const TASK: usize = 1 << 12;
        let tasks: Vec<[Vec<u8>; 3]> = bytes
            .par_chunks(self.bytes * TASK)
            .map(|bytes| {
                let mut planes: [Vec<u8>; 3] = Default::default();
                for block in bytes.chunks_exact(self.bytes) {
                    let [codes, scales, biases] = &mut planes;
                    // Eight codes fill `bits` bytes.
                    for first in (0..self.values).step_by(8) {
                        let code = |i| u64::from((self.code)(block, first + i)) << (i * self.bits);
                        codes.extend(&(0..8).map(code).sum::<u64>().to_le_bytes()[..self.bits]);
                    }
                    (self.scales)(block, scales);
                    (self.biases)(block, biases);
                }
                planes
            })
            .collect();
        std::array::from_fn(|plane| tasks.iter().flat_map(|planes| &planes[plane]).copied().collect())
    }
}

fn scale(block: &[u8], out: &mut Vec<u8>) {
    out.extend(&block[..2]);
}

fn scale_and_min(block: &[u8], out: &mut Vec<u8>) {
    out.extend(&block[..4]);
}

/// Of 32 codes: byte j holds code j (low) and code j + 16 (high).
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

/// Of 256 codes: byte 32 h + j holds code 64 h + j (low) and code 64 h + 32 + j (high).
fn half(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15
}

/// Of 256 codes: bits 2j of byte 32 h + l hold code 128 h + 32 j + l.
fn pair(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3
}

fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// Q4_K's and Q5_K's scales and minima, a byte each.
fn sub_scales(packed: &[u8], out: &mut Vec<u8>) {
    for s in 0..8 {
        out.extend(match s {
            0..4 => [packed[s] & 63, packed[s + 4] & 63],
            _ => [packed[s + 4] & 15 | packed[s - 4] >> 6 << 4, packed[s + 4] >> 4 | packed[s] >> 6 << 4],
        });
    }
}

/// Q3_K's scale s, as a signed byte.
fn q3_scale(packed: &[u8], s: usize) -> u8 {
    let low = packed[s % 8] >> (s / 8 * 4) & 15;
    let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
    (low | high << 4).wrapping_sub(32)
}

/// IQ4_XS's scale s, as a signed byte.
fn iq4_xs_scale(block: &[u8], s: usize) -> u8 {
    let low = block[4 + s / 2] >> (s % 2 * 4) & 15;
    let high = block[2 + s / 4] >> (s % 4 * 2) & 3;
    (low | high << 4).wrapping_sub(32)
}

/// Evaluates `$body` with the types `$s` and `$b` standing for what a layout's planes of scales and biases hold.
macro_rules! with_planes {
    ($layout:expr, $s:ident, $b:ident => $body:expr) => {{
        macro_rules! with {
            ($scales:ty, $biases:ty) => {{
                type $s = $scales;
                type $b = $biases;
                $body
            }};
        }
        match $layout.scale_sizes() {
            (1, 2) => with!(u8, u16),
            (1, _) => with!(u8, u32),
            (2, 2) => with!(u16, u16),
            (2, _) => with!(u16, u32),
            _ => with!(u32, u32),
        }
    }};
}
pub(crate) use with_planes;
