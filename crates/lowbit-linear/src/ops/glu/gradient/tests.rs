use super::super::constants::OAI_LIMIT;
use super::*;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
};
use numcheck::{Random, gamma};

/// Values, and the magnitude of what makes each.
type Bounded = [Vec<f64>; 2];

/// `[dx, dgate]` in f64. `gate` has one value for each `x.len() / gate.len()` of x.
fn reference(by: Gate, x: &[f32], gate: &[f32], dy: &[f32]) -> [Bounded; 2] {
    let width = x.len() / gate.len();
    let mut dgate = [vec![0.0; gate.len()], vec![0.0; gate.len()]];
    let mut dx = [vec![], vec![]];
    for (i, (&x, &dy)) in x.iter().zip(dy).enumerate() {
        let (factor, slope) = {
            let of = by.reference(gate[i / width].into());
            (of.factor, of.slope)
        };
        let (value, value_slope) = by.value(x.into());
        let dy = f64::from(dy);
        dx[0].push(dy * factor.0 * value_slope);
        dx[1].push(dy.abs() * factor.1 * value_slope);
        dgate[0][i / width] += dy * value * slope.0;
        dgate[1][i / width] += (dy * value).abs() * slope.1;
    }
    [dx, dgate]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let [x, all, dy] =
        [(); 3].map(|()| coarse(&mut random, 3 * 8).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
    for (by, gate) in Gate::ALL.into_iter().flat_map(|by| [(by, &all[..]), (by, &all[..3])]) {
        let f = |x: &[f32], gate: &[f32]| dot(&by.references(x, gate)[0], &dy);
        let [[dx, _], [dgate, _]] = reference(by, &x, gate, &dy);
        assert_derivatives(&format!("dx {by:?}"), &x, &dx, |x| f(x, gate));
        assert_derivatives(&format!("dgate {by:?}"), gate, &dgate, |gate| f(&x, gate));
    }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices(), &WIDTHS.map(|width| [67, width]));
    // More than a task has.
    agrees_with_f64_on(&devices()[..1], &[[67, 300]]);
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
    for (device, shape) in devices.iter().flat_map(|device| shapes.iter().map(move |shape| (device, *shape)))
    {
        let [rows, width] = shape;
        let dtype = FLOATS[width % 3];
        let (x, xs) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], device);
        let (dy, dys) = normal(&mut random, &shape, dtype, device);
        for columns in [1, width, width + 3, 2 * width] {
            let (gate, gates) = normal(&mut random, &[rows, columns], FLOATS[0], device);
            let unread = columns.saturating_sub(width);
            let read: Vec<f32> = gates.chunks(columns).flat_map(|row| &row[unread..]).copied().collect();
            for by in Gate::ALL {
                let [[want_dx, of_dx], of_read] = reference(by, &xs, &read, &dys);
                let [want, magnitude] = of_read.map(|of_read| {
                    let rows = of_read.chunks(columns - unread);
                    rows.flat_map(|row| [&vec![0.0; unread], row].concat()).collect::<Vec<_>>()
                });
                let GluGradient { dx, dgate } = glu_backward(&x, &gate, by, &dy).unwrap();
                assert_close(&dx, &shape, dtype, &want_dx, |i| gamma(by.roundings()) * of_dx[i]);
                // The sum has as many roundings as a row has columns.
                let summed = if columns < width { width } else { 0 };
                let of_dgate = |i: usize| gamma(summed + by.gradient_roundings()) * magnitude[i];
                assert_close(&dgate, &[rows, columns], dtype, &want, of_dgate);
            }
        }
    }
}

#[test]
fn gates_far_from_zero() {
    gates_far_from_zero_on(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_gates_far_from_zero() {
    gates_far_from_zero_on(&gpu());
}

fn gates_far_from_zero_on(device: &Device) {
    let gate = Tensor::new(&[-1e30f32, -200.0, 200.0, 1e30], &[4], device).unwrap();
    let one = Tensor::new(&[1f32; 4], &[4], device).unwrap();
    for (by, want) in [
        (Gate::Silu, [0.0, 0.0, 1.0, 1.0]),
        (Gate::GeluTanh, [0.0, 0.0, 1.0, 1.0]),
        (Gate::Sigmoid, [0.0; 4]),
        (Gate::SwigluOai, [0.0; 4]),
        (Gate::Relu, [0.0, 0.0, 1.0, 1.0]),
    ] {
        assert_eq!(values(&glu_backward(&one, &gate, by, &one).unwrap().dgate), want, "{by:?}");
        let nan = Tensor::new(&[f32::NAN; 4], &[4], device).unwrap();
        let GluGradient { dx, dgate } = glu_backward(&one, &nan, by, &one).unwrap();
        assert!(values(&dx).iter().chain(&values(&dgate)).all(|x| x.is_nan()), "{by:?}");
    }
    // At the limit the gradient passes, and beyond it nothing does.
    let x = Tensor::new(&[OAI_LIMIT, -OAI_LIMIT, OAI_LIMIT.next_up(), -OAI_LIMIT.next_up()], &[4], device)
        .unwrap();
    let GluGradient { dx, dgate } = glu_backward(&x, &x, Gate::SwigluOai, &one).unwrap();
    let (dx, dgate) = (values(&dx), values(&dgate));
    assert!(dx[0] > 6.9 && dx[1] < 0.0 && dx[2..] == [0.0; 2], "{dx:?}");
    assert!(dgate[0] > 7.9 && dgate[1] > 0.0 && dgate[2] == 0.0, "{dgate:?}");
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
    for by in Gate::ALL {
        let got = glu_backward(&none, &gate, by, &none).unwrap();
        assert_eq!((got.dx.shape(), values(&got.dgate)), (&[2, 0][..], vec![0.0; 2]));
        let got = glu_backward(&none, &none, by, &none).unwrap();
        assert_eq!((got.dx.shape(), got.dgate.shape()), (&[2, 0][..], &[2, 0][..]));
    }
    let scalar = |x: f32| Tensor::new(&[x], &[], device).unwrap();
    let got = glu_backward(&scalar(3.0), &scalar(0.0), Gate::Sigmoid, &scalar(2.0)).unwrap();
    assert_eq!((values(&got.dx), values(&got.dgate)), (vec![1.0], vec![1.5]));
    // Heads side by side, of which each has one gate.
    let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &[1, 4], device).unwrap();
    let gate = Tensor::new(&[0f32; 2], &[1, 2, 1], device).unwrap();
    let got = glu_backward(&x, &gate, Gate::Sigmoid, &x).unwrap();
    assert_eq!((got.dx.shape(), values(&got.dx)), (&[1, 4][..], vec![0.5, 1.0, 1.5, 2.0]));
    assert_eq!((got.dgate.shape(), values(&got.dgate)), (&[1, 2, 1][..], vec![1.25, 6.25]));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[1f32; 6], &[2, 3], &device).unwrap();
    let gate = Tensor::new(&[1f32; 2], &[2, 1], &device).unwrap();
    let error = glu_backward(&x, &gate, Gate::Sigmoid, &gate).unwrap_err();
    assert_eq!(error.to_string(), "glu_backward: dy is [2, 1], but x wants [2, 3]");
}
