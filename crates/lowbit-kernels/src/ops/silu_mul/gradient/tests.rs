use super::*;
use crate::ops::rms_norm::gradient::reference::silu_and_slope;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
};
use numcheck::{Random, gamma};

/// The gradients in f64, and the magnitude of what makes each: `[dgate, dup]`.
fn reference(gate: &[f32], up: &[f32], dy: &[f32]) -> [(Vec<f64>, Vec<f64>); 2] {
    let each = |f: &dyn Fn(f64, f64, f64) -> (f64, f64)| {
        let triples = gate.iter().zip(up).zip(dy);
        triples.map(|((&gate, &up), &dy)| f(gate.into(), up.into(), dy.into())).unzip()
    };
    let dgate = each(&|gate, up, dy| {
        let (_, slope, magnitude) = silu_and_slope(gate);
        (dy * up * slope, (dy * up).abs() * magnitude)
    });
    [dgate, each(&|gate, _, dy| (dy * silu_and_slope(gate).0, (dy * silu_and_slope(gate).0).abs()))]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let [gate, up, dy] = [(); 3].map(|()| coarse(&mut random, 9));
    let [dgate, dup] = reference(&gate, &up, &dy);
    assert_derivatives("dgate", &gate, &dgate.0, |gate| dot(&SiluMul::references(gate, &up), &dy));
    assert_derivatives("dup", &up, &dup.0, |up| dot(&SiluMul::references(&gate, up), &dy));
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(2);
    for device in devices {
        for width in WIDTHS {
            let (shape, dtype) = ([3, width], FLOATS[width % 3]);
            let (gate, gates) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], device);
            let (up, ups) = normal(&mut random, &shape, FLOATS[0], device);
            let (dy, dys) = normal(&mut random, &shape, dtype, device);
            let SiluMulGradient { dgate, dup } = silu_mul_backward(&gate, &up, &dy).unwrap();
            for (got, (want, magnitude)) in [dgate, dup].iter().zip(reference(&gates, &ups, &dys)) {
                // Two sigmoids of 5 units each, and 6 products and sums.
                assert_close(got, &shape, dtype, &want, |i| gamma(16) * magnitude[i]);
            }
        }
    }
}

#[test]
fn gates_far_from_zero() {
    gates_far_from_zero_on(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_gates_far_from_zero() {
    gates_far_from_zero_on(&gpu());
}

fn gates_far_from_zero_on(device: &Device) {
    let gate = Tensor::new(&[-1e30f32, -200.0, 200.0, 1e30], &[4], device).unwrap();
    let one = Tensor::new(&[1f32; 4], &[4], device).unwrap();
    let SiluMulGradient { dgate, .. } = silu_mul_backward(&gate, &one, &one).unwrap();
    assert_eq!(values(&dgate), [0.0, 0.0, 1.0, 1.0]);
    let none = one.rows(0, 0).unwrap();
    let SiluMulGradient { dgate, dup } = silu_mul_backward(&none, &none, &none).unwrap();
    assert_eq!((dgate.shape(), dup.shape()), (&[0][..], &[0][..]));
}

#[test]
fn refusals_name_both_sides() {
    let one = Tensor::new(&[1f32; 4], &[4], &device()).unwrap();
    let error = silu_mul_backward(&one, &one, &one.rows(0, 3).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "silu_mul_backward: dy is [3], but gate wants [4]");
}
