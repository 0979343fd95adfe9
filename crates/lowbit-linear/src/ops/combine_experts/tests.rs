use super::*;
use crate::ops::testing::{FLOATS, devices, rounded, rounding, values};
use numcheck::{Random, assert_within};

#[test]
fn agrees_with_the_sum_in_f64() {
    agrees_with_the_sum_in_f64_on(&devices());
}

pub(super) fn agrees_with_the_sum_in_f64_on(devices: &[Device]) {
    let mut random = Random::new(5);
    for (tokens, top_k, n) in [(1, 8, 33), (3, 1, 16), (5, 4, 1), (40, 3, 700)] {
        for dtype in FLOATS {
            let x: Vec<f32> =
                random.normal(tokens * top_k * n, 1.0).iter().map(|&x| dtype.round(x)).collect();
            let weights = random.normal(tokens * top_k, 0.3);
            let (want, bounds): (Vec<f64>, Vec<f64>) = (0..tokens * n)
                .map(|at| {
                    let slots = at / n * top_k..(at / n + 1) * top_k;
                    reference::combine_experts(slots.map(|slot| (weights[slot], x[slot * n + at % n])))
                })
                .unzip();
            for device in devices {
                let x = rounded(&x, &[tokens, top_k, n], dtype, device);
                let weights = Tensor::new(&weights, &[tokens, top_k], device).unwrap();
                let y = combine_experts(&x, &weights).unwrap();
                assert_eq!((y.dtype(), y.shape()), (dtype.dtype(), &[tokens, n][..]));
                assert_within(&values(&y), &want, |i| bounds[i] + rounding(dtype, want[i].abs() + bounds[i]));
            }
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let run = |x: &[usize], weights: &[usize], dtype: DType| {
        let (x, weights) = (Tensor::zeros(x, DType::F32, &device), Tensor::zeros(weights, dtype, &device));
        combine_experts(&x, &weights).map_err(|error| error.to_string())
    };
    assert!(run(&[5, 2, 7], &[5, 2], DType::F32).is_ok());
    assert!(run(&[0, 2, 7], &[0, 2], DType::F32).unwrap().is_empty());
    assert_eq!(
        run(&[5, 2, 7], &[2, 5], DType::F32).unwrap_err(),
        "combine_experts: weights is [2, 5], but x [5, 2, 7] wants [5, 2]"
    );
    assert_eq!(
        run(&[5, 2, 7], &[5, 2], DType::BF16).unwrap_err(),
        "combine_experts: weights is bf16, but f32 is wanted"
    );
    assert_eq!(
        run(&[5, 7], &[5], DType::F32).unwrap_err(),
        "combine_experts: x is [5, 7], but [T, top_k, N] is wanted"
    );
}
