//! Weights of small floats with a power of two per 32 values, which have the bytes of MLX's `mxfp4`
//! and `mxfp8`: gpt-oss' experts and compressed-tensors' `mxfp4-pack-quantized` and
//! `mxfp8-quantized`.
//!
//! ```text
//! gpt-oss              X_blocks u8 [E, N, K/32, 16]   X_scales u8 [E, N, K/32]
//! compressed-tensors   weight_packed u8 [N, K/2]      weight_scale u8 [N, K/32]
//!                      weight f8e4m3 [N, K]           weight_scale u8 [N, K/32]
//! ```
//! Source: transformers 5.24 `integrations/mxfp4.py`, compressed-tensors 0.20
//! `compressors/{mxfp4,mxfp8}`.

use lowbit_formats::{DType, Format};

use super::Adapter;
use crate::{FileError, Stored, TensorView};

/// gpt-oss' experts, whose names have no dot before their parts.
pub(super) fn read_gpt_oss(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    for module in adapter.modules_with("_blocks") {
        let blocks = adapter.need_named(module, "_blocks")?;
        let scales = adapter.need_named(module, "_scales")?;
        let &[experts, n, groups, 16] = &blocks.shape[..] else {
            return Err(adapter.misfit(blocks, "u8 [E, N, K/32, 16] is wanted"));
        };
        push(adapter, module, (blocks, scales), (Format::Mxfp4, &[experts, n], groups * 32))?;
    }
    Ok(())
}

/// A module of compressed-tensors: its codes and its scales, which are u8.
pub(super) fn read_module(
    adapter: &mut Adapter<'_>,
    module: &str,
    (codes, scales): (&TensorView, &TensorView),
) -> Result<(), FileError> {
    let (format, per_byte) = match codes.stored {
        Stored::Plain(DType::F8E4M3) => (Format::Mxfp8, 1),
        _ => (Format::Mxfp4, 2),
    };
    match codes.shape.split_last().filter(|(_, rows)| !rows.is_empty()) {
        Some((&columns, rows)) => push(adapter, module, (codes, scales), (format, rows, columns * per_byte)),
        None => Err(adapter.misfit(codes, "a matrix is wanted")),
    }
}

fn push(
    adapter: &mut Adapter<'_>,
    module: &str,
    (codes, scales): (&TensorView, &TensorView),
    (format, rows, k): (Format, &[usize], usize),
) -> Result<(), FileError> {
    let groups = k / 32;
    if groups * 32 != k {
        return Err(adapter.misfit(codes, "rows of a multiple of 32 values are wanted"));
    }
    let want = [rows, &[groups]].concat();
    if !matches!(codes.stored, Stored::Plain(DType::U8 | DType::F8E4M3)) {
        return Err(adapter.misfit(codes, "a type of one byte is wanted"));
    }
    if scales.stored != Stored::Plain(DType::U8) || scales.shape != want {
        return Err(adapter.misfit(scales, format!("u8 {want:?} is wanted")));
    }
    let words = [rows, &[k / 32 * format.scheme().bits]].concat();
    adapter.push(module, "weight", codes, (DType::U32, words, codes.bytes.clone()));
    adapter.push(module, "scales", scales, (DType::U8, want, scales.bytes.clone()));
    adapter.is_in(module, format);
    Ok(())
}
