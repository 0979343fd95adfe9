use super::tests::{agrees_with_f64_on, gates_far_from_zero_on, limits_are_their_own_on};
use super::*;
use crate::ops::testing::{FLOATS, gpu, values};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn gates_far_from_zero() {
    // A GPU may flush what is subnormal.
    gates_far_from_zero_on(&[gpu()], f64::from(f32::MIN_POSITIVE));
}

#[test]
fn limits_are_their_own() {
    limits_are_their_own_on(&gpu());
}

#[test]
fn nan_stays_where_it_is() {
    let device = gpu();
    let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &[2, 2], &device).unwrap();
    let gate = Tensor::new(&[f32::NAN, f32::INFINITY], &[2, 1], &device).unwrap();
    let y = values(&glu(&x, &gate, Gate::Sigmoid).unwrap());
    assert!(y[0].is_nan() && y[1].is_nan());
    assert_eq!(y[2..], [3.0, 4.0]);
    let none = Tensor::zeros(&[0, 4], FLOATS[0].dtype(), &device);
    assert!(glu(&none, &none, Gate::Sigmoid).unwrap().is_empty());
}
