use crate::ops::quantized_matmul::{quantized_matmul, reference, tests::check};
use crate::ops::testing::{devices, values};
use crate::{Device, QuantizedTensor, Tensor, inputs};
use lowbit_formats::{FloatType, Format};

#[test]
fn sizes_around_every_tile() {
    let devices = devices();
    for m in [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 130, 257] {
        check(&devices, Format::Mxfp8, (m, 27, 544), FloatType::F32);
    }
    for (n, k) in [(1, 32), (15, 64), (16, 256), (17, 288), (32, 512), (33, 96), (49, 1056), (250, 160)] {
        for m in [1, 6, 18] {
            check(&devices, Format::Mxfp8, (m, n, k), FloatType::F32);
        }
    }
}

/// `[n, k]` in mxfp8 of these codes, one after the other, and scales.
fn weight(codes: &[u8], scales: &[u8], k: usize, device: &Device) -> QuantizedTensor {
    let n = codes.len() / k;
    let components = Format::Mxfp8.components(k).unwrap();
    let tensors = [codes, scales].into_iter().zip(&components).map(|(bytes, component)| {
        Tensor::mapped(bytes.to_vec().into(), &[n, component.columns], component.dtype, device).unwrap()
    });
    QuantizedTensor::new(Format::Mxfp8, &[n, k], tensors.collect()).unwrap()
}

/// All codes but NaN, subnormals among them, with x and scales of every magnitude.
#[test]
fn magnitudes_cost_nothing() {
    let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).chain([0, 1]).collect();
    for device in devices() {
        for (x_exponent, scale) in
            [(-140, 200), (-100, 127), (-60, 20), (0, 127), (60, 127), (110, 20), (120, 10)]
        {
            let weight = weight(&codes, &[scale; 8], 64, &device);
            let decoded = reference::decoded(&weight, 4).unwrap();
            let panels = weight.to_panels().unwrap();
            assert!(panels.is_repacked());
            for m in [1, 3] {
                let mut x = inputs::activations(&[m, 64], FloatType::F32, 5, &device).unwrap();
                let power = 2f64.powi(x_exponent);
                x.as_mut_slice::<f32>().unwrap().iter_mut().for_each(|x| *x = (f64::from(*x) * power) as f32);
                let want = reference::matmul(&values(&x), &decoded, 64, FloatType::F32);
                let y = values(&quantized_matmul(&x, &panels).unwrap());
                for (got, want) in y.iter().zip(want) {
                    // Products below the least number that f32 has are rounded to its multiples.
                    let bound = want.bound + 64.0 * 2f64.powi(-149);
                    let error = (f64::from(*got) - want.value).abs();
                    assert!(error <= bound, "M={m} x 2^{x_exponent} scale {scale}: got {got}, {want:?}");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity() {
    for device in devices() {
        let sound = weight(&[0x38; 128], &[127; 4], 64, &device).to_panels().unwrap();
        for (m, bad) in [1, 2, 9].into_iter().flat_map(|m| [(m, f32::NAN), (m, f32::NEG_INFINITY)]) {
            let mut x = inputs::activations(&[m, 64], FloatType::F32, 2, &device).unwrap();
            x.as_mut_slice::<f32>().unwrap()[(m - 1) * 64 + 5] = bad;
            for (i, y) in values(&quantized_matmul(&x, &sound).unwrap()).into_iter().enumerate() {
                assert_eq!(y.is_nan(), i / 2 == m - 1, "M={m} {bad} [{i}]: {y}");
            }
        }
        // A weight with a NaN stays as it is.
        for (at, code) in [(3, 0x7f), (100, 0xff)] {
            let mut codes = [0x38; 128];
            codes[at] = code;
            let weight = weight(&codes, &[127; 4], 64, &device);
            assert!(!weight.to_panels().unwrap().is_repacked());
        }
        assert!(!weight(&[0x38; 32], &[254], 32, &device).to_panels().unwrap().is_repacked());
    }
}
