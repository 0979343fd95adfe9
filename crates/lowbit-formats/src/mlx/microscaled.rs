use crate::codec::vectorise_within_runs;
use crate::{Codec, Component, DType, FloatType, Minifloat, Parts, Scheme};

/// An MLX mode whose codes and scales are small floats: `value = code * scale`, one scale per
/// group, no bias.
///
/// ```text
/// weight  u32 [N, K*BITS/32]    each row's codes in order
/// scales  u8  [N, K/GROUP]      one per group
///
/// 4 bits:  byte 0        1        2              8 bits:  byte 0        1        2
///               +--------+--------+---                       +--------+--------+---
///               |  1   0 |  3   2 | ..                       |   0    |   1    | ..
///               +--------+--------+---                       +--------+--------+---
///          bit   7..4 3..0                           bit        7..0
/// ```
/// Source: `mx.quantize` and `mx.dequantize`, mlx 0.32 `mlx/ops.cpp` (no `global_scale`: a
/// checkpoint has none).
pub trait MicroscaledMode: Copy + Send + Sync + 'static {
    /// The mode's name in `mx.quantize` and in `config.json`.
    const NAME: &'static str;
    /// Values per scale.
    const GROUP: usize;
    /// The meaning of codes and scales, in agreement with `Code` and `Scale`.
    const SCHEME: Scheme;
    /// The type of codes.
    type Code: Minifloat;
    /// The type of scales.
    type Scale: Minifloat;
}

/// A [`MicroscaledMode`] as a [`Codec`].
#[derive(Clone, Copy, Debug)]
pub struct Microscaled<M>(pub M);

/// One row's components.
#[derive(Clone, Copy, Debug)]
pub struct MicroscaledRow<'a> {
    /// `k * BITS / 8` bytes.
    pub codes: &'a [u8],
    /// One per group.
    pub scales: &'a [u8],
}

impl<M: MicroscaledMode> Microscaled<M> {
    /// `value(code) * scale` of a group, each product rounded by `round`.
    #[inline(always)]
    fn decode_with(codes: &[u8], scale: f32, round: impl Fn(f32) -> f32, out: &mut [f32]) {
        vectorise_within_runs();
        let codes = &codes[..M::GROUP * M::Code::BITS / 8];
        let out = &mut out[..M::GROUP];
        match M::Code::BITS {
            4 => {
                let words = codes.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes));
                for (values, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                    for (lane, y) in values.iter_mut().enumerate() {
                        *y = round(M::Code::decode((word >> (4 * lane)) as u8 & 15) * scale);
                    }
                }
            }
            _ => {
                for (y, &code) in out.iter_mut().zip(codes) {
                    *y = round(M::Code::decode(code) * scale);
                }
            }
        }
    }
}

impl<M: MicroscaledMode> Codec for Microscaled<M> {
    const RUN: usize = M::GROUP;
    type Row<'a> = MicroscaledRow<'a>;

    fn name(&self) -> String {
        M::NAME.into()
    }

    fn block(&self) -> usize {
        M::GROUP
    }

    fn components(&self, k: usize) -> Vec<Component> {
        vec![
            Component { name: "weight", dtype: DType::U32, columns: k / 8 * M::Code::BITS / 4 },
            Component { name: "scales", dtype: DType::U8, columns: k / M::GROUP },
        ]
    }

    fn scheme(&self) -> Scheme {
        M::SCHEME
    }

    #[inline(always)]
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> MicroscaledRow<'a> {
        let (bytes, groups) = (k * M::Code::BITS / 8, k / M::GROUP);
        MicroscaledRow {
            codes: &parts[0][index * bytes..][..bytes],
            scales: &parts[1][index * groups..][..groups],
        }
    }

    #[inline(always)]
    fn decode(&self, row: MicroscaledRow<'_>, index: usize, out: &mut [f32]) {
        let codes = &row.codes[index * M::GROUP * M::Code::BITS / 8..];
        Self::decode_with(codes, M::Scale::decode(row.scales[index]), |y| y, out);
    }

    /// `mx.dequantize` rounds the scale to its output type, then the product.
    fn decode_as(&self, row: MicroscaledRow<'_>, index: usize, float: FloatType, out: &mut [f32]) {
        let codes = &row.codes[index * M::GROUP * M::Code::BITS / 8..];
        let scale = float.round(M::Scale::decode(row.scales[index]));
        Self::decode_with(codes, scale, |y| float.round(y), out);
    }

    /// `mx.quantize` divides in the weights' own type. Its scale is `largest / MAX`, encoded.
    /// (Where the scale would be below 2^-127, MLX lets the scale's byte wrap around; here it is
    /// 2^-127.)
    fn encode(&self, values: &[f32], source: FloatType, [weight, scales, _]: &mut [Vec<u8>; 3]) {
        for group in values.chunks_exact(M::GROUP) {
            let largest = group.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            let scale_code = M::Scale::encode(source.round(largest / M::Code::MAX));
            let scale = M::Scale::decode(scale_code);
            let code = |value: f32| match scale {
                0.0 => 0,
                _ => M::Code::encode(source.round(value / scale)),
            };
            scales.push(scale_code);
            match M::Code::BITS {
                4 => {
                    weight.extend(group.as_chunks().0.iter().map(|&[low, high]| code(low) | code(high) << 4))
                }
                _ => weight.extend(group.iter().map(|&value| code(value))),
            }
        }
    }
}
