//! The layout of weights on a GPU. Every format is repacked at upload into the same three
//! components, so that kernels know one way to load:
//!
//! ```text
//! codes   u32 [N, K/32 * bits]  each row one stream of codes, least significant bit first, as MLX affine has it
//! scales  [N, ..]               what multiplies a group of codes
//! biases  [N, ..]               what is added to a group; or, in superblocks, the scale of the scales
//! ```
//!
//! MLX's formats lie so already and are uploaded as they are. GGML's blocks are taken apart: their
//! 18, 34 or 210 bytes keep a GPU from loading 16 aligned bytes per unit. `lowbit-formats` says
//! what a block's bits mean ([`Unpacked`]); this file says where they go. Rows are padded with
//! zeros to whole runs of [`RUN`].

use lowbit_formats::{BlockScales, Format, Parts, Scheme, Unpacked};
pub use lowbit_formats::{Codes, Scales};
use rayon::prelude::*;
use std::borrow::Cow;

/// Values that a unit decodes at a time.
pub const RUN: usize = 32;

/// A format as kernels know it at compile time: its [`Scheme`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Bits per code.
    pub bits: usize,
    /// The meaning of codes.
    pub codes: Codes,
    /// Their scales.
    pub scales: Scales,
}

impl Layout {
    /// The layout of `format`.
    pub fn of(format: Format) -> Self {
        let Scheme { bits, codes, scales } = format.scheme();
        Self { bits, codes, scales }
    }

    /// Values of a run that share a scale.
    pub fn group(self) -> usize {
        self.group_within(RUN)
    }

    /// Groups of a run.
    pub fn groups(self) -> usize {
        RUN / self.group()
    }

    /// Of `values` values that are decoded together (one run or several), how many share a scale.
    pub fn group_within(self, values: usize) -> usize {
        let size = match self.scales {
            Scales::One | Scales::E8M0 { .. } => RUN,
            Scales::E4M3 => 16,
            Scales::Group { size, .. } | Scales::Super { size } | Scales::SuperWithMinima { size } => size,
        };
        size.min(values)
    }

    /// True if something is added to groups.
    pub fn biased(self) -> bool {
        matches!(self.scales, Scales::Group { biased: true, .. } | Scales::SuperWithMinima { .. })
    }

    /// Bytes per element of the scales and of the biases; 4 where there are none.
    pub fn scale_sizes(self) -> (usize, usize) {
        match self.scales {
            Scales::One => (4, 4),
            Scales::Group { float, .. } => (float.size(), float.size()),
            Scales::E8M0 { .. } | Scales::E4M3 => (1, 4),
            Scales::Super { size } => (RUN / size, 2),
            Scales::SuperWithMinima { .. } => (2, 4),
        }
    }

    /// Elements of the scales and of the biases for `runs` runs of a row, a whole number of groups.
    pub fn elements(self, runs: usize) -> (usize, usize) {
        let Self { bits, codes, scales } = self;
        let [_, of_scales, of_biases] = Scheme { bits, codes, scales }.bytes(runs * RUN);
        let (scale, bias) = self.scale_sizes();
        (of_scales / scale, of_biases / bias)
    }

    /// The words of codes per load: a run is a whole number of loads.
    pub fn vector(self) -> usize {
        1 << self.bits.trailing_zeros().min(2)
    }
}

/// Bytes of the three components of `n` rows of `k` values, as [`repack`] gives them.
pub fn repacked_bytes(format: Format, n: usize, k: usize) -> [usize; 3] {
    format.scheme().bytes(k.next_multiple_of(RUN)).map(|row| n * row)
}

/// The three components of `n` rows of `k` values, repacked.
pub fn repack<'a>(format: Format, parts: &Parts<'a>, n: usize, k: usize) -> [Cow<'a, [u8]>; 3] {
    if let Some(unpack) = format.unpack() {
        let components = format.components(format.block()).expect("a block is a whole number of blocks");
        let block_bytes = components[0].row_bytes();
        let repack = Repack { layout: Layout::of(format), unpack, values: format.block(), block_bytes };
        return repack.blocks(parts[0]);
    }
    let padded = k.next_multiple_of(RUN);
    parts.map(|part| match k {
        _ if k == padded || part.is_empty() || n == 0 => Cow::Borrowed(part),
        // Whatever is not padded to a whole run lies a fixed number of bytes per block.
        _ => {
            let row = part.len() / n;
            let padding = vec![0; row / (k / format.block()) * (padded / format.block()) - row];
            Cow::Owned(part.chunks_exact(row).flat_map(|row| [row, &padding]).flatten().copied().collect())
        }
    })
}

/// The repacking of blocks of bytes.
struct Repack {
    layout: Layout,
    unpack: fn(&[u8], &mut Unpacked),
    /// Values per block.
    values: usize,
    block_bytes: usize,
}

impl Repack {
    fn blocks(&self, bytes: &[u8]) -> [Cow<'static, [u8]>; 3] {
        /// Blocks per task.
        const TASK: usize = 1 << 12;
        let tasks: Vec<[Vec<u8>; 3]> = bytes
            .par_chunks(self.block_bytes * TASK)
            .map(|bytes| {
                let (mut components, mut block) = (<[Vec<u8>; 3]>::default(), Unpacked::default());
                for bytes in bytes.chunks_exact(self.block_bytes) {
                    (self.unpack)(bytes, &mut block);
                    self.push_codes(&block.codes[..self.values], &mut components[0]);
                    let [_, scales, biases] = &mut components;
                    self.push_scales(&block.scales, scales, biases);
                }
                components
            })
            .collect();
        std::array::from_fn(|i| tasks.iter().flat_map(|components| &components[i]).copied().collect())
    }

    /// Eight codes fill `bits` bytes.
    fn push_codes(&self, codes: &[u8], out: &mut Vec<u8>) {
        let bits = self.layout.bits;
        for codes in codes.as_chunks::<8>().0 {
            let packed = codes.iter().rfold(0, |packed, &code| packed << bits | u64::from(code));
            out.extend(&packed.to_le_bytes()[..bits]);
        }
    }

    /// One block's elements of the scales and biases, as [`super::decode::scale_of`] and
    /// [`super::decode::bias_of`] read them.
    fn push_scales(&self, block: &BlockScales, scales: &mut Vec<u8>, biases: &mut Vec<u8>) {
        let BlockScales { scale, min, sub_scales, sub_minima } = block;
        match self.layout.scales {
            Scales::Group { biased, .. } => {
                scales.extend(scale.to_le_bytes());
                if biased {
                    biases.extend(min.to_le_bytes());
                }
            }
            Scales::E8M0 { .. } => scales.push(*scale as u8),
            Scales::E4M3 => scales.extend(sub_scales[..self.values / 16].iter().map(|&scale| scale as u8)),
            Scales::Super { size } => {
                scales.extend(sub_scales[..self.values / size].iter().map(|&scale| scale as u8));
                biases.extend(scale.to_le_bytes());
            }
            Scales::SuperWithMinima { size } => {
                for (&scale, &min) in sub_scales.iter().zip(sub_minima).take(self.values / size) {
                    let (scale, min) = (scale as u8, min as u8);
                    match size {
                        // Two sub-blocks per run, in 16 bits.
                        16 => scales.push(scale | min << 4),
                        _ => scales.extend([scale, min]),
                    }
                }
                biases.extend(scale.to_le_bytes());
                biases.extend(min.to_le_bytes());
            }
            Scales::One => unreachable!("no format has blocks with such scales"),
        }
    }
}

/// Evaluates `$body` with the types `$s` and `$b` standing for the elements of a layout's scales
/// and biases.
#[macro_export]
macro_rules! with_components {
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
pub use with_components;

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit_formats::{E2M1, E4M3, E8M0, FloatType, Minifloat};

    /// Values per superblock.
    const SUPERBLOCK: usize = 256;

    /// Value `i` of a row, read from the row's components as kernels do, but with a host's
    /// arithmetic.
    fn value(layout: Layout, [codes, scales, biases]: [&[u8]; 3], i: usize) -> f32 {
        let bit = |b: usize| u32::from(codes[b / 8] >> (b % 8) & 1);
        let code = (0..layout.bits).map(|b| bit(i * layout.bits + b) << b).sum::<u32>();
        let f16_at = |bytes: &[u8], index: usize| FloatType::F16.get(bytes, index);
        let value = match layout.codes {
            Codes::Integer { zero } => (code as i32 - zero as i32) as f32,
            Codes::E2M1 => E2M1::decode(code as u8),
            Codes::E4M3 => E4M3::decode(code as u8),
            Codes::Codebook(codebook) => codebook.values()[code as usize],
            Codes::Float(float) => float.get(&code.to_le_bytes(), 0),
        };
        match layout.scales {
            Scales::One => value,
            Scales::Group { float, size, biased } => {
                let scaled = value * float.get(scales, i / size);
                if biased { scaled + float.get(biases, i / size) } else { scaled }
            }
            // 2^128 is no f32, but half a subnormal code times it may be one.
            Scales::E8M0 { infinite: false } => {
                (f64::from(value) * 2f64.powi(i32::from(scales[i / RUN]) - 127)) as f32
            }
            Scales::E8M0 { infinite: true } => value * E8M0::decode(scales[i / RUN]),
            Scales::E4M3 => value * E4M3::decode(scales[i / 16]),
            Scales::Super { size } => {
                let scale = f16_at(biases, i / SUPERBLOCK) * f32::from(scales[i / size] as i8);
                scale * value
            }
            Scales::SuperWithMinima { size } => {
                let (scale, min) = match size {
                    16 => (scales[i / 16] & 15, scales[i / 16] >> 4),
                    _ => (scales[i / 32 * 2], scales[i / 32 * 2 + 1]),
                };
                let block = i / SUPERBLOCK * 2;
                let scale = f16_at(biases, block) * f32::from(scale);
                scale * value - f16_at(biases, block + 1) * f32::from(min)
            }
        }
    }

    fn formats() -> impl Iterator<Item = Format> {
        let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
        floats.into_iter().flat_map(|float| Format::all().map(move |format| format.with_float(float)))
    }

    /// Of random bytes, so that every bit of a block counts. nvfp4's and plain floats' rows are no
    /// whole runs.
    #[test]
    fn repacked_weights_decode_as_their_formats_do() {
        for format in formats() {
            let (n, k) = (5, format.block() * 5);
            let mut random = numcheck::Random::new(3);
            let components = format.components(k).unwrap();
            let bytes: Vec<Vec<u8>> = components
                .iter()
                .map(|component| (0..n * component.row_bytes()).map(|_| random.bits() as u8).collect())
                .collect();
            let parts = std::array::from_fn(|i| bytes.get(i).map_or(&[][..], Vec::as_slice));
            let mut want = vec![0.0; n * k];
            format.decode(&parts, n, k, &mut want).unwrap();
            let layout = Layout::of(format);
            let repacked = repack(format, &parts, n, k);
            let lengths = repacked.each_ref().map(|component| component.len());
            assert_eq!(lengths, repacked_bytes(format, n, k), "{format}");
            let row_bytes = lengths.map(|length| length / n);
            for row in 0..n {
                let row_of = |c: usize| &repacked[c][row * row_bytes[c]..][..row_bytes[c]];
                let components = [row_of(0), row_of(1), row_of(2)];
                for (i, &want) in want[row * k..][..k].iter().enumerate() {
                    let got = value(layout, components, i);
                    // -0 is 0: ggml's MXFP4 and NVFP4 have no -0.
                    assert!(
                        got == want || got.is_nan() && want.is_nan(),
                        "{format} [{row}, {i}]: {got}, {want}"
                    );
                }
            }
        }
    }
}
