use super::reference::{self, Sums};
use super::*;
use crate::ops::quantized_matmul::reference::decoded;
use crate::ops::quantized_matmul::tests::formats;
use crate::ops::testing::{assert_close, device, devices, fetched, host, rounding, values};
use crate::{Device, inputs};
use lowbit_formats::{BlockScales, Codes, E4M3, E8M0, FloatType, Format, Minifloat, Scales, Unpacked};
use numcheck::{assert_bits, gamma};

#[track_caller]
fn assert_sums(got: &Tensor, shape: &[usize], dtype: FloatType, want: &Sums, terms: usize) {
    assert_close(got, shape, dtype, &want.values, |i| gamma(terms) * want.magnitudes[i]);
}

/// A weight of random values, on any device.
fn weight_on(device: &Device, format: Format, shape: &[usize], seed: u64) -> QuantizedTensor {
    let weight = inputs::weight(format, shape, seed, &host(device)).unwrap();
    if let Device::Gpu(_) = device { weight.to_device(device).unwrap() } else { weight }
}

fn f16(bits: u16) -> f64 {
    half::f16::from_bits(bits).to_f64()
}

/// The factor and the bias of each group of a block, as its scheme says.
fn effective(scales: Scales, block: &BlockScales, group: usize) -> (f64, f64) {
    let (scale, min) = (f16(block.scale), f16(block.min));
    let (sub_scale, sub_minimum) = (f64::from(block.sub_scales[group]), f64::from(block.sub_minima[group]));
    match scales {
        Scales::Group { biased, .. } => (scale, if biased { min } else { 0.0 }),
        Scales::E8M0 { .. } => (E8M0::decode(block.scale as u8).into(), 0.0),
        Scales::Super { .. } => (scale * sub_scale, 0.0),
        Scales::SuperWithMinima { .. } => (scale * sub_scale, -min * sub_minimum),
        Scales::E4M3 => (E4M3::decode(block.sub_scales[group] as u8).into(), 0.0),
        Scales::One => unreachable!("no block has such scales"),
    }
}

/// The scale and bias of each group of a weight, row by row, read from its bytes.
fn scales_and_biases(weight: &QuantizedTensor) -> Vec<(f64, f64)> {
    let (format, parts, scheme) = (weight.format(), weight.parts(), weight.format().scheme());
    let groups = weight.rows() * weight.k() / scheme.group_size().unwrap();
    let Some(unpack) = format.unpack() else {
        let scale = |i: usize| match scheme.scales {
            Scales::Group { float, .. } => float.get(parts[1], i),
            Scales::E8M0 { .. } => E8M0::decode(parts[1][i]),
            _ => E4M3::decode(parts[1][i]),
        };
        let bias = |i: usize| match scheme.scales {
            Scales::Group { float, biased: true, .. } => float.get(parts[2], i),
            _ => 0.0,
        };
        return (0..groups).map(|i| (scale(i).into(), bias(i).into())).collect();
    };
    let blocks = weight.rows() * weight.k() / format.block();
    let mut all = vec![];
    for bytes in parts[0].chunks_exact(parts[0].len() / blocks) {
        let mut block = Unpacked::default();
        unpack(bytes, &mut block);
        all.extend((0..groups / blocks).map(|group| effective(scheme.scales, &block.scales, group)));
    }
    all
}

/// The numbers that the codes stand for, found from their decoded values: multiples of an eighth
/// but in e4m3, whose scales divide exactly. None in groups whose scale is 0.
fn code_values(weight: &QuantizedTensor, decoded: &[f32]) -> Vec<Option<f64>> {
    let scheme = weight.format().scheme();
    let scales = scales_and_biases(weight);
    let value = |(i, &w): (usize, &f32)| {
        let (scale, bias) = scales[i / scheme.group_size().unwrap()];
        let code = (f64::from(w) - bias) / scale;
        let rounded = (8.0 * code).round() / 8.0;
        (scale != 0.0).then_some(if scheme.codes == Codes::E4M3 { code } else { rounded })
    };
    decoded.iter().enumerate().map(value).collect()
}

fn check(devices: &[Device], format: Format, (m, n, k): (usize, usize, usize), dtype: FloatType) {
    let host = device();
    let weight = inputs::weight(format, &[n, k], 7, &host).unwrap();
    let [x, dy] =
        [(k, 8), (n, 9)].map(|(width, seed)| inputs::activations(&[m, width], dtype, seed, &host).unwrap());
    let (xs, dys, decoded) = (values(&x), values(&dy), decoded(&weight, n).unwrap());
    let want_dx = reference::backward_x(&dys, &decoded, k);
    let want_dweight = reference::backward_weight(&xs, &dys, (n, k));
    let scaled = format.scheme().group_size().map(|group| {
        let codes = code_values(&weight, &decoded);
        let known: Vec<bool> = codes.chunks_exact(group).map(|codes| codes[0].is_some()).collect();
        assert!(known.iter().filter(|&&known| known).count() * 10 >= known.len() * 9, "{format}");
        let codes: Vec<f64> = codes.into_iter().map(|code| code.unwrap_or(0.0)).collect();
        (group, known, reference::backward_scales(&want_dweight, &codes, group))
    });
    for device in devices {
        let [x, dy] = [&x, &dy].map(|x| x.to_device(device).unwrap());
        let weight = weight_on(device, format, &[n, k], 7);
        let dx = quantized_matmul_backward_x(&dy, &weight).unwrap();
        // A GPU decodes the weight to dy's type.
        let decoding = |magnitude| if let Device::Gpu(_) = device { rounding(dtype, magnitude) } else { 0.0 };
        assert_close(&dx, &[m, k], dtype, &want_dx.values, |i| {
            gamma(n) * want_dx.magnitudes[i] + decoding(want_dx.magnitudes[i])
        });
        let dweight = quantized_matmul_backward_weight(&x, &dy, &[n, k]).unwrap();
        assert_sums(&dweight, &[n, k], FloatType::F32, &want_dweight, m);
        let got = quantized_matmul_backward_scales(&x, &weight, &dy);
        let Some((group, known, [want_dscales, want_dbiases])) = &scaled else {
            let error = got.unwrap_err().to_string();
            assert_eq!(error, format!("{format} has no codes, but codes of 8 bits or fewer are wanted"));
            continue;
        };
        let ScalesGradient { dscales, dbiases } = got.unwrap();
        let mut dscales = fetched(&dscales);
        let shape = [n, k / group];
        // The oracle does not know the codes of a group whose scale is 0.
        for (dscale, _) in
            dscales.as_mut_slice::<f32>().unwrap().iter_mut().zip(known).filter(|(_, known)| !**known)
        {
            assert!(dscale.is_finite());
            *dscale = 0.0;
        }
        assert_sums(&dscales, &shape, FloatType::F32, want_dscales, m + group + 1);
        assert_eq!(dbiases.is_some(), format.scheme().biased());
        if let Some(dbiases) = dbiases {
            assert_sums(&dbiases, &shape, FloatType::F32, want_dbiases, m + group);
        }
    }
}

#[test]
fn every_format_agrees_with_f64() {
    let devices = devices();
    for format in formats() {
        check(&devices, format, (5, 29, 768), FloatType::F32);
    }
}

#[test]
fn sizes_around_every_tile() {
    sizes_around_every_tile_on(&devices());
}

fn sizes_around_every_tile_on(devices: &[Device]) {
    let q4 = Format::affine(4, 32, FloatType::BF16).unwrap();
    for (m, n, k) in [(1, 1, 32), (3, 63, 64), (130, 64, 96), (67, 65, 544), (17, 130, 512)] {
        check(devices, q4, (m, n, k), FloatType::F32);
    }
    for (m, n, k) in [(1, 1, 1), (9, 65, 17), (65, 9, 33), (2, 16, 513)] {
        check(devices, Format::Float(FloatType::F32), (m, n, k), FloatType::F32);
    }
    check(devices, Format::Q6_K, (9, 13, 512), FloatType::F16);
    check(devices, Format::Nvfp4, (9, 13, 48), FloatType::BF16);
}

/// `sum of dy * y` in f64, of a weight as it decodes.
fn loss(x: &[f32], dy: &[f32], weight: &QuantizedTensor) -> f64 {
    let (n, k) = (weight.n(), weight.k());
    let y =
        crate::ops::quantized_matmul::reference::matmul(x, &decoded(weight, n).unwrap(), k, FloatType::F32);
    y.iter().zip(dy).map(|(y, &dy)| y.value * f64::from(dy)).sum()
}

/// The formulas are the derivatives of the forward product's reference, whose weight is decoded
/// from changed bytes. It is linear in each operand, so that a difference is the derivative,
/// whatever the step; steps are exact in f32.
#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let (m, n, k, host) = (3, 2, 64, device());
    let format = Format::affine(4, 32, FloatType::F32).unwrap();
    // Multiples of 2^-8, so that decoding rounds nothing.
    let exact = |values: &[f32]| values.iter().map(|x| (x * 256.0).round() / 256.0).collect::<Vec<_>>();
    let mut weight = inputs::weight(format, &[n, k], 1, &host).unwrap();
    let rounded = |weight: &QuantizedTensor, component: usize, change: Option<usize>| {
        let mut at = 0;
        let parts = weight.map_components(vec![n, k], |x| {
            let mut x = x.clone();
            if at > 0 {
                let mut values = exact(x.as_slice()?);
                if let (true, Some(i)) = (at == component, change) {
                    values[i] += 0.5;
                }
                x = Tensor::new(&values, x.shape(), &host)?;
            }
            at += 1;
            Ok(x)
        });
        parts.unwrap()
    };
    weight = rounded(&weight, 0, None);
    let x = exact(&values(&inputs::activations(&[m, k], FloatType::F32, 2, &host).unwrap()));
    let dy = exact(&values(&inputs::activations(&[m, n], FloatType::F32, 3, &host).unwrap()));
    let start = loss(&x, &dy, &weight);
    let decoded = decoded(&weight, n).unwrap();
    let is = |difference: f64, gradient: f64, magnitude: f64| {
        // f64's own rounding of the two losses.
        assert!((difference / 0.5 - gradient).abs() < 1e-12 * (1.0 + magnitude), "{difference} {gradient}");
        assert!(gradient != 0.0);
    };
    let dx = reference::backward_x(&dy, &decoded, k);
    for i in 0..m * k {
        let mut x = x.clone();
        x[i] += 0.5;
        is(loss(&x, &dy, &weight) - start, dx.values[i], dx.magnitudes[i]);
    }
    let dweight = reference::backward_weight(&x, &dy, (n, k));
    let codes: Vec<f64> = code_values(&weight, &decoded).into_iter().map(Option::unwrap).collect();
    for (component, want) in (1..).zip(reference::backward_scales(&dweight, &codes, 32)) {
        for i in 0..n * k / 32 {
            let changed = rounded(&weight, component, Some(i));
            is(loss(&x, &dy, &changed) - start, want.values[i], want.magnitudes[i]);
        }
    }
}

#[test]
fn one_weight_batch_serves_several_of_x() {
    one_weight_batch_serves_several_of_x_on(&devices());
}

fn one_weight_batch_serves_several_of_x_on(devices: &[Device]) {
    let (batches, r, m, n, k) = (3, 2, 5, 11, 64);
    for device in devices {
        let weight = weight_on(device, Format::Q4_1, &[batches, n, k], 1);
        let x = inputs::activations(&[batches * r, m, k], FloatType::F32, 2, device).unwrap();
        let dy = inputs::activations(&[batches * r, m, n], FloatType::F32, 3, device).unwrap();
        let dx = quantized_matmul_backward_x(&dy, &weight).unwrap();
        let ScalesGradient { dscales, dbiases } = quantized_matmul_backward_scales(&x, &weight, &dy).unwrap();
        let dweight = quantized_matmul_backward_weight(&x, &dy, weight.shape()).unwrap();
        assert_eq!(
            (dx.shape(), dscales.shape(), dweight.shape()),
            (x.shape(), &[3, 11, 2][..], weight.shape())
        );
        for b in 0..batches {
            let alone = weight.slice(b, b + 1).unwrap().reshape(&[n, k]).unwrap();
            let [x, dy, dx] = [&x, &dy, &dx].map(|x| x.rows(b * r, (b + 1) * r).unwrap());
            assert_bits("dx", &values(&dx), &values(&quantized_matmul_backward_x(&dy, &alone).unwrap()));
            let want = quantized_matmul_backward_weight(&x, &dy, &[n, k]).unwrap();
            assert_bits("dweight", &values(&dweight.rows(b, b + 1).unwrap()), &values(&want));
            let want = quantized_matmul_backward_scales(&x, &alone, &dy).unwrap();
            assert_bits("dscales", &values(&dscales.rows(b, b + 1).unwrap()), &values(&want.dscales));
            let got = dbiases.as_ref().unwrap().rows(b, b + 1).unwrap();
            assert_bits("dbiases", &values(&got), &values(&want.dbiases.unwrap()));
        }
    }
}

#[test]
fn the_same_for_every_number_of_threads() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        let weight = inputs::weight(Format::Q4_K, &[150, 768], 1, &device).unwrap();
        let x = inputs::activations(&[141, 768], FloatType::F32, 2, &device).unwrap();
        let dy = inputs::activations(&[141, 150], FloatType::F32, 3, &device).unwrap();
        let scales = quantized_matmul_backward_scales(&x, &weight, &dy).unwrap();
        [
            quantized_matmul_backward_x(&dy, &weight).unwrap(),
            quantized_matmul_backward_weight(&x, &dy, &[150, 768]).unwrap(),
            scales.dscales,
            scales.dbiases.unwrap(),
        ]
        .map(|x| values(&x))
    };
    let one = of(1);
    for threads in [2, 3, 5] {
        for (got, want) in of(threads).iter().zip(&one) {
            assert_bits("threads", got, want);
        }
    }
}

#[test]
fn empty_sizes_give_empty_or_zero() {
    empty_sizes_give_empty_or_zero_on(&device());
}

fn empty_sizes_give_empty_or_zero_on(device: &Device) {
    let float = |shape: &[usize]| inputs::activations(shape, FloatType::F32, 2, device).unwrap();
    for (m, n, k) in [(0, 5, 32), (5, 0, 32), (5, 3, 0)] {
        let weight = weight_on(device, Format::Q4_0, &[n, k], 1);
        let (x, dy) = (float(&[m, k]), float(&[m, n]));
        let dx = quantized_matmul_backward_x(&dy, &weight).unwrap();
        assert_eq!((dx.shape(), values(&dx)), (&[m, k][..], vec![0.0; m * k]));
        let dweight = quantized_matmul_backward_weight(&x, &dy, &[n, k]).unwrap();
        assert_eq!((dweight.shape(), values(&dweight)), (&[n, k][..], vec![0.0; n * k]));
        let dscales = quantized_matmul_backward_scales(&x, &weight, &dy).unwrap().dscales;
        assert_eq!((dscales.shape(), values(&dscales)), (&[n, k / 32][..], vec![0.0; n * k / 32]));
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let float = |shape: &[usize]| inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[7, 32], 1, &device).unwrap();
    let message = |result: Result<Tensor, KernelError>| result.unwrap_err().to_string();
    let dscales = |x: &Tensor, weight: &QuantizedTensor, dy: &Tensor| {
        quantized_matmul_backward_scales(x, weight, dy).map(|gradient| gradient.dscales)
    };
    assert_eq!(
        message(quantized_matmul_backward_x(&float(&[3, 32]), &weight)),
        "quantized_matmul_backward_x: dy is [3, 32], but weight is [7, 32]"
    );
    assert_eq!(
        message(quantized_matmul_backward_x(&float(&[3, 7]), &weight.to_panels().unwrap())),
        "quantized_matmul_backward_x does not run on a repacked weight"
    );
    assert_eq!(
        message(dscales(&float(&[3, 32]), &weight, &float(&[4, 7]))),
        "quantized_matmul_backward_scales: dy is [4, 7], but x [3, 32] with weight [7, 32] wants [3, 7]"
    );
    assert_eq!(
        message(quantized_matmul_backward_weight(&float(&[3, 32]), &float(&[3, 7]), &[7, 33])),
        "quantized_matmul_backward_weight: x is [3, 32], but weight is [7, 33]"
    );
    assert_eq!(
        message(quantized_matmul_backward_weight(&float(&[3, 32]), &float(&[3, 7]), &[7])),
        "quantized_matmul_backward_weight: shape is [7], but [N, K] or [B, N, K] is wanted"
    );
    let ids = Tensor::new(&[0u32; 7], &[1, 7], &device).unwrap();
    assert!(quantized_matmul_backward_x(&ids, &weight).is_err());
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::quantized_matmul::tests::gpu_formats;
    use crate::ops::testing::gpu;

    #[test]
    fn every_format_agrees_with_f64() {
        for format in gpu_formats() {
            check(&[gpu()], format, (5, 29, 768), FloatType::F32);
        }
    }

    #[test]
    fn sizes_around_every_tile() {
        sizes_around_every_tile_on(&[gpu()]);
        let wide = Format::affine(3, 128, FloatType::BF16).unwrap();
        for dtype in crate::ops::testing::FLOATS {
            check(&[gpu()], wide, (130, 96, 256), dtype);
        }
    }

    #[test]
    fn one_weight_batch_serves_several_of_x() {
        one_weight_batch_serves_several_of_x_on(&[gpu()]);
    }

    #[test]
    fn empty_sizes_give_empty_or_zero() {
        empty_sizes_give_empty_or_zero_on(&gpu());
    }

    #[test]
    fn sums_of_gradients() {
        let device = gpu();
        let new = |values: &[f32]| WeightGradient::Values(Tensor::new(values, &[1, 3], &device).unwrap());
        let mut sum = new(&[1.0, 2.0, -3.0]);
        sum.add(&new(&[0.5, 0.25, 3.0])).unwrap();
        assert_eq!(values(sum.tensors()[0]), [1.5, 2.25, 0.0]);
    }
}
