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
            logits.chunks_exact(experts).flat_map(|row| reference::router_top_k(row, params)).collect();
        let (ids, weights): (Vec<u32>, Vec<f64>) =
            want.iter().map(|choice| (choice.id, choice.weight)).unzip();
        for device in devices {
            let tokens = logits.len() / experts;
            let x = rounded(&logits, &[tokens, experts], dtype, device);
            let (got_ids, got_weights) = router_top_k(&x, None, params).unwrap();
            assert_eq!(got_ids.shape(), [tokens, params.top_k]);
            assert_eq!((got_weights.shape(), got_weights.dtype()), (got_ids.shape(), DType::F32));
            assert_eq!(fetched(&got_ids).as_slice::<u32>().unwrap(), ids);
            let got_weights = values(&got_weights);
            assert_within(&got_weights, &weights, |i| want[i].bound);

            let gates: Vec<f32> = (0..tokens).map(|t| dtype.round(t as f32 * 0.7 - 3.0)).collect();
            let shared = rounded(&gates, &[tokens, 1], dtype, device);
            let (with_ids, with_weights) = router_top_k(&x, Some(&shared), params).unwrap();
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
            check(&logits, experts, RouterParams { top_k, normalize });
        }
    }
}

#[test]
fn ties_go_to_the_lower_id() {
    // Rounding to bf16 makes many more.
    let mut random = Random::new(4);
    let logits: Vec<f32> = (0..6 * 64).map(|_| random.below(5) as f32).collect();
    check(&logits, 64, RouterParams { top_k: 9, normalize: true });
    check(&[1.0; 24], 12, RouterParams { top_k: 7, normalize: false });
    // Zeros of both signs are equal.
    check(&[-0.0, 0.0, -1.0, 0.0, -0.0], 5, RouterParams { top_k: 4, normalize: false });
}

#[test]
fn experts_that_are_switched_off() {
    let off = f32::NEG_INFINITY;
    check(&[off, 2.0, off, 1.0, off, off, 0.5, off], 4, RouterParams { top_k: 2, normalize: true });
    check(&[off, 2.0, off, off], 4, RouterParams { top_k: 3, normalize: false });
}

#[test]
fn refusals_name_the_row() {
    let device = Device::cpu(Some(1)).unwrap();
    let run = |logits: &[f32], experts: usize, top_k: usize| {
        let x = Tensor::new(logits, &[logits.len() / experts, experts], &device).unwrap();
        router_top_k(&x, None, RouterParams { top_k, normalize: true }).unwrap_err().to_string()
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
        router_top_k(&ids, None, RouterParams { top_k: 1, normalize: true }).unwrap_err().to_string(),
        "router_top_k: logits is u32, but f32, f16 or bf16 is wanted"
    );
    let logits = Tensor::zeros(&[2, 3], DType::F32, &device);
    let with = |shared: &Tensor| {
        let params = RouterParams { top_k: 1, normalize: true };
        router_top_k(&logits, Some(shared), params).unwrap_err().to_string()
    };
    assert_eq!(
        with(&Tensor::zeros(&[3, 1], DType::F32, &device)),
        "router_top_k: shared is [3, 1], but logits [2, 3] wants [2, 1]"
    );
    assert_eq!(
        with(&Tensor::zeros(&[2, 1], DType::F16, &device)),
        "router_top_k: shared is f16, but f32 is wanted"
    );
}

#[test]
fn agrees_with_transformers() {
    let file = numcheck::Vectors::open("delta/router_top_k");
    let logits = file.get("logits");
    let device = Device::cpu(None).unwrap();
    let x = Tensor::new(&logits.f32s(), &logits.shape, &device).unwrap();
    for (name, normalize) in [("weights", false), ("normalized", true)] {
        let params = RouterParams { top_k: 5, normalize };
        let (ids, weights) = router_top_k(&x, None, params).unwrap();
        assert_eq!(ids.as_slice::<u32>().unwrap(), file.get("ids").u32s());
        let rows = logits.f32s();
        let exact: Vec<_> =
            rows.chunks_exact(logits.shape[1]).flat_map(|row| reference::router_top_k(row, params)).collect();
        let of_peer: Vec<f64> = file.get(name).f32s().into_iter().map(f64::from).collect();
        // Each is within a bound of the exact value.
        assert_within(&values(&weights), &of_peer, |i| 2.0 * exact[i].bound);
    }
}
