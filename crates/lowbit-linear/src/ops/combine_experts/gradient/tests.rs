use super::*;
use crate::Device;
use crate::ops::combine_experts::reference;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, normal,
};
use numcheck::{Random, gamma};

/// `[dx, dweights]` in f64, and the magnitude of what makes each.
fn reference(x: &[f32], weights: &[f32], dy: &[f32], top_k: usize) -> [(Vec<f64>, Vec<f64>); 2] {
    let n = x.len() / weights.len();
    let of = |slot: usize, i: usize| f64::from(dy[slot / top_k * n + i]);
    let dx: Vec<f64> = (0..x.len()).map(|at| f64::from(weights[at / n]) * of(at / n, at % n)).collect();
    let products = |slot: usize| (0..n).map(move |i| f64::from(x[slot * n + i]) * of(slot, i));
    let all = |f: fn(f64) -> f64| (0..weights.len()).map(|slot| products(slot).map(f).sum()).collect();
    [(dx.clone(), dx.iter().map(|dx| dx.abs()).collect()), (all(|x| x), all(f64::abs))]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    let (top_k, n) = (3, 4);
    let (x, weights, dy) =
        (coarse(&mut random, 2 * top_k * n), coarse(&mut random, 2 * top_k), coarse(&mut random, 2 * n));
    let loss = |x: &[f32], weights: &[f32]| {
        let y = |at: usize| {
            let slots = at / n * top_k..(at / n + 1) * top_k;
            reference::combine_experts(slots.map(|s| (weights[s], x[s * n + at % n]))).0
        };
        (0..2 * n).map(|at| y(at) * f64::from(dy[at])).sum()
    };
    let [dx, dweights] = reference(&x, &weights, &dy, top_k);
    assert_derivatives("dx", &x, &dx.0, |x| loss(x, &weights));
    assert_derivatives("dweights", &weights, &dweights.0, |weights| loss(&x, weights));
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(2);
    for device in devices {
        for (i, n) in WIDTHS.into_iter().chain([512, 520]).enumerate() {
            // Every pair of types, since there are two powers of 3 among as many widths.
            let (shape, dtype) = ([19, 3, n], FLOATS[i % 3]);
            let (x, xs) = normal(&mut random, &shape, FLOATS[i / 3 % 3], device);
            let (weights, ws) = normal(&mut random, &shape[..2], FLOATS[0], device);
            let (dy, dys) = normal(&mut random, &[19, n], dtype, device);
            let got = combine_experts_backward(&x, &weights, &dy).unwrap();
            let [dx, dweights] = reference(&xs, &ws, &dys, 3);
            assert_close(&got.dx, &shape, dtype, &dx.0, |i| gamma(1) * dx.1[i]);
            assert_close(&got.dweights, &[19, 3], FLOATS[0], &dweights.0, |i| gamma(n) * dweights.1[i]);
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[0f32; 24], &[2, 3, 4], &device).unwrap();
    let weights = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let error = combine_experts_backward(&x, &weights, &weights).unwrap_err().to_string();
    assert_eq!(error, "combine_experts_backward: dy is [2, 3], but x [2, 3, 4] wants [2, 4]");
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::{gpu, values};

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    /// More slots than a device takes rows at once, and rows of nothing.
    #[test]
    fn many_rows_and_none() {
        let (gpu, tokens) = (gpu(), 70_000);
        let ones = |shape: &[usize]| Tensor::new(&vec![1f32; shape.iter().product()], shape, &gpu).unwrap();
        let got = combine_experts_backward(&ones(&[tokens, 2, 3]), &ones(&[tokens, 2]), &ones(&[tokens, 3]))
            .unwrap();
        assert!(values(&got.dx).iter().all(|&dx| dx == 1.0));
        assert!(values(&got.dweights).iter().all(|&dweight| dweight == 3.0));
        let got = combine_experts_backward(&ones(&[2, 3, 0]), &ones(&[2, 3]), &ones(&[2, 0])).unwrap();
        assert_eq!((got.dx.shape(), values(&got.dweights)), (&[2, 3, 0][..], vec![0.0; 6]));
        let got = combine_experts_backward(&ones(&[0, 3, 4]), &ones(&[0, 3]), &ones(&[0, 4])).unwrap();
        assert_eq!((got.dx.shape(), got.dweights.shape()), (&[0, 3, 4][..], &[0, 3][..]));
    }
}
