//! NVFP4: e2m1 codes, an e4m3 scale per 16 values and a float for the matrix. No format of lowbit's
//! has that float yet, so weights become f32, which holds the products exactly.
//!
//! ```text
//! ModelOpt             weight u8 [N, K/2]          weight_scale f8e4m3 [N, K/16]   weight_scale_2 f32
//! compressed-tensors   weight_packed u8 [N, K/2]   weight_scale f8e4m3 [N, K/16]   weight_global_scale f32
//! ```
//! `value = code * (weight_scale * weight_scale_2)`, or
//! `code * (weight_scale / weight_global_scale)`. Source: nvidia-modelopt 0.40
//! `torch/quantization/qtensor/nvfp4_tensor.py`, compressed-tensors 0.20 `compressors/nvfp4`,
//! `quantization/lifecycle/forward_helpers.py`.

use lowbit_formats::{DType, E2M1, E4M3, Minifloat};

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
    let (from, of_groups) = (codes.bytes.clone(), scales.bytes.clone());
    let values = Contents::computed(n * k * 4, move || {
        let (codes, scales) = (from.get(), of_groups.get());
        words_by_rows(n, k, |first, out| {
            for (i, out) in out.chunks_mut(4 * k).enumerate() {
                let codes = &codes[(first + i) * columns..][..columns];
                let scales = &scales[(first + i) * (k / GROUP)..][..k / GROUP];
                decode_row(codes, scales, (factor, kind), out);
            }
        })
    });
    adapter.push(module, "weight", codes, (DType::F32, vec![n, k], values));
    adapter.expanded.insert(module.into());
    Ok(())
}

fn decode_row(codes: &[u8], scales: &[u8], (factor, kind): (f32, Global), out: &mut [u8]) {
    let groups = codes.chunks_exact(GROUP / 2).zip(out.as_chunks_mut::<{ 4 * GROUP }>().0);
    for ((codes, out), &scale) in groups.zip(scales) {
        let scale = match kind {
            Global::Multiplies => E4M3::decode(scale) * factor,
            Global::Divides => E4M3::decode(scale) / factor,
        };
        for (code, out) in codes.iter().zip(out.as_chunks_mut::<8>().0) {
            let [low, high] = [code & 15, code >> 4].map(|code| (E2M1::decode(code) * scale).to_le_bytes());
            out[..4].copy_from_slice(&low);
            out[4..].copy_from_slice(&high);
        }
    }
}
