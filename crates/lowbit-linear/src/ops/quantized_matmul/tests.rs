use super::{
    policy, quantized_matmul, quantized_matmul_each,
    reference::{self, Rounded},
};
use crate::{
    Device, KernelError, QuantizedTensor, Tensor,
    bench::Expected,
    inputs,
    ops::testing::{FLOATS, devices, values},
};
use lowbit_formats::{Component, FloatType, Format};
use numcheck::{Vectors, assert_bits};
use proptest::prelude::*;

/// Every format; affine with scales of every type.
pub(crate) fn formats() -> Vec<Format> {
    let all = Format::all().flat_map(|format| FLOATS.map(|float| format.with_float(float)));
    let mut formats: Vec<Format> = Vec::new();
    for format in all {
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    formats
}

#[track_caller]
pub(crate) fn assert_expected(what: &str, got: &Tensor, want: &[Expected]) {
    let got = values(got);
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want.value).abs();
        // Not `error > bound`: a NaN must fail.
        assert!(error <= want.bound, "{what} [{i}]: got {got}, {want:?}, error {error:e}");
    }
}

pub(super) fn check(devices: &[Device], format: Format, (m, n, k): (usize, usize, usize), dtype: FloatType) {
    // One for all that round alike: devices differ in nothing else that the reference reads.
    let mut wanted: Vec<(Rounded, Vec<Expected>)> = Vec::new();
    for device in devices {
        let weight = inputs::weight(format, &[n, k], 7, device).unwrap();
        let x = inputs::activations(&[m, k], dtype, 8, device).unwrap();
        for repacked in layouts(&weight) {
            let y = quantized_matmul(&x, &repacked).unwrap();
            assert_eq!((y.shape(), y.dtype()), (&[m, n][..], dtype.dtype()));
            let rounded = Rounded::on_cpu(&repacked, m);
            let known = wanted.iter().position(|(like, _)| *like == rounded).unwrap_or_else(|| {
                let decoded = reference::decoded(&weight, n).unwrap();
                wanted.push((rounded, reference::matmul_bounded(&values(&x), &decoded, k, dtype, rounded)));
                wanted.len() - 1
            });
            assert_expected(
                &format!("{format} M={m} N={n} K={k} {dtype:?} {rounded:?} on {device:?}"),
                &y,
                &wanted[known].1,
            );
        }
    }
}

/// Formats whose x is rounded alike and otherwise, panels or not, other numbers of rows.
#[test]
fn each_of_several_weights_is_multiplied_as_alone() {
    let q8 = Format::affine(8, 64, FloatType::F16).unwrap();
    let formats = [Format::Q4_K, Format::Q6_K, Format::Q4_K, q8, Format::Q4_0, Format::Mxfp8];
    for device in devices() {
        for (m, dtype) in [(1, FloatType::F32), (5, FloatType::BF16), (67, FloatType::F32)] {
            let x = inputs::activations(&[m, 512], dtype, 3, &device).unwrap();
            let mut weights = vec![];
            for (i, format) in formats.into_iter().enumerate() {
                let weight = inputs::weight(format, &[19 + 7 * i, 512], i as u64, &device).unwrap();
                weights.push(if i == 2 { weight } else { weight.to_panels().unwrap() });
            }
            let all = quantized_matmul_each(&x, &weights.iter().collect::<Vec<_>>()).unwrap();
            assert_eq!(all.len(), weights.len());
            for (weight, y) in weights.iter().zip(all) {
                let want = quantized_matmul(&x, weight).unwrap();
                assert_eq!((y.shape(), y.dtype()), (want.shape(), want.dtype()));
                assert_bits(&format!("{} M={m} on {device:?}", weight.format()), &values(&y), &values(&want));
            }
        }
        let x = inputs::activations(&[2, 64], FloatType::F32, 3, &device).unwrap();
        assert!(quantized_matmul_each(&x, &[]).unwrap().is_empty());
        let other = inputs::weight(Format::Q8_0, &[4, 32], 1, &device).unwrap();
        let fits = inputs::weight(Format::Q8_0, &[4, 64], 1, &device).unwrap();
        let error = quantized_matmul_each(&x, &[&fits, &other]).unwrap_err().to_string();
        assert!(error.contains("[2, 64]") && error.contains("[4, 32]"), "{error}");
    }
}

/// A weight as its file has it and, if products in integers take it, in panels.
pub(crate) fn layouts(weight: &QuantizedTensor) -> Vec<QuantizedTensor> {
    let panels = weight.to_panels().unwrap();
    let floats = matches!(weight.format(), Format::Float(_));
    assert_eq!(panels.is_repacked(), !floats, "{}", weight.format());
    [weight.clone()].into_iter().chain((!floats).then_some(panels)).collect()
}

#[test]
fn every_format_on_every_instruction_set() {
    let devices = devices();
    for format in formats() {
        for m in [1, 3, 17] {
            check(&devices, format, (m, 29, 768), FloatType::F32);
        }
    }
}

/// In panels, whatever the number of rows; of weights as their files have them, in twos and threes,
/// which is how a model's routers are multiplied.
#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    for device in devices() {
        let Device::Cpu(cpu) = &device else { unreachable!("a CPU was asked for") };
        let counts: Vec<usize> = (1..=20).chain([31, 67]).collect();
        let counts: Vec<usize> = counts.into_iter().filter(|&m| !policy::in_tiles(cpu.isa(), m)).collect();
        let most = counts[counts.len() - 1];
        for format in formats() {
            let k = 512 + format.block();
            let x = inputs::activations(&[most, k], FloatType::F32, 5, &device).unwrap();
            for weight in layouts(&inputs::weight(format, &[41, k], 6, &device).unwrap()) {
                let mut known: Vec<Option<Vec<u32>>> = vec![None; most];
                let mut compare = |first: usize, m: usize| {
                    let y = values(&quantized_matmul(&x.rows(first, first + m).unwrap(), &weight).unwrap());
                    for (row, y) in (first..).zip(y.chunks_exact(41)) {
                        let y: Vec<u32> = y.iter().map(|y| y.to_bits()).collect();
                        let place = format!("{format}, row {row} of {m} from {first} on, on {device:?}");
                        let known = known[row].get_or_insert_with(|| y.clone());
                        assert!(*known == y, "{place}: {:?} is {:?} elsewhere", &y[..4], &known[..4]);
                    }
                };
                if weight.is_repacked() {
                    (0..most).for_each(|row| compare(row, 1));
                    counts.iter().for_each(|&m| compare(0, m));
                } else {
                    for (first, m) in [(0, 2), (2, 2), (1, 2), (0, 3), (1, 3)] {
                        compare(first, m);
                    }
                }
            }
        }
    }
}

/// A peer's weight, its values as the peer decodes them, `[n, k]`, and its name.
fn peers_weights(device: &Device) -> Vec<(String, QuantizedTensor, Vec<f32>)> {
    let load = |file: &str, format: Format, [weight, scales, decoded]: [&str; 3]| {
        let vectors = Vectors::open(&format!("formats/{file}"));
        let want = vectors.get(&format!("{decoded}decoded"));
        let (n, k) = (want.shape[0], want.shape[1]);
        let component = |c: &Component| {
            let prefix = if c.name == "weight" { weight } else { scales };
            let bytes = vectors.get(&format!("{prefix}{}", c.name)).bytes;
            Tensor::mapped(bytes.into(), &[n, c.columns], c.dtype, device).unwrap()
        };
        let components = format.components(k).unwrap().iter().map(component).collect();
        (format.to_string(), QuantizedTensor::new(format, &[n, k], components).unwrap(), want.f32s())
    };
    let mut weights = Vec::new();
    for format in Format::all() {
        match format {
            // mxfp8's random bytes hold a NaN in every row, and formats that are only read have
            // random bytes alone, among whose scales are infinities. No peer has small floats with
            // a float per group in one tensor.
            Format::Float(_) | Format::Mxfp8 | Format::Fp8 { .. } | Format::Fp4 => {}
            _ if !format.encodes() => {}
            Format::Affine { bits, group_size, .. } => {
                let weight = format!("random.{bits}.{group_size}.");
                let scales = format!("{weight}f32.");
                weights.push(load("affine", format.with_float(FloatType::F32), [&weight, &scales, &scales]));
            }
            Format::Mxfp4 | Format::Nvfp4 => {
                weights.push(load(&format.to_string(), format, ["random.", "random.", "random.f32."]));
            }
            _ => weights.push(load(&format.to_string(), format, [""; 3])),
        }
    }
    weights
}

#[test]
fn agrees_with_products_of_the_peers_values() {
    for device in devices() {
        for (name, weight, decoded) in peers_weights(&device) {
            let (n, k) = (weight.n(), weight.k());
            let panels = weight.to_panels().unwrap();
            for (m, weight) in [1, 6, 18].into_iter().flat_map(|m| [(m, &weight), (m, &panels)]) {
                let x = inputs::activations(&[m, k], FloatType::F32, 8, &device).unwrap();
                let y = values(&quantized_matmul(&x, weight).unwrap());
                let rounded = Rounded::on_cpu(weight, m);
                let want = reference::matmul_bounded(&values(&x), &decoded, k, FloatType::F32, rounded);
                // Random bytes hold scales whose products f32 cannot: those rows say nothing.
                let sound = |row: &[f32]| row.iter().all(|value| value.abs() < 1e30);
                let rows: Vec<bool> = decoded.chunks_exact(k).map(sound).collect();
                assert!(rows.iter().filter(|&&sound| sound).count() * 2 > n, "{name}: {rows:?}");
                for want in want.iter().filter(|want| rows[want.index % n]) {
                    let error = (f64::from(y[want.index]) - want.value).abs();
                    assert!(
                        error <= want.bound,
                        "{name} M={m}: got {}, {want:?}, error {error:e}",
                        y[want.index]
                    );
                }
            }
        }
    }
}

#[test]
fn sizes_around_every_tile() {
    let q4 = Format::affine(4, 32, FloatType::BF16).unwrap();
    let devices = devices();
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 130, 257] {
        check(&devices, q4, (m, 27, 544), FloatType::F32);
    }
    // So many that the last of the pieces they are cut into has a few.
    for m in [8961, 8962, 8963, 8965] {
        check(&devices, q4, (m, 2, 32), FloatType::F32);
    }
    for n in [1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 17, 23, 24, 25, 33, 49, 250] {
        for m in [1, 6, 18] {
            check(&devices, q4, (m, n, 96), FloatType::F32);
        }
    }
    for k in [32, 64, 96, 256, 288, 480, 512, 544, 1024, 1056] {
        for m in [1, 6, 18] {
            check(&devices, q4, (m, 14, k), FloatType::F32);
        }
    }
    for k in [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 511, 513] {
        for m in [1, 6, 18] {
            check(&devices, Format::Float(FloatType::F32), (m, 14, k), FloatType::F32);
        }
    }
}

#[test]
fn every_activation_type() {
    let devices = devices();
    for dtype in [FloatType::F16, FloatType::BF16] {
        for m in [1, 5, 20] {
            check(&devices, Format::Q4_0, (m, 19, 160), dtype);
        }
    }
}

#[test]
fn work_is_cut_for_two_threads() {
    let devices = [Device::cpu(Some(2)).unwrap()];
    for m in [1, 9, 40, 300] {
        check(&devices, Format::Q4_0, (m, 500, 1024), FloatType::F32);
    }
}

#[test]
fn one_weight_batch_serves_several_of_x() {
    for device in devices() {
        let (batches, r, m, n, k) = (3, 2, 5, 11, 64);
        let weight = inputs::weight(Format::Q4_0, &[batches, n, k], 1, &device).unwrap();
        let x = inputs::activations(&[batches * r, m, k], FloatType::F32, 2, &device).unwrap();
        let decoded = reference::decoded(&weight, weight.rows()).unwrap();
        for weight in layouts(&weight) {
            let y = quantized_matmul(&x, &weight).unwrap();
            assert_eq!(y.shape(), [batches * r, m, n]);
            let x = x.as_slice::<f32>().unwrap();
            let of_batch = |i: usize| {
                let (x, decoded) = (&x[i * m * k..][..m * k], &decoded[i / r * n * k..][..n * k]);
                reference::matmul_bounded(x, decoded, k, FloatType::F32, Rounded::on_cpu(&weight, r * m))
            };
            assert_expected("batches", &y, &(0..batches * r).flat_map(of_batch).collect::<Vec<_>>());
        }
    }
}

#[test]
fn leading_dimensions_stay() {
    let device = Device::cpu(Some(1)).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[7, 32], 1, &device).unwrap();
    for shape in [&[32][..], &[2, 32], &[2, 3, 32], &[2, 1, 3, 32]] {
        let x = inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
        let y = quantized_matmul(&x, &weight).unwrap();
        assert_eq!(y.shape()[..shape.len() - 1], shape[..shape.len() - 1]);
        assert_eq!(y.dim(-1), 7);
    }
}

#[test]
fn empty_sizes_give_empty_or_zero() {
    for device in devices() {
        let weights = |shape: &[usize]| layouts(&inputs::weight(Format::Q4_0, shape, 1, &device).unwrap());
        let product = |x: &[usize], weight: &QuantizedTensor| {
            quantized_matmul(&inputs::activations(x, FloatType::F32, 2, &device).unwrap(), weight).unwrap()
        };
        for weight in weights(&[5, 32]) {
            assert_eq!(product(&[0, 32], &weight).shape(), [0, 5]);
        }
        for weight in weights(&[0, 32]) {
            assert_eq!(product(&[5, 32], &weight).shape(), [5, 0]);
        }
        for (m, weight) in
            [1, 3, 20].into_iter().flat_map(|m| weights(&[5, 0]).into_iter().map(move |w| (m, w)))
        {
            assert_eq!(product(&[m, 0], &weight).as_slice::<f32>().unwrap(), vec![0.0; m * 5]);
        }
        for none in weights(&[0, 5, 32]) {
            assert_eq!(product(&[0, 4, 32], &none).shape(), [0, 4, 5]);
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_rows() {
    for device in devices() {
        let weight = inputs::weight(Format::Q4_0, &[13, 64], 1, &device).unwrap();
        for (m, bad) in [2, 20, 50].into_iter().flat_map(|m| [(m, f32::NAN), (m, f32::INFINITY)]) {
            let mut x = inputs::activations(&[m, 64], FloatType::F32, 2, &device).unwrap();
            x.as_mut_slice::<f32>().unwrap()[64 + 5] = bad;
            for weight in layouts(&weight) {
                let y = quantized_matmul(&x, &weight).unwrap();
                for (i, y) in y.as_slice::<f32>().unwrap().iter().enumerate() {
                    assert_eq!(!y.is_finite(), i / 13 == 1, "[{i}] {y}");
                }
            }
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[7, 32], 1, &device).unwrap();
    let stack = inputs::weight(Format::Q4_0, &[2, 7, 32], 1, &device).unwrap();
    let refuse = |shape: &[usize], weight: &QuantizedTensor| {
        let x = inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
        quantized_matmul(&x, weight).unwrap_err().to_string()
    };
    assert_eq!(refuse(&[3, 64], &weight), "quantized_matmul: x is [3, 64], but weight is [7, 32]");
    assert_eq!(refuse(&[], &weight), "quantized_matmul: x is [], but weight is [7, 32]");
    assert_eq!(refuse(&[3, 5, 32], &stack), "quantized_matmul: x is [3, 5, 32], but weight is [2, 7, 32]");
    assert_eq!(refuse(&[2, 32], &stack), "quantized_matmul: x is [2, 32], but weight is [2, 7, 32]");
    let ids = Tensor::new(&[0u32; 32], &[1, 32], &device).unwrap();
    assert!(matches!(quantized_matmul(&ids, &weight), Err(KernelError::Value { operand: "x", .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_shape(m in 1usize..70, n in 1usize..70, blocks in 1usize..40, format in prop::sample::select(formats())) {
        let device = Device::cpu(Some(2)).unwrap();
        check(&[device], format, (m, n, blocks * format.block()), FloatType::F32);
    }
}

/// Formats of every kind of layout that weights have on a GPU: of those that differ in a codebook's
/// entries or in a group's size alone, some.
#[cfg(feature = "gpu")]
pub(crate) fn gpu_formats() -> Vec<Format> {
    use Format::{IQ1_M, IQ1_S, IQ2_S, IQ2_XXS, IQ3_S, Q1_0, TQ1_0};
    let scales = [FloatType::F32, FloatType::F16].map(|float| Format::affine(4, 64, float).unwrap());
    let alike = [IQ1_S, IQ1_M, IQ2_XXS, IQ2_S, IQ3_S, TQ1_0, Q1_0];
    Format::all().filter(|format| !alike.contains(format)).chain(scales).collect()
}
