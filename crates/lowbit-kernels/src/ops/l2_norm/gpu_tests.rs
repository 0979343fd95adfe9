use super::tests::{agrees_with_f64_on, conventions_differ_where_eps_counts_on};
use super::*;
use crate::ops::testing::{FLOATS, assert_close, gpu, normal, values};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
    conventions_differ_where_eps_counts_on(&[gpu()]);
}

#[test]
fn heads_and_wide_rows() {
    let params = L2Norm { eps: 1e-6, convention: L2NormConvention::Sum };
    for (shape, dtype) in [[777, 128], [3, 516], [2, 4096]].into_iter().zip(FLOATS) {
        let (x, xs) = normal(&mut Random::new(2), &shape, dtype, &gpu());
        let want = reference::l2_norm(&xs, shape[1], &params);
        let bound = |i: usize| gamma(reference::roundings(shape[1])) * want[i].abs();
        assert_close(&l2_norm(&x, &params).unwrap(), &shape, dtype, &want, bound);
    }
}

#[test]
fn nan_is_not_hidden() {
    for convention in [L2NormConvention::Sum, L2NormConvention::Mean, L2NormConvention::Max] {
        let x = Tensor::new(&[1.0, f32::NAN, 3.0, 4.0], &[2, 2], &gpu()).unwrap();
        let y = values(&l2_norm(&x, &L2Norm { eps: 0.0, convention }).unwrap());
        assert_eq!([0, 1, 2, 3].map(|i: usize| y[i].is_nan()), [true, true, false, false]);
    }
}
