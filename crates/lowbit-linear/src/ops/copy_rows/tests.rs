use super::copy_rows;
use crate::{Device, Tensor};
use lowbit_formats::DType;

#[test]
fn copies_one_row_and_leaves_the_others() {
    let device = Device::cpu(Some(1)).unwrap();
    let src = Tensor::new(&[1f32, 2., 3., 4., 5., 6.], &[3, 2, 1], &device).unwrap();
    let mut dst = Tensor::new(&[7f32, 8., 9., 10.], &[2, 2, 1], &device).unwrap();
    let before = dst.clone();
    copy_rows(&src, 2, &mut dst, 0).unwrap();
    assert_eq!(dst.as_slice::<f32>().unwrap(), [5., 6., 9., 10.]);
    assert_eq!(before.as_slice::<f32>().unwrap(), [7., 8., 9., 10.], "a clone keeps its values");
    // The source is the destination's clone.
    let all = dst.clone();
    copy_rows(&all, 0, &mut dst, 1).unwrap();
    assert_eq!(dst.as_slice::<f32>().unwrap(), [5., 6., 5., 6.]);
    let mut none = Tensor::zeros(&[2, 0], DType::U32, &device);
    copy_rows(&none.clone(), 1, &mut none, 0).unwrap();
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let src = zeros(&[3, 2, 1], DType::F32);
    for (shape, dtype, src_row, dst_row, message) in [
        (&[2, 2, 1][..], DType::F32, 3, 0, "src_row is 3, but the tensor has 3 rows"),
        (&[2, 2, 1], DType::F32, 0, 2, "dst_row is 2, but the tensor has 2 rows"),
        (&[2, 1, 2], DType::F32, 0, 0, "dst is [2, 1, 2], but src [3, 2, 1] wants [2, 2, 1]"),
        (&[2, 2, 1], DType::U32, 0, 0, "dst is u32, but f32 is wanted"),
        (&[], DType::F32, 0, 0, "dst is [], but [rows, ..] is wanted"),
    ] {
        let error = copy_rows(&src, src_row, &mut zeros(shape, dtype), dst_row).unwrap_err();
        assert_eq!(error.to_string(), format!("copy_rows: {message}"));
    }
}
