use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal};
use numcheck::{Random, gamma};

#[test]
fn products_in_every_type() {
    products_in_every_type_on(&devices());
}

pub(super) fn products_in_every_type_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [2, width, 3];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let (y, ys) = normal(&mut random, &shape, FLOATS[width % 3], device);
                let want: Vec<f64> = xs.iter().zip(&ys).map(|(&x, &y)| f64::from(x) * f64::from(y)).collect();
                // One f32 product.
                assert_close(&mul(&x, &y).unwrap(), &shape, dtype, &want, |i| gamma(1) * want[i].abs());
            }
        }
    }
}

#[test]
fn a_row_is_multiplied_with_every_row() {
    a_row_is_multiplied_with_every_row_on(&devices());
}

pub(super) fn a_row_is_multiplied_with_every_row_on(devices: &[Device]) {
    let mut random = Random::new(3);
    for device in devices {
        for width in WIDTHS {
            let shape = [2, 7, width];
            let (x, xs) = normal(&mut random, &shape, FLOATS[width % 3], device);
            let (y, ys) = normal(&mut random, &[width], FLOATS[0], device);
            let want: Vec<f64> =
                xs.iter().zip(ys.iter().cycle()).map(|(&x, &y)| f64::from(x) * f64::from(y)).collect();
            let z = mul(&x, &y).unwrap();
            assert_close(&z, &shape, FLOATS[width % 3], &want, |i| gamma(1) * want[i].abs());
        }
    }
    let (x, y) = (
        Tensor::zeros(&[2, 3], FLOATS[0].dtype(), &device()),
        Tensor::zeros(&[2], FLOATS[0].dtype(), &device()),
    );
    assert_eq!(mul(&x, &y).unwrap_err().to_string(), "mul: y is [2], but x wants [2, 3]");
}

#[test]
fn many_rows_reach_every_thread() {
    many_rows_reach_every_thread_on(&devices());
}

pub(super) fn many_rows_reach_every_thread_on(devices: &[Device]) {
    for device in devices {
        let (x, xs) = normal(&mut Random::new(2), &[300, 511], FLOATS[0], device);
        let want: Vec<f64> = xs.iter().map(|&x| f64::from(x) * f64::from(x)).collect();
        assert_close(&mul(&x, &x).unwrap(), &[300, 511], FLOATS[0], &want, |i| gamma(1) * want[i]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let (x, y) = (Tensor::new(&[0f32; 6], &[2, 3], &device), Tensor::new(&[0f32; 6], &[3, 2], &device));
    let (x, y) = (x.unwrap(), y.unwrap());
    assert_eq!(mul(&x, &y).unwrap_err().to_string(), "mul: y is [3, 2], but x wants [2, 3]");
    let ids = Tensor::new(&[0u32; 6], &[2, 3], &device).unwrap();
    assert_eq!(mul(&x, &ids).unwrap_err().to_string(), "mul: y is u32, but f32, f16 or bf16 is wanted");
    assert_eq!(mul(&ids, &x).unwrap_err().to_string(), "mul: x is u32, but f32, f16 or bf16 is wanted");
}

#[test]
fn nothing_and_scalars() {
    let device = device();
    let none = Tensor::new::<f32>(&[], &[0, 3], &device).unwrap();
    assert!(mul(&none, &none).unwrap().is_empty());
    let one = Tensor::new(&[2f32], &[], &device).unwrap();
    assert_eq!(mul(&one, &one).unwrap().as_slice::<f32>().unwrap(), [4.0]);
}

#[test]
fn gradients_are_those_of_the_products() {
    gradients_are_those_of_the_products_on(&devices());
}

pub(super) fn gradients_are_those_of_the_products_on(devices: &[Device]) {
    let mut random = Random::new(5);
    for device in devices {
        let (rows, width) = (70, 9);
        let (x, xs) = normal(&mut random, &[rows, width], FLOATS[0], device);
        let (dz, dzs) = normal(&mut random, &[rows, width], FLOATS[0], device);
        for shape in [&[rows, width][..], &[width]] {
            let (y, ys) = normal(&mut random, shape, FLOATS[0], device);
            let MulGradient { dx, dy } = mul_backward(&x, &y, &dz).unwrap();
            let (mut want_dx, mut want_dy) = (vec![0.0; rows * width], vec![0.0; ys.len()]);
            let mut absolute = vec![0.0; ys.len()];
            for i in 0..rows * width {
                let (at, dz) = (i % ys.len(), f64::from(dzs[i]));
                want_dx[i] = dz * f64::from(ys[at]);
                want_dy[at] += dz * f64::from(xs[i]);
                absolute[at] += (dz * f64::from(xs[i])).abs();
            }
            assert_close(&dx, &[rows, width], FLOATS[0], &want_dx, |i| gamma(1) * want_dx[i].abs());
            assert_close(&dy, shape, FLOATS[0], &want_dy, |i| gamma(rows) * absolute[i]);
        }
    }
}
