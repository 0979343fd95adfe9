//! NVFP4: e2m1 codes, an e4m3 scale per 16 values and a float for the matrix. It becomes
//! [`Format::Fp4`], whose scales are the products of both, in f32.
//!
//! ```text
//! ModelOpt             weight u8 [N, K/2]          weight_scale f8e4m3 [N, K/16]   weight_scale_2 f32
//! compressed-tensors   weight_packed u8 [N, K/2]   weight_scale f8e4m3 [N, K/16]   weight_global_scale f32
//! ```
//! `value = code * (weight_scale * weight_scale_2)`, or
//! `code * (weight_scale / weight_global_scale)`. Source: nvidia-modelopt 0.40
//! `torch/quantization/qtensor/nvfp4_tensor.py`, compressed-tensors 0.20 `compressors/nvfp4`,
//! `quantization/lifecycle/forward_helpers.py`.

use lowbit_formats::{DType, E4M3, Format, Minifloat};

use super::Adapter;
use super::integers::words_by_rows;
use crate::{Contents, FileError, Stored, TensorView};

/// The effect of the scale of a matrix's scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    Multiplies,
    Divides,
}

/// Values that share a scale.
const GROUP: usize = 16;

/// A module of the given codes, scales and scale of scales.
pub(super) fn read_module(
    adapter: &mut Adapter<'_>,
    module: &str,
    [codes, scales, global]: [&TensorView; 3],
    kind: Global,
) -> Result<(), FileError> {
    let &[n, columns] = &codes.shape[..] else {
        return Err(adapter.misfit(codes, "u8 [N, K/2] is wanted"));
    };
    let k = columns * 2;
    if codes.stored != Stored::Plain(DType::U8) || !k.is_multiple_of(GROUP) {
        return Err(adapter.misfit(codes, "u8 [N, K/2] with whole groups of 16 values is wanted"));
    }
    if scales.stored != Stored::Plain(DType::F8E4M3) || scales.shape != [n, k / GROUP] {
        return Err(adapter.misfit(scales, format!("f8e4m3 [{n}, {}] is wanted", k / GROUP)));
    }
    let float = adapter.floats(global)?;
    if global.elements() != 1 {
        return Err(adapter.misfit(global, "one number is wanted"));
    }
    let factor = float.get(&global.bytes.get(), 0);
    if !factor.is_finite() || factor == 0.0 {
        return Err(adapter.misfit(global, format!("its value is {factor}")));
    }
    let of_groups = scales.bytes.clone();
    let products = Contents::computed(n * (k / GROUP) * 4, move || {
        let of_groups = of_groups.get();
        words_by_rows(n, k / GROUP, |first, out| {
            let codes = of_groups[first * (k / GROUP)..].iter();
            for (&code, out) in codes.zip(out.as_chunks_mut().0) {
                let scale = match kind {
                    Global::Multiplies => E4M3::decode(code) * factor,
                    Global::Divides => E4M3::decode(code) / factor,
                };
                *out = scale.to_le_bytes();
            }
        })
    });
    adapter.push(module, "weight", codes, (DType::U32, vec![n, k / 8], codes.bytes.clone()));
    adapter.push(module, "scales", scales, (DType::F32, vec![n, k / GROUP], products));
    adapter.is_in(module, Format::Fp4);
    Ok(())
}
