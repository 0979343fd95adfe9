use super::tests::*;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, fetched, gpu, normal, values};
use numcheck::Random;

#[test]
fn agrees_with_f64() {
    sums_in_every_type_on(&[gpu()]);
    a_row_is_added_to_every_row_on(&[gpu()]);
    many_rows_reach_every_thread_on(&[gpu()]);
}

#[test]
fn views_that_start_anywhere() {
    let device = gpu();
    for dtype in FLOATS {
        let (x, xs) = normal(&mut Random::new(1), &[9, 4, 3], dtype, &device);
        for first in 1..4 {
            let z = add(&x.rows(first, 9).unwrap(), &x.rows(0, 9 - first).unwrap()).unwrap();
            let pairs = xs[first * 12..].iter().zip(&xs);
            let want: Vec<f64> = pairs.map(|(&x, &y)| f64::from(x) + f64::from(y)).collect();
            let bound = |i: usize| numcheck::gamma(1) * want[i].abs();
            assert_close(&z, &[9 - first, 4, 3], dtype, &want, bound);
        }
    }
}

#[test]
fn nothing_and_nan() {
    let device = gpu();
    let none = Tensor::zeros(&[0, 3], FLOATS[0].dtype(), &device);
    assert_eq!(add(&none, &none).unwrap().shape(), [0, 3]);
    for dtype in FLOATS {
        let x =
            Tensor::new(&[f32::NAN, 1.0, f32::INFINITY], &[3], &device).unwrap().cast(dtype.dtype()).unwrap();
        let z = values(&fetched(&add(&x, &x).unwrap()));
        assert!(z[0].is_nan() && z[1] == 2.0 && z[2] == f32::INFINITY, "{z:?}");
    }
}

#[test]
fn operands_are_on_one_device() {
    let device = gpu();
    let x = Tensor::zeros(&[3], FLOATS[0].dtype(), &device);
    let error = add(&x, &fetched(&x)).unwrap_err().to_string();
    assert_eq!(error, format!("add: y is on cpu, but x is on {device}"));
}
