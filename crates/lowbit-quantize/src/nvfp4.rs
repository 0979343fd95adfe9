//! Weights in NVFP4 and the float of each of their matrices, which a checkpoint stores beside them.
//!
//! A weight that is NVFP4 already keeps its codes and scales. Of one that was opened as
//! [`Format::Fp4`], whose scales are products, the float is found again: the one by which each
//! scale is a product of an e4m3 and it. Other weights get the float with which their largest value
//! is the largest that codes and scales can say, as ModelOpt has it.

use crate::source::Source;
use lowbit_formats::{BlockScales, E4M3, Format, FormatError, Minifloat, Unpacked};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Values that share a scale.
const GROUP: usize = 16;

/// The greatest value of a code times the greatest scale.
const GREATEST: f32 = 6.0 * E4M3::MAX;

/// The most that a scale may differ from an e4m3 times a float: three f32 roundings.
/// compressed-tensors divides by a float, of which llama.cpp's files have the reciprocal.
const ROUNDINGS: f32 = 3.0 / (1 << 24) as f32;

/// True for formats of e2m1 codes with a scale per 16 values.
pub fn is_nvfp4(format: Format) -> bool {
    matches!(format, Format::Fp4 | Format::Nvfp4 | Format::NVFP4)
}

/// The `global_scale` that stands for `factor` in MLX, which divides it by [`GREATEST`]. Some
/// numbers are no such quotient; of these it stands for a neighbour.
pub fn global_scale(factor: f32) -> f32 {
    let product = factor * GREATEST;
    let near = [product, product.next_up(), product.next_down()];
    near.into_iter().find(|near| near / GREATEST == factor).unwrap_or(product)
}

/// True if llama.cpp reads a float beside the weight of this name, if there are as many dimensions.
///
/// Source: `load_tensors`, llama.cpp (llama-cpp-python 0.3.36) `src/llama-model.cpp`.
pub fn has_float_in_gguf(name: &str, dimensions: usize) -> bool {
    const MATRICES: [&str; 18] = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_qkv",
        "attn_gate",
        "ffn_gate",
        "ffn_down",
        "ffn_up",
        "ffn_gate_shexp",
        "ffn_down_shexp",
        "ffn_up_shexp",
        "ssm_in",
        "ssm_out",
        "ssm_alpha",
        "ssm_beta",
        "nextn.eh_proj",
        "nextn.shared_head_head",
    ];
    const STACKS: [&str; 3] = ["ffn_gate_exps", "ffn_down_exps", "ffn_up_exps"];
    let module = name.strip_suffix(".weight").unwrap_or_default();
    let known = if dimensions > 2 { &STACKS[..] } else { &MATRICES };
    match module.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, module)) => known.contains(&module),
        None => module == "output",
    }
}

/// The name in GGUF of the float of the weight of this name.
pub fn float_of(name: &str) -> String {
    format!("{}.scale", name.strip_suffix(".weight").unwrap_or(name))
}

/// True unless weights in this format have e4m3 scales alone.
pub fn wants_float(source: Format) -> bool {
    !matches!(source, Format::Nvfp4 | Format::NVFP4)
}

/// The float of a matrix that is not in NVFP4 and has this largest magnitude.
pub fn float_for(largest: f32) -> f32 {
    let float = largest / GREATEST;
    if float.is_normal() { float } else { 1.0 }
}

/// The numbers by which a weight's matrices are divided before they are encoded, once they were
/// needed.
#[derive(Clone, Debug, Default)]
pub struct Divisors(Arc<OnceLock<Vec<f32>>>);

impl Divisors {
    /// The numbers, which `compute` makes if they are not known yet.
    ///
    /// # Errors
    /// Those of `compute`.
    pub fn get_or<E>(&self, compute: impl FnOnce() -> Result<Vec<f32>, E>) -> Result<&[f32], E> {
        match self.0.get() {
            Some(known) => Ok(known),
            None => {
                let computed = compute()?;
                Ok(self.0.get_or_init(|| computed))
            }
        }
    }
}

/// The number by which each of `scales`, sorted, is a product of an e4m3 and it; that with the
/// least errors, if products were rounded otherwise.
fn common_factor(scales: &[f32]) -> Option<f32> {
    let largest = *scales.last().filter(|largest| largest.is_finite() && scales[0] >= 0.0)?;
    if largest == 0.0 {
        return Some(1.0);
    }
    let errors = |factor: f32| {
        let error = |&scale: &f32| Some(f64::from(code_of(scale, factor)?.1 / scale.max(f32::MIN_POSITIVE)));
        scales.iter().map(error).sum::<Option<f64>>().filter(|_| factor.is_normal())
    };
    let mut best: Option<(f64, f32)> = None;
    for code in (1..=0x7e).rev() {
        let quotient = largest / E4M3::decode(code);
        for factor in [quotient, quotient.next_up(), quotient.next_down()] {
            match errors(factor) {
                Some(0.0) => return Some(factor),
                Some(error) if best.is_none_or(|(least, _)| error < least) => best = Some((error, factor)),
                _ => {}
            }
        }
    }
    best.map(|(_, factor)| factor)
}

/// The e4m3 whose product with `factor` is `scale`, and what the product is off by; `None` where
/// that is more than roundings.
fn code_of(scale: f32, factor: f32) -> Option<(u8, f32)> {
    let code = E4M3::encode(scale / factor);
    let error = (E4M3::decode(code) * factor - scale).abs();
    (scale >= 0.0 && error <= scale * ROUNDINGS).then_some((code, error))
}

/// The rows of a weight in NVFP4, in the order of a new checkpoint, and so their columns.
pub struct Rows<'s> {
    pub source: &'s Source,
    pub order: Option<&'s [usize]>,
    pub columns: Option<&'s [usize]>,
}

/// A row's codes and the scale of each group.
struct Row {
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Rows<'_> {
    fn row(&self, row: usize) -> Result<Row, FormatError> {
        let Self { source, order, .. } = self;
        let (k, row) = (source.k(), order.map_or(row, |order| order[row]));
        let (components, mut codes) = (source.encoded(row, 1)?, vec![0; k]);
        source.format.codes(&components[0], k, &mut codes)?;
        let scales = match source.format {
            Format::Fp4 => {
                components[1].as_chunks().0.iter().map(|&scale| f32::from_le_bytes(scale)).collect()
            }
            Format::Nvfp4 => components[1].iter().map(|&scale| E4M3::decode(scale)).collect(),
            _ => scales_of_blocks(&components[0]),
        };
        Ok(Row { codes, scales })
    }

    /// As [`Self::row`], with its columns in the new order; `None` if that takes groups apart.
    fn in_order(&self, row: usize) -> Result<Option<Row>, FormatError> {
        let Row { codes, scales } = self.row(row)?;
        let Some(columns) = self.columns else { return Ok(Some(Row { codes, scales })) };
        let groups = columns.chunks(GROUP).map(|columns| {
            let group = columns[0] / GROUP;
            columns.iter().all(|column| column / GROUP == group).then(|| scales[group])
        });
        let scales: Option<Vec<f32>> = groups.collect();
        let codes = columns.iter().map(|&column| codes[column]).collect();
        Ok(scales.map(|scales| Row { codes, scales }))
    }

    /// The float by which the scales of `rows` are products of an e4m3 and it, if there is one.
    ///
    /// # Errors
    /// Those of reading the source.
    pub fn float(&self, rows: Range<usize>) -> Result<Option<f32>, FormatError> {
        let mut scales = vec![];
        for row in rows {
            scales.extend(self.row(row)?.scales);
            scales.sort_unstable_by(f32::total_cmp);
            scales.dedup();
        }
        Ok(common_factor(&scales))
    }

    /// The components in `format` of `rows`, with the codes that they have; `None` for scales that
    /// `format` does not have. Row `i` is divided by `divisor(i)`.
    ///
    /// # Errors
    /// Those of reading the source.
    pub fn kept(
        &self,
        format: Format,
        rows: Range<usize>,
        divisor: impl Fn(usize) -> f32,
    ) -> Result<Option<Vec<Vec<u8>>>, FormatError> {
        let mut components = vec![vec![]; format.components(self.source.k())?.len()];
        for row in rows {
            let Some(Row { codes, scales }) = self.in_order(row)? else { return Ok(None) };
            let found = scales.iter().map(|&scale| Some(code_of(scale, divisor(row))?.0));
            let Some(scales) = found.collect::<Option<Vec<u8>>>() else { return Ok(None) };
            match (format.pack(), &mut components[..]) {
                (Some(pack), [blocks]) => {
                    let groups = format.block() / GROUP;
                    for (codes, scales) in codes.chunks(format.block()).zip(scales.chunks(groups)) {
                        let mut block = BlockScales::default();
                        block.sub_scales.iter_mut().zip(scales).for_each(|(out, &code)| *out = code as i8);
                        pack(codes, &block, blocks);
                    }
                }
                (_, all) => {
                    format.scheme().pack_stream(&codes, &mut all[0]);
                    all[1].extend(scales);
                }
            }
        }
        Ok(Some(components))
    }
}

fn scales_of_blocks(blocks: &[u8]) -> Vec<f32> {
    let format = Format::NVFP4;
    let (unpack, groups) = (format.unpack().expect("it has blocks"), format.block() / GROUP);
    let bytes = format.components(format.block()).map_or(1, |components| components[0].row_bytes());
    let (mut scales, mut block) = (vec![], Unpacked::default());
    for bytes in blocks.chunks_exact(bytes) {
        unpack(bytes, &mut block);
        scales.extend(block.scales.sub_scales[..groups].iter().map(|&code| E4M3::decode(code as u8)));
    }
    scales
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(mut scales: Vec<f32>) -> Vec<f32> {
        scales.sort_unstable_by(f32::total_cmp);
        scales.dedup();
        scales
    }

    #[test]
    fn a_common_factor_is_found_again() {
        for (seed, factor) in [3.1e-4f32, 0.0117, 1.0, 77.7, 1.9999999e-3].into_iter().enumerate() {
            for codes in [2, 7, 40, 126u8] {
                let code = |i: usize| (i * 37 + seed) as u8 % codes + 127 - codes;
                let scales = sorted((0..200).map(|i| E4M3::decode(code(i)) * factor).collect());
                let found = common_factor(&scales).unwrap();
                let again =
                    scales.iter().map(|&scale| E4M3::decode(code_of(scale, found).unwrap().0) * found);
                assert_eq!(again.collect::<Vec<_>>(), scales, "{factor} {codes}");
            }
        }
        // Divided instead of multiplied: off by an f32's rounding.
        let scales = sorted((60..127).map(|code| E4M3::decode(code) / 1234.567f32).collect());
        let found = common_factor(&scales).unwrap();
        assert!((found * 1234.567 - 1.0).abs() < 1e-6, "{found}");
        assert_eq!(common_factor(&[0.0]), Some(1.0));
        for scales in [&[-1.0, 2.0][..], &[1.0, 1.01, 1.02], &[1.0, f32::INFINITY], &[f32::NAN], &[]] {
            assert_eq!(common_factor(scales), None, "{scales:?}");
        }
    }

    #[test]
    fn global_scales_stand_for_their_factors() {
        let factors = (0..1000u32).map(|i| f32::from_bits(0x3a00_0000 + i * 0x4321));
        let exact = factors.filter(|&factor| {
            let got = global_scale(factor) / GREATEST;
            assert!([got, got.next_up(), got.next_down()].contains(&factor), "{factor} {got}");
            got == factor
        });
        assert!((800..900).contains(&exact.count()));
    }

    #[test]
    fn names_with_a_float() {
        for (name, dimensions, want) in [
            ("blk.3.attn_q.weight", 2, true),
            ("blk.3.ffn_down_exps.weight", 3, true),
            ("blk.3.ffn_down_exps.weight", 2, false),
            ("blk.3.attn_q_a.weight", 2, false),
            ("blk.3.nextn.eh_proj.weight", 2, true),
            ("output.weight", 2, true),
            ("token_embd.weight", 2, false),
        ] {
            assert_eq!(has_float_in_gguf(name, dimensions), want, "{name}");
        }
    }
}
