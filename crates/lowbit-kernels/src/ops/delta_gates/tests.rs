use super::*;
use crate::ops::testing::{FLOATS, devices, rounded, values};
use lowbit_formats::{DType, FloatType};
use numcheck::{Random, assert_within};

/// Gates far apart: softplus and sigmoid at both ends, and in between.
fn spread(random: &mut Random, n: usize, dtype: FloatType) -> Vec<f32> {
    (0..n).map(|i| dtype.round(random.uniform() * [0.1, 3.0, 30.0, 200.0][i % 4])).collect()
}

#[test]
fn agrees_with_the_reference() {
    agrees_with_the_reference_on(&devices());
}

pub(super) fn agrees_with_the_reference_on(devices: &[Device]) {
    let mut random = Random::new(7);
    for (tokens, heads) in [(1, 33), (70, 12), (900, 5)] {
        for dtype in FLOATS {
            let [a, b] = [(); 2].map(|()| spread(&mut random, tokens * heads, dtype));
            let a_log: Vec<f32> = (0..heads).map(|_| dtype.round(random.uniform() * 3.0)).collect();
            let dt_bias: Vec<f32> = (0..heads).map(|_| dtype.round(random.uniform() * 5.0)).collect();
            let want: Vec<_> = (0..a.len())
                .map(|i| reference::delta_gates(a[i], b[i], a_log[i % heads], dt_bias[i % heads]))
                .collect();
            let [decays, betas] = [0, 1].map(|gate| want.iter().map(|both| both[gate].0).collect::<Vec<_>>());
            for device in devices {
                let made = |x: &[f32], shape: &[usize]| rounded(x, shape, dtype, device);
                let (a, b) = (made(&a, &[tokens, heads]), made(&b, &[tokens, heads]));
                let (log_decay, beta) =
                    delta_gates(&a, &b, &made(&a_log, &[heads]), &made(&dt_bias, &[heads])).unwrap();
                assert_eq!((log_decay.dtype(), beta.dtype()), (DType::F32, DType::F32));
                assert_eq!((log_decay.shape(), beta.shape()), (a.shape(), a.shape()));
                assert_within(&values(&log_decay), &decays, |i| want[i][0].1);
                assert_within(&values(&beta), &betas, |i| want[i][1].1);
            }
        }
    }
}

#[test]
fn inputs_are_left_alone() {
    let device = crate::Device::cpu(Some(1)).unwrap();
    let a = rounded(&[0.5, -1.0], &[1, 2], FloatType::F32, &device);
    let bias = rounded(&[0.0, 1.0], &[2], FloatType::F32, &device);
    let (log_decay, beta) = delta_gates(&a, &a, &bias, &bias).unwrap();
    assert_eq!(values(&a), [0.5, -1.0]);
    assert_ne!(values(&log_decay), values(&beta));
}

#[test]
fn refusals_name_both_sides() {
    let device = crate::Device::cpu(Some(1)).unwrap();
    let run = |a: &[usize], b: &[usize], a_log: usize, dt_bias: usize, dtype: DType| {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
        let (a, b) = (zeros(a, dtype), zeros(b, DType::F32));
        delta_gates(&a, &b, &zeros(&[a_log], DType::F32), &zeros(&[dt_bias], DType::F32))
            .map_err(|error| error.to_string())
    };
    let (a, other) = ([5, 3], [5, 4]);
    assert!(run(&a, &a, 3, 3, DType::F32).is_ok());
    assert_eq!(
        run(&a, &other, 3, 3, DType::F32).unwrap_err(),
        "delta_gates: b is [5, 4], but a [5, 3] wants [5, 3]"
    );
    assert_eq!(
        run(&a, &a, 4, 3, DType::F32).unwrap_err(),
        "delta_gates: a_log is [4], but a [5, 3] wants [3]"
    );
    assert_eq!(
        run(&a, &a, 3, 2, DType::F32).unwrap_err(),
        "delta_gates: dt_bias is [2], but a [5, 3] wants [3]"
    );
    assert_eq!(
        run(&a, &a, 3, 3, DType::U32).unwrap_err(),
        "delta_gates: a is u32, but f32, f16 or bf16 is wanted"
    );
    assert_eq!(run(&[3], &a, 3, 3, DType::F32).unwrap_err(), "delta_gates: a is [3], but [T, Hv] is wanted");
    let (none, _) = run(&[0, 3], &[0, 3], 3, 3, DType::F32).unwrap();
    assert!(none.is_empty());
}

#[test]
fn agrees_with_mlx_lm() {
    let file = numcheck::Vectors::open("delta/delta_gates");
    let device = crate::Device::cpu(None).unwrap();
    let [a, a_log, dt_bias, decay] = ["a", "a_log", "dt_bias", "decay"].map(|name| file.get(name));
    let made = |vector: &numcheck::Vector| Tensor::new(&vector.f32s(), &vector.shape, &device).unwrap();
    let (log_decay, _) = delta_gates(&made(&a), &made(&a), &made(&a_log), &made(&dt_bias)).unwrap();
    let (a, a_log, dt_bias) = (a.f32s(), a_log.f32s(), dt_bias.f32s());
    for (i, (log_decay, decay)) in values(&log_decay).into_iter().zip(decay.f32s()).enumerate() {
        let head = i % a_log.len();
        let [(_, bound), _] = reference::delta_gates(a[i], a[i], a_log[head], dt_bias[head]);
        // The peer's log decay is a bound away too, and its exponential adds an error of its own.
        let (ours, peer) = (f64::from(log_decay).exp(), f64::from(decay));
        let bound = peer * (2.0 * bound + 2.0 * f64::from(f32::EPSILON)) + f64::from(f32::MIN_POSITIVE);
        assert!((ours - peer).abs() <= bound, "[{i}] {ours} {peer}: over {bound:e}");
    }
}
