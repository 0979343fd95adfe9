//! `qdq` on a CPU against the formulas in f64, and its errors. The GPU's tests share the
//! comparisons.

use super::*;
use crate::ops::testing::{device, devices};
use numcheck::Random;

/// Group sizes around a vector and a plane, not only powers of two, and both ends.
pub(super) const SIZES: [(usize, usize, usize); 7] =
    [(5, 3, 2), (3, 2, 3), (2, 3, 20), (4, 2, 32), (3, 1, 100), (2, 2, 257), (1, 2, 1024)];
/// Levels of 1, 3, 4 and 8 bits, and one between.
pub(super) const LEVELS: [usize; 5] = [2, 8, 11, 16, 256];

/// Weights `[rows, groups * size]`: among them a group of one value and one of zeros.
pub(super) fn weights(rows: usize, groups: usize, size: usize) -> Vec<f32> {
    let mut w = Random::new((rows * 31 + size) as u64).normal(rows * groups * size, 0.7);
    w[..size].fill(-1.25);
    let len = w.len();
    w[len - size..].fill(0.0);
    w
}

/// That the grid and the codes are what the formulas want, within what f32 may add.
pub(super) fn assert_init(
    w: &[f32],
    (codes, scales, biases): (&[u8], &[f32], &[f32]),
    size: usize,
    levels: usize,
) {
    for (group, w) in w.chunks_exact(size).enumerate() {
        let (scale, bias, off) = reference::grid(w, levels);
        assert_eq!(f64::from(biases[group]), bias, "bias of group {group}");
        let error = (f64::from(scales[group]) - scale).abs();
        assert!(error <= off, "scale of group {group}: {} for {scale}", scales[group]);
        for (i, (&w, &code)) in w.iter().zip(&codes[group * size..]).enumerate() {
            let steps = reference::distance(w, code, (f64::from(scales[group]), bias));
            assert!(usize::from(code) < levels, "code {code} of {levels}");
            assert!(
                steps <= 0.5 + levels as f64 * numcheck::gamma(4),
                "{i} of group {group}: {steps} steps off"
            );
        }
    }
}

/// One f32 for every group's `(sum, bound)`.
pub(super) fn assert_sums(got: &[f32], codes: Option<&[u8]>, dy: &[f32], size: usize) {
    for (group, dy) in dy.chunks_exact(size).enumerate() {
        let factor = |i: usize| codes.map_or(1.0, |codes| f64::from(codes[group * size + i]));
        let (want, bound) = reference::sum(dy.iter().enumerate().map(|(i, &dy)| (factor(i), dy)));
        assert!((f64::from(got[group]) - want).abs() <= bound, "group {group}: {} for {want}", got[group]);
    }
}

pub(super) fn assert_forward(y: &[f32], (codes, scales, biases): (&[u8], &[f32], &[f32]), size: usize) {
    assert_eq!(y.len(), codes.len());
    for (i, (&y, &code)) in y.iter().zip(codes).enumerate() {
        let (want, bound) = reference::forward(code, scales[i / size], biases[i / size]);
        assert!((f64::from(y) - want).abs() <= bound, "[{i}]: {y} for {want}");
    }
}

#[test]
fn grids_and_codes_are_as_the_formulas_say() {
    for (rows, groups, size) in SIZES {
        let w = weights(rows, groups, size);
        for levels in LEVELS {
            for device in devices() {
                let tensor = Tensor::new(&w, &[rows, groups * size], &device).unwrap();
                let Qdq { codes, scales, biases } = qdq_init(&tensor, size, levels).unwrap();
                assert_eq!((codes.shape(), scales.shape()), (tensor.shape(), &[rows, groups][..]));
                let parts =
                    (codes.as_slice().unwrap(), scales.as_slice().unwrap(), biases.as_slice().unwrap());
                assert_init(&w, parts, size, levels);
            }
        }
    }
}

#[test]
fn forward_and_both_gradients_are_as_the_formulas_say() {
    for (rows, groups, size) in SIZES {
        let (w, dy) = (weights(rows, groups, size), Random::new(9).normal(rows * groups * size, 1.0));
        for device in devices() {
            let shape = [rows, groups * size];
            let qdq = qdq_init(&Tensor::new(&w, &shape, &device).unwrap(), size, 16).unwrap();
            let codes = qdq.codes.as_slice::<u8>().unwrap();
            let parts = (codes, qdq.scales.as_slice().unwrap(), qdq.biases.as_slice().unwrap());
            assert_forward(qdq_forward(&qdq, size).unwrap().as_slice().unwrap(), parts, size);
            let dy_tensor = Tensor::new(&dy, &shape, &device).unwrap();
            let scales = qdq_backward_scales(&qdq.codes, &dy_tensor, size).unwrap();
            assert_sums(scales.as_slice().unwrap(), Some(codes), &dy, size);
            let biases = qdq_backward_biases(&dy_tensor, size).unwrap();
            assert_sums(biases.as_slice().unwrap(), None, &dy, size);
        }
    }
}

/// The gradients are those of the forward pass: the loss `sum of dy * y` is linear in scales and
/// biases.
#[test]
fn gradients_are_the_forward_passs_slopes() {
    let device = device();
    let (size, shape) = (20, [2, 60]);
    let w = Tensor::new(&weights(2, 3, 20), &shape, &device).unwrap();
    let dy = Random::new(4).normal(120, 1.0);
    let qdq = qdq_init(&w, size, 16).unwrap();
    let loss = |qdq: &Qdq| -> f64 {
        let y = qdq_forward(qdq, size).unwrap();
        y.as_slice::<f32>().unwrap().iter().zip(&dy).map(|(&y, &dy)| f64::from(y) * f64::from(dy)).sum()
    };
    let dy_tensor = Tensor::new(&dy, &shape, &device).unwrap();
    let dscales = qdq_backward_scales(&qdq.codes, &dy_tensor, size).unwrap();
    let dbiases = qdq_backward_biases(&dy_tensor, size).unwrap();
    for group in 0..6 {
        for (grads, moved) in [(&dscales, 0), (&dbiases, 1)] {
            let mut other = qdq.clone();
            let values = if moved == 0 { &mut other.scales } else { &mut other.biases };
            values.as_mut_slice::<f32>().unwrap()[group] += 0.5;
            let slope = (loss(&other) - loss(&qdq)) / 0.5;
            let got = f64::from(grads.as_slice::<f32>().unwrap()[group]);
            assert!((got - slope).abs() <= 1e-4 * (1.0 + slope.abs()), "group {group}: {got} for {slope}");
        }
    }
}

#[test]
fn halves_round_away_from_zero_and_nan_spoils_its_group_alone() {
    for device in devices() {
        // 15 levels above 0 for 0 to 15: a scale of 1.
        let w = [0.0, 0.5, 1.5, 2.5, 0.49999997, 15.0, f32::NAN, 1.0, 2.0, 3.0, 4.0, 5.0];
        let qdq = qdq_init(&Tensor::new(&w, &[12], &device).unwrap(), 6, 16).unwrap();
        assert_eq!(qdq.codes.as_slice::<u8>().unwrap()[..6], [0, 1, 2, 3, 0, 15]);
        let y = qdq_forward(&qdq, 6).unwrap();
        for (i, y) in y.as_slice::<f32>().unwrap().iter().enumerate() {
            assert_eq!(y.is_nan(), i >= 6, "[{i}] {y}");
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let w = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let refuse = |w: &Tensor, size, levels| qdq_init(w, size, levels).unwrap_err().to_string();
    assert_eq!(
        refuse(&w(&[2, 10]), 4, 16),
        "qdq_init: w is [2, 10], but [.., K] with K a multiple of the group size, 4, is wanted"
    );
    assert_eq!(refuse(&w(&[4]), 1, 16), "qdq_init: group_size is 1, but 2 to 1024 are wanted");
    assert_eq!(
        refuse(&w(&[4]), 4, 257),
        "qdq_init: levels is 257, but 2 to 256 are wanted, since codes are bytes"
    );
    let half = Tensor::zeros(&[4], DType::F16, &device);
    assert_eq!(refuse(&half, 4, 16), "qdq_init: w is f16, but f32 is wanted");
    let qdq = qdq_init(&w(&[2, 4]), 4, 16).unwrap();
    assert_eq!(
        qdq_backward_scales(&qdq.codes, &w(&[2, 8]), 4).unwrap_err().to_string(),
        "qdq_backward_scales: codes is [2, 4], but dy wants [2, 8]"
    );
    let wrong = Qdq { scales: w(&[1, 2]), ..qdq };
    assert_eq!(
        qdq_forward(&wrong, 4).unwrap_err().to_string(),
        "qdq_forward: scales is [1, 2], but codes [2, 4] wants [2, 1]"
    );
}
