use super::tests::agrees_with_f64_on;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, gpu, normal, values};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn heads_rows_and_wide_ones() {
    let mut random = Random::new(2);
    let device = gpu();
    for shape in [[999, 128], [3, 516], [1, 4096], [2, 5120]] {
        for dtype in FLOATS {
            let (x, xs) = normal(&mut random, &shape, dtype, &device);
            let (weight, weights) = normal(&mut random, &shape[1..], FLOATS[0], &device);
            let want = reference::rms_norm(&xs, None, &weights, 1e-6);
            let y = rms_norm(&x, &weight, 1e-6).unwrap();
            let bound = |i: usize| gamma(reference::roundings(shape[1], false)) * want[i].abs();
            assert_close(&y, &shape, dtype, &want, bound);
        }
    }
}

#[test]
fn nan_stays_in_its_row() {
    let device = gpu();
    // The square of the last one overflows: zeros would hide that.
    for (width, bad) in [3, 8, 600].into_iter().flat_map(|width| [(width, f32::NAN), (width, f32::MAX)]) {
        let mut x = vec![1f32; 5 * width];
        x[2 * width + 1] = bad;
        let x = Tensor::new(&x, &[5, width], &device).unwrap();
        let weight = Tensor::new(&vec![1f32; width], &[width], &device).unwrap();
        for (i, y) in values(&rms_norm(&x, &weight, 1e-6).unwrap()).iter().enumerate() {
            assert_eq!(y.is_nan(), i / width == 2, "[{i}] {y}");
        }
    }
    let none = Tensor::zeros(&[0, 3], FLOATS[0].dtype(), &device);
    let weight = Tensor::zeros(&[3], FLOATS[0].dtype(), &device);
    assert_eq!(rms_norm(&none, &weight, 1e-6).unwrap().shape(), [0, 3]);
}
