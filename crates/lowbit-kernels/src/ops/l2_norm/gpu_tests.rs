use super::tests::agrees_with_f64_on;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, gpu, normal, values};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn heads_and_wide_rows() {
    for (shape, dtype) in [[777, 128], [3, 516], [2, 4096]].into_iter().zip(FLOATS) {
        let (x, xs) = normal(&mut Random::new(2), &shape, dtype, &gpu());
        let want = reference::l2_norm(&xs, shape[1], 1e-6);
        let bound = |i: usize| gamma(reference::roundings(shape[1])) * want[i].abs();
        assert_close(&l2_norm(&x, 1e-6).unwrap(), &shape, dtype, &want, bound);
    }
}

#[test]
fn nan_is_not_hidden() {
    let x = Tensor::new(&[1.0, f32::NAN, 3.0, 4.0], &[2, 2], &gpu()).unwrap();
    let y = values(&l2_norm(&x, 0.0).unwrap());
    assert_eq!([0, 1, 2, 3].map(|i: usize| y[i].is_nan()), [true, true, false, false]);
}
