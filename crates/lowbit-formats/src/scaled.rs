use crate::codec::vectorise_within_runs;
use crate::{Codec, Codes, Component, DType, E2M1, E4M3, FloatType, Minifloat, Parts, Scales, Scheme};
use std::marker::PhantomData;

/// Small floats with a float as scale: `value = code * scale`, an f32 per group of values of a row.
///
/// ```text
/// weight  u32 [N, K*BITS/32]      each row's codes in order, as in MLX's modes
/// scales  f32 [N, K/group_size]
/// ```
/// No file has this layout: checkpoints in FP8 have a scale per matrix, per row or per block of 128
/// x 128 values, and NVFP4 one of e4m3 per 16 values and a float for the matrix. Each of these, or
/// the product of both, is the scale of whole groups. Source: transformers 5.24
/// `integrations/finegrained_fp8.py`, compressed-tensors 0.20 `compressors/naive_quantized` and
/// `compressors/nvfp4`.
#[derive(Clone, Copy, Debug)]
pub struct Scaled<C, const RUN: usize> {
    group_size: usize,
    code: PhantomData<C>,
}

/// e4m3 codes.
pub type Fp8 = Scaled<E4M3, 32>;
/// e2m1 codes, in groups of 16.
pub type Fp4 = Scaled<E2M1, 16>;

impl<C, const RUN: usize> Scaled<C, RUN> {
    /// `group_size` is a power of two and a multiple of RUN (see [`crate::Format::fp8`]).
    pub const fn new(group_size: u8) -> Self {
        Self { group_size: group_size as usize, code: PhantomData }
    }
}

/// One row's components.
#[derive(Clone, Copy, Debug)]
pub struct ScaledRow<'a> {
    /// `k * BITS / 8` bytes.
    pub codes: &'a [u8],
    /// One f32 per group.
    pub scales: &'a [u8],
}

impl<C: Minifloat, const RUN: usize> Codec for Scaled<C, RUN> {
    const RUN: usize = RUN;
    type Row<'a> = ScaledRow<'a>;

    fn name(&self) -> String {
        format!("fp{}g{}", C::BITS, self.group_size)
    }

    fn block(&self) -> usize {
        self.group_size
    }

    fn components(&self, k: usize) -> Vec<Component> {
        vec![
            Component { name: "weight", dtype: DType::U32, columns: k / 8 * C::BITS / 4 },
            Component { name: "scales", dtype: DType::F32, columns: k / self.group_size },
        ]
    }

    fn scheme(&self) -> Scheme {
        let codes = if C::BITS == 4 { Codes::E2M1 } else { Codes::E4M3 };
        let scales = Scales::Group { float: FloatType::F32, size: self.group_size, biased: false };
        Scheme { bits: C::BITS, codes, scales }
    }

    #[inline(always)]
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> ScaledRow<'a> {
        let (bytes, scales) = (k * C::BITS / 8, (k >> self.group_size.trailing_zeros()) * 4);
        ScaledRow {
            codes: &parts[0][index * bytes..][..bytes],
            scales: &parts[1][index * scales..][..scales],
        }
    }

    #[inline(always)]
    fn decode(&self, row: ScaledRow<'_>, index: usize, out: &mut [f32]) {
        vectorise_within_runs();
        // A power of two: a division would take longer than the rest.
        let group = (index * RUN) >> self.group_size.trailing_zeros();
        let scale = FloatType::F32.get(row.scales, group);
        let codes = &row.codes[index * RUN * C::BITS / 8..][..RUN * C::BITS / 8];
        if C::BITS == 4 {
            for (y, &codes) in out[..RUN].as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *y = [codes & 15, codes >> 4].map(|code| C::decode(code) * scale);
            }
        } else {
            for (y, &code) in out[..RUN].iter_mut().zip(codes) {
                *y = C::decode(code) * scale;
            }
        }
    }

    /// The greatest value of a group is the greatest of codes times its scale.
    fn encode(&self, values: &[f32], _: FloatType, [weight, scales, _]: &mut [Vec<u8>; 3]) {
        for group in values.chunks_exact(self.group_size) {
            let largest = group.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            let scale = largest / C::MAX;
            let code = |value: f32| if scale == 0.0 { 0 } else { C::encode(value / scale) };
            FloatType::F32.push(scale, scales);
            if C::BITS == 4 {
                weight.extend(group.as_chunks().0.iter().map(|&[low, high]| code(low) | code(high) << 4));
            } else {
                weight.extend(group.iter().map(|&value| code(value)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Format;

    #[test]
    fn values_are_codes_times_their_groups_scale() {
        let format = Format::fp8(32).unwrap();
        let (codes, scales): (Vec<u8>, _) = ((0..64).collect(), [0.5f32, 3.0].map(f32::to_le_bytes).concat());
        let mut got = vec![0.0; 64];
        format.decode(&[&codes, &scales, &[]], 1, 64, &mut got).unwrap();
        // 8 is the least normal code, 2^-6; 56 is 1.
        assert_eq!((got[1], got[8], got[56], got[63]), (0.5 / 512.0, 0.5 / 64.0, 3.0, 3.0 * 1.875));
        assert_eq!((format.to_string(), format.block(), Format::fp8(16)), ("fp8g32".into(), 32, None));
        let codes: Vec<u8> = (0..16).map(|i| (2 * i % 16) | (((2 * i + 1) % 16) << 4)).collect();
        Format::Fp4.decode(&[&codes, &scales, &[]], 1, 32, &mut got[..32]).unwrap();
        assert_eq!((got[1], got[7], got[15], got[17], got[23]), (0.25, 3.0, -3.0, 1.5, 18.0));
        assert_eq!((Format::Fp4.to_string(), Format::Fp4.block()), ("fp4g16".into(), 16));
    }
}
