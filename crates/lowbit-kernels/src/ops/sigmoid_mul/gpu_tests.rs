use super::tests::a_gate_an_element_and_a_gate_a_row_on;
use super::*;
use crate::ops::testing::{FLOATS, gpu, values};

#[test]
fn a_gate_an_element_and_a_gate_a_row() {
    a_gate_an_element_and_a_gate_a_row_on(&[gpu()]);
}

#[test]
fn nan_stays_where_it_is() {
    let device = gpu();
    let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &[2, 2], &device).unwrap();
    let gate = Tensor::new(&[f32::NAN, f32::INFINITY], &[2, 1], &device).unwrap();
    let y = values(&sigmoid_mul(&x, &gate).unwrap());
    assert!(y[0].is_nan() && y[1].is_nan());
    assert_eq!(y[2..], [3.0, 4.0]);
    let none = Tensor::zeros(&[0, 4], FLOATS[0].dtype(), &device);
    assert!(sigmoid_mul(&none, &none).unwrap().is_empty());
}
