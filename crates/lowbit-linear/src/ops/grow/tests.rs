use super::grow;
use crate::{Device, Tensor};
use lowbit_formats::DType;

#[test]
fn keeps_what_was_there_and_zeroes_the_rest() {
    let device = Device::cpu(Some(1)).unwrap();
    let x = Tensor::new(&[1f32, 2., 3., 4., 5., 6.], &[2, 1, 3], &device).unwrap();
    let y = grow(&x, 2).unwrap();
    assert_eq!(y.shape(), [2, 2, 3]);
    assert_eq!(y.as_slice::<f32>().unwrap(), [1., 2., 3., 0., 0., 0., 4., 5., 6., 0., 0., 0.]);
    let empty = Tensor::zeros(&[2, 0, 3], DType::F32, &device);
    assert!(grow(&empty, 4).unwrap().as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
}

#[test]
fn never_loses_anything() {
    let device = Device::cpu(Some(1)).unwrap();
    let x = Tensor::zeros(&[2, 5, 3], DType::F32, &device);
    assert_eq!(grow(&x, 4).unwrap_err().to_string(), "grow: x is [2, 5, 3], but the new capacity is 4");
    assert!(grow(&x.reshape(&[10, 3]).unwrap(), 20).is_err());
}
