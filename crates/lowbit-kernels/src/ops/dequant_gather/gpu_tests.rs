use super::dequant_gather;
use crate::ops::quantized_matmul::{reference, tests::gpu_formats};
use crate::ops::testing::{FLOATS, device, gpu, rounding, values};
use crate::{Tensor, inputs};
use lowbit_formats::{FloatType, Format};

/// Rows of a `[40, k]` table against the format's own values.
fn check(format: Format, k: usize, dtype: FloatType) {
    let (host, gpu) = (device(), gpu());
    let table = inputs::weight(format, &[40, k], 9, &host).unwrap();
    let decoded = reference::decoded(&table, table.rows()).unwrap();
    let ids = [39u32, 0, 7, 40, 21, 38];
    let ids_tensor = Tensor::new(&ids, &[2, 3], &gpu).unwrap();
    let y = dequant_gather(&table.to_device(&gpu).unwrap(), &ids_tensor, dtype).unwrap();
    assert_eq!((y.shape(), y.dtype()), (&[2, 3, k][..], dtype.dtype()));
    let y = values(&y.to_device(&host).unwrap());
    for (i, &y) in y.iter().enumerate() {
        let id = ids[i / k] as usize;
        if id == 40 {
            assert!(y.is_nan(), "[{i}] {y} for an id that is not there");
            continue;
        }
        let row = &decoded[id * k..][..k];
        // A value is a product and a sum, neither larger than twice the row's largest value.
        let most = row.iter().fold(0.0, |most: f64, &x| most.max(f64::from(x).abs()));
        let bound = numcheck::gamma(4) * 3.0 * most;
        let want = f64::from(row[i % k]);
        let bound = bound + rounding(dtype, want.abs() + bound);
        assert!((f64::from(y) - want).abs() <= bound, "{format} K={k} {dtype:?} [{i}]: {y} for {want}");
    }
}

#[test]
fn every_format_on_a_gpu() {
    for format in gpu_formats() {
        check(format, 768, FloatType::F32);
    }
}

/// As metaltile has it: 3, 4, 5, 6 and 8 bits to f32, f16 and bf16.
#[test]
fn metaltile_widths_to_every_float_on_a_gpu() {
    for bits in [3, 4, 5, 6, 8] {
        for dtype in FLOATS {
            check(Format::affine(bits, 64, FloatType::F16).unwrap(), 192, dtype);
        }
    }
}

#[test]
fn ragged_rows_on_a_gpu() {
    for dtype in FLOATS {
        for k in [1, 5, 31, 33, 36, 100] {
            check(Format::Float(FloatType::BF16), k, dtype);
        }
    }
    let (host, gpu) = (device(), gpu());
    let table = inputs::weight(Format::Q4_0, &[5, 32], 9, &host).unwrap().to_device(&gpu).unwrap();
    let none = Tensor::new::<u32>(&[], &[0], &gpu).unwrap();
    assert_eq!(dequant_gather(&table, &none, FloatType::F32).unwrap().shape(), [0, 32]);
    let message = dequant_gather(&table, &Tensor::new(&[1u32], &[1], &host).unwrap(), FloatType::F32);
    assert_eq!(
        message.unwrap_err().to_string(),
        format!("dequant_gather: ids is on cpu, but x is on {gpu}").replace("ids[", "ids")
    );
}
