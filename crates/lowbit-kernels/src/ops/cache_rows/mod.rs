//! The rows of key-value caches: floats, or integers of 8 bits with scales.

mod cpu;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::{DType, FloatType};

pub(crate) use cpu::{Int8, Stored};

/// The type of cached keys and values.
///
/// A row of [`CacheType::Int8`] is a tensor's row of i8: D codes, then a scale for each group of
/// `CacheType::group` values, f16, then zeros up to a multiple of 16 bytes.
///
/// ```text
/// byte 0                    D                     D + 2 D / group
///      | code 0 .. D - 1    | scale 0, scale 1 .. | 0 .. |
/// ```
///
/// A value is `code / 128 * scale`, codes being from -127 to 127. A group's scale is, of those that
/// give its greatest magnitude a code of 120 to 127, the one with the least squared error. A group
/// whose scale is NaN or infinite has no value that is finite. Rows have 16 bytes for scales up to
/// D of 256, so that narrow heads have smaller groups: 8 values up to D of 64, 16 up to 128, else
/// 32 (the last one may have 16).
///
/// Keys that [`rms_norm_rope_append`](super::rms_norm_rope_append()) makes are rotated by
/// [`hadamard_transform`](super::hadamard_transform()), and so must be the queries to them.
///
/// Source: ggml 0.25 `q8_0` (groups of 32 with a scale in f16, `absmax / 127`), which llama.cpp's
/// caches have by `-ctk q8_0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheType {
    /// The values as they are.
    Float(FloatType),
    /// Integers of 8 bits, a scale for a few neighbours of a head: 17 bits per 2 values in heads of
    /// 256.
    Int8,
}

impl From<FloatType> for CacheType {
    fn from(float: FloatType) -> Self {
        Self::Float(float)
    }
}

/// Bytes of a row's scales are a multiple of this, and so are the values.
const BLOCK: usize = 16;

/// The least code that a group's greatest magnitude may have; the greatest one is 127.
const LEAST_CODE: u32 = 120;

impl CacheType {
    /// The element type of a cache's tensor.
    pub fn dtype(self) -> DType {
        match self {
            Self::Float(float) => float.dtype(),
            Self::Int8 => DType::I8,
        }
    }

    /// The name that users type: `f16`, or ggml's `q8_0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(float) => float.dtype().name(),
            Self::Int8 => "q8_0",
        }
    }

    /// Elements of a tensor's row that holds `width` values.
    pub fn row(self, width: usize) -> usize {
        match self {
            Self::Float(_) => width,
            Self::Int8 => width + BLOCK * width.div_ceil(256),
        }
    }

    /// True if rows can have `width` values: of integers multiples of 16 up to 512.
    pub fn takes(self, width: usize) -> bool {
        self != Self::Int8 || width.is_multiple_of(BLOCK) && (BLOCK..=512).contains(&width)
    }

    /// The values of a tensor's row of `row` elements.
    pub(crate) fn width(self, row: usize) -> usize {
        match self {
            Self::Float(_) => row,
            Self::Int8 => row - BLOCK * row.div_ceil(256 + BLOCK),
        }
    }

    /// Values that share a scale, in rows of `width` integers.
    pub(crate) fn group(width: usize) -> usize {
        match width {
            ..=64 => 8,
            65..=128 => 16,
            _ => 32,
        }
    }

    /// The type of the cache `x`, whose rows are checked.
    pub(crate) fn of(check: Check, operand: &'static str, x: &Tensor) -> Result<Self, KernelError> {
        if x.dtype() != DType::I8 {
            let float = FloatType::from_dtype(x.dtype());
            return float
                .map(Self::Float)
                .ok_or_else(|| check.value(operand, x.dtype(), "f32, f16, bf16 or i8 is wanted"));
        }
        let row = x.dim(-1);
        let width = row - row.min(BLOCK * row.div_ceil(256 + BLOCK));
        if Self::Int8.takes(width) && Self::Int8.row(width) == row {
            return Ok(Self::Int8);
        }
        let want =
            "rows of i8 are D codes, a multiple of 16 up to 512, and 16 bytes of scales per 256".into();
        Err(check.shape_error(operand, x, want))
    }

    /// The floats that a GPU moves rows as, and the elements that one of them has: integers are
    /// moved in pairs, and a NaN in place of all pairs makes scales NaN.
    #[cfg(feature = "gpu")]
    pub(crate) fn moved(self) -> (FloatType, usize) {
        match self {
            Self::Float(float) => (float, 1),
            Self::Int8 => (FloatType::BF16, 2),
        }
    }

    /// The float type, for ops that take no other cache.
    #[cfg(feature = "gpu")]
    pub(crate) fn float(self) -> Option<FloatType> {
        match self {
            Self::Float(float) => Some(float),
            Self::Int8 => None,
        }
    }
}

/// `x`, `[.., D]` on the CPU, as rows of a cache of this type: `[.., row]`.
///
/// # Errors
/// [`KernelError::Value`] for a finite number that is infinite in the type, or whose scale is.
pub(crate) fn encoded(
    check: Check,
    (name, x): (&'static str, &Tensor),
    cache: CacheType,
) -> Result<Tensor, KernelError> {
    match cache {
        CacheType::Float(float) => cpu::round(check, (name, x), float),
        CacheType::Int8 => cpu::encode(check, (name, x)),
    }
}

/// `y[.., d] = code / 128 * scale`: the values of a cache of integers, rounded to `dtype`.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `cache` | `[.., row]`, see [`CacheType::Int8`] | i8 |
/// | `y` | `[.., D]` | f32, f16, bf16 |
///
/// It is for kernels that multiply matrices of floats: a pass over many tokens reads each key as
/// often as it has blocks of rows, and expands it once.
///
/// # Errors
/// [`KernelError::Value`] and [`KernelError::Shape`] for other operands, [`KernelError::Gpu`]
/// without memory for y.
pub fn expand_cache(cache: &Tensor, dtype: DType) -> Result<Tensor, KernelError> {
    let check = Check("expand_cache");
    if CacheType::of(check, "cache", cache)? != CacheType::Int8 {
        return Err(check.value("cache", cache.dtype(), "i8 is wanted"));
    }
    let float = FloatType::from_dtype(dtype);
    let float = float.ok_or_else(|| check.value("dtype", dtype, "f32, f16 or bf16 is wanted"))?;
    let (rows, row) = (&cache.shape()[..cache.shape().len() - 1], cache.dim(-1));
    let shape = [rows, &[CacheType::Int8.width(row)]].concat();
    match cache.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::expand(check, gpu, cache, float, &shape),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::expand(cpu, cache, &shape)?.cast(float.dtype()),
    }
}
