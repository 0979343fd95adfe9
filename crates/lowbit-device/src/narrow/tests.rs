use super::*;
use crate::testing::{device, devices, fetched};

#[test]
fn copies_columns_of_any_type() {
    let (rows, width) = (211, 37);
    for device in devices() {
        let wide: Vec<u32> = (0..rows * width).map(|i| i as u32 * 97).collect();
        let bytes: Vec<u8> = wide.iter().map(|&x| x as u8).collect();
        let x = Tensor::new(&wide, &[rows, width], &device).unwrap();
        let b = Tensor::new(&bytes, &[1, rows, width], &device).unwrap();
        for (start, len) in [(0, 5), (5, 32), (36, 1), (0, 37), (37, 0), (3, 16)] {
            let columns = |i: &usize| (start..start + len).contains(&(i % width));
            let want: Vec<usize> = (0..rows * width).filter(columns).collect();
            let y = narrow(&x, start, len).unwrap();
            assert_eq!(y.shape(), [rows, len]);
            assert_eq!(y.as_slice::<u32>().unwrap(), want.iter().map(|&i| wide[i]).collect::<Vec<_>>());
            let y = narrow(&b, start, len).unwrap();
            assert_eq!(y.shape(), [1, rows, len]);
            assert_eq!(y.as_slice::<u8>().unwrap(), want.iter().map(|&i| bytes[i]).collect::<Vec<_>>());
        }
    }
}

#[test]
fn one_row_is_viewed_where_vectors_begin() {
    one_row_is_viewed_where_vectors_begin_on(&device());
}

pub(super) fn one_row_is_viewed_where_vectors_begin_on(device: &Device) {
    let values: Vec<u32> = (0..42).collect();
    let whole = Tensor::new(&values, &[42], device).unwrap();
    // In words.
    let aligned = alignment(device) / 4;
    for (before, start, len, viewed) in [
        (0, 0, 5, true),
        (0, aligned, 8, true),
        (0, 2 * aligned, 0, true),
        (0, aligned + 1, 8, false),
        (0, aligned / 2, 8, false),
        // The bytes of memory before x count.
        (2, aligned, 8, false),
        (2, aligned - 2, 8, true),
    ] {
        let x = whole.rows(before, 42).unwrap().reshape(&[1, 1, 42 - before]).unwrap();
        let y = narrow(&x, start, len).unwrap();
        assert_eq!(y.shape(), [1, 1, len]);
        assert_eq!(fetched(&y).as_slice::<u32>().unwrap(), &values[before + start..][..len]);
        assert_eq!(y.is_shared(), viewed, "{before} {start} {len}");
    }
    assert!(!narrow(&whole.reshape(&[2, 21]).unwrap(), 0, 4).unwrap().is_shared());
}

#[test]
fn columns_that_are_not_there() {
    let x = Tensor::new(&[0f32; 6], &[2, 3], &device()).unwrap();
    let error = narrow(&x, 2, 2).unwrap_err();
    assert_eq!(error.to_string(), "narrow: x is [2, 3], but columns 2 to 2 + 2 are wanted");
    assert!(narrow(&x, usize::MAX, 2).is_err() && narrow(&x, 4, 0).is_err());
    assert!(narrow(&Tensor::new(&[0f32], &[], &device()).unwrap(), 0, 0).is_err());
}
