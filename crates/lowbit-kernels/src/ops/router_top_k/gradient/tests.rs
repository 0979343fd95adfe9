use super::*;
use crate::Device;
use crate::ops::router_top_k::{RouterScores, reference, router_top_k};
use crate::ops::testing::{
    FLOATS, assert_close, assert_derivatives, coarse, device, devices, fetched, normal, values,
};
use numcheck::{Random, gamma};

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

/// dlogits of one token in f64, and the magnitude of its terms.
fn reference(logits: &[f32], ids: &[u32], dweights: &[f32], params: RouterParams) -> (Vec<f64>, Vec<f64>) {
    let scale = f64::from(params.scale);
    let (values, most): (Vec<f64>, Vec<f64>) = match params.scores {
        RouterScores::Softmax => of_softmax(logits, ids, dweights, params.normalize),
        RouterScores::Sigmoid => of_sigmoids(logits, ids, dweights, params),
    };
    values.iter().zip(&most).map(|(value, most)| (value * scale, most * scale.abs())).unzip()
}

fn of_sigmoids(logits: &[f32], ids: &[u32], dweights: &[f32], params: RouterParams) -> (Vec<f64>, Vec<f64>) {
    let RouterParams { normalize, sum_eps, .. } = params;
    let chosen: f64 = ids.iter().map(|&id| sigmoid(logits[id as usize])).sum();
    let sum = if normalize { chosen + f64::from(sum_eps) } else { 1.0 };
    let along = |f: fn(f64) -> f64| {
        let terms =
            ids.iter().zip(dweights).map(|(&id, &dp)| sigmoid(logits[id as usize]) / sum * f(dp.into()));
        if normalize { terms.sum() } else { 0.0 }
    };
    let (value, most): (f64, f64) = (along(|x| x), along(f64::abs));
    let token = |e: usize| match ids.iter().position(|&id| id as usize == e) {
        None => (0.0, 0.0),
        Some(slot) => {
            let (slope, dp) = (sigmoid(logits[e]) * sigmoid(-logits[e]) / sum, f64::from(dweights[slot]));
            (slope * (dp - value), slope * (dp.abs() + most))
        }
    };
    (0..logits.len()).map(token).unzip()
}

fn of_softmax(logits: &[f32], ids: &[u32], dweights: &[f32], normalize: bool) -> (Vec<f64>, Vec<f64>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp = |e: usize| (f64::from(logits[e]) - f64::from(max)).exp();
    let taken = |e: usize| !normalize || ids.contains(&(e as u32));
    let sum: f64 = (0..logits.len()).filter(|&e| taken(e)).map(exp).sum();
    let p = |e: usize| if taken(e) { exp(e) / sum } else { 0.0 };
    let dp = |e: usize| ids.iter().position(|&id| id as usize == e).map_or(0.0, |i| f64::from(dweights[i]));
    let along = |f: fn(f64) -> f64| (0..logits.len()).map(|e| p(e) * f(dp(e))).sum::<f64>();
    let (value, most) = (along(|x| x), along(f64::abs));
    (0..logits.len()).map(|e| (p(e) * (dp(e) - value), p(e) * (dp(e).abs() + most))).unzip()
}

/// Each kind, with a choice of `top_k`.
fn params(top_k: usize) -> [RouterParams; 4] {
    let softmax = [false, true].map(|normalize| RouterParams::softmax(top_k, normalize));
    let sigmoids = [false, true]
        .map(|normalize| RouterParams { scale: 2.5, ..RouterParams::sigmoid(top_k, normalize, 1e-3) });
    [softmax[0], softmax[1], sigmoids[0], sigmoids[1]]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    // Far enough from each other for the choice to stay.
    let logits: Vec<f32> = [0.5, -1.0, 2.0, 0.0, 1.25].to_vec();
    let dweights = coarse(&mut random, 3);
    for params in params(3) {
        let ids: Vec<u32> =
            reference::router_top_k(&logits, &[], params).iter().map(|choice| choice.id).collect();
        let want = reference(&logits, &ids, &dweights, params).0;
        assert_derivatives("dlogits", &logits, &want, |logits| {
            let choices = reference::router_top_k(logits, &[], params);
            assert!(choices.iter().zip(&ids).all(|(choice, &id)| choice.id == id));
            choices.iter().zip(&dweights).map(|(choice, &d)| choice.weight * f64::from(d)).sum()
        });
    }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(2);
    for device in devices {
        let sizes = [(1, 4, 2), (67, 33, 8), (5, 3, 3), (2, 512, 40), (0, 4, 2)];
        for (tokens, experts, top_k, params) in sizes
            .into_iter()
            .flat_map(|(tokens, experts, top_k)| params(top_k).map(|p| (tokens, experts, top_k, p)))
        {
            let (logits, all) = normal(&mut random, &[tokens, experts], FLOATS[1], device);
            let (shared, gates) = normal(&mut random, &[tokens, 1], FLOATS[1], device);
            for shared in [None, Some(&shared)] {
                let (ids, _) = router_top_k(&logits, None, shared, params).unwrap();
                let (dweights, ds) = normal(&mut random, ids.shape(), FLOATS[0], device);
                let got = router_top_k_backward(&logits, shared, params, &ids, &dweights).unwrap();
                let on_host = fetched(&ids);
                let (slots, ids) = (ids.dim(1), on_host.as_slice::<u32>().unwrap());
                let token = |t: usize| {
                    let at = t * slots..t * slots + top_k;
                    reference(&all[t * experts..(t + 1) * experts], &ids[at.clone()], &ds[at], params)
                };
                let each: Vec<_> = (0..tokens).map(token).collect();
                let want: Vec<f64> = each.iter().flat_map(|token| token.0.clone()).collect();
                let most: Vec<f64> = each.iter().flat_map(|token| token.1.clone()).collect();
                // Exponentials and their sum come twice; a difference to the greatest is 12 at most
                // here.
                let gamma_of = gamma(2 * (12 + 3 + experts) + top_k + 6);
                assert_close(&got.dlogits, &[tokens, experts], FLOATS[0], &want, |i| gamma_of * most[i]);
                assert_eq!(got.dshared.is_some(), shared.is_some());
                if let Some(dshared) = got.dshared {
                    let of =
                        |t: usize| sigmoid(gates[t]) * sigmoid(-gates[t]) * f64::from(ds[t * slots + top_k]);
                    let want: Vec<f64> = (0..tokens).map(of).collect();
                    assert_close(&dshared, &[tokens, 1], FLOATS[0], &want, |i| gamma(13) * want[i].abs());
                }
            }
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let logits = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let ids = Tensor::new(&[0u32, 1, 3, 2], &[2, 2], &device).unwrap();
    let dweights = Tensor::new(&[0f32; 4], &[2, 2], &device).unwrap();
    let params = RouterParams::softmax(2, true);
    let refuse = |ids: &Tensor, dweights: &Tensor, shared: Option<&Tensor>, params| {
        router_top_k_backward(&logits, shared, params, ids, dweights).unwrap_err().to_string()
    };
    assert_eq!(
        refuse(&ids, &dweights, None, params),
        "router_top_k_backward: ids[2] is 3, but there are 3 rows to choose from"
    );
    assert_eq!(
        refuse(&ids, &logits, None, params),
        "router_top_k_backward: dweights is [2, 3], but ids wants [2, 2]"
    );
    let shared = Tensor::new(&[0f32; 2], &[2, 1], &device).unwrap();
    let params = RouterParams::softmax(1, true);
    assert_eq!(
        refuse(&ids, &dweights, Some(&shared), params),
        "router_top_k_backward: ids is 3 in row 1, but that is the shared expert's, which comes last"
    );
    assert!(values(&dweights).iter().all(|&x| x == 0.0));
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    /// The token of an id that is no expert's is NaN, and no other.
    #[test]
    fn wrong_ids() {
        let gpu = gpu();
        let logits = Tensor::new(&[0f32; 12], &[4, 3], &gpu).unwrap();
        let shared = Tensor::new(&[0f32; 4], &[4, 1], &gpu).unwrap();
        let ids = Tensor::new(&[0u32, 1, 3, 2, 3, 3, 1, u32::MAX, 3, 2, 0, 3], &[4, 3], &gpu).unwrap();
        let dweights = Tensor::new(&[1f32; 12], &[4, 3], &gpu).unwrap();
        for normalize in [false, true] {
            let params = RouterParams::softmax(2, normalize);
            let got = router_top_k_backward(&logits, Some(&shared), params, &ids, &dweights).unwrap();
            let nans: Vec<bool> = values(&got.dlogits).iter().map(|dlogit| dlogit.is_nan()).collect();
            assert_eq!(nans, [[false; 3], [true; 3], [true; 3], [false; 3]].as_flattened());
            assert_eq!(values(&got.dshared.unwrap()), [0.25; 4]);
        }
    }
}
