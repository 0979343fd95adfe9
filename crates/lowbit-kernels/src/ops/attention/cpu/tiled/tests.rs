use super::super::on_tiles;
use crate::{
    Device, Tensor,
    ops::{
        attention::{
            AttentionParams,
            tests::{CASE, Case},
        },
        cache_rows::{CacheType, Int8, Stored},
        testing::devices,
    },
    simd::tiles::Model,
};
use half::{bf16, f16};
use lowbit_formats::{DType, FloatType};

/// Attention by the model of a unit, and by the device's own unit if it has one.
fn attention(
    device: &Device,
    [q, k, v, at]: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Vec<Tensor> {
    match k.dtype() {
        DType::I8 => attention_of::<Int8>(device, [q, k, v, at], sinks, params),
        DType::F16 => attention_of::<f16>(device, [q, k, v, at], sinks, params),
        _ => attention_of::<bf16>(device, [q, k, v, at], sinks, params),
    }
}

fn attention_of<T: Stored>(
    device: &Device,
    [q, k, v, at]: [&Tensor; 4],
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Vec<Tensor> {
    let cpu = device.as_cpu("test").unwrap();
    let at = (at.as_slice().unwrap(), sinks.map(|sinks| sinks.as_slice().unwrap()));
    let model = on_tiles::<T>(cpu, Model, [q, k, v], at, params).unwrap();
    #[cfg(target_arch = "x86_64")]
    let own = cpu.isa().tiles().map(|amx| on_tiles::<T>(cpu, amx, [q, k, v], at, params).unwrap());
    #[cfg(not(target_arch = "x86_64"))]
    let own = None;
    std::iter::once(model).chain(own).collect()
}

/// Compares with the reference, for queries in f32. Keys and values that no query sees are NaN.
fn check(case: &Case, positions: &[u32], cache: impl Into<CacheType>, device: &Device) {
    case.check_each(positions, (FloatType::F32, cache.into()), device, |operands, sinks| {
        let all = attention(device, operands, sinks, &case.params());
        all.into_iter().map(|y| (y, Some(FloatType::BF16))).collect()
    });
}

fn range(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

#[test]
fn rows_around_every_tile() {
    for device in devices() {
        // Rows of three query heads; keys from the middle of a step to the middle of another one.
        for tokens in [1, 5, 6, 10, 11, 22, 43] {
            check(&CASE, &range(101, tokens), FloatType::F16, &device);
        }
        check(&CASE, &range(0, 37), FloatType::BF16, &device);
    }
}

#[test]
fn sinks() {
    for device in devices() {
        let case = Case { sinks: true, capacity: 1200, ..CASE };
        check(&case, &range(101, 22), FloatType::F16, &device);
        // Cut into several stretches of keys, where there are threads.
        check(&Case { query_heads: 2, heads: 1, ..case }, &range(1100, 20), FloatType::BF16, &device);
    }
}

#[test]
fn head_sizes_around_every_tile() {
    for device in devices() {
        for (width, value_width) in [(1, 8), (16, 15), (17, 16), (31, 17), (32, 33), (33, 48), (65, 64)] {
            let case = Case { width, value_width, ..CASE };
            check(&case, &range(30, 35), FloatType::F16, &device);
        }
    }
}

#[test]
fn keys_beyond_a_stretch_and_rows_beyond_a_block() {
    let device = Device::cpu(Some(2)).unwrap();
    let case = Case { capacity: 420, query_heads: 12, heads: 2, width: 32, value_width: 32, ..CASE };
    check(&case, &range(0, 400), FloatType::F16, &device);
    check(&case, &range(380, 40), FloatType::F16, &device);
    // Cut into several stretches of keys.
    let case = Case { capacity: 1200, query_heads: 2, heads: 1, ..case };
    check(&case, &range(1100, 20), FloatType::F16, &device);
}

#[test]
fn caches_of_8_bits() {
    for device in devices() {
        for (width, value_width) in [(16, 48), (48, 16), (64, 144), (256, 32)] {
            let case = Case { width, value_width, ..CASE };
            check(&case, &range(30, 35), CacheType::Int8, &device);
        }
    }
}

#[test]
fn windows_and_positions_in_any_order() {
    for device in devices() {
        for window in [1, 2, 31, 32, 33, 64, 500] {
            let case = Case { window: Some(window), capacity: 350, ..CASE };
            check(&case, &range(260, 39), FloatType::F16, &device);
            check(&case, &[299, 3, 50, 3, 0, 149], FloatType::F16, &device);
        }
    }
}

#[test]
fn caps_and_keys_after_the_own() {
    for device in devices() {
        let case = Case { softcap: Some(4.0), ..CASE };
        check(&case, &range(101, 22), FloatType::F16, &device);
        check(&Case { spread: 1000.0, ..case }, &range(0, 37), FloatType::BF16, &device);
        for (look_ahead, window) in [(usize::MAX, None), (20, Some(21))] {
            check(&Case { look_ahead, window, ..CASE }, &range(0, 150), FloatType::F16, &device);
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for device in devices() {
        let case = Case { spread: 1000.0, ..CASE };
        check(&case, &range(0, 70), FloatType::F16, &device);
    }
}

/// Values that are not finite reach the rows that see them, in their column; keys and queries their
/// rows.
#[test]
fn what_is_not_finite_reaches_who_sees_it() {
    const SIZES: [usize; 3] = [40, 20, 18];
    let [tokens, width, value_width] = SIZES;
    for device in devices() {
        for bad in [f32::NAN, f32::INFINITY] {
            let tensor = |shape: &[usize], at: Option<usize>| {
                let mut values = vec![0.5f32; shape.iter().product()];
                at.into_iter().for_each(|at| values[at] = bad);
                Tensor::new(&values, shape, &device).unwrap()
            };
            let at = Tensor::new(&range(0, tokens as u32), &[tokens], &device).unwrap();
            let params = AttentionParams { sliding_window: Some(30), ..AttentionParams::causal(0.25) };
            let run = |q: Option<usize>, k: Option<usize>, v: Option<usize>| {
                let half = |x: Tensor| x.cast(DType::F16).unwrap();
                let q = tensor(&[tokens, 1, width], q);
                let (k, v) =
                    (half(tensor(&[1, tokens, width], k)), half(tensor(&[1, tokens, value_width], v)));
                attention(&device, [&q, &k, &v, &at], None, &params)
            };
            let check = |y: Vec<Tensor>, reached: &dyn Fn(usize, usize) -> bool| {
                for y in y {
                    for (i, y) in y.as_slice::<f32>().unwrap().iter().enumerate() {
                        let (row, column) = (i / value_width, i % value_width);
                        let as_wanted = if reached(row, column) { !y.is_finite() } else { *y == 0.5 };
                        assert!(as_wanted, "{bad}, row {row}, column {column}: {y}");
                    }
                }
            };
            let (row, column) = (7, 17);
            let sees = |t: usize| (row..row + 30).contains(&t);
            check(run(None, None, Some(row * value_width + column)), &|t, c| sees(t) && c == column);
            if bad.is_nan() {
                check(run(Some(row * width + 3), None, None), &|t, _| t == row);
                check(run(None, Some(row * width + 3), None), &|t, _| sees(t));
            }
        }
    }
}
