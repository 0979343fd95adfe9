use super::tests::agrees_with_f64_on;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, gpu, tensor, values};
use numcheck::gamma;

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn gates_far_from_zero() {
    let device = gpu();
    let gates = [-1e30, -200.0, -100.0, -88.5, -20.0, 0.0, 20.0, 88.5, 100.0, 1e30];
    let (gate, _) = tensor(&gates, &[10], FLOATS[0], &device);
    let (up, ups) = tensor(&[3.0; 10], &[10], FLOATS[0], &device);
    let want = reference::silu_mul(&gates, &ups);
    // A sigmoid that is subnormal may be flushed: it is times gate, 104 at most, times up.
    let bound =
        |i: usize| gamma(reference::ROUNDINGS) * want[i].abs() + f64::from(f32::MIN_POSITIVE) * 104.0 * 3.0;
    assert_close(&silu_mul(&gate, &up).unwrap(), &[10], FLOATS[0], &want, bound);
    let nan = Tensor::new(&[f32::NAN, 1.0], &[2], &device).unwrap();
    let one = Tensor::new(&[1.0, f32::NAN], &[2], &device).unwrap();
    assert!(values(&silu_mul(&nan, &one).unwrap()).iter().all(|y| y.is_nan()));
}
