use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, tensor};
use numcheck::{Random, gamma};

const CONVENTIONS: [L2NormConvention; 3] =
    [L2NormConvention::Sum, L2NormConvention::Mean, L2NormConvention::Max];

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for (dtype, convention) in FLOATS.into_iter().zip(CONVENTIONS) {
                let shape = [2, 3, width];
                let params = L2Norm { eps: 0.3, convention };
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let want = reference::l2_norm(&xs, width, &params);
                let bound = |i: usize| gamma(reference::roundings(width)) * want[i].abs();
                assert_close(&l2_norm(&x, &params).unwrap(), &shape, dtype, &want, bound);
            }
        }
    }
}

#[test]
fn conventions_differ_where_eps_counts() {
    conventions_differ_where_eps_counts_on(&devices());
}

pub(super) fn conventions_differ_where_eps_counts_on(devices: &[Device]) {
    let values = [3e-4, -4e-4, 0.0, 0.0];
    for device in devices {
        let (x, xs) = tensor(&values, &[2, 2], FLOATS[0], device);
        let lengths = [(25e-8f64 + 1e-3).sqrt(), (25e-8f64 + 2e-3).sqrt(), 1e-3];
        for (convention, length) in CONVENTIONS.into_iter().zip(lengths) {
            let want: Vec<f64> = values.map(|x| f64::from(x) / length).to_vec();
            let params = L2Norm { eps: 1e-3, convention };
            // eps and values as f32 are one rounding each besides.
            let bound = |i: usize| gamma(reference::roundings(2) + 2) * want[i].abs();
            assert_close(&l2_norm(&x, &params).unwrap(), &[2, 2], FLOATS[0], &want, bound);
            assert_eq!(xs.len(), 4);
        }
    }
}

#[test]
fn nan_is_not_hidden_and_bad_eps_is_refused() {
    for (device, convention) in devices().into_iter().zip(CONVENTIONS.into_iter().cycle()) {
        let x = Tensor::new(&[1.0, f32::NAN], &[2], &device).unwrap();
        let y = l2_norm(&x, &L2Norm { eps: 1e-6, convention }).unwrap();
        assert!(y.as_slice::<f32>().unwrap().iter().all(|y| y.is_nan()));
        let error = l2_norm(&x, &L2Norm { eps: -1.0, convention }).unwrap_err();
        assert_eq!(error.to_string(), "l2_norm: eps is -1, but a finite number from 0 is wanted");
    }
    let params = L2Norm { eps: 1e-6, convention: L2NormConvention::Sum };
    assert!(l2_norm(&Tensor::new(&[0u32], &[1], &device()).unwrap(), &params).is_err());
    assert!(l2_norm(&Tensor::new(&[0f32], &[], &device()).unwrap(), &params).is_err());
}
