use super::tests::*;
use super::*;
use crate::ops::testing::{FLOATS, fetched, gpu};

#[test]
fn agrees_with_f64() {
    caps_in_every_type_on(&[gpu()]);
    all_magnitudes_on(&[gpu()]);
    infinities_and_nan_on(&[gpu()]);
    gradients_keep_their_digits_on(&[gpu()]);
}

#[test]
fn operands_are_on_one_device() {
    let device = gpu();
    let x = Tensor::zeros(&[3], FLOATS[0].dtype(), &device);
    let error = softcap(&x, &fetched(&x)).unwrap_err().to_string();
    assert_eq!(error, format!("softcap: y is on cpu, but x is on {device}"));
}
