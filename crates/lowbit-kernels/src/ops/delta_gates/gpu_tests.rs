use super::tests::agrees_with_the_reference_on;
use super::*;
use crate::ops::testing::{gpu, values};

#[test]
fn agrees_with_the_reference() {
    agrees_with_the_reference_on(&[gpu()]);
}

#[test]
fn nan_stays_where_it_is() {
    let device = gpu();
    let a = Tensor::new(&[f32::NAN, 1.0, 1.0, 1.0], &[2, 2], &device).unwrap();
    let b = Tensor::new(&[0.0, 0.0, 0.0, f32::NAN], &[2, 2], &device).unwrap();
    let zero = Tensor::new(&[0f32; 2], &[2], &device).unwrap();
    let (log_decay, beta) = delta_gates(&a, &b, &zero, &zero).unwrap();
    let nans = |x: &Tensor| values(x).iter().map(|x| x.is_nan()).collect::<Vec<_>>();
    assert_eq!(nans(&log_decay), [true, false, false, false]);
    assert_eq!(nans(&beta), [false, false, false, true]);
    assert_eq!(delta_gates(&a.rows(0, 0).unwrap(), &b.rows(0, 0).unwrap(), &zero, &zero).unwrap().0.len(), 0);
}
