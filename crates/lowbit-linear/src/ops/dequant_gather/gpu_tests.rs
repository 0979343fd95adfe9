use super::dequant_gather;
use crate::ops::quantized_matmul::{reference, tests::gpu_formats};
use crate::ops::testing::{FLOATS, device, gpu, rounding, values};
use crate::{Device, QuantizedTensor, Tensor, inputs};
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
                    // If product and sum are rounded together, the product's own rounding is
                    // missing. It is at most as large as two values of its group.
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

/// Those that make normal numbers of all codes: devices may take others for 0.
#[test]
fn every_scale_that_is_a_power_of_two() {
    let (host, gpu) = (device(), gpu());
    let k = 32 * 240;
    // The component that has the scales, and the bytes from one to the next.
    for (format, component, stride) in [(Format::Mxfp4, 1, 1), (Format::Mxfp8, 1, 1), (Format::MXFP4, 0, 17)]
    {
        let weight = inputs::weight(format, &[1, k], 5, &host).unwrap();
        let mut bytes = weight.parts()[component].to_vec();
        bytes.iter_mut().step_by(stride).zip(16..=255).for_each(|(scale, code)| *scale = code);
        let mut components = weight.components().to_vec();
        let like = &components[component];
        components[component] = Tensor::mapped(bytes.into(), like.shape(), like.dtype(), &host).unwrap();
        let table = QuantizedTensor::new(format, &[1, k], components).unwrap();
        let want = reference::decoded(&table, 1).unwrap();
        let ids = Tensor::new(&[0u32], &[1], &gpu).unwrap();
        let y = dequant_gather(&table.to_device(&gpu).unwrap(), &ids, FloatType::F32).unwrap();
        for (i, (&y, &want)) in values(&y).iter().zip(&want).enumerate() {
            let same = y == want || y.is_nan() && want.is_nan();
            assert!(same, "{format} scale {}: {y:e}, {want:e}", 16 + i / 32);
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
