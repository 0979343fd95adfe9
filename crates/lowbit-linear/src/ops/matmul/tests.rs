use super::matmul;
use crate::{
    KernelError, Tensor, inputs,
    ops::{
        quantized_matmul::{reference, tests::assert_expected},
        testing::{FLOATS, devices, values},
    },
};
use lowbit_formats::FloatType;

#[test]
fn every_pair_of_types_agrees_with_the_reference() {
    for device in devices() {
        for (weight_type, x_type) in FLOATS.iter().flat_map(|&w| FLOATS.map(|x| (w, x))) {
            for (m, n, k) in [(1, 37, 100), (6, 5, 33), (50, 14, 515)] {
                let weight = inputs::activations(&[n, k], weight_type, 3, &device).unwrap();
                let x = inputs::activations(&[m, k], x_type, 4, &device).unwrap();
                let y = matmul(&x, &weight).unwrap();
                assert_eq!((y.shape(), y.dtype()), (&[m, n][..], x_type.dtype()));
                let want = reference::matmul(&values(&x), &values(&weight), k, x_type);
                assert_expected(&format!("M={m} N={n} K={k} {x_type:?} {weight_type:?}"), &y, &want);
            }
        }
    }
}

#[test]
fn a_weight_of_integers_is_refused() {
    let device = &devices()[0];
    let x = inputs::activations(&[2, 4], FloatType::F32, 1, device).unwrap();
    let weight = Tensor::new(&[0i32; 12], &[3, 4], device).unwrap();
    assert!(matches!(matmul(&x, &weight), Err(KernelError::Value { operand: "weight", .. })));
}
