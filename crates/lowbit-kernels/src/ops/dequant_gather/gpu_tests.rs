use super::dequant_gather;
use crate::ops::quantized_matmul::{reference, tests::gpu_formats};
use crate::ops::testing::{FLOATS, device, gpu, rounding, values};
use crate::{Device, Tensor, inputs};
use lowbit_formats::{FloatType, Format};

/// Rows of a table of `format` as `dtype`, bit by bit, and one of an id that there is not.
fn check(format: Format, (rows, k): (usize, usize), dtype: FloatType) {
    let (host, gpu): (Device, Device) = (device(), gpu());
    let table = inputs::weight(format, &[rows, k], 9, &host).unwrap();
    let decoded = reference::decoded(&table, rows).unwrap();
    let last = rows as u32 - 1;
    let ids = [last, 0, 2, 2, rows as u32, 1, u32::MAX, last];
    let y =
        dequant_gather(&table.to_device(&gpu).unwrap(), &Tensor::new(&ids, &[2, 4], &gpu).unwrap(), dtype)
            .unwrap();
    assert_eq!((y.shape(), y.dtype()), (&[2, 4, k][..], dtype.dtype()));
    for (&id, y) in ids.iter().zip(values(&y).chunks(k)) {
        let name = format!("{format} {dtype:?} row {id}");
        match decoded.chunks(k).nth(id as usize) {
            Some(row) => {
                let want: Vec<f32> = row.iter().map(|&x| dtype.round(x)).collect();
                if matches!(format, Format::Affine { scales: FloatType::F32, .. }) {
                    // Where product and sum are rounded together, the product's own rounding is missing. It is at most
                    // as large as two values of its group.
                    let greatest = row.iter().fold(0f32, |a, b| a.max(b.abs()));
                    let bound = f64::from(greatest) * 2.0 * f64::from(f32::EPSILON);
                    let wide: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
                    numcheck::assert_within(y, &wide, |i| bound + rounding(dtype, wide[i].abs() + bound));
                    continue;
                }
                numcheck::assert_bits(&name, y, &want);
            }
            None => assert!(y.iter().all(|y| y.is_nan()), "{name}: {y:?}"),
        }
    }
}

#[test]
fn every_format() {
    for (i, format) in gpu_formats().into_iter().enumerate() {
        check(format, (40, 768), FLOATS[i % 3]);
    }
}

#[test]
fn affine_at_3_4_5_6_and_8_bits_in_every_type() {
    for bits in [3, 4, 5, 6, 8] {
        for (dtype, group_size) in FLOATS.into_iter().zip([64, 32, 128]) {
            for scales in [FloatType::F16, FloatType::BF16] {
                check(Format::affine(bits, group_size, scales).unwrap(), (11, 256), dtype);
            }
        }
    }
}

#[test]
fn ragged_rows_and_empty_sizes() {
    for dtype in FLOATS {
        for k in [1, 31, 37, 100] {
            check(Format::Float(FLOATS[k % 3]), (5, k), dtype);
        }
    }
    check(Format::Nvfp4, (5, 48), FloatType::BF16);
    let gpu = gpu();
    let table = |rows, k| {
        inputs::weight(Format::Float(FloatType::F32), &[rows, k], 9, &device())
            .unwrap()
            .to_device(&gpu)
            .unwrap()
    };
    let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &gpu).unwrap();
    assert_eq!(dequant_gather(&table(5, 64), &ids(&[]), FloatType::F32).unwrap().shape(), [0, 64]);
    assert_eq!(dequant_gather(&table(5, 0), &ids(&[1]), FloatType::F32).unwrap().shape(), [1, 0]);
    let nan = dequant_gather(&table(0, 32), &ids(&[0]), FloatType::F32).unwrap();
    assert!(values(&nan).iter().all(|y| y.is_nan()));
}
