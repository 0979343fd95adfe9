use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal};
use numcheck::{Random, gamma};

#[test]
fn sums_in_every_type() {
    sums_in_every_type_on(&devices());
}

pub(super) fn sums_in_every_type_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [2, width, 3];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let (y, ys) = normal(&mut random, &shape, FLOATS[width % 3], device);
                let want: Vec<f64> = xs.iter().zip(&ys).map(|(&x, &y)| f64::from(x) + f64::from(y)).collect();
                // One f32 addition.
                assert_close(&add(&x, &y).unwrap(), &shape, dtype, &want, |i| gamma(1) * want[i].abs());
            }
        }
    }
}

#[test]
fn a_row_is_added_to_every_row() {
    a_row_is_added_to_every_row_on(&devices());
}

pub(super) fn a_row_is_added_to_every_row_on(devices: &[Device]) {
    let mut random = Random::new(3);
    for device in devices {
        for width in WIDTHS {
            let shape = [2, 7, width];
            let (x, xs) = normal(&mut random, &shape, FLOATS[width % 3], device);
            let (y, ys) = normal(&mut random, &[width], FLOATS[0], device);
            let want: Vec<f64> =
                xs.iter().zip(ys.iter().cycle()).map(|(&x, &y)| f64::from(x) + f64::from(y)).collect();
            let z = add(&x, &y).unwrap();
            assert_close(&z, &shape, FLOATS[width % 3], &want, |i| gamma(1) * want[i].abs());
        }
    }
    let (x, y) = (
        Tensor::zeros(&[2, 3], FLOATS[0].dtype(), &device()),
        Tensor::zeros(&[2], FLOATS[0].dtype(), &device()),
    );
    assert_eq!(add(&x, &y).unwrap_err().to_string(), "add: y is [2], but x wants [2, 3]");
}

#[test]
fn many_rows_reach_every_thread() {
    many_rows_reach_every_thread_on(&devices());
}

pub(super) fn many_rows_reach_every_thread_on(devices: &[Device]) {
    for device in devices {
        let (x, xs) = normal(&mut Random::new(2), &[300, 511], FLOATS[0], device);
        let want: Vec<f64> = xs.iter().map(|&x| f64::from(x) * 2.0).collect();
        assert_close(&add(&x, &x).unwrap(), &[300, 511], FLOATS[0], &want, |_| 0.0);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let (x, y) = (Tensor::new(&[0f32; 6], &[2, 3], &device), Tensor::new(&[0f32; 6], &[3, 2], &device));
    let (x, y) = (x.unwrap(), y.unwrap());
    assert_eq!(add(&x, &y).unwrap_err().to_string(), "add: y is [3, 2], but x wants [2, 3]");
    let ids = Tensor::new(&[0u32; 6], &[2, 3], &device).unwrap();
    assert_eq!(add(&x, &ids).unwrap_err().to_string(), "add: y is u32, but f32, f16 or bf16 is wanted");
    assert_eq!(add(&ids, &x).unwrap_err().to_string(), "add: x is u32, but f32, f16 or bf16 is wanted");
}

#[test]
fn nothing_and_scalars() {
    let device = device();
    let none = Tensor::new::<f32>(&[], &[0, 3], &device).unwrap();
    assert!(add(&none, &none).unwrap().is_empty());
    let one = Tensor::new(&[2f32], &[], &device).unwrap();
    assert_eq!(add(&one, &one).unwrap().as_slice::<f32>().unwrap(), [4.0]);
}
