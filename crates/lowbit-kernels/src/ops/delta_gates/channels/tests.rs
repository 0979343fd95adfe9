use super::super::reference::delta_gates;
use super::*;
use crate::ops::testing::{FLOATS, devices, rounded, values};
use lowbit_formats::DType;
use numcheck::{Random, assert_within};

const DECAYS: [ChannelDecay; 2] = [ChannelDecay::Softplus, ChannelDecay::Bounded(-5.0)];

fn agrees_with_the_reference_on(devices: &[Device]) {
    let mut random = Random::new(9);
    for (tokens, heads, channels) in [(1, 33, 5), (70, 3, 19), (2, 1, 1)] {
        for (dtype, decay) in FLOATS.into_iter().flat_map(|dtype| DECAYS.map(|decay| (dtype, decay))) {
            let mut normal = |len, scale: f32| -> Vec<f32> {
                random.normal(len, scale).into_iter().map(|x| dtype.round(x)).collect()
            };
            let gates = tokens * heads;
            let mut a = normal(gates * channels, 1.0);
            let factors = [0.1, 3.0, 30.0, 200.0];
            a.iter_mut().enumerate().for_each(|(i, x)| *x = dtype.round(*x * factors[i % 4]));
            let (b, a_log, dt_bias) =
                (normal(gates, 20.0), normal(heads, 1.5), normal(heads * channels, 3.0));
            let decays: Vec<_> = (0..a.len())
                .map(|i| {
                    let head = i / channels % heads;
                    let bias = dt_bias[head * channels + i % channels];
                    reference::channel_decay(a[i], a_log[head], bias, decay)
                })
                .collect();
            let betas: Vec<_> = b.iter().map(|&b| delta_gates(0.0, b, 0.0, 0.0)[1]).collect();
            let exact = |all: &[(f64, f64)]| all.iter().map(|both| both.0).collect::<Vec<_>>();
            for device in devices {
                let made = |x: &[f32], shape: &[usize]| rounded(x, shape, dtype, device);
                let (log_decay, beta) = channel_gates(
                    &made(&a, &[tokens, heads, channels]),
                    &made(&b, &[tokens, heads]),
                    &made(&a_log, &[heads]),
                    &made(&dt_bias, &[heads, channels]),
                    decay,
                )
                .unwrap();
                assert_eq!((log_decay.dtype(), beta.dtype()), (DType::F32, DType::F32));
                assert_within(&values(&log_decay), &exact(&decays), |i| decays[i].1);
                assert_within(&values(&beta), &exact(&betas), |i| betas[i].1);
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
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let run = |b: &[usize], a_log: usize, dt_bias: &[usize], decay| {
        let result = channel_gates(&zeros(&[5, 3, 2]), &zeros(b), &zeros(&[a_log]), &zeros(dt_bias), decay);
        result.map_err(|error| error.to_string())
    };
    let plain = ChannelDecay::Softplus;
    assert!(run(&[5, 3], 3, &[3, 2], plain).is_ok());
    for (result, want) in [
        (run(&[5, 2], 3, &[3, 2], plain), "b is [5, 2], but a [5, 3, 2] wants [5, 3]"),
        (run(&[5, 3], 4, &[3, 2], plain), "a_log is [4], but a [5, 3, 2] wants [3]"),
        (run(&[5, 3], 3, &[6], plain), "dt_bias is [6], but a [5, 3, 2] wants [3, 2]"),
        (
            run(&[5, 3], 3, &[3, 2], ChannelDecay::Bounded(0.0)),
            "bound is 0, but a finite number below 0 is wanted",
        ),
        (
            run(&[5, 3], 3, &[3, 2], ChannelDecay::Bounded(f32::NAN)),
            "bound is NaN, but a finite number below 0 is wanted",
        ),
    ] {
        assert_eq!(result.unwrap_err(), format!("channel_gates: {want}"));
    }
}

#[test]
fn agrees_with_mlx_lm() {
    let file = numcheck::Vectors::open("delta/channel_gates");
    let device = Device::cpu(None).unwrap();
    let load = |name: &str| {
        let vector = file.get(name);
        Tensor::new(&vector.f32s(), &vector.shape, &device).unwrap()
    };
    let [a, a_log, dt_bias] = ["a", "a_log", "dt_bias"].map(load);
    let bound = file.get("bound").f32s()[0];
    let (heads, channels) = (a.dim(1), a.dim(2));
    let b = Tensor::zeros(&a.shape()[..2], DType::F32, &device);
    for (decay, peer) in [(DECAYS[0], "decay"), (ChannelDecay::Bounded(bound), "bounded_decay")] {
        let (log_decay, _) = channel_gates(&a, &b, &a_log, &dt_bias, decay).unwrap();
        let both = values(&log_decay).into_iter().zip(file.get(peer).f32s());
        for (i, (log_decay, peer)) in both.enumerate() {
            let head = i / channels % heads;
            let bias = values(&dt_bias)[i % (heads * channels)];
            let (_, bound) = reference::channel_decay(values(&a)[i], values(&a_log)[head], bias, decay);
            // The peer's log decay is a bound away too, and its exponential adds an error of its
            // own.
            let (ours, peer) = (f64::from(log_decay).exp(), f64::from(peer));
            let bound = peer * (2.0 * bound + 2.0 * f64::from(f32::EPSILON)) + f64::from(f32::MIN_POSITIVE);
            assert!((ours - peer).abs() <= bound, "[{i}] {ours} {peer}: over {bound:e}");
        }
    }
}
