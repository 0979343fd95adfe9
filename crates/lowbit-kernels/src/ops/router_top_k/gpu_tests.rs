use super::tests::{check_groups_of_softmax, check_on, check_sigmoids, check_sums_of_nothing};
use super::*;
use crate::ops::testing::{fetched, gpu, values};
use numcheck::Random;

#[test]
fn agrees_with_the_reference() {
    let mut random = Random::new(3);
    for (tokens, experts, top_k) in
        [(1, 1, 1), (3, 5, 5), (7, 16, 2), (41, 60, 4), (130, 512, 10), (2, 255, 8), (3, 512, 32)]
    {
        for (scale, normalize) in [(0.5, true), (4.0, false), (40.0, true)] {
            let logits = random.normal(tokens * experts, scale);
            check_on(&[gpu()], &logits, experts, RouterParams::softmax(top_k, normalize));
        }
    }
}

#[test]
fn sigmoids_agree_with_the_reference() {
    check_sigmoids(&[gpu()]);
    check_sums_of_nothing(&[gpu()]);
}

#[test]
fn groups_of_softmax_agree_with_the_reference() {
    check_groups_of_softmax(&[gpu()]);
}

#[test]
fn ties_go_to_the_lower_id() {
    let mut random = Random::new(4);
    let logits: Vec<f32> = (0..6 * 64).map(|_| random.below(5) as f32).collect();
    check_on(&[gpu()], &logits, 64, RouterParams::softmax(9, true));
    check_on(&[gpu()], &[1.0; 24], 12, RouterParams::softmax(7, false));
    check_on(&[gpu()], &[-0.0, 0.0, -1.0, 0.0, -0.0], 5, RouterParams::softmax(4, false));
    let off = f32::NEG_INFINITY;
    check_on(&[gpu()], &[off, 2.0, off, 1.0, off, off, 0.5, off], 4, RouterParams::softmax(2, true));
    check_on(&[gpu()], &[off, 2.0, off, off], 4, RouterParams::softmax(3, false));
}

#[test]
fn tokens_without_a_right_answer() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let logits = [1.0, 2.0, 0.0, nan, inf, 1.0, -inf, -inf, 3.0, -inf];
    let x = Tensor::new(&logits, &[5, 2], &gpu()).unwrap();
    for normalize in [false, true] {
        let (ids, weights) = router_top_k(&x, None, None, RouterParams::softmax(2, normalize)).unwrap();
        assert_eq!(fetched(&ids).as_slice::<u32>().unwrap(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        let nans: Vec<bool> = values(&weights).iter().map(|weight| weight.is_nan()).collect();
        assert_eq!(nans, [false, false, true, true, true, true, true, true, false, false]);
    }
    // With sigmoids alike, and with groups: also of the group that would not be chosen.
    let logits = [1.0, 2.0, 0.0, nan, inf, 1.0, 3.0, 2.0, -inf, -inf, -inf, -inf, 4.0, -inf, 5.0, 1.0];
    let x = Tensor::new(&logits, &[4, 4], &gpu()).unwrap();
    let sigmoids = RouterParams::sigmoid(2, true, 1e-20);
    for (n_group, topk_group) in [(1, 1), (2, 1)] {
        let params = RouterParams { n_group, topk_group, ..sigmoids };
        let (ids, weights) = router_top_k(&x, None, None, params).unwrap();
        assert_eq!(fetched(&ids).as_slice::<u32>().unwrap()[6..], [2, if n_group == 1 { 0 } else { 3 }]);
        let nans: Vec<bool> = values(&weights).iter().map(|weight| weight.is_nan()).collect();
        assert_eq!(nans, [true, true, true, true, true, true, false, false]);
    }
    let none = Tensor::zeros(&[0, 4], lowbit_formats::DType::F32, &gpu());
    assert!(router_top_k(&none, None, None, RouterParams::softmax(2, true)).unwrap().0.is_empty());
}
