use crate::codec::vectorise_within_runs;
use crate::{Codec, Component, DType, FloatType, Parts};
use bytemuck::{Pod, Zeroable};
use half::f16;

/// A GGML block type: a struct of bytes that holds `Values`. Implementing it makes a [`Codec`].
pub trait GgmlType: Copy + Send + Sync + 'static {
    /// The type's name in ggml.
    const NAME: &'static str;
    /// Its number in GGUF files, `enum ggml_type`.
    const NUMBER: u32;
    /// The block, as it lies in the file: no padding, no alignment.
    type Block: Pod;
    /// The values that it holds, `[f32; 32]` or `[f32; 256]`.
    type Values: Pod;

    /// Decodes one block.
    fn decode_block(block: &Self::Block, values: &mut Self::Values);

    /// Encodes one block of finite values.
    fn encode_block(values: &Self::Values) -> Self::Block;
}

impl<T: GgmlType> Codec for T {
    const RUN: usize = size_of::<T::Values>() / size_of::<f32>();
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

/// A little-endian f16 inside a block, unaligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, packed)]
pub struct F16(u16);

impl F16 {
    /// `value` rounded to nearest, ties to even.
    pub fn new(value: f32) -> Self {
        Self(f16::from_f32(value).to_bits().to_le())
    }

    /// Widened exactly.
    #[inline(always)]
    pub fn get(self) -> f32 {
        // By F16C where it is there: a block has one scale or two, not enough of them for a vector.
        f16::from_bits(u16::from_le(self.0)).to_f32()
    }
}
