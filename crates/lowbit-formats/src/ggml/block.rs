use crate::codec::vectorise_within_runs;
use crate::{
    BlockScales, Codec, Codes, Component, DType, FloatType, PackBlock, Parts, Scales, Scheme, Unpacked,
};
use bytemuck::{Pod, Zeroable};
use half::f16;

/// A GGML block type: a struct of bytes that holds `Values`. Every implementation is a [`Codec`].
pub trait GgmlType: Copy + Send + Sync + 'static {
    /// The type's name in ggml.
    const NAME: &'static str;
    /// Its number in GGUF files, `enum ggml_type`.
    const NUMBER: u32;
    /// The meaning of its codes and scales.
    const SCHEME: Scheme;
    /// The block, as it lies in the file: no padding, no alignment.
    type Block: Pod;
    /// The values that it holds, `[f32; 32]` to `[f32; 256]`.
    type Values: Pod + AsMut<[f32]>;
    /// Their codes, `[u8; 32]` to `[u8; 256]`.
    type Codes: Pod;
    /// The least and the greatest integer of a sub-block's scale; minima have the same range.
    const SUB_SCALES: [i8; 2] = [0, 0];
    /// False for a type that is only read: it has no [`Self::pack`] and no [`Self::encode_block`].
    const ENCODES: bool = true;

    /// Calls `each(s, i, code)` for every code i of sub-block s (0 in blocks without sub-blocks),
    /// in the order in which the bytes are best read. Decoding and repacking are both made of this.
    fn for_each_code(block: &Self::Block, each: impl FnMut(usize, usize, u32));

    /// The block's scales.
    fn scales(block: &Self::Block) -> BlockScales;

    /// Packs a block: the inverse of [`Self::for_each_code`] and [`Self::scales`]. Codes and
    /// integers must be in the type's range.
    fn pack(_codes: &Self::Codes, _scales: &BlockScales) -> Self::Block {
        unreachable!("{} is only read", Self::NAME)
    }

    /// Decodes one block: the scheme's formula in f32, in the order of operations of ggml's
    /// `dequantize_row_*`.
    #[inline(always)]
    fn decode_block(block: &Self::Block, values: &mut Self::Values) {
        let BlockScales { scale, min, sub_scales, sub_minima } = Self::scales(block);
        let (scale, values) = (f16_to_f32(scale), values.as_mut());
        match Self::SCHEME.scales {
            Scales::Group { biased: false, .. } => {
                Self::for_each_code(block, |_, i, code| values[i] = value::<Self>(code) * scale);
            }
            Scales::Group { biased: true, .. } => {
                let min = f16_to_f32(min);
                Self::for_each_code(block, |_, i, code| values[i] = value::<Self>(code) * scale + min);
            }
            Scales::Super { size } => {
                let scales = scaled(scale, &sub_scales, size);
                Self::for_each_code(block, |s, i, code| values[i] = scales[s] * value::<Self>(code));
            }
            Scales::SuperWithMinima { size } => {
                let scales = scaled(scale, &sub_scales, size);
                let minima = scaled(f16_to_f32(min), &sub_minima, size);
                Self::for_each_code(block, |s, i, code| {
                    values[i] = scales[s] * value::<Self>(code) - minima[s];
                });
            }
            Scales::One | Scales::E8M0 { .. } | Scales::E4M3 => {
                unreachable!("MXFP4 and NVFP4 have their own decode_block")
            }
        }
    }

    /// Encodes one block of finite values.
    fn encode_block(_values: &Self::Values) -> Self::Block {
        unreachable!("{} is only read", Self::NAME)
    }
}

/// `scale` times the integers of sub-blocks of `size` values.
#[inline(always)]
fn scaled(scale: f32, integers: &[i8; 16], size: usize) -> [f32; 16] {
    let mut scaled = [0.0; 16];
    for s in 0..256 / size {
        scaled[s] = scale * f32::from(integers[s]);
    }
    scaled
}

/// The values of a scheme's codes, if they are entries of a codebook.
const fn entries(scheme: Scheme) -> [f32; 16] {
    match scheme.codes {
        Codes::Codebook(codebook) => codebook.values(),
        _ => [0.0; 16],
    }
}

/// A code's value before it is scaled.
#[inline(always)]
fn value<T: GgmlType>(code: u32) -> f32 {
    match T::SCHEME.codes {
        Codes::Integer { zero } => (code as i32 - zero as i32) as f32,
        // A constant: a block has 256 of them to look up.
        Codes::Codebook(_) => (const { &entries(T::SCHEME) })[code as usize],
        Codes::E2M1 | Codes::E4M3 | Codes::Float(_) => {
            unreachable!("MXFP4 and NVFP4 have their own decode_block")
        }
    }
}

impl<T: GgmlType> Codec for T {
    const RUN: usize = size_of::<T::Values>() / size_of::<f32>();
    const UNPACK: Option<fn(&[u8], &mut Unpacked)> = Some(unpack::<T>);
    const PACK: Option<PackBlock> = if T::ENCODES { Some(pack::<T>) } else { None };
    const ENCODES: bool = T::ENCODES;
    const SUB_SCALES: [i8; 2] = T::SUB_SCALES;
    type Row<'a> = &'a [T::Block];

    fn name(&self) -> String {
        T::NAME.into()
    }

    fn block(&self) -> usize {
        Self::RUN
    }

    fn components(&self, k: usize) -> Vec<Component> {
        let columns = k / Self::RUN * size_of::<T::Block>();
        vec![Component { name: "weight", dtype: DType::U8, columns }]
    }

    fn scheme(&self) -> Scheme {
        T::SCHEME
    }

    fn ggml_type(&self) -> Option<u32> {
        Some(T::NUMBER)
    }

    #[inline(always)]
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> &'a [T::Block] {
        let bytes = k / Self::RUN * size_of::<T::Block>();
        bytemuck::cast_slice(&parts[0][index * bytes..][..bytes])
    }

    #[inline(always)]
    fn decode(&self, row: &[T::Block], index: usize, out: &mut [f32]) {
        vectorise_within_runs();
        // Not into `out`, which LLVM must assume to overlap the file's bytes.
        let mut values = T::Values::zeroed();
        T::decode_block(&row[index], &mut values);
        bytemuck::cast_slice_mut(&mut out[..Self::RUN])[0] = values;
    }

    fn encode(&self, values: &[f32], _: FloatType, [weight, ..]: &mut [Vec<u8>; 3]) {
        for values in bytemuck::cast_slice(values) {
            weight.extend(bytemuck::bytes_of(&T::encode_block(values)));
        }
    }
}

fn unpack<T: GgmlType>(bytes: &[u8], out: &mut Unpacked) {
    let block = bytemuck::from_bytes(bytes);
    T::for_each_code(block, |_, i, code| out.codes[i] = code as u8);
    out.scales = T::scales(block);
}

fn pack<T: GgmlType>(codes: &[u8], scales: &BlockScales, out: &mut Vec<u8>) {
    out.extend(bytemuck::bytes_of(&T::pack(bytemuck::from_bytes(codes), scales)));
}

/// A little-endian f16 inside a block, unaligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, packed)]
pub struct F16(u16);

impl F16 {
    /// `value` rounded to nearest, ties to even.
    pub fn new(value: f32) -> Self {
        Self::from_bits(f16::from_f32(value).to_bits())
    }

    /// The inverse of [`Self::bits`].
    pub fn from_bits(bits: u16) -> Self {
        Self(bits.to_le())
    }

    /// Its bits.
    #[inline(always)]
    pub fn bits(self) -> u16 {
        u16::from_le(self.0)
    }

    /// Widened exactly.
    #[inline(always)]
    pub fn get(self) -> f32 {
        f16_to_f32(self.bits())
    }
}

/// Widens exactly, with F16C where the processor has it: a block has one scale or two, not enough
/// for a vector.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}
