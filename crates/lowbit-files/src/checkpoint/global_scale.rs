//! NVFP4 whose matrices have a float each, in a tensor of its own. The weight becomes
//! [`Format::Fp4`], whose scales are the products of both, in f32.
//!
//! ```text
//! GGUF   X.weight NVFP4 [.., N, K]                            X.scale f32 [matrices]
//! MLX    X.weight u32 [E, N, K/8]   X.scales u8 [E, N, K/16]  X.global_scale f32 [E]
//! ```
//! `value = code * (scale * X.scale)`, or `code * (scale * (global_scale / 2688))`. Source:
//! llama.cpp (llama-cpp-python 0.3.36) `src/llama-model.cpp`, mlx 0.32 `fp_quantized.h`, mlx-lm
//! 0.32 `models/switch_layers.py`.

use std::collections::HashSet;

use lowbit_formats::{DType, E4M3, FloatType, Format, Minifloat, Unpacked};
use serde_json::Value;

use super::makers::words_by_rows;
use super::{Checkpoint, Quantization, quantization};
use crate::gguf::Metadata;
use crate::{Contents, FileError, Stored, TensorView, Tensors};

/// Values that share a scale.
const GROUP: usize = 16;

/// The greatest value of nvfp4, by which MLX divides: 448 of scales times 6 of codes.
pub(crate) const MLX_UNIT: f32 = 2688.0;

/// MLX's tensor of such numbers.
const MLX_NAME: &str = ".global_scale";

/// The tensor that scales activations of 4 bits, which are floats here.
const INPUT_SCALE: &str = "input_scale";

/// A GGUF file's tensors, each NVFP4 weight with its float; and the kinds of tensors that are
/// without effect.
///
/// # Errors
/// [`FileError::Quantized`] for scales that are not floats, one per matrix.
pub(super) fn of_gguf(metadata: &Metadata, tensors: Tensors) -> Result<(Tensors, Vec<String>), FileError> {
    // Gemma 4's experts have such a tensor in any format: the model multiplies by it.
    let is_gemma_4 = metadata.find::<&str>("general.architecture")? == Some("gemma4");
    let own = |module: &str| is_gemma_4 && module.ends_with("ffn_down_exps");
    let is_weight = |module: &str| {
        let weight = tensors.get(&format!("{module}.weight"));
        weight.is_some_and(|weight| weight.stored == Stored::Blocks(Format::NVFP4))
    };
    let (mut made, mut without_effect) = (vec![], vec![]);
    for view in &tensors {
        let (module, part) = view.name.rsplit_once('.').unwrap_or((&view.name, ""));
        let scale = || tensors.get(&format!("{module}.scale")).filter(|_| !own(module));
        match part {
            "weight" if is_weight(module) => made.push(match scale() {
                Some(scale) => multiplied(view, scale)?,
                None => view.clone(),
            }),
            "scale" if is_weight(module) && !own(module) => {}
            INPUT_SCALE if is_weight(module) => without_effect = vec![INPUT_SCALE.to_string()],
            _ => made.push(view.clone()),
        }
    }
    Ok((Tensors::new(made)?, without_effect))
}

/// An error: `view` is not what it should be.
fn refuse(view: &TensorView, want: String) -> FileError {
    let (file, tensor) = (view.file.to_path_buf(), view.name.clone());
    FileError::Quantized { file, tensor, got: format!("{} {:?}", view.stored, view.shape), want }
}

/// The numbers of `view`, one for each of `matrices`.
fn factors(view: &TensorView, matrices: usize) -> Result<Vec<f32>, FileError> {
    let refuse = |want: String| refuse(view, want);
    let float = match view.stored {
        Stored::Plain(dtype) => FloatType::from_dtype(dtype),
        Stored::Blocks(_) => None,
    };
    let float = float.ok_or_else(|| refuse("a float type is wanted".into()))?;
    if view.elements() != matrices {
        return Err(refuse(format!("a number for each of {matrices} matrices is wanted")));
    }
    let bytes = view.bytes.get();
    let factors: Vec<f32> = (0..matrices).map(|i| float.get(&bytes, i)).collect();
    match factors.iter().find(|factor| !factor.is_finite() || **factor == 0.0) {
        Some(factor) => Err(refuse(format!("one of its values is {factor}"))),
        None => Ok(factors),
    }
}

/// Blocks of NVFP4 as [`Format::Fp4`], the scales of each matrix times its number in `scale`; as
/// they are, if all of these are 1.
fn multiplied(view: &TensorView, scale: &TensorView) -> Result<TensorView, FileError> {
    let factors = factors(scale, view.shape.iter().rev().skip(2).product())?;
    if factors.iter().all(|&factor| factor == 1.0) {
        return Ok(view.clone());
    }
    let k = view.shape.last().copied().unwrap_or(0);
    let rows: usize = view.shape.iter().rev().skip(1).product();
    let blocks = view.bytes.clone();
    let bytes = Contents::computed(rows * (k / 2 + k / GROUP * 4), move || {
        let blocks = blocks.get();
        let mut all = by_blocks(&blocks, [rows, k], 8, |_, block, out| {
            let pairs = block.codes.as_chunks::<2>().0;
            out.iter_mut().zip(pairs).for_each(|(out, [low, high])| *out = low | high << 4);
        });
        all.extend(by_blocks(&blocks, [rows, k], 4, |row, block, out| {
            let factor = factors[row / (rows / factors.len())];
            for (out, &code) in out.as_chunks_mut().0.iter_mut().zip(&block.scales.sub_scales) {
                *out = (E4M3::decode(code as u8) * factor).to_le_bytes();
            }
        }));
        all
    });
    Ok(TensorView { stored: Stored::Blocks(Format::Fp4), bytes, ..view.clone() })
}

/// `words` words of each block of NVFP4 in rows of `k` values: `take(row, block, out)` makes them.
fn by_blocks(
    blocks: &[u8],
    [rows, k]: [usize; 2],
    words: usize,
    take: impl Fn(usize, &Unpacked, &mut [u8]) + Sync,
) -> Vec<u8> {
    let unpack = Format::NVFP4.unpack().expect("NVFP4 has blocks");
    let (per_row, block_bytes) = (k / Format::NVFP4.block(), blocks.len() / (rows * k / 64).max(1));
    words_by_rows(rows, per_row * words, |first, out| {
        let mut block = Unpacked::default();
        for (row, out) in (first..).zip(out.chunks_exact_mut(per_row * words * 4)) {
            let blocks = blocks[row * per_row * block_bytes..].chunks_exact(block_bytes);
            for (bytes, out) in blocks.zip(out.chunks_exact_mut(words * 4)) {
                unpack(bytes, &mut block);
                take(row, &block, out);
            }
        }
    })
}

/// Multiplies the scales of the weights of `checkpoint`, in MLX's layout, that have a number per
/// matrix; these become [`Format::Fp4`].
///
/// # Errors
/// [`FileError::Quantized`] for numbers that do not fit their weight, are missing, or are of
/// weights in other modes; those of [`Checkpoint::quantization`].
pub(super) fn of_mlx(checkpoint: &Checkpoint) -> Result<(Tensors, HashSet<String>), FileError> {
    let tensors = &checkpoint.tensors;
    let (mut made, mut modules) = (vec![], HashSet::new());
    for view in tensors.iter().filter(|view| !view.name.ends_with(MLX_NAME)) {
        let module = view.name.strip_suffix(".scales");
        let global = module.and_then(|module| tensors.get(&format!("{module}{MLX_NAME}")));
        let (Some(module), Some(global)) = (module, global) else {
            made.push(view.clone());
            continue;
        };
        let (groups, rows) = view.shape.split_last().unwrap_or((&0, &[]));
        let (groups, rows): (usize, usize) = (*groups, rows.iter().product());
        let matrices = view.shape.iter().rev().skip(2).product();
        if checkpoint.quantization(module)? != Some(Quantization::of(Format::Nvfp4)) {
            return Err(refuse(global, "only weights in nvfp4 have one".into()));
        }
        if view.stored != Stored::Plain(DType::U8) {
            return Err(refuse(view, "u8 is wanted".into()));
        }
        let factors = factors(global, matrices)?;
        let codes = view.bytes.clone();
        let products = Contents::computed(rows * groups * 4, move || {
            let codes = codes.get();
            words_by_rows(rows, groups, |first, out| {
                let codes = codes[first * groups..].iter().zip(out.as_chunks_mut().0);
                for (i, (&code, out)) in codes.enumerate() {
                    let matrix = (first + i / groups) / (rows / factors.len());
                    *out = (E4M3::decode(code) * (factors[matrix] / MLX_UNIT)).to_le_bytes();
                }
            })
        });
        made.push(TensorView { stored: Stored::Plain(DType::F32), bytes: products, ..view.clone() });
        modules.insert(module.to_string());
    }
    let named = |view: &&TensorView| view.name.ends_with(MLX_NAME);
    let is_used = |view: &TensorView| modules.contains(view.name.trim_end_matches(MLX_NAME));
    if let Some(view) = tensors.iter().filter(named).find(|view| !is_used(view)) {
        return Err(refuse(view, "its module has no scales".into()));
    }
    let settings = checkpoint.config().ok().and_then(quantization::find).and_then(|(_, all)| all.as_object());
    let promised = |(path, settings): (&String, &Value)| {
        let scales = tensors.get(&format!("{path}.scales")).filter(|_| !modules.contains(path))?;
        (settings.get("global_scale") == Some(&Value::Bool(true))).then_some(scales)
    };
    match settings.into_iter().flatten().find_map(promised) {
        Some(scales) => Err(refuse(scales, format!("config.json says that there is a {MLX_NAME} beside it"))),
        None => Ok((Tensors::new(made)?, modules)),
    }
}
