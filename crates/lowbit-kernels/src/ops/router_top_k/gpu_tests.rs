use super::*;
use crate::ops::testing::{FLOATS, device, gpu, rounded, values};
use numcheck::{Random, assert_within};

fn check(logits: &[f32], experts: usize, params: RouterParams) {
    let (host, gpu) = (device(), gpu());
    for dtype in FLOATS {
        let logits: Vec<f32> = logits.iter().map(|&x| dtype.round(x)).collect();
        let rows = logits.chunks_exact(experts);
        let want: Vec<_> = rows.clone().flat_map(|row| reference::router_top_k(row, params)).collect();
        let x = rounded(&logits, &[logits.len() / experts, experts], dtype, &host).to_device(&gpu).unwrap();
        let (ids, weights) = router_top_k(&x, params).unwrap();
        let ids = ids.to_device(&host).unwrap();
        let got: Vec<u32> = ids.as_slice().unwrap().to_vec();
        assert_eq!(got, want.iter().map(|choice| choice.id).collect::<Vec<_>>());
        let spread = logits.iter().filter(|x| x.is_finite()).fold(0.0f32, |most, x| most.max(x.abs()));
        // Vulkan lets an exponential of x be 3 + 2 |x| units in the last place off, and a quotient 2.5.
        let exp = (2.0 * (3.0 + 4.0 * f64::from(spread)) + 3.0) * f64::from(f32::EPSILON);
        let wanted: Vec<f64> = want.iter().map(|choice| choice.weight).collect();
        assert_within(&values(&weights.to_device(&host).unwrap()), &wanted, |i| {
            want[i].bound + exp * want[i].weight
        });
    }
}

#[test]
fn agrees_with_the_reference_on_a_gpu() {
    let mut random = Random::new(3);
    for (tokens, experts, top_k) in
        [(1, 1, 1), (3, 5, 5), (7, 16, 2), (41, 60, 4), (30, 512, 10), (2, 255, 8), (0, 8, 2)]
    {
        for (scale, normalize) in [(0.5, true), (4.0, false), (40.0, true)] {
            let logits = random.normal(tokens * experts, scale);
            check(&logits, experts, RouterParams { top_k, normalize });
        }
    }
}

#[test]
fn ties_and_experts_that_are_off_on_a_gpu() {
    let mut random = Random::new(4);
    let logits: Vec<f32> = (0..6 * 64).map(|_| random.below(5) as f32).collect();
    check(&logits, 64, RouterParams { top_k: 9, normalize: true });
    check(&[1.0; 24], 12, RouterParams { top_k: 7, normalize: false });
    check(&[-0.0, 0.0, -1.0, 0.0, -0.0], 5, RouterParams { top_k: 4, normalize: false });
    let off = f32::NEG_INFINITY;
    check(&[off, 2.0, off, 1.0, off, off, 0.5, off], 4, RouterParams { top_k: 2, normalize: true });
    check(&[off, 2.0, off, off], 4, RouterParams { top_k: 3, normalize: false });
}

#[test]
fn rows_without_an_answer_are_nan_on_a_gpu() {
    let rows = [1.0, 2.0, f32::NAN, 0.0, f32::INFINITY, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let x = Tensor::new(&rows, &[4, 2], &gpu()).unwrap();
    let (ids, weights) = router_top_k(&x, RouterParams { top_k: 1, normalize: true }).unwrap();
    assert_eq!(ids.to_device(&device()).unwrap().as_slice::<u32>().unwrap(), [1, 0, 0, 0]);
    let weights = values(&weights.to_device(&device()).unwrap());
    assert_eq!(weights.iter().map(|w| w.is_nan()).collect::<Vec<_>>(), [false, true, true, true]);
}
