use super::bench::{ROUNDINGS, reference};
use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, values};
use lowbit_formats::FloatType;
use numcheck::{Random, gamma};

#[test]
fn caps_in_every_type() {
    caps_in_every_type_on(&devices());
}

pub(super) fn caps_in_every_type_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [2, 3, width];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                // From caps that cut nearly all to caps that cut nothing.
                let caps: Vec<f32> = (0..width).map(|i| 0.05 * 2f32.powi((i % 14) as i32)).collect();
                let y = Tensor::new(&caps, &[width], device).unwrap();
                let want: Vec<f64> =
                    xs.iter().zip(caps.iter().cycle()).map(|(&x, &cap)| reference(x, cap)).collect();
                let z = softcap(&x, &y).unwrap();
                assert_close(&z, &shape, dtype, &want, |i| gamma(ROUNDINGS) * want[i].abs());
            }
        }
    }
}

#[test]
fn all_magnitudes() {
    all_magnitudes_on(&devices());
}

/// Both sides of each bound, and both signs.
pub(super) fn all_magnitudes_on(devices: &[Device]) {
    let sizes = (-60..=20).flat_map(|n| [1.0, 1.3, 1.7].map(|m| m * 2f32.powi(n)));
    let xs: Vec<f32> = sizes.flat_map(|x| [x, -x]).chain([0.0, 7.499_999, 7.5, 7.500_001]).collect();
    let want: Vec<f64> = xs.iter().map(|&x| reference(x, 30.0)).collect();
    for device in devices {
        let x = Tensor::new(&xs, &[xs.len(), 1], device).unwrap();
        let z = softcap(&x, &Tensor::new(&[30f32], &[1], device).unwrap()).unwrap();
        assert_close(&z, &[xs.len(), 1], FloatType::F32, &want, |i| gamma(ROUNDINGS) * want[i].abs());
    }
}

#[test]
fn infinities_and_nan() {
    infinities_and_nan_on(&devices());
}

pub(super) fn infinities_and_nan_on(devices: &[Device]) {
    for device in devices {
        let x = Tensor::new(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN], &[3, 1], device).unwrap();
        let z = softcap(&x, &Tensor::new(&[30f32], &[1], device).unwrap()).unwrap();
        let z = values(&z.to_device(&device.host().unwrap()).unwrap());
        assert!(z[0] == 30.0 && z[1] == -30.0 && z[2].is_nan(), "{z:?}");
    }
}

#[test]
fn gradients_keep_their_digits() {
    gradients_keep_their_digits_on(&devices());
}

/// From slopes of 1 to slopes near the smallest number.
pub(super) fn gradients_keep_their_digits_on(devices: &[Device]) {
    let mut random = Random::new(2);
    let cap = 30.0;
    let xs: Vec<f32> = (-40..=40).map(|i| i as f32 * 0.5 * cap).chain([0.0, 1e-20, 0.3, -7.0]).collect();
    for device in devices {
        let x = Tensor::new(&xs, &[xs.len(), 1], device).unwrap();
        let y = Tensor::new(&[cap], &[1], device).unwrap();
        for dtype in FLOATS {
            let (dz, dzs) = normal(&mut random, &[xs.len(), 1], dtype, device);
            let slope = |x: f32| (f64::from(x) / f64::from(cap)).cosh().powi(-2);
            let want: Vec<f64> = xs.iter().zip(&dzs).map(|(&x, &dz)| f64::from(dz) * slope(x)).collect();
            // An exponent that is rounded moves its power by that much.
            let bound = |i: usize| gamma(ROUNDINGS + 12 * (xs[i] / cap).abs() as usize) * want[i].abs();
            assert_close(&softcap_backward(&x, &y, &dz).unwrap(), &[xs.len(), 1], dtype, &want, bound);
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, FLOATS[0].dtype(), &device);
    let error = softcap(&zeros(&[2, 3]), &zeros(&[2])).unwrap_err();
    assert_eq!(error.to_string(), "softcap: y is [2], but x [2, 3] wants [3]");
    let ids = Tensor::new(&[0u32; 3], &[3], &device).unwrap();
    let error = softcap(&ids, &zeros(&[3])).unwrap_err();
    assert_eq!(error.to_string(), "softcap: x is u32, but f32, f16 or bf16 is wanted");
    assert!(softcap(&zeros(&[0, 3]), &zeros(&[3])).unwrap().is_empty());
    let error = softcap_backward(&zeros(&[2, 3]), &zeros(&[3]), &zeros(&[3, 2])).unwrap_err();
    assert_eq!(error.to_string(), "softcap_backward: dz is [3, 2], but x wants [2, 3]");
}
