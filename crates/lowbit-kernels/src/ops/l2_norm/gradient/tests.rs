use super::*;
use crate::ops::l2_norm::reference;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal,
};
use numcheck::{Random, gamma};

/// dx in f64, and the magnitude of its terms.
fn reference(x: &[f32], width: usize, eps: f32, dy: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let mut dx = (vec![], vec![]);
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
        let products = || x.iter().zip(dy).map(|(&x, &dy)| f64::from(x) * f64::from(dy));
        let sum: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let length = (sum + f64::from(eps)).sqrt();
        let factor = length.powi(-2);
        let (along, most) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
        for (&x, &dy) in x.iter().zip(dy) {
            let (x, dy) = (f64::from(x), f64::from(dy));
            dx.0.push((dy - x * factor * along) / length);
            dx.1.push((dy.abs() + x.abs() * factor * most) / length);
        }
    }
    dx
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let (x, dy) = (coarse(&mut random, 2 * 5), coarse(&mut random, 2 * 5));
    for eps in [0.01, 10.0] {
        let want = reference(&x, 5, eps, &dy).0;
        assert_derivatives("dx", &x, &want, |x| dot(&reference::l2_norm(x, 5, eps), &dy));
    }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices(), &WIDTHS.map(|width| [3, width]));
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    agrees_with_f64_on(&[gpu()], &WIDTHS.map(|width| [3, width]));
    agrees_with_f64_on(&[gpu()], &[[300, 64], [150, 3], [2, 4096], [130, 520]]);
}

fn agrees_with_f64_on(devices: &[Device], shapes: &[[usize; 2]]) {
    let mut random = Random::new(2);
    for device in devices {
        for &shape in shapes {
            let (width, dtype) = (shape[1], FLOATS[shape[1] % 3]);
            let (x, xs) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], device);
            let (dy, dys) = normal(&mut random, &shape, dtype, device);
            for eps in [1e-6, 100.0] {
                let (want, magnitude) = reference(&xs, width, eps, &dys);
                // The length comes three times; the sum along dy once; and what joins the terms.
                let gamma = gamma(3 * reference::roundings(width) + width + 6);
                let dx = l2_norm_backward(&x, eps, &dy).unwrap();
                assert_close(&dx, &shape, dtype, &want, |i| gamma * magnitude[i]);
            }
        }
        let empty = Tensor::new::<f32>(&[], &[0, 3], device).unwrap();
        assert_eq!(l2_norm_backward(&empty, 1e-6, &empty).unwrap().shape(), [0, 3]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[1f32; 6], &[2, 3], &device).unwrap();
    let error = l2_norm_backward(&x, 1e-6, &x.reshape(&[3, 2]).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "l2_norm_backward: dy is [3, 2], but x wants [2, 3]");
}
