use half::{bf16, f16};

/// The element types that checkpoints store and ops exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 | Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// The lower-case name, as in `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::F8E8M0 => "f8e8m0",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U64 => "u64",
            Self::U32 => "u32",
            Self::U16 => "u16",
            Self::U8 => "u8",
            Self::Bool => "bool",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The float types of weights, scales and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum FloatType {
    F32,
    F16,
    BF16,
}

impl FloatType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        self.dtype().size()
    }

    /// The same type among all dtypes.
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// The same type as a float; `None` for a dtype that is not one of the three.
    pub const fn from_dtype(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::BF16),
            _ => None,
        }
    }

    /// Element `index` of little-endian `bytes`, widened exactly.
    #[inline(always)]
    pub fn get(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::F32 => f32::from_le_bytes(element(bytes, index)),
            Self::F16 => f16_to_f32(u16::from_le_bytes(element(bytes, index))),
            Self::BF16 => f32::from_bits(u32::from(u16::from_le_bytes(element(bytes, index))) << 16),
        }
    }

    /// Widens the first of little-endian `bytes` into all of `out`, exactly.
    ///
    /// # Panics
    /// When `bytes` hold fewer elements than `out`.
    #[inline(always)]
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        let bytes = &bytes[..out.len() * self.size()];
        match self {
            Self::F32 => widen(bytes, out, f32::from_le_bytes),
            Self::F16 => widen(bytes, out, |bytes| f16_to_f32(u16::from_le_bytes(bytes))),
            Self::BF16 => {
                widen(bytes, out, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
            }
        }
    }

    /// Appends `value`, rounded to nearest, ties to even.
    pub fn push(self, value: f32, out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(value.to_le_bytes()),
            Self::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
            Self::BF16 => out.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }

    /// `value` rounded to this type and widened again.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::BF16 => bf16::from_f32(value).to_f32(),
        }
    }
}

#[inline(always)]
fn element<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    bytes.as_chunks().0[index]
}

#[inline(always)]
fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (y, &bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *y = value(bytes);
    }
}

/// Widens an IEEE 754 binary16 exactly, without branches, so that loops over it vectorise, and
/// without arithmetic on subnormal f32, which takes some processors a hundred cycles. (NaN payloads
/// pass through; `half::f16::to_f32` sets the quiet bit.)
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = i32::from(bits & 0x7fff);
    // Exponents are biased by 127 instead of 15.
    let normal = (magnitude << 13) + (112 << 23);
    let subnormal = (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits() as i32;
    let infinite_or_nan = magnitude << 13 | 0xff << 23;
    let finite = if magnitude < 1 << 10 { subnormal } else { normal };
    let value = if magnitude < 0x1f << 10 { finite } else { infinite_or_nan };
    f32::from_bits(value as u32 | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_as_half_does() {
        for bits in 0..=u16::MAX {
            let (got, want) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            if want.is_nan() {
                assert!(got.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{bits:#06x}");
            }
        }
    }
}
