use super::tests::{agrees_with_f64_on, the_sum_is_normed_before_it_is_rounded_on};
use super::*;
use crate::ops::testing::{FLOATS, gpu, values};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
    the_sum_is_normed_before_it_is_rounded_on(&[gpu()]);
}

#[test]
fn nan_stays_in_its_row() {
    let device = gpu();
    for width in [3, 8, 600] {
        let mut x = vec![1f32; 5 * width];
        x[2 * width + 1] = f32::NAN;
        let x = Tensor::new(&x, &[5, width], &device).unwrap();
        let one = Tensor::new(&vec![1f32; 5 * width], &[5, width], &device).unwrap();
        let weight = Tensor::new(&vec![1f32; width], &[width], &device).unwrap();
        let (sum, y) = add_rms_norm(&one, &x, &weight, 1e-6).unwrap();
        for (i, (sum, y)) in values(&sum).iter().zip(values(&y)).enumerate() {
            assert_eq!((sum.is_nan(), y.is_nan()), (i == 2 * width + 1, i / width == 2), "[{i}] {sum} {y}");
        }
    }
    let none = Tensor::zeros(&[0, 3], FLOATS[0].dtype(), &device);
    let weight = Tensor::zeros(&[3], FLOATS[0].dtype(), &device);
    assert_eq!(add_rms_norm(&none, &none, &weight, 1e-6).unwrap().1.shape(), [0, 3]);
}
