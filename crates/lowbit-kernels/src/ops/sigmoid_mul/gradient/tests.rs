use super::*;
use crate::ops::sigmoid_mul::reference;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
};
use numcheck::{Random, gamma};

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// dx; dgate of gates as long as x or one per row, and the magnitude of its terms.
fn reference(x: &[f32], gate: &[f32], dy: &[f32]) -> (Vec<f64>, [Vec<f64>; 2]) {
    let width = x.len() / gate.len();
    let mut dgate = [vec![0.0; gate.len()], vec![0.0; gate.len()]];
    let mut dx = vec![];
    for (i, (&x, &dy)) in x.iter().zip(dy).enumerate() {
        let s = sigmoid(gate[i / width]);
        dx.push(f64::from(dy) * s);
        let term = f64::from(dy) * f64::from(x) * s * sigmoid(-gate[i / width]);
        dgate[0][i / width] += term;
        dgate[1][i / width] += term.abs();
    }
    (dx, dgate)
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let [x, all, dy] = [(); 3].map(|()| coarse(&mut random, 2 * 3));
    for gate in [&all[..], &all[..2]] {
        let (dx, [dgate, _]) = reference(&x, gate, &dy);
        assert_derivatives("dx", &x, &dx, |x| dot(&reference::sigmoid_mul(x, gate), &dy));
        assert_derivatives("dgate", gate, &dgate, |gate| dot(&reference::sigmoid_mul(&x, gate), &dy));
    }
}

#[test]
fn agrees_with_f64() {
    // More rows than a task has.
    agrees_with_f64_on(&devices(), &WIDTHS.map(|width| [67, width]));
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    agrees_with_f64_on(&[gpu()], &WIDTHS.map(|width| [67, width]));
    // Rows that share a cube, and rows that have several planes.
    agrees_with_f64_on(&[gpu()], &[[300, 64], [2, 4096], [130, 520]]);
}

fn agrees_with_f64_on(devices: &[Device], shapes: &[[usize; 2]]) {
    let mut random = Random::new(2);
    for device in devices {
        for &shape in shapes {
            let [rows, width] = shape;
            let dtype = FLOATS[width % 3];
            let (x, xs) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], device);
            let (dy, dys) = normal(&mut random, &shape, dtype, device);
            for columns in [1, width, width + 3, 2 * width] {
                let (gate, gates) = normal(&mut random, &[rows, columns], FLOATS[0], device);
                let unread = columns.saturating_sub(width);
                let read: Vec<f32> = gates.chunks(columns).flat_map(|row| &row[unread..]).copied().collect();
                let (want_dx, of_read) = reference(&xs, &read, &dys);
                let [want, magnitude] = of_read.map(|of_read| {
                    let rows = of_read.chunks(columns - unread);
                    rows.flat_map(|row| [&vec![0.0; unread], row].concat()).collect::<Vec<_>>()
                });
                let SigmoidMulGradient { dx, dgate } = sigmoid_mul_backward(&x, &gate, &dy).unwrap();
                let of_dx = |i: usize| gamma(reference::ROUNDINGS) * want_dx[i].abs();
                assert_close(&dx, &shape, dtype, &want_dx, of_dx);
                // Two sigmoids of 5 units each, 3 products, and the sum.
                let of_dgate = |i: usize| gamma(width + 13) * magnitude[i];
                assert_close(&dgate, &[rows, columns], dtype, &want, of_dgate);
            }
        }
    }
}

#[test]
fn of_nothing_and_of_scalars() {
    of_nothing_and_of_scalars_on(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_of_nothing_and_of_scalars() {
    of_nothing_and_of_scalars_on(&gpu());
}

fn of_nothing_and_of_scalars_on(device: &Device) {
    let gate = Tensor::new(&[1f32; 2], &[2, 1], device).unwrap();
    let none = Tensor::new::<f32>(&[], &[2, 0], device).unwrap();
    let got = sigmoid_mul_backward(&none, &gate, &none).unwrap();
    assert_eq!((got.dx.shape(), values(&got.dgate)), (&[2, 0][..], vec![0.0; 2]));
    let scalar = |x: f32| Tensor::new(&[x], &[], device).unwrap();
    let got = sigmoid_mul_backward(&scalar(3.0), &scalar(0.0), &scalar(2.0)).unwrap();
    assert_eq!((values(&got.dx), values(&got.dgate)), (vec![1.0], vec![1.5]));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[1f32; 6], &[2, 3], &device).unwrap();
    let gate = Tensor::new(&[1f32; 2], &[2, 1], &device).unwrap();
    let error = sigmoid_mul_backward(&x, &gate, &gate).unwrap_err();
    assert_eq!(error.to_string(), "sigmoid_mul_backward: dy is [2, 1], but x wants [2, 3]");
}
