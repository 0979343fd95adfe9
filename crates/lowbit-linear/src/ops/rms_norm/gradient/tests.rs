use super::*;
use crate::Device;
use crate::ops::rms_norm::reference as forward;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
};
use numcheck::{Random, assert_bits};

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let (rows, width, eps) = (2, 5, 1e-2);
    let of = |n: usize, random: &mut Random| coarse(random, n);
    let (x, gate, dy) =
        (of(rows * width, &mut random), of(rows * width, &mut random), of(rows * width, &mut random));
    let weight = of(width, &mut random);
    for gate in [None, Some(&gate[..])] {
        let loss = |x: &[f32], gate: Option<&[f32]>, weight: &[f32]| {
            dot(&forward::rms_norm(x, gate, weight, eps), &dy)
        };
        let [dx, dgate, dweight] = reference::rms_norm_backward(&x, gate, (&weight, eps), &dy);
        assert_derivatives("dx", &x, &dx.0, |x| loss(x, gate, &weight));
        assert_derivatives("dweight", &weight, &dweight.0, |weight| loss(&x, gate, weight));
        if let Some(gate) = gate {
            assert_derivatives("dgate", gate, &dgate.0, |gate| loss(&x, Some(gate), &weight));
        }
    }
}

fn check(device: &Device, shape: &[usize], random: &mut Random) {
    let width = shape[shape.len() - 1];
    let dtype = FLOATS[(width + 1) % 3];
    let (x, xs) = normal(random, shape, FLOATS[width % 3], device);
    let (dy, dys) = normal(random, shape, dtype, device);
    let (gate, gates) = normal(random, shape, FLOATS[0], device);
    let (weight, weights) = normal(random, &[width], FLOATS[0], device);
    let close = |y: &Tensor, shape: &[usize], dtype, want: &reference::Bounded| {
        assert_close(y, shape, dtype, &want.0, |i| want.1[i]);
    };
    let [dx, _, dweight] = reference::rms_norm_backward(&xs, None, (&weights, 1e-3), &dys);
    let got = rms_norm_backward(&x, &weight, 1e-3, &dy).unwrap();
    close(&got.dx, shape, dtype, &dx);
    close(&got.dweight, &[width], FLOATS[0], &dweight);
    let [dx, dgate, dweight] = reference::rms_norm_backward(&xs, Some(&gates), (&weights, 1e-3), &dys);
    let got = gated_rms_norm_backward(&x, &gate, &weight, 1e-3, &dy).unwrap();
    close(&got.dx, shape, dtype, &dx);
    close(&got.dgate, shape, dtype, &dgate);
    close(&got.dweight, &[width], FLOATS[0], &dweight);
}

#[test]
fn agrees_with_f64() {
    let mut random = Random::new(2);
    for device in devices() {
        for width in WIDTHS {
            check(&device, &[2, 3, width], &mut random);
        }
        for rows in [1, 63, 64, 65, 200] {
            check(&device, &[rows, 19], &mut random);
        }
    }
}

/// Several units per row, two blocks of rows and more, and more than a block of blocks.
#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    let (device, mut random) = (gpu(), Random::new(2));
    for width in WIDTHS {
        check(&device, &[2, 3, width], &mut random);
    }
    for shape in [[1, 19], [63, 64], [64, 128], [65, 33], [300, 19], [2, 4096], [130, 520], [4100, 8]] {
        check(&device, &shape, &mut random);
    }
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_of_nothing_is_zero() {
    of_nothing_is_zero_on(&gpu());
}

#[test]
fn the_same_for_every_number_of_threads() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        let mut random = Random::new(3);
        let [x, gate, dy] = [(); 3].map(|()| normal(&mut random, &[300, 33], FLOATS[0], &device).0);
        let (weight, _) = normal(&mut random, &[33], FLOATS[0], &device);
        let GatedRmsNormGradient { dx, dgate, dweight } =
            gated_rms_norm_backward(&x, &gate, &weight, 1e-6, &dy).unwrap();
        [dx, dgate, dweight].map(|x| values(&x))
    };
    let one = of(1);
    for (got, want) in of(3).iter().zip(&one) {
        assert_bits("threads", got, want);
    }
}

#[test]
fn of_nothing_is_zero() {
    of_nothing_is_zero_on(&device());
}

fn ones(shape: &[usize], device: &Device) -> Tensor {
    Tensor::new(&vec![1f32; shape.iter().product()], shape, device).unwrap()
}

fn of_nothing_is_zero_on(device: &Device) {
    let float = |shape: &[usize]| ones(shape, device);
    let none = rms_norm_backward(&float(&[0, 3]), &float(&[3]), 1e-6, &float(&[0, 3])).unwrap();
    assert_eq!((none.dx.shape(), values(&none.dweight)), (&[0, 3][..], vec![0.0; 3]));
    let none = rms_norm_backward(&float(&[2, 0]), &float(&[0]), 1e-6, &float(&[2, 0])).unwrap();
    assert_eq!((none.dx.shape(), none.dweight.shape()), (&[2, 0][..], &[0][..]));
    let none = float(&[0, 3]);
    let none = gated_rms_norm_backward(&none, &none, &float(&[3]), 1e-6, &none).unwrap();
    assert_eq!((none.dgate.shape(), values(&none.dweight)), (&[0, 3][..], vec![0.0; 3]));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let float = |shape: &[usize]| ones(shape, &device);
    let error = rms_norm_backward(&float(&[2, 3]), &float(&[3]), 1e-6, &float(&[3, 2])).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm_backward: dy is [3, 2], but x wants [2, 3]");
    let error = rms_norm_backward(&float(&[2, 3]), &float(&[2]), 1e-6, &float(&[2, 3])).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm_backward: weight is [2], but x [2, 3] wants [3]");
}
