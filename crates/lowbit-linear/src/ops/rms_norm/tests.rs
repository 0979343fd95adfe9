use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, tensor};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [2, 3, width];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let (gate, gates) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], device);
                let (weight, weights) = normal(&mut random, &[width], FLOATS[width % 3], device);
                let want = reference::rms_norm(&xs, None, &weights, 1e-3);
                let bound = |i: usize| gamma(reference::roundings(width, false)) * want[i].abs();
                assert_close(&rms_norm(&x, &weight, 1e-3).unwrap(), &shape, dtype, &want, bound);
                let want = reference::rms_norm(&xs, Some(&gates), &weights, 1e-3);
                let bound = |i: usize| gamma(reference::roundings(width, true)) * want[i].abs();
                let y = gated_rms_norm(&x, &gate, &weight, 1e-3).unwrap();
                assert_close(&y, &shape, dtype, &want, bound);
            }
        }
    }
}

#[test]
fn many_rows_and_a_wide_one() {
    let mut random = Random::new(2);
    for device in devices() {
        for shape in [[999, 70], [1, 5120]] {
            let (x, xs) = normal(&mut random, &shape, FLOATS[0], &device);
            let (gate, gates) = normal(&mut random, &shape, FLOATS[0], &device);
            let (weight, weights) = normal(&mut random, &shape[1..], FLOATS[0], &device);
            let want = reference::rms_norm(&xs, Some(&gates), &weights, 1e-6);
            let y = gated_rms_norm(&x, &gate, &weight, 1e-6).unwrap();
            let bound = |i: usize| gamma(reference::roundings(shape[1], true)) * want[i].abs();
            assert_close(&y, &shape, FLOATS[0], &want, bound);
        }
    }
}

#[test]
fn eps_is_inside_the_root_and_nan_stays_in_its_row() {
    for device in devices() {
        let (x, xs) = tensor(&[1e-6, -2e-6, 0.0, 0.0, 0.0, 0.0], &[2, 3], FLOATS[0], &device);
        let (weight, weights) = tensor(&[1.0, 0.5, 3.0], &[3], FLOATS[0], &device);
        let want = reference::rms_norm(&xs, None, &weights, 1e-6);
        let bound = |i: usize| gamma(reference::roundings(3, false)) * want[i].abs();
        assert_close(&rms_norm(&x, &weight, 1e-6).unwrap(), &[2, 3], FLOATS[0], &want, bound);
        let x = Tensor::new(&[1.0, f32::NAN, 2.0, 1.0, 1.0, 1.0], &[2, 3], &device).unwrap();
        let y = rms_norm(&x, &weight, 1e-6).unwrap();
        assert_eq!(
            y.as_slice::<f32>().unwrap().iter().map(|y| y.is_nan()).collect::<Vec<_>>(),
            [true, true, true, false, false, false]
        );
    }
}

#[test]
fn a_sum_that_overflows_is_nan_and_not_zero() {
    for device in devices() {
        let x = Tensor::new(&[f32::MAX, 1.0, 1.0, 2.0, 2.0, 1.0], &[2, 3], &device).unwrap();
        let weight = Tensor::new(&[1f32; 3], &[3], &device).unwrap();
        let y = rms_norm(&x, &weight, 1e-6).unwrap();
        let is_nan: Vec<_> = y.as_slice::<f32>().unwrap().iter().map(|y| y.is_nan()).collect();
        assert_eq!(is_nan, [true, true, true, false, false, false]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let weight = Tensor::new(&[0f32; 3], &[3], &device).unwrap();
    let short = Tensor::new(&[0f32; 2], &[2], &device).unwrap();
    let error = rms_norm(&x, &short, 1e-6).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: weight is [2], but x [2, 3] wants [3]");
    let error = gated_rms_norm(&x, &weight, &weight, 1e-6).unwrap_err();
    assert_eq!(error.to_string(), "gated_rms_norm: gate is [3], but x wants [2, 3]");
    for eps in [-1e-6, f32::NAN, f32::INFINITY] {
        let error = rms_norm(&x, &weight, eps).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("rms_norm: eps is {eps}, but a finite number from 0 is wanted")
        );
    }
    let ids = Tensor::new(&[0u32; 3], &[3], &device).unwrap();
    assert!(rms_norm(&x, &ids, 1e-6).is_err() && rms_norm(&ids, &weight, 1e-6).is_err());
    assert!(rms_norm(&Tensor::new(&[0f32], &[], &device).unwrap(), &weight, 1e-6).is_err());
}
