use super::*;
use crate::Device;
use crate::ops::delta_gates::reference;
use crate::ops::testing::{FLOATS, assert_close, assert_derivatives, coarse, device, devices, normal};
use numcheck::{Random, gamma};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `[da, db, da_log, ddt_bias]` in f64, and the bound of each: the sum `a + dt_bias` rounds once,
/// which moves softplus and sigmoid by at most the rounding; exp and `ln_1p` are within 2 units of
/// the last place, sigmoid within 2.5.
fn reference(of: [&[f32]; 4], [dlog_decay, dbeta]: [&[f32]; 2]) -> [(Vec<f64>, Vec<f64>); 4] {
    let [a, b, a_log, dt_bias] = of;
    let heads = a_log.len();
    let zeros = |n: usize| (vec![0.0; n], vec![0.0; n]);
    let [mut da, mut db, mut da_log, mut ddt_bias] = [a.len(), a.len(), heads, heads].map(zeros);
    // 64 at a time, and these sums.
    let count = 64 + (a.len() / heads).div_ceil(64);
    for i in 0..a.len() {
        let head = i % heads;
        let x = f64::from(a[i]) + f64::from(dt_bias[head]);
        let dx = -f64::from(a_log[head]).exp() * f64::from(dlog_decay[i]);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let moved = dx.abs() * gamma(1) * x.abs();
        da.0[i] = sigmoid(x) * dx;
        da.1[i] = gamma(12) * da.0[i].abs() + moved;
        ddt_bias.0[head] += da.0[i];
        ddt_bias.1[head] += da.1[i] + gamma(count) * (da.0[i].abs() + da.1[i]);
        da_log.0[head] += softplus * dx;
        let off = gamma(18) * (softplus * dx).abs() + moved;
        da_log.1[head] += off + gamma(count) * ((softplus * dx).abs() + off);
        let b = f64::from(b[i]);
        db.0[i] = sigmoid(b) * sigmoid(-b) * f64::from(dbeta[i]);
        db.1[i] = gamma(13) * db.0[i].abs();
    }
    [da, db, da_log, ddt_bias]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let (mut random, heads) = (Random::new(1), 2);
    let mut of = |n: usize| coarse(&mut random, n);
    let (a, b, a_log, dt_bias) = (of(6), of(6), of(heads), of(heads));
    let (dlog_decay, dbeta) = (of(6), of(6));
    let loss = |a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32]| {
        let gate = |i: usize| {
            let [decay, beta] = reference::delta_gates(a[i], b[i], a_log[i % heads], dt_bias[i % heads]);
            decay.0 * f64::from(dlog_decay[i]) + beta.0 * f64::from(dbeta[i])
        };
        (0..6).map(gate).sum()
    };
    let [da, db, da_log, ddt_bias] = reference([&a, &b, &a_log, &dt_bias], [&dlog_decay, &dbeta]);
    assert_derivatives("da", &a, &da.0, |a| loss(a, &b, &a_log, &dt_bias));
    assert_derivatives("db", &b, &db.0, |b| loss(&a, b, &a_log, &dt_bias));
    assert_derivatives("da_log", &a_log, &da_log.0, |a_log| loss(&a, &b, a_log, &dt_bias));
    assert_derivatives("ddt_bias", &dt_bias, &ddt_bias.0, |dt_bias| loss(&a, &b, &a_log, dt_bias));
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(2);
    for device in devices {
        // The longest takes sums of the sums of 64.
        for (tokens, heads) in [(1, 1), (3, 8), (200, 19), (0, 3), (64 * 65 + 1, 3)] {
            let mut float = |shape: &[usize], dtype| normal(&mut random, shape, dtype, device);
            let ((a, av), (b, bv)) = (float(&[tokens, heads], FLOATS[1]), float(&[tokens, heads], FLOATS[2]));
            let ((a_log, lv), (dt_bias, tv)) = (float(&[heads], FLOATS[0]), float(&[heads], FLOATS[0]));
            let [dlog_decay, dbeta] = [(); 2].map(|()| float(&[tokens, heads], FLOATS[0]));
            let got = delta_gates_backward([&a, &b], [&a_log, &dt_bias], [&dlog_decay.0, &dbeta.0]).unwrap();
            let want = reference([&av, &bv, &lv, &tv], [&dlog_decay.1, &dbeta.1]);
            let shapes = [&[tokens, heads][..], &[tokens, heads], &[heads], &[heads]];
            let all = [got.da, got.db, got.da_log, got.ddt_bias];
            for ((got, shape), want) in all.iter().zip(shapes).zip(want) {
                assert_close(got, shape, FLOATS[0], &want.0, |i| want.1[i]);
            }
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let head = Tensor::new(&[0f32; 3], &[3], &device).unwrap();
    let error = delta_gates_backward([&x, &x], [&head, &head], [&x, &head]).unwrap_err().to_string();
    assert_eq!(error, "delta_gates_backward: dbeta is [3], but a [2, 3] wants [2, 3]");
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    #[test]
    fn nothing() {
        let gpu = gpu();
        let [gates, heads] = [&[5, 0][..], &[0]].map(|shape| Tensor::zeros(shape, DType::F32, &gpu));
        let got = delta_gates_backward([&gates, &gates], [&heads, &heads], [&gates, &gates]).unwrap();
        assert_eq!([got.da.shape(), got.db.shape()], [[5, 0]; 2]);
        assert_eq!([got.da_log.shape(), got.ddt_bias.shape()], [[0]; 2]);
    }
}
