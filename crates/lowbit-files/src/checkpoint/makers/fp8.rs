//! Weights of e4m3 with floats as scales: of a matrix, of rows, or of blocks. They become
//! [`Format::Fp8`], with each group's scale; those without whole groups become f32.
//!
//! ```text
//! fp8                  weight f8e4m3 [N, K]   weight_scale_inv [N/128, K/128]   (or one)
//! fbgemm_fp8           weight f8e4m3 [N, K]   weight_scale [N, 1]
//! compressed-tensors   weight f8e4m3 [N, K]   weight_scale [1], [N, 1], [N/128, K/128] or [N, K/group]
//! ModelOpt             weight f8e4m3 [N, K]   weight_scale []
//! ```
//! `value = code * scale`, also where the scale is called `weight_scale_inv`.
//! Source: transformers 5.24 `integrations/finegrained_fp8.py`, compressed-tensors 0.20
//! `compressors/naive_quantized`.

use lowbit_formats::{DType, E4M3, FloatType, Format, Minifloat};
use serde_json::Value;

use super::Adapter;
use super::integers::words_by_rows;
use crate::{Contents, FileError, Stored, TensorView};

/// The names of scales of activations and caches.
const ACTIVATIONS: [&str; 4] = ["input_scale", "input_scale_ub", "activation_scale", "output_scale"];

/// `fp8` and `fbgemm_fp8`.
pub(super) fn read(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    for module in adapter.modules_with(".weight") {
        read_if_e4m3(adapter, module)?;
    }
    Ok(())
}

/// A module's weight, if it is of e4m3.
pub(super) fn read_if_e4m3(adapter: &mut Adapter<'_>, module: &str) -> Result<(), FileError> {
    let weight = adapter.tensors.get(&format!("{module}.weight"));
    if weight.is_none_or(|weight| weight.stored != Stored::Plain(DType::F8E4M3)) {
        return Ok(());
    }
    let weight = adapter.need(module, "weight")?;
    let scale = match adapter.take(module, "weight_scale_inv") {
        Some(scale) => scale,
        None => adapter.need(module, "weight_scale")?,
    };
    read_module(adapter, module, (weight, scale))?;
    ACTIVATIONS.iter().for_each(|part| adapter.drop_without_effect(module, part));
    Ok(())
}

/// A module's codes and its scales, which are floats.
pub(super) fn read_module(
    adapter: &mut Adapter<'_>,
    module: &str,
    (weight, scale): (&TensorView, &TensorView),
) -> Result<(), FileError> {
    let &[.., n, k] = &weight.shape[..] else { return Err(adapter.misfit(weight, "a matrix is wanted")) };
    let float = adapter.floats(scale)?;
    let leading = &weight.shape[..weight.shape.len() - 1];
    let [tall, wide] = block(adapter, (weight, scale))?;
    // A group is within one of the file's blocks.
    let fits = |&size: &usize| k.is_multiple_of(size) && (wide >= k || wide.is_multiple_of(size));
    let format = [128, 32].into_iter().find(fits).and_then(Format::fp8);
    let blocks = Blocks { n, down: n.div_ceil(tall), across: k.div_ceil(wide), tall, wide };
    let (rows, of_blocks) = (leading.iter().product::<usize>(), scale.bytes.clone());
    let Some(format) = format else {
        return expand(adapter, module, weight, (blocks, of_blocks, float));
    };
    let groups = k / format.block();
    let scales = Contents::computed(rows * groups * 4, move || {
        let (of_blocks, mut scales) = (of_blocks.get(), Vec::with_capacity(rows * groups * 4));
        for row in 0..rows {
            let first = blocks.first_of_row(row);
            for group in 0..groups {
                let index = first + group * format.block() / wide;
                FloatType::F32.push(float.get(&of_blocks, index), &mut scales);
            }
        }
        scales
    });
    let with = |columns: usize| [leading, &[columns]].concat();
    adapter.push(module, "weight", weight, (DType::U32, with(k / 4), weight.bytes.clone()));
    adapter.push(module, "scales", scale, (DType::F32, with(groups), scales));
    adapter.is_in(module, format);
    Ok(())
}

/// The blocks of matrices of `n` rows: of `tall` rows and `wide` columns, `down` x `across` for
/// each matrix.
#[derive(Clone, Copy)]
struct Blocks {
    n: usize,
    down: usize,
    across: usize,
    tall: usize,
    wide: usize,
}

impl Blocks {
    /// The first block of a row, counted over all matrices.
    fn first_of_row(&self, row: usize) -> usize {
        (row / self.n * self.down + row % self.n / self.tall) * self.across
    }
}

/// A module in f32, which holds the products exactly: its rows or blocks are no whole groups.
fn expand(
    adapter: &mut Adapter<'_>,
    module: &str,
    weight: &TensorView,
    (blocks, of_blocks, float): (Blocks, Contents, FloatType),
) -> Result<(), FileError> {
    let (&k, leading) = weight.shape.split_last().expect("a matrix");
    let (rows, from) = (leading.iter().product::<usize>(), weight.bytes.clone());
    let values = Contents::computed(rows * k * 4, move || {
        let (codes, scales) = (from.get(), of_blocks.get());
        words_by_rows(rows, k, |first, out| {
            for (i, out) in out.chunks_mut(4 * k).enumerate() {
                let (row, wide) = (first + i, blocks.wide);
                let codes = codes[row * k..][..k].chunks(wide).zip(out.chunks_mut(4 * wide));
                for (index, (codes, out)) in codes.enumerate() {
                    let scale = float.get(&scales, blocks.first_of_row(row) + index);
                    for (&code, out) in codes.iter().zip(out.as_chunks_mut().0) {
                        *out = (E4M3::decode(code) * scale).to_le_bytes();
                    }
                }
            }
        })
    });
    adapter.push(module, "weight", weight, (DType::F32, weight.shape.clone(), values));
    adapter.expanded.insert(module.into());
    Ok(())
}

/// Rows and columns that share a scale.
fn block(
    adapter: &Adapter<'_>,
    (weight, scale): (&TensorView, &TensorView),
) -> Result<[usize; 2], FileError> {
    let (leading, &[n, k]) = weight.shape.split_last_chunk().expect("a matrix");
    if n == 0 || k == 0 {
        return Err(adapter.misfit(weight, "a matrix with values is wanted"));
    }
    // A scalar, or one for each matrix of a stack.
    let of_matrices = scale.shape == leading || scale.shape == [leading, &[1]].concat();
    if scale.elements() == 1 && leading.is_empty()
        || of_matrices
        || scale.shape == [leading, &[1, 1]].concat()
    {
        return Ok([n, k]);
    }
    if scale.shape == [leading, &[n]].concat() || scale.shape == [leading, &[n, 1]].concat() {
        return Ok([1, k]);
    }
    let (of_scale, down, across) = match &scale.shape[..] {
        [of_scale @ .., down, across] => (of_scale, *down, *across),
        _ => return Err(adapter.misfit(scale, format!("scales of {n} x {k} values are wanted"))),
    };
    let named = named_blocks(adapter.settings);
    let fits = |&[tall, wide]: &[usize; 2]| n.div_ceil(tall) == down && k.div_ceil(wide) == across;
    // A group of each row, which has no other name.
    let of_rows = (down == n && across > 0 && k.is_multiple_of(across)).then(|| [1, k / across]);
    let block = named.iter().copied().find(fits).or(of_rows).filter(|_| of_scale == leading);
    block.ok_or_else(|| {
        let of = named.first().map_or(String::new(), |[tall, wide]| format!(" in blocks of {tall} x {wide}"));
        adapter.misfit(scale, format!("scales of {n} x {k} values{of} are wanted"))
    })
}

/// The sizes of blocks that the configuration names.
fn named_blocks(settings: &Value) -> Vec<[usize; 2]> {
    let groups = settings.get("config_groups").and_then(Value::as_object);
    let of_groups = groups.into_iter().flat_map(|groups| groups.values());
    let of_groups = of_groups.filter_map(|group| group.pointer("/weights/block_structure"));
    let all = settings.get("weight_block_size").into_iter().chain(of_groups);
    let size = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&size| size > 0);
    all.filter_map(|block| Some([size(block.get(0)?)?, size(block.get(1)?)?])).collect()
}
