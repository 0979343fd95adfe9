use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, values};
use lowbit_formats::DType;
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for (dtype, eps) in FLOATS.into_iter().flat_map(|dtype| [(dtype, 1e-6), (dtype, 0.3)]) {
                let shape = [2, 3, width];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let want = reference::l2_norm(&xs, width, eps);
                let bound = |i: usize| gamma(reference::roundings(width)) * want[i].abs();
                assert_close(&l2_norm(&x, eps).unwrap(), &shape, dtype, &want, bound);
            }
        }
        let zeros = Tensor::zeros(&[2, 2], DType::F32, device);
        assert_eq!(values(&l2_norm(&zeros, 1e-3).unwrap()), [0.0; 4]);
    }
}

#[test]
fn nan_is_not_hidden_and_bad_eps_is_refused() {
    for device in devices() {
        let x = Tensor::new(&[1.0, f32::NAN], &[2], &device).unwrap();
        let y = l2_norm(&x, 1e-6).unwrap();
        assert!(y.as_slice::<f32>().unwrap().iter().all(|y| y.is_nan()));
        let error = l2_norm(&x, -1.0).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm: eps is -1, but a finite number from 0 is wanted");
    }
    assert!(l2_norm(&Tensor::new(&[0u32], &[1], &device()).unwrap(), 1e-6).is_err());
    assert!(l2_norm(&Tensor::new(&[0f32], &[], &device()).unwrap(), 1e-6).is_err());
}
