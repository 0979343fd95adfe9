use super::*;
use crate::ops::testing::{FLOATS, device, devices, normal};
use lowbit_formats::DType;
use numcheck::{Random, gamma};

/// The formula in f64, by sorting all.
fn reference(logits: &[f32], token: u32, top: usize) -> RowLogprobs {
    let wide: Vec<f64> = logits.iter().map(|&logit| logit.into()).collect();
    let greatest = wide.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let norm = wide.iter().map(|logit| (logit - greatest).exp()).sum::<f64>().ln();
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let logprob = |id: u32| wide[id as usize] - greatest - norm;
    RowLogprobs { token: logprob(token), top: ids[..top].iter().map(|&id| (id, logprob(id))).collect() }
}

/// Asserts that ids are the same, and numbers within `terms` roundings of f32 sums and one of a
/// difference.
fn assert_near(got: &RowLogprobs, want: &RowLogprobs, terms: usize) {
    let ids = |of: &RowLogprobs| of.top.iter().map(|&(id, _)| id).collect::<Vec<_>>();
    assert_eq!(ids(got), ids(want));
    let numbers =
        |of: &RowLogprobs| of.top.iter().map(|&(_, logprob)| logprob).chain([of.token]).collect::<Vec<_>>();
    for (got, want) in numbers(got).into_iter().zip(numbers(want)) {
        let bound = gamma(terms) + 2f64.powi(-24) * (want.abs() + 20.0);
        assert!(got == want || (got - want).abs() <= bound, "{got} for {want}");
    }
}

fn agrees_with_f64_on(device: &Device) {
    let mut random = Random::new(3);
    for (i, count) in [1, 2, 19, 64, 257, 1000, 5003].into_iter().enumerate() {
        for rows in [1, 3] {
            let (logits, values) = normal(&mut random, &[rows, count], FLOATS[i % 3], device);
            let tokens: Vec<u32> = (0..rows).map(|row| (row * 7919 % count) as u32).collect();
            let at = Tensor::new(&tokens, &[rows], device).unwrap();
            for top in [0, 1, 5, 20] {
                let got = top_logprobs(&logits, &at, top).unwrap().wait().unwrap();
                assert_eq!(got.len(), rows);
                for (row, got) in got.iter().enumerate() {
                    let values = &values[row * count..][..count];
                    let want = reference(values, tokens[row], top.min(count));
                    assert_near(got, &want, count + 8);
                }
            }
        }
    }
}

/// Equal logits, both zeros, -inf, and a row without an answer among others.
fn ties_are_in_the_order_of_ids_on(device: &Device) {
    let mut logits = vec![f32::NEG_INFINITY; 2 * 600];
    for (id, logit) in [(3, -0.0), (599, 0.0), (7, 0.0), (300, 1.0), (12, 1.0), (301, 1.0), (40, -2.0)] {
        logits[600 + id] = logit;
    }
    logits[5] = f32::NAN;
    let logits = Tensor::new(&logits, &[2, 600], device).unwrap();
    let tokens = Tensor::new(&[u32::MAX, 3], &[2], device).unwrap();
    let rows = top_logprobs(&logits, &tokens, 9).unwrap().wait().unwrap();
    let ids: Vec<u32> = rows[1].top.iter().map(|&(id, _)| id).collect();
    assert_eq!(ids, [12, 300, 301, 7, 599, 3, 40, 0, 1]);
    assert_eq!(rows[1].top[8].1, f64::NEG_INFINITY);
    assert_eq!(rows[1].token, rows[1].top[5].1);
    assert!(rows[0].token.is_nan());
}

#[test]
fn on_cpus() {
    for device in devices() {
        agrees_with_f64_on(&device);
        ties_are_in_the_order_of_ids_on(&device);
    }
}

#[cfg(feature = "gpu")]
#[test]
fn on_a_gpu() {
    let device = crate::ops::testing::gpu();
    agrees_with_f64_on(&device);
    ties_are_in_the_order_of_ids_on(&device);
}

/// `ln(1/2)`, `ln(1/4)`, by hand.
#[test]
fn by_hand() {
    let logits = [2f32.ln() + 5.0, 5.0, 5.0];
    let row = RowLogprobs::new(&logits, 2, 2);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
    assert!(near(row.token, 0.25f64.ln()) && near(row.top[0].1, 0.5f64.ln()), "{row:?}");
    assert_eq!((row.top[0].0, row.top[1].0), (0, 1));
}

#[test]
fn other_operands_are_refused() {
    let device = device();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let refused = |logits: &Tensor, tokens: &Tensor| top_logprobs(logits, tokens, 1).unwrap_err().to_string();
    let logits = zeros(&[2, 3], DType::F32);
    assert_eq!(
        refused(&logits, &zeros(&[3], DType::U32)),
        "top_logprobs: tokens is [3], but logits [2, 3] wants [2]"
    );
    assert_eq!(
        refused(&zeros(&[2, 0], DType::F32), &zeros(&[2], DType::U32)),
        "top_logprobs: logits is [2, 0], but one row and one logit at least are wanted"
    );
    assert_eq!(refused(&logits, &zeros(&[2], DType::F32)), "top_logprobs: tokens is f32, but u32 is wanted");
    refused(&zeros(&[2, 3], DType::U32), &zeros(&[2], DType::U32));
}
