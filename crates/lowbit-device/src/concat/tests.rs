use super::concat;
use crate::{Device, Tensor};
use lowbit_formats::DType;

#[test]
fn joins_columns_of_different_widths() {
    let device = Device::cpu(Some(1)).unwrap();
    let a = Tensor::new(&[1u32, 2, 3, 4], &[2, 2], &device).unwrap();
    let b = Tensor::new(&[5u32, 6], &[2, 1], &device).unwrap();
    let none = Tensor::new::<u32>(&[], &[2, 0], &device).unwrap();
    let y = concat(&[&a, &none, &b, &a]).unwrap();
    assert_eq!(y.shape(), [2, 5]);
    assert_eq!(y.as_slice::<u32>().unwrap(), [1, 2, 5, 1, 2, 3, 4, 6, 3, 4]);
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let a = Tensor::zeros(&[2, 2], DType::F32, &device);
    let b = Tensor::zeros(&[3, 2], DType::F32, &device);
    let message = concat(&[&a, &b]).unwrap_err().to_string();
    assert_eq!(message, "concat: x is [3, 2], but the first has leading sizes [2]");
    let c = Tensor::zeros(&[2, 2], DType::U32, &device);
    assert_eq!(concat(&[&a, &c]).unwrap_err().to_string(), "concat: x is u32, but f32 is wanted");
    assert!(concat(&[]).is_err());
}
