//! The layout of weights for the CPU's products in integers, of small floats and in tiles of bf16.
//! Formats whose codes have at most 8 bits are repacked at load into panels of [`ROWS`] rows, so
//! that a vector of sums has a row per lane, whatever the format:
//!
//! ```text
//! codes   [panel][span][bit][64 bytes]         a span is 32 values of each of the panel's rows
//! scales  [panel][..][row]                     as the format stores them, a row per element
//! biases  [panel][..][row]                     what is added to a group; or, in superblocks, the scale of the scales
//! ```
//!
//! Within a span, quad q holds values 4q to 4q + 3 of all rows: byte 4r + i is value 4q + i of row
//! r, which is what a dot product of four bytes per lane reads. A vector of 64 bytes has whole
//! codes of as many quads as fit, the first one lowest; the bits that are left over hold, from the
//! first vector to the last, the codes of the last quads.
//!
//! ```text
//! 4 bits:  vector 0      1      2      3        6 bits:  vector 0     1     2     3     4     5
//!          +------+------+------+------+                 +-----+-----+-----+-----+-----+-----+
//!          | 1  0 | 3  2 | 5  4 | 7  6 |  quads          | 6 0 | 6 1 | 6 2 | 7 3 | 7 4 | 7 5 |  quads
//!          +------+------+------+------+                 +-----+-----+-----+-----+-----+-----+
//!     bit   7..4 3..0                               bit   7..6 5..0
//! ```
//! Rows are padded to whole panels within each matrix, values to whole spans, with zero codes and
//! scales.

mod bits;
mod pack;
mod unpack;

pub use pack::pack;
pub use unpack::{CHUNK, Chunk, PANELS, PanelScales, Unpack, ask_ahead, half_span};
// Kernels that multiply tiles decode panels themselves.
pub use unpack::with_bits;

use lowbit_formats::{Codes, FloatType, Format, Scales, Scheme};

/// Rows of a panel: lanes of the widest vector, and columns of a matrix unit's tile.
pub const ROWS: usize = 16;
/// Values of a row that are packed together.
pub const SPAN: usize = 32;
/// Quads of a span.
const QUADS: usize = SPAN / 4;
/// Values per superblock.
const SUPERBLOCK: usize = 256;

/// The places and contents of the panels of a weight's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    scheme: Scheme,
    /// Rows of each matrix.
    n: usize,
    /// Values per row.
    k: usize,
}

impl Layout {
    /// The layout of matrices `[n, k]`; `None` for formats whose codes are plain floats.
    pub fn of(format: Format, n: usize, k: usize) -> Option<Self> {
        let scheme = format.scheme();
        (!matches!(scheme.codes, Codes::Float(_))).then_some(Self { scheme, n, k })
    }

    /// True if codes are e4m3, which bytes of integers cannot say.
    pub fn minifloat(&self) -> bool {
        self.scheme.codes == Codes::E4M3
    }

    /// True if one of these codes is not a number.
    fn has_nan(&self, codes: &[u8]) -> bool {
        self.minifloat() && codes.iter().fold(0, |greatest, code| (code & 0x7f).max(greatest)) == 0x7f
    }

    /// Values per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Panels of each matrix.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(ROWS)
    }

    /// Spans of each row.
    pub fn spans(&self) -> usize {
        self.k.div_ceil(SPAN)
    }

    /// Values whose products are summed in integers: 16 or 32. They share a scale. (With 64, where
    /// 64 or more share one, prompts are a sixth faster, but rounding x to 8 bits costs twice as
    /// much of the demo model's perplexity.)
    pub fn group(&self) -> usize {
        self.scale_group().min(32)
    }

    /// Values that share a scale.
    fn scale_group(&self) -> usize {
        self.scheme.group_size().unwrap_or(32)
    }

    /// The unpacked code of value 0.
    pub fn zero(&self) -> i32 {
        match self.scheme.codes {
            Codes::Integer { zero } => zero as i32,
            Codes::E2M1 => unpack::E2M1_ZERO,
            Codes::Codebook(codebook) => unpack::codebook_zero(codebook),
            Codes::E4M3 | Codes::Float(_) => 0,
        }
    }

    /// Bits per packed code.
    pub fn bits(&self) -> usize {
        self.scheme.bits
    }

    /// The values of packed codes, if codes are not numbers.
    pub fn table(&self) -> Option<&'static [u8; 16]> {
        match self.scheme.codes {
            Codes::E2M1 => Some(&unpack::E2M1_TABLE),
            Codes::Codebook(codebook) => Some(&unpack::CODEBOOK_TABLES[codebook as usize]),
            _ => None,
        }
    }

    /// The greatest that an unpacked code can be.
    pub fn greatest_code(&self) -> u8 {
        match self.scheme.codes {
            Codes::Integer { .. } => (0xffu16 >> (8 - self.scheme.bits)) as u8,
            Codes::E2M1 => 2 * unpack::E2M1_ZERO as u8,
            Codes::Codebook(codebook) => 2 * codebook.greatest().min(127),
            _ => 255,
        }
    }

    /// True if unpacked codes are below 128, and then below 64.
    pub fn narrow(&self) -> bool {
        self.greatest_code() < 64
    }

    /// True if scales have more than 22 significant bits.
    pub fn long_scales(&self) -> bool {
        matches!(self.scheme.scales, Scales::Group { float: FloatType::F32, .. })
    }

    /// True if all of a panel's stored scales are below 2^100: products with larger ones overflow.
    fn are_small(&self, scales: &[u8]) -> bool {
        match self.scheme.scales {
            Scales::E8M0 { .. } => scales.iter().all(|&code| code < 127 + 100),
            Scales::Group { float, .. } => {
                // NaN makes products NaN in any case.
                !(0..scales.len() / float.size()).any(|i| float.get(scales, i).abs() >= 2f32.powi(100))
            }
            _ => true,
        }
    }

    /// True if something is added to groups.
    pub fn biased(&self) -> bool {
        self.scheme.biased()
    }

    /// Bytes per panel of the codes, the scales and the biases.
    pub fn bytes(&self) -> [usize; 3] {
        self.scheme.bytes(self.spans() * SPAN).map(|row| row * ROWS)
    }
}
