//! MLX affine: `value = code * scale + bias`; a group of 32, 64 or 128 values shares a scale and a
//! bias.
//!
//! ```text
//! weight  u32 [N, K*BITS/32]    each row one stream of codes, least significant bit first: code d is bits
//!                               [d*BITS, (d+1)*BITS) of the row's little-endian bytes
//! scales  [N, K/group_size]     f16, bf16 or f32
//! biases  [N, K/group_size]     the same type
//!
//! 4 bits:  byte 0        1        2              3 bits:  byte 0          1            2
//!               +--------+--------+---                       +-----------+------------+----------+
//!               |  1   0 |  3   2 | ..                       | 2' 1   0  | 5' 4  3  2 | 7   6  5 |
//!               +--------+--------+---                       +-----------+------------+----------+
//!          bit   7..4 3..0                           bit       7,6 5..3 2..0
//! ```
//! Each number is a code's; with 3 bits, code 2 has its low two bits in byte 0 and its highest in
//! bit 0 of byte 1. Source: `mx.quantize(mode="affine")`, mlx 0.32 `mlx/backend/cpu/quantized.cpp`.

use crate::codec::vectorise_within_runs;
use crate::{Codec, Codes, Component, DType, FloatType, Parts, Scales, Scheme};

/// Affine at `BITS` bits as a [`Codec`].
#[derive(Clone, Copy, Debug)]
pub struct Affine<const BITS: usize> {
    group_size: usize,
    scales: FloatType,
}

impl<const BITS: usize> Affine<BITS> {
    /// `group_size` is a multiple of 32 (see [`crate::Format::affine`]).
    pub const fn new(group_size: u8, scales: FloatType) -> Self {
        Self { group_size: group_size as usize, scales }
    }

    /// `code * scale + bias` of run `index`, each operation rounded by `round`.
    #[inline(always)]
    fn decode_with(&self, row: AffineRow<'_>, index: usize, round: impl Fn(f32) -> f32, out: &mut [f32]) {
        vectorise_within_runs();
        // A power of two: a division would take longer than the rest.
        let group = (index * Self::RUN) >> self.group_size.trailing_zeros();
        let (scale, bias) = (self.scales.get(row.scales, group), self.scales.get(row.biases, group));
        let value = |bits: u32| round(round((bits & ((1 << BITS) - 1)) as f32 * scale) + bias);
        let codes = &row.codes[index * 4 * BITS..][..4 * BITS];
        // Not into `out`, which LLVM must assume to overlap the file's bytes.
        let mut decoded = [0.0; 32];
        // Eight codes fill BITS bytes and are shifted out of one word, each lane by a constant: out
        // of a u32 where they fit, since a vector has twice as many lanes of u32 as of u64.
        for (i, values) in decoded.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            if BITS == 8 {
                for (y, &code) in values.iter_mut().zip(&codes[i * 8..]) {
                    *y = value(code.into());
                }
            } else if BITS <= 4 {
                let (bytes, unused) = window(codes, i * BITS);
                let word = u32::from_le_bytes(bytes) >> unused;
                for (lane, y) in values.iter_mut().enumerate() {
                    *y = value(word >> (lane * BITS));
                }
            } else {
                let (bytes, unused) = window(codes, i * BITS);
                let word = u64::from_le_bytes(bytes) >> unused;
                for (lane, y) in values.iter_mut().enumerate() {
                    *y = value((word >> (lane * BITS)) as u32);
                }
            }
        }
        out[..Self::RUN].copy_from_slice(&decoded);
    }
}

/// `N` bytes of `codes` from `first` on or, near the end, the last `N`; and how many bits of these
/// lie before `first`.
#[inline(always)]
fn window<const N: usize>(codes: &[u8], first: usize) -> ([u8; N], usize) {
    let start = first.min(codes.len() - N);
    let mut bytes = [0; N];
    bytes.copy_from_slice(&codes[start..start + N]);
    (bytes, 8 * (first - start))
}

/// One row's components.
#[derive(Clone, Copy, Debug)]
pub struct AffineRow<'a> {
    /// `k * BITS / 8` bytes.
    pub codes: &'a [u8],
    /// One per group.
    pub scales: &'a [u8],
    /// One per group.
    pub biases: &'a [u8],
}

impl<const BITS: usize> Codec for Affine<BITS> {
    const RUN: usize = 32;
    type Row<'a> = AffineRow<'a>;

    fn name(&self) -> String {
        format!("affine{BITS}g{}", self.group_size)
    }

    fn block(&self) -> usize {
        self.group_size
    }

    fn components(&self, k: usize) -> Vec<Component> {
        let groups = k / self.group_size;
        vec![
            Component { name: "weight", dtype: DType::U32, columns: k / 32 * BITS },
            Component { name: "scales", dtype: self.scales.dtype(), columns: groups },
            Component { name: "biases", dtype: self.scales.dtype(), columns: groups },
        ]
    }

    fn scheme(&self) -> Scheme {
        let scales = Scales::Group { float: self.scales, size: self.group_size, biased: true };
        Scheme { bits: BITS, codes: Codes::Integer { zero: 0 }, scales }
    }

    #[inline(always)]
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> AffineRow<'a> {
        let [codes, scales, biases] = *parts;
        let (bytes, scale_bytes) =
            (k / 8 * BITS, (k >> self.group_size.trailing_zeros()) * self.scales.size());
        AffineRow {
            codes: &codes[index * bytes..][..bytes],
            scales: &scales[index * scale_bytes..][..scale_bytes],
            biases: &biases[index * scale_bytes..][..scale_bytes],
        }
    }

    #[inline(always)]
    fn decode(&self, row: AffineRow<'_>, index: usize, out: &mut [f32]) {
        self.decode_with(row, index, |y| y, out);
    }

    /// `mx.dequantize` computes in the scales' type, then converts.
    fn decode_as(&self, row: AffineRow<'_>, index: usize, float: FloatType, out: &mut [f32]) {
        self.decode_with(row, index, |y| self.scales.round(y), out);
        out[..Self::RUN].iter_mut().for_each(|y| *y = float.round(*y));
    }

    fn encode(&self, values: &[f32], _: FloatType, [weight, scales, biases]: &mut [Vec<u8>; 3]) {
        for group in values.chunks_exact(self.group_size) {
            let (scale, bias) = fit(group, BITS);
            self.scales.push(scale, scales);
            self.scales.push(bias, biases);
            // The codes are those of the scale and bias before these are rounded.
            let code =
                |&value: &f32| ((value - bias) / scale).round_ties_even().clamp(0.0, max_code(BITS)) as u8;
            let mut codes = [0; 128];
            codes.iter_mut().zip(group).for_each(|(slot, value)| *slot = code(value));
            self.scheme().pack_stream(&codes[..self.group_size], weight);
        }
    }
}

fn max_code(bits: usize) -> f32 {
    ((1 << bits) - 1) as f32
}

/// A group's scale and bias: the extreme of larger magnitude is exactly one of the grid's values,
/// and so is zero.
fn fit(group: &[f32], bits: usize) -> (f32, f32) {
    let (min, max) = group.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &value| {
        (if value < min { value } else { min }, if value > max { value } else { max })
    });
    let step = ((max - min) / max_code(bits)).max(1e-7);
    let (scale, edge) = if min.abs() > max.abs() { (step, min) } else { (-step, max) };
    let steps = (edge / scale).round_ties_even();
    if steps == 0.0 { (scale, 0.0) } else { (edge / steps, edge) }
}
