//! Attention over caches of 8 bits, by every way through the op.

use super::tests::{CASE, Case};
use super::{AttentionParams, CacheType, attention, attention_backward};
#[cfg(feature = "gpu")]
use crate::ops::testing::FLOATS;
use crate::ops::testing::devices;
use crate::{Device, Tensor};
use lowbit_formats::{DType, FloatType};

const WIDE: Case = Case { query_heads: 12, heads: 2, width: 64, value_width: 64, ..CASE };

/// Steps, prompts, windows and sinks of heads of each size of groups, and of queries of each type.
fn heads_on(device: &Device, sizes: &[(usize, usize)], dtypes: &[FloatType]) {
    for &(width, value_width) in sizes {
        let case = Case { width, value_width, ..WIDE };
        for position in [0, 3, 63, 64, 67, 149] {
            case.check(&[position], FloatType::F32, CacheType::Int8, device);
        }
        case.check(&(11..48).collect::<Vec<_>>(), FloatType::F32, CacheType::Int8, device);
        let window = Case { window: Some(70), sinks: true, ..case };
        window.check(&[140, 141], FloatType::F32, CacheType::Int8, device);
    }
    for &dtype in dtypes {
        for width in [64, 128, 256] {
            // A step with tensor cores has up to 16 rows, a prompt more; rows see different keys.
            for query_heads in [4, 10, 16] {
                let case = Case { query_heads, width, value_width: width, ..WIDE };
                case.check(&[70], dtype, CacheType::Int8, device);
                case.check(&[148, 149], dtype, CacheType::Int8, device);
            }
            let case = Case { width, value_width: width, ..WIDE };
            case.check(&(30..99).collect::<Vec<_>>(), dtype, CacheType::Int8, device);
            Case { window: Some(33), sinks: true, ..case }.check(&[130], dtype, CacheType::Int8, device);
            let long = Case { capacity: 2100, ..case };
            long.check(&[2077], dtype, CacheType::Int8, device);
        }
    }
    let widest = Case { width: 512, value_width: 512, ..WIDE };
    widest.check(&[149], FloatType::F16, CacheType::Int8, device);
    widest.check(&[140, 149], FloatType::BF16, CacheType::Int8, device);
    let spread = Case { spread: 1000.0, capacity: 1100, ..WIDE };
    spread.check(&[1000], FloatType::F32, CacheType::Int8, device);
}

#[test]
fn heads_on_cpus() {
    for device in devices() {
        let sizes = [(16, 32), (32, 16), (48, 80), (80, 48), (128, 96), (144, 256), (512, 512)];
        heads_on(&device, &sizes, &[FloatType::F32]);
    }
}

#[cfg(feature = "gpu")]
#[test]
fn heads_on_a_gpu() {
    heads_on(&crate::ops::testing::gpu(), &[(16, 32), (48, 80), (144, 256)], &FLOATS);
}

#[test]
fn what_has_no_8_bits_is_refused_by_name() {
    let device = crate::ops::testing::device();
    let f = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let i = |shape: &[usize]| Tensor::zeros(shape, DType::I8, &device);
    let at = Tensor::new(&[0u32, 1], &[2], &device).unwrap();
    let params = AttentionParams::causal(1.0);
    let q = f(&[2, 4, 64]);
    let refused = |k: &Tensor, v: &Tensor| attention(&q, k, v, &at, None, &params).unwrap_err().to_string();
    let rows = i(&[2, 9, 80]);
    assert_eq!(
        refused(&i(&[2, 9, 64]), &rows),
        "attention: k is [2, 9, 64], but q [2, 4, 64] wants [2, 9, 80]"
    );
    assert_eq!(
        refused(&i(&[2, 9, 72]), &rows),
        "attention: k is [2, 9, 72], but rows of i8 are D codes, a multiple of 16 up to 512, and 16 bytes \
         of scales per 256"
    );
    assert_eq!(refused(&rows, &f(&[2, 9, 64])), "attention: v is f32, but i8 is wanted");
    let y = f(&[2, 4, 64]);
    let error = attention_backward([&q, &rows, &rows], &at, &params, [&y, &y]).unwrap_err().to_string();
    assert_eq!(error, "attention_backward: k is i8, but f32, f16 or bf16 is wanted");
}
