//! Compares with mlx-lm's penalty and filters.

use super::*;
use crate::ops::testing::device;
use numcheck::{Vectors, gamma};

/// Draws of a case.
const DRAWS: u64 = 2000;

#[test]
fn filters_and_penalty() {
    let vectors = Vectors::open("ops/sample");
    let (logits, history) = (vectors.get("logits").f32s(), vectors.get("history").u32s());
    let cases = vectors.names().iter().filter(|name| name.ends_with(".params")).count();
    assert_eq!((vectors.names().len(), cases), (2 + 2 * 8, 8), "a case is not tested");
    for case in 0..cases {
        let params = vectors.get(&format!("{case}.params")).f32s();
        let &[top_k, top_p, min_p, repetition_penalty] = params.as_slice() else { panic!("{params:?}") };
        let top_p = if top_p == 0.0 { 1.0 } else { top_p };
        let params = SampleParams {
            temperature: 1.0,
            top_k: top_k as usize,
            top_p,
            min_p,
            repetition_penalty,
            seed: 1,
            ..SampleParams::default()
        };
        let want = vectors.get(&format!("{case}.logprobs")).f32s();
        let kept = |id: u32| want[id as usize] > f32::NEG_INFINITY;
        let ours = reference::distribution(&logits, &history, &params);
        assert_eq!(ours.len(), want.iter().filter(|p| p.is_finite()).count(), "{params:?}");
        // Their log-sum-exp and difference are f32 numbers below 32, so each errs by 32 roundings
        // of 1, and the probability by that relatively.
        let total: f64 = want.iter().map(|&p| f64::from(p).exp()).sum();
        for (id, p) in ours {
            let want = f64::from(want[id as usize]).exp() / total;
            assert!((p - want).abs() <= 2.0 * gamma(64) * want, "{params:?}: {id} {p} {want}");
        }
        let x = Tensor::new(&logits, &[logits.len()], &device()).unwrap();
        for step in 0..DRAWS {
            let id = sample(&x, &history, &params, step).unwrap();
            assert!(kept(id), "{params:?}: {id}");
        }
    }
}
