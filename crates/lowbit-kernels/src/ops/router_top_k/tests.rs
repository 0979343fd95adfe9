use super::*;
use crate::ops::testing::{FLOATS, devices, fetched, rounded, values};
use lowbit_formats::DType;
use numcheck::{Random, assert_within};

fn check(logits: &[f32], experts: usize, params: RouterParams) {
    check_on(&devices(), logits, experts, params);
}

pub(super) fn check_on(devices: &[Device], logits: &[f32], experts: usize, params: RouterParams) {
    for dtype in FLOATS {
        let logits: Vec<f32> = logits.iter().map(|&x| dtype.round(x)).collect();
        let want: Vec<_> =
            logits.chunks_exact(experts).flat_map(|row| reference::router_top_k(row, &[], params)).collect();
        let (ids, weights): (Vec<u32>, Vec<f64>) =
            want.iter().map(|choice| (choice.id, choice.weight)).unzip();
        for device in devices {
            let tokens = logits.len() / experts;
            let x = rounded(&logits, &[tokens, experts], dtype, device);
            let (got_ids, got_weights) = router_top_k(&x, None, None, params).unwrap();
            assert_eq!(got_ids.shape(), [tokens, params.top_k]);
            assert_eq!((got_weights.shape(), got_weights.dtype()), (got_ids.shape(), DType::F32));
            assert_eq!(fetched(&got_ids).as_slice::<u32>().unwrap(), ids);
            let got_weights = values(&got_weights);
            assert_within(&got_weights, &weights, |i| want[i].bound);

            let gates: Vec<f32> = (0..tokens).map(|t| dtype.round(t as f32 * 0.7 - 3.0)).collect();
            let shared = rounded(&gates, &[tokens, 1], dtype, device);
            let (with_ids, with_weights) = router_top_k(&x, None, Some(&shared), params).unwrap();
            assert_eq!(with_ids.shape(), [tokens, params.top_k + 1]);
            let (with_ids, with_weights) = (fetched(&with_ids), values(&with_weights));
            let with = with_ids.as_slice::<u32>().unwrap().chunks(params.top_k + 1);
            for (t, (with, weights)) in with.zip(with_weights.chunks(params.top_k + 1)).enumerate() {
                let others = t * params.top_k..(t + 1) * params.top_k;
                assert_eq!(with, [&ids[others.clone()], &[experts as u32]].concat());
                assert_eq!(weights[..params.top_k], got_weights[others]);
                let want = 1.0 / (1.0 + (-f64::from(gates[t])).exp());
                assert_within(&weights[params.top_k..], &[want], |_| 4.0 * f64::from(f32::EPSILON) * want);
            }
        }
    }
}

#[test]
fn agrees_with_the_reference() {
    let mut random = Random::new(3);
    for (tokens, experts, top_k) in
        [(1, 1, 1), (3, 5, 5), (7, 16, 2), (41, 60, 4), (130, 512, 10), (2, 255, 8)]
    {
        for (scale, normalize) in [(0.5, true), (4.0, false), (40.0, true)] {
            let logits = random.normal(tokens * experts, scale);
            check(&logits, experts, RouterParams::softmax(top_k, normalize));
        }
    }
}

/// Softmax over all experts, of which some groups' are chosen.
pub(super) fn check_groups_of_softmax(devices: &[Device]) {
    let mut random = Random::new(6);
    for (tokens, experts, top_k, n_group, topk_group) in
        [(7, 16, 2, 8, 3), (9, 64, 4, 32, 3), (41, 60, 4, 3, 1), (30, 160, 6, 8, 3), (3, 512, 8, 2, 1)]
    {
        for (scale, normalize) in [(1.0, false), (16.0, false), (0.75, true)] {
            let softmax = RouterParams::softmax(top_k, normalize);
            let params = RouterParams { scale, n_group, topk_group, ..softmax };
            let mut logits = random.normal(tokens * experts, 2.0);
            // An expert that is switched off, and groups that are equal.
            logits[experts / 2] = f32::NEG_INFINITY;
            logits[..experts].iter_mut().for_each(|x| *x = x.round());
            check_on(devices, &logits, experts, params);
        }
    }
}

#[test]
fn groups_of_softmax_agree_with_the_reference() {
    check_groups_of_softmax(&devices());
}

/// Sigmoids with and without a bias that changes the choice, and a scale.
pub(super) fn check_sigmoids(devices: &[Device]) {
    let mut random = Random::new(5);
    for (tokens, experts, top_k, n_group, topk_group) in [
        (1, 1, 1, 1, 1),
        (3, 5, 5, 1, 1),
        (7, 16, 2, 8, 3),
        (9, 64, 4, 32, 3),
        (41, 60, 4, 1, 1),
        (41, 60, 4, 3, 3),
        (30, 512, 8, 8, 4),
    ] {
        for (scale, normalize) in [(1.0, true), (2.5, true), (0.75, false)] {
            let eps = if scale > 2.0 { 1e-3 } else { 0.0 };
            let sigmoid = RouterParams::sigmoid(top_k, normalize, eps);
            let params = RouterParams { scale, n_group, topk_group, ..sigmoid };
            let mut logits = random.normal(tokens * experts, 2.0);
            // An expert that is switched off.
            logits[experts / 2] = if experts > 5 { f32::NEG_INFINITY } else { 0.5 };
            let biases = random.normal(experts, 0.3);
            for (dtype, bias) in FLOATS.into_iter().flat_map(|dtype| [&[][..], &biases].map(|b| (dtype, b))) {
                let logits: Vec<f32> = logits.iter().map(|&x| dtype.round(x)).collect();
                let rows = logits.chunks_exact(experts);
                let want: Vec<_> = rows.flat_map(|row| reference::router_top_k(row, bias, params)).collect();
                for device in devices {
                    let x = rounded(&logits, &[tokens, experts], dtype, device);
                    let on_device = Tensor::new(&biases, &[experts], device).unwrap();
                    let bias = (!bias.is_empty()).then_some(&on_device);
                    let (ids, weights) = router_top_k(&x, bias, None, params).unwrap();
                    let ids = fetched(&ids).as_slice::<u32>().unwrap().to_vec();
                    assert_eq!(ids, want.iter().map(|choice| choice.id).collect::<Vec<_>>());
                    let wanted: Vec<f64> = want.iter().map(|choice| choice.weight).collect();
                    assert_within(&values(&weights), &wanted, |i| want[i].bound);
                }
            }
        }
    }
}

#[test]
fn sigmoids_agree_with_the_reference() {
    check_sigmoids(&devices());
}

/// Sigmoids of 0, with something to divide them by.
pub(super) fn check_sums_of_nothing(devices: &[Device]) {
    for device in devices {
        let x = Tensor::new(&[-1000f32, -2000.0, -1000.0], &[1, 3], device).unwrap();
        let params = RouterParams::sigmoid(2, true, 1e-20);
        let (ids, weights) = router_top_k(&x, None, None, params).unwrap();
        assert_eq!(fetched(&ids).as_slice::<u32>().unwrap(), [0, 1]);
        assert!(values(&weights).iter().all(|weight| (0.0..1e-15).contains(weight)));
    }
}

#[test]
fn sigmoids_without_a_sum() {
    check_sums_of_nothing(&devices());
}

#[test]
fn ties_go_to_the_lower_id() {
    // Rounding to bf16 makes many more.
    let mut random = Random::new(4);
    let logits: Vec<f32> = (0..6 * 64).map(|_| random.below(5) as f32).collect();
    check(&logits, 64, RouterParams::softmax(9, true));
    check(&[1.0; 24], 12, RouterParams::softmax(7, false));
    // Zeros of both signs are equal.
    check(&[-0.0, 0.0, -1.0, 0.0, -0.0], 5, RouterParams::softmax(4, false));
}

#[test]
fn experts_that_are_switched_off() {
    let off = f32::NEG_INFINITY;
    check(&[off, 2.0, off, 1.0, off, off, 0.5, off], 4, RouterParams::softmax(2, true));
    check(&[off, 2.0, off, off], 4, RouterParams::softmax(3, false));
}

#[test]
fn refusals_name_the_row() {
    let device = Device::cpu(Some(1)).unwrap();
    let run = |logits: &[f32], experts: usize, top_k: usize| {
        let x = Tensor::new(logits, &[logits.len() / experts, experts], &device).unwrap();
        router_top_k(&x, None, None, RouterParams::softmax(top_k, true)).unwrap_err().to_string()
    };
    let wanted = "but every row is to have finite logits, or -inf beside finite ones";
    assert_eq!(
        run(&[1.0, 2.0, 1.0, f32::NAN, 0.0, 0.0], 2, 1),
        format!("router_top_k: logits is NaN in row 1 of 3, {wanted}")
    );
    assert_eq!(
        run(&[f32::INFINITY, 2.0], 2, 1),
        format!("router_top_k: logits is inf in row 0 of 1, {wanted}")
    );
    assert_eq!(
        run(&[0.0, 0.0, f32::NEG_INFINITY, f32::NEG_INFINITY], 2, 1),
        format!("router_top_k: logits is -inf in row 1 of 2, {wanted}")
    );
    assert_eq!(run(&[0.0; 6], 3, 4), "router_top_k: logits is [2, 3], but top_k is 4: 1 to E are wanted");
    assert_eq!(run(&[0.0; 6], 3, 0), "router_top_k: logits is [2, 3], but top_k is 0: 1 to E are wanted");
    let ids = Tensor::zeros(&[2, 3], DType::U32, &device);
    assert_eq!(
        router_top_k(&ids, None, None, RouterParams::softmax(1, true)).unwrap_err().to_string(),
        "router_top_k: logits is u32, but f32, f16 or bf16 is wanted"
    );
    let logits = Tensor::zeros(&[2, 3], DType::F32, &device);
    let with = |shared: &Tensor| {
        let params = RouterParams::softmax(1, true);
        router_top_k(&logits, None, Some(shared), params).unwrap_err().to_string()
    };
    assert_eq!(
        with(&Tensor::zeros(&[3, 1], DType::F32, &device)),
        "router_top_k: shared is [3, 1], but logits [2, 3] wants [2, 1]"
    );
    assert_eq!(
        with(&Tensor::zeros(&[2, 1], DType::F16, &device)),
        "router_top_k: shared is f16, but f32 is wanted"
    );
    let biased =
        |bias: &Tensor, params| router_top_k(&logits, Some(bias), None, params).unwrap_err().to_string();
    let bias = Tensor::zeros(&[3], DType::F32, &device);
    let softmax = RouterParams::softmax(1, true);
    assert_eq!(biased(&bias, softmax), "router_top_k: bias is there, but softmax has none");
    let sigmoid = RouterParams::sigmoid(1, true, 1e-20);
    let short = Tensor::zeros(&[2], DType::F32, &device);
    assert_eq!(biased(&short, sigmoid), "router_top_k: bias is [2], but logits [2, 3] wants [3]");
    assert_eq!(
        biased(&bias, RouterParams { scale: f32::NAN, ..sigmoid }),
        "router_top_k: scale is NaN, but a finite number is wanted"
    );
    let refuse = |params| router_top_k(&logits, None, None, params).unwrap_err().to_string();
    assert_eq!(
        refuse(RouterParams { sum_eps: 1.0, ..softmax }),
        "router_top_k: sum_eps is 1, but softmax has none"
    );
    assert_eq!(
        refuse(RouterParams { sum_eps: -1.0, ..sigmoid }),
        "router_top_k: sum_eps is -1, but a finite number from 0 is wanted"
    );
    let infinite = Tensor::new(&[0.0, f32::INFINITY, 0.0], &[3], &device).unwrap();
    assert_eq!(
        biased(&infinite, sigmoid),
        "router_top_k: bias is inf for expert 1 of 3, but a finite number is wanted"
    );
}

#[test]
fn refusals_of_groups() {
    let device = Device::cpu(Some(1)).unwrap();
    let logits = Tensor::zeros(&[2, 12], DType::F32, &device);
    let refuse = |n_group, topk_group, scores| {
        let params = RouterParams { n_group, topk_group, scores, ..RouterParams::softmax(5, true) };
        router_top_k(&logits, None, None, params).unwrap_err().to_string()
    };
    let sigmoid = RouterScores::Sigmoid;
    let softmax = refuse(5, 1, RouterScores::Softmax);
    assert_eq!(softmax, "router_top_k: n_group is 5, but 12 experts make no such groups of 2 or more");
    assert_eq!(refuse(0, 1, sigmoid), "router_top_k: n_group is 0, but 1 to 32 groups are wanted");
    assert_eq!(refuse(33, 1, sigmoid), "router_top_k: n_group is 33, but 1 to 32 groups are wanted");
    for n_group in [5, 12] {
        let want = format!("n_group is {n_group}, but 12 experts make no such groups of 2 or more");
        assert_eq!(refuse(n_group, 1, sigmoid), format!("router_top_k: {want}"));
    }
    for topk_group in [0, 1, 4] {
        let want = format!("topk_group is {topk_group}, but 5 experts are chosen in 1 to 3 groups of 4");
        assert_eq!(refuse(3, topk_group, sigmoid), format!("router_top_k: {want}"));
    }
}

#[test]
fn agrees_with_transformers() {
    let file = numcheck::Vectors::open("delta/router_top_k");
    let logits = file.get("logits");
    let device = Device::cpu(None).unwrap();
    let x = Tensor::new(&logits.f32s(), &logits.shape, &device).unwrap();
    for (name, normalize) in [("weights", false), ("normalized", true)] {
        let params = RouterParams::softmax(5, normalize);
        let (ids, weights) = router_top_k(&x, None, None, params).unwrap();
        assert_eq!(ids.as_slice::<u32>().unwrap(), file.get("ids").u32s());
        let rows = logits.f32s();
        let exact: Vec<_> = rows
            .chunks_exact(logits.shape[1])
            .flat_map(|row| reference::router_top_k(row, &[], params))
            .collect();
        let of_peer: Vec<f64> = file.get(name).f32s().into_iter().map(f64::from).collect();
        // Each is within a bound of the exact value.
        assert_within(&values(&weights), &of_peer, |i| 2.0 * exact[i].bound);
    }
}

#[test]
fn sigmoids_agree_with_transformers() {
    let file = numcheck::Vectors::open("delta/router_top_k");
    let device = Device::cpu(None).unwrap();
    let [logits, bias] = ["group_logits", "group_bias"].map(|name| file.get(name));
    let (rows, biases) = (logits.f32s(), bias.f32s());
    let x = Tensor::new(&rows, &logits.shape, &device).unwrap();
    let on_device = Tensor::new(&biases, &bias.shape, &device).unwrap();
    for (name, n_group, topk_group) in [("one_group", 1, 1), ("some_groups", 6, 2)] {
        let params =
            RouterParams { scale: 2.5, n_group, topk_group, ..RouterParams::sigmoid(5, true, 1e-20) };
        let (ids, weights) = router_top_k(&x, Some(&on_device), None, params).unwrap();
        assert_eq!(ids.as_slice::<u32>().unwrap(), file.get(&format!("{name}_ids")).u32s());
        let rows = rows.chunks_exact(logits.shape[1]);
        let exact: Vec<_> = rows.flat_map(|row| reference::router_top_k(row, &biases, params)).collect();
        let of_peer = file.get(&format!("{name}_weights")).f32s();
        let of_peer: Vec<f64> = of_peer.into_iter().map(f64::from).collect();
        assert_within(&values(&weights), &of_peer, |i| 2.0 * exact[i].bound);
    }
}
