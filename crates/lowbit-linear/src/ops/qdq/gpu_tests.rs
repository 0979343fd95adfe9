//! mlx-native's four kernels, each by its own test.

use super::tests::{LEVELS, SIZES, assert_forward, assert_init, assert_sums, weights};
use super::*;
use crate::Tensor;
use crate::ops::testing::{device, gpu};
use lowbit_device::Element;
use numcheck::Random;

fn host<T: Element>(x: &Tensor) -> Vec<T> {
    x.to_device(&device()).unwrap().as_slice::<T>().unwrap().to_vec()
}

fn made(rows: usize, groups: usize, size: usize, levels: usize) -> (Vec<f32>, Qdq) {
    let w = weights(rows, groups, size);
    let tensor = Tensor::new(&w, &[rows, groups * size], &gpu()).unwrap();
    (w, qdq_init(&tensor, size, levels).unwrap())
}

#[test]
fn qdq_init_on_a_gpu() {
    for (rows, groups, size) in SIZES {
        for levels in LEVELS {
            let (w, Qdq { codes, scales, biases }) = made(rows, groups, size, levels);
            assert_eq!((codes.shape(), scales.shape()), (&[rows, groups * size][..], &[rows, groups][..]));
            assert_init(&w, (&host(&codes), &host(&scales), &host(&biases)), size, levels);
        }
    }
}

#[test]
fn qdq_forward_on_a_gpu() {
    for (rows, groups, size) in SIZES {
        let (_, qdq) = made(rows, groups, size, 16);
        let y = qdq_forward(&qdq, size).unwrap();
        let Qdq { codes, scales, biases } = qdq;
        assert_forward(&host(&y), (&host(&codes), &host(&scales), &host(&biases)), size);
    }
}

#[test]
fn qdq_backward_to_scales_on_a_gpu() {
    for (rows, groups, size) in SIZES {
        let (w, qdq) = made(rows, groups, size, 16);
        let dy = Random::new(9).normal(w.len(), 1.0);
        let dy_tensor = Tensor::new(&dy, &[rows, groups * size], &gpu()).unwrap();
        let sums = qdq_backward_scales(&qdq.codes, &dy_tensor, size).unwrap();
        assert_sums(&host(&sums), Some(&host(&qdq.codes)), &dy, size);
    }
}

#[test]
fn qdq_backward_to_biases_on_a_gpu() {
    for (rows, groups, size) in SIZES {
        let dy = Random::new(9).normal(rows * groups * size, 1.0);
        let dy_tensor = Tensor::new(&dy, &[rows, groups * size], &gpu()).unwrap();
        assert_sums(&host(&qdq_backward_biases(&dy_tensor, size).unwrap()), None, &dy, size);
    }
}

#[test]
fn halves_and_nan_on_a_gpu() {
    let w = [0.0, 0.5, 1.5, 2.5, 0.49999997, 15.0, f32::NAN, 1.0, 2.0, 3.0, 4.0, 5.0];
    let qdq = qdq_init(&Tensor::new(&w, &[12], &gpu()).unwrap(), 6, 16).unwrap();
    assert_eq!(host::<u8>(&qdq.codes)[..6], [0, 1, 2, 3, 0, 15]);
    for (i, y) in host::<f32>(&qdq_forward(&qdq, 6).unwrap()).iter().enumerate() {
        assert_eq!(y.is_nan(), i >= 6, "[{i}] {y}");
    }
}

#[test]
fn an_empty_weight_is_empty_on_a_gpu() {
    let w = Tensor::new::<f32>(&[], &[0, 64], &gpu()).unwrap();
    let qdq = qdq_init(&w, 32, 16).unwrap();
    assert_eq!(qdq.scales.shape(), [0, 2]);
    assert_eq!(qdq_forward(&qdq, 32).unwrap().shape(), [0, 64]);
    assert_eq!(qdq_backward_biases(&w, 32).unwrap().shape(), [0, 2]);
}
