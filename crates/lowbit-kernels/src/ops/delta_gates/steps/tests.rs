use super::*;
use crate::ops::testing::{FLOATS, devices, rounded, values};
use numcheck::{Random, assert_within};

/// Limits that cut at both ends, and none.
const LIMITS: [StepLimits; 2] = [StepLimits { least: 0.01, most: 2.5 }, StepLimits::NONE];

fn agrees_with_the_reference_on(devices: &[Device]) {
    let mut random = Random::new(9);
    for (tokens, heads) in [(1, 33), (70, 12)] {
        for (dtype, limits) in FLOATS.into_iter().flat_map(|dtype| LIMITS.map(|limits| (dtype, limits))) {
            let factors = [0.1, 3.0, 30.0, 200.0];
            let dt: Vec<f32> =
                (0..tokens * heads).map(|i| dtype.round(random.uniform() * factors[i % 4])).collect();
            let [a_log, dt_bias] = [3.0, 5.0].map(|scale| -> Vec<f32> {
                (0..heads).map(|_| dtype.round(random.uniform() * scale)).collect()
            });
            let want: Vec<_> = (0..dt.len())
                .map(|i| reference::step_gates(dt[i], a_log[i % heads], dt_bias[i % heads], limits))
                .collect();
            let [decays, steps] = [0, 1].map(|gate| want.iter().map(|both| both[gate].0).collect::<Vec<_>>());
            for device in devices {
                let made = |x: &[f32], shape: &[usize]| rounded(x, shape, dtype, device);
                let (log_decay, beta) = step_gates(
                    &made(&dt, &[tokens, heads]),
                    &made(&a_log, &[heads]),
                    &made(&dt_bias, &[heads]),
                    limits,
                )
                .unwrap();
                assert_eq!((log_decay.dtype(), beta.dtype()), (DType::F32, DType::F32));
                assert_within(&values(&log_decay), &decays, |i| want[i][0].1);
                assert_within(&values(&beta), &steps, |i| want[i][1].1);
            }
        }
    }
}

#[test]
fn agrees_with_the_reference() {
    agrees_with_the_reference_on(&devices());
}

#[cfg(feature = "gpu")]
#[test]
fn agrees_with_the_reference_on_a_gpu() {
    agrees_with_the_reference_on(&[crate::ops::testing::gpu()]);
}

#[test]
fn nan_stays_where_it_is() {
    #[cfg(feature = "gpu")]
    let all = [devices(), vec![crate::ops::testing::gpu()]].concat();
    #[cfg(not(feature = "gpu"))]
    let all = devices();
    for device in all {
        let dt = Tensor::new(&[f32::NAN, 1.0, 1.0, 1.0], &[2, 2], &device).unwrap();
        let zero = Tensor::new(&[0f32; 2], &[2], &device).unwrap();
        let (log_decay, beta) = step_gates(&dt, &zero, &zero, LIMITS[0]).unwrap();
        for x in [log_decay, beta] {
            assert_eq!(
                values(&x).iter().map(|x| x.is_nan()).collect::<Vec<_>>(),
                [true, false, false, false]
            );
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let run = |a_log: usize, dt_bias: usize, limits| {
        let result = step_gates(&zeros(&[5, 3]), &zeros(&[a_log]), &zeros(&[dt_bias]), limits);
        result.map_err(|error| error.to_string())
    };
    assert!(run(3, 3, StepLimits::NONE).is_ok());
    assert_eq!(run(4, 3, StepLimits::NONE).unwrap_err(), "step_gates: a_log is [4], but dt [5, 3] wants [3]");
    assert_eq!(
        run(3, 2, StepLimits::NONE).unwrap_err(),
        "step_gates: dt_bias is [2], but dt [5, 3] wants [3]"
    );
    for (least, most) in [(-1.0, 2.0), (2.0, 1.0), (f32::NAN, 1.0), (0.0, f32::NAN)] {
        let want = format!(
            "step_gates: limits is {least} to {most}, but numbers from 0 on are wanted, the least first"
        );
        assert_eq!(run(3, 3, StepLimits { least, most }).unwrap_err(), want);
    }
}
