use super::tests::agrees_with_the_sum_in_f64_on;
use super::*;
use crate::ops::testing::gpu;

#[test]
fn agrees_with_the_sum_in_f64() {
    agrees_with_the_sum_in_f64_on(&[gpu()]);
}

#[test]
fn nothing() {
    let device = gpu();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    assert_eq!(combine_experts(&zeros(&[0, 2, 7]), &zeros(&[0, 2])).unwrap().shape(), [0, 7]);
    assert_eq!(
        crate::ops::testing::values(&combine_experts(&zeros(&[2, 0, 3]), &zeros(&[2, 0])).unwrap()),
        [0.0; 6]
    );
}
