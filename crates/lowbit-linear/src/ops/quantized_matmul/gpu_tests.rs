//! The product on a GPU against the reference.

use super::gpu::cmma_tile::{self, CmmaTile};
use super::gpu::{Experts, plan_of};
use super::plan::{Kernel, Plan, rounds_weight};
use super::problem::{Operands, Problem, XOperands};
use super::reference::{self, Rounded};
use super::tests::{assert_expected, gpu_formats};
use super::{quantized_matmul, quantized_matmul_glu, quantized_matmul_parts, quantized_matmul_to};
use crate::ops::glu::Gate;
use crate::ops::testing::{FLOATS, gpu, values};
use crate::{Device, QuantizedTensor, Tensor, inputs};
use lowbit_formats::{FloatType, Format};

fn host() -> Device {
    Device::cpu(Some(2)).unwrap()
}

/// `x [.., k]` times `weight [.., n, k]`, `r` batches of x to one of the weight.
fn check(format: Format, (b, r, m, n, k): (usize, usize, usize, usize, usize), dtype: FloatType) {
    let (host, gpu) = (host(), gpu());
    let weight = inputs::weight(format, &[b, n, k], 7, &host).unwrap();
    let x = inputs::activations(&[b * r, m, k], dtype, 8, &host).unwrap();
    let (on_gpu, weight_on_gpu) = (x.to_device(&gpu).unwrap(), weight.to_device(&gpu).unwrap());
    let y = quantized_matmul(&on_gpu, &weight_on_gpu).unwrap();
    assert_eq!((y.shape(), y.dtype()), (&[b * r, m, n][..], dtype.dtype()));
    let plan = planned(&on_gpu, &weight_on_gpu, None, &[b * r, m, n]);
    let (rounded, y, x) =
        (Rounded::weight_if(rounds_weight(&plan), dtype), y.to_device(&host).unwrap(), values(&x));
    let weight = reference::decoded(&weight, weight.rows()).unwrap();
    let want: Vec<_> = (0..b * r)
        .flat_map(|i| {
            let (x, weight) = (&x[i * m * k..][..m * k], &weight[i / r * n * k..][..n * k]);
            reference::matmul_bounded(x, weight, k, dtype, rounded)
        })
        .collect();
    assert_expected(&format!("{format} B={b} r={r} M={m} N={n} K={k} {dtype:?}"), &y, &want);
}

/// The plan for a product of a tensor on a GPU whose result has this shape and x's type.
pub(crate) fn planned(
    x: &Tensor,
    weight: &QuantizedTensor,
    experts: Option<Experts<'_>>,
    shape: &[usize],
) -> Plan {
    let Device::Gpu(gpu) = x.device() else { unreachable!() };
    let dtype = FloatType::from_dtype(x.dtype()).unwrap();
    plan_of(
        gpu,
        &XOperands::new(&x.into()).unwrap(),
        weight,
        experts.map(|experts| experts.routing),
        shape,
        dtype,
    )
    .1
}

/// True if products of many rows round weights to x's type.
#[cfg(feature = "cuda")]
fn has_tensor_cores(gpu: &Device) -> bool {
    let Device::Gpu(gpu) = gpu else { unreachable!() };
    gpu.caps().tensor_cores
}

#[test]
fn every_format() {
    for format in gpu_formats() {
        for dtype in FLOATS {
            check(format, (1, 1, 1, 29, 768), dtype);
        }
        check(format, (1, 1, 5, 29, 512), FloatType::F16);
    }
}

/// Those that differ from others in a codebook's entries or in a group's size.
#[test]
fn formats_that_are_like_others() {
    let all = gpu_formats();
    for format in Format::all().filter(|format| !all.contains(format)) {
        for (m, dtype) in [(1, FloatType::F16), (3, FloatType::F32), (40, FloatType::BF16)] {
            check(format, (1, 1, m, 40, 512), dtype);
        }
    }
}

#[test]
fn sizes_around_every_tile() {
    for format in [Format::Q4_0, Format::Q8_0, Format::affine(3, 32, FloatType::BF16).unwrap()] {
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31] {
            check(format, (1, 1, 1, n, 96), FloatType::F32);
        }
        for k in [32, 64, 224, 256, 288, 1024, 1056, 4128, 8224] {
            check(format, (1, 1, 1, 11, k), FloatType::F32);
        }
        for k in [32, 96, 224, 1056] {
            check(format, (1, 1, 2, 11, k), FloatType::F16);
        }
    }
}

/// More cubes than a device launches along a dimension, as a vocabulary takes them.
#[test]
fn weights_of_more_rows_than_there_are_cubes() {
    check(Format::Q8_0, (1, 1, 1, 270_001, 32), FloatType::F32);
    check(Format::Q8_0, (1, 1, 2, 140_001, 32), FloatType::F32);
    check(Format::Q8_0, (2, 2, 5, 131_073, 32), FloatType::F32);
}

#[test]
fn rows_that_end_within_a_run() {
    for dtype in FLOATS {
        for k in [1, 2, 7, 31, 33, 65, 513] {
            for float in FLOATS {
                check(Format::Float(float), (1, 1, 3, 14, k), dtype);
            }
        }
        check(Format::Nvfp4, (1, 1, 3, 14, 48), dtype);
    }
}

/// Not rounded to x's type in between.
#[test]
fn f32_results_of_half_precision() {
    let (host, gpu) = (host(), gpu());
    for format in [Format::Q4_0, Format::Q6_K, Format::affine(4, 64, FloatType::BF16).unwrap()] {
        let (n, k) = (22, 512);
        let weight = inputs::weight(format, &[n, k], 7, &host).unwrap();
        let decoded = reference::decoded(&weight, n).unwrap();
        let weight = weight.to_device(&gpu).unwrap();
        for (m, dtype) in [
            (1, FloatType::F16),
            (1, FloatType::BF16),
            (4, FloatType::F16),
            (11, FloatType::BF16),
            (40, FloatType::F16),
            (40, FloatType::BF16),
        ] {
            let x = inputs::activations(&[m, k], dtype, 8, &host).unwrap();
            let on_gpu = x.to_device(&gpu).unwrap();
            let Device::Gpu(queue) = &gpu else { unreachable!() };
            let of_x = XOperands::new(&(&on_gpu).into()).unwrap();
            let (_, plan) = plan_of(queue, &of_x, &weight, None, &[m, n], FloatType::F32);
            let rounded = Rounded::weight_if(rounds_weight(&plan), dtype);
            let y = quantized_matmul_to(&on_gpu, &weight, FloatType::F32).unwrap();
            let want = reference::matmul_bounded(&values(&x), &decoded, k, FloatType::F32, rounded);
            assert_expected(&format!("{format} M={m} {dtype:?}"), &y.to_device(&host).unwrap(), &want);
        }
    }
}

/// An ancestor's checks of its mat-vecs for three of GGML's formats.
#[test]
fn q4_0_q8_0_and_q6_k_times_one_row() {
    for format in [Format::Q4_0, Format::Q8_0, Format::Q6_K] {
        for (n, k) in [(1, 256), (7, 256), (64, 512), (33, 4096)] {
            check(format, (1, 1, 1, n, k), FloatType::F32);
        }
    }
}

#[test]
fn rows_of_x_and_batches() {
    for format in [Format::Q3_K, Format::Q4_K, Format::Q6_K] {
        for m in [2, 3, 8, 17] {
            check(format, (1, 1, m, 13, 512), FloatType::F16);
        }
        check(format, (3, 2, 5, 11, 256), FloatType::BF16);
    }
}

/// Exact products on tensor cores, where there are any: rows of x and of the weight below, at and
/// above each tile, and as many steps, in groups of every size.
#[test]
fn several_rows_on_both_sides_of_every_tile() {
    let affine = |bits, group_size| Format::affine(bits, group_size, FloatType::BF16).unwrap();
    let formats =
        [affine(4, 32), affine(4, 64), affine(4, 128), affine(2, 64), affine(3, 128), affine(6, 128)];
    for format in formats.into_iter().chain([Format::Q4_0, Format::Q4_1, Format::Q8_0]) {
        for k in [128, 256, 640, 4096, 4480] {
            check(format, (1, 1, 7, 35, k), FloatType::BF16);
        }
        for n in [1, 2, 15, 16, 17, 63, 66, 130] {
            check(format, (1, 1, 9, n, 384), FloatType::F16);
        }
    }
    for format in [affine(4, 64), Format::Q4_0, Format::Q4_K, Format::Q8_0] {
        for m in [6, 7, 8, 9, 13, 15, 16, 17, 23, 24, 25, 31, 32] {
            check(format, (1, 1, m, 38, 768), FloatType::F16);
            check(format, (1, 1, m, 21, 2304), FloatType::BF16);
        }
        for dtype in [FloatType::F16, FloatType::BF16] {
            check(format, (3, 1, 6, 11, 256), dtype);
            check(format, (2, 3, 5, 26, 512), dtype);
        }
    }
}

/// In a step a row's bits are the same whatever rows are beside it, and however many; parts of its
/// columns are those of the whole.
#[test]
#[cfg(feature = "cuda")]
fn rows_of_a_step_do_not_depend_on_each_other() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    if !queue.caps().tensor_cores || !queue.caps().overlaps {
        return;
    }
    let affine = |bits, group_size| Format::affine(bits, group_size, FloatType::F16).unwrap();
    let formats = [affine(4, 64), affine(4, 128), affine(4, 32), affine(2, 64), affine(8, 64)];
    for format in formats.into_iter().chain([Format::Q4_0, Format::Q4_1, Format::Q4_K, Format::Q8_0]) {
        for (n, k) in [(96, 1024), (2200, 4096), (48, 5120), (4300, 2304)] {
            let weight = inputs::weight(format, &[n, k], 7, &host).unwrap().to_device(&gpu).unwrap();
            let rows = if n < 1000 { 200 } else { 64 };
            let x = inputs::activations(&[rows, k], FloatType::F16, 8, &host).unwrap();
            let x = x.to_device(&gpu).unwrap();
            let plan = planned(&x, &weight, None, &[rows, n]);
            let whole = quantized_matmul(&x, &weight).unwrap().to_device(&host).unwrap();
            // Rows of some formats are no whole vectors.
            if !matches!(plan.kernel, Kernel::StreamRows(_)) {
                assert!(k == 2304 || format == Format::Q4_K, "{format} K={k}: {}", plan.explain());
                continue;
            }
            for (first, last) in [(0, 2), (1, 5), (3, 12), (5, 22), (9, 40), (31, rows)] {
                let some = x.rows(first, last).unwrap();
                let y = quantized_matmul(&some, &weight).unwrap().to_device(&host).unwrap();
                let want = whole.rows(first, last).unwrap();
                assert_eq!(values(&y), values(&want), "{format} N={n} K={k} rows {first}..{last}");
                let widths = [16, 32 + n % 16, n - 48 - n % 16];
                let parts = quantized_matmul_parts(&some, &weight, &widths).unwrap();
                let mut start = 0;
                for (part, width) in parts.iter().zip(widths) {
                    let want = crate::ops::narrow(&y, start, width).unwrap();
                    let part = part.to_device(&host).unwrap();
                    assert_eq!(
                        (part.shape(), values(&part)),
                        (want.shape(), values(&want)),
                        "{format} N={n}"
                    );
                    start += width;
                }
            }
        }
    }
}

/// The glu of both halves of a product is that of the halves as tensors, but for the sigmoid.
#[test]
fn the_glu_of_halves() {
    let (host, gpu) = (host(), gpu());
    for (m, n, dtype) in [(3, 56, FloatType::F16), (12, 3000, FloatType::BF16), (27, 1000, FloatType::F16)] {
        let format = Format::affine(4, 64, FloatType::BF16).unwrap();
        let weight = inputs::weight(format, &[2 * n, 1024], 7, &host).unwrap().to_device(&gpu).unwrap();
        let x = inputs::activations(&[m, 1024], dtype, 8, &host).unwrap().to_device(&gpu).unwrap();
        for by in Gate::ALL {
            let halves = quantized_matmul_parts(&x, &weight, &[n; 2]).unwrap();
            let want =
                values(&crate::ops::glu(&halves[1], &halves[0], by).unwrap().to_device(&host).unwrap());
            let y = quantized_matmul_glu(&x, &weight, by).unwrap();
            assert_eq!((y.shape(), y.dtype()), (&[m, n][..], dtype.dtype()));
            for (i, (got, want)) in values(&y.to_device(&host).unwrap()).iter().zip(want).enumerate() {
                let bound =
                    2.0 * inputs::rounding(dtype, f64::from(want)) + f64::from(want).abs() * 2f64.powi(-16);
                assert!(f64::from(got - want).abs() <= bound, "{by:?} {m} {n} [{i}]: {got}, {want}");
            }
        }
    }
}

/// As many cubes as there are processors, and planes that take all of K.
#[test]
#[cfg(feature = "cuda")]
fn several_rows_of_a_large_weight() {
    if !has_tensor_cores(&gpu()) {
        return;
    }
    for (m, n) in [(8, 9000), (19, 35000)] {
        check(Format::affine(4, 64, FloatType::BF16).unwrap(), (1, 1, m, n, 320), FloatType::BF16);
    }
}

/// Rows that end within a stage, and groups of tiles that some processors have one more of; then
/// more of them than wait to be added up together.
#[test]
#[cfg(feature = "cuda")]
fn one_row_of_a_large_weight() {
    if !has_tensor_cores(&gpu()) {
        return;
    }
    for format in gpu_formats() {
        check(format, (1, 1, 1, 2200, 5120), FloatType::F16);
        check(format, (1, 1, 1, 1589, 4096), FloatType::BF16);
    }
    let affine = Format::affine(4, 64, FloatType::BF16).unwrap();
    for (n, k) in [(26000, 256), (13001, 512), (6400, 1280), (4300, 2304), (2113, 14336), (17000, 4096)] {
        check(affine, (1, 1, 1, n, k), FloatType::F16);
    }
}

#[test]
fn many_rows_in_every_format() {
    for format in gpu_formats() {
        check(format, (1, 1, 37, 21, 256), FloatType::F32);
    }
}

/// e4m3 has a code for NaN, of either sign.
#[test]
fn a_code_that_is_no_number_gives_nan_in_its_row_alone() {
    let (host, gpu) = (host(), gpu());
    let (n, k) = (2200, 256);
    let weight = inputs::weight(Format::Mxfp8, &[n, k], 7, &host).unwrap();
    let mut components = weight.components().to_vec();
    let mut codes = weight.parts()[0].to_vec();
    (codes[3 * k + 70], codes[2100 * k + 255]) = (0x7f, 0xff);
    components[0] =
        Tensor::mapped(codes.into(), components[0].shape(), components[0].dtype(), &host).unwrap();
    let weight = QuantizedTensor::new(Format::Mxfp8, &[n, k], components).unwrap().to_device(&gpu).unwrap();
    for (m, dtype) in [1, 3, 8, 37].into_iter().flat_map(|m| FLOATS.map(|dtype| (m, dtype))) {
        let x = inputs::activations(&[m, k], dtype, 8, &gpu).unwrap();
        let y = values(&quantized_matmul(&x, &weight).unwrap().to_device(&host).unwrap());
        for (i, y) in y.iter().enumerate() {
            assert_eq!(y.is_nan(), [3, 2100].contains(&(i % n)), "M={m} {dtype:?} row {}: {y}", i % n);
        }
    }
}

#[test]
fn other_scales_for_the_same_codes() {
    let (host, gpu) = (host(), gpu());
    for (bits, group, k) in [(4, 64, 128), (3, 32, 96), (8, 64, 192)] {
        let format = Format::affine(bits, group, FloatType::BF16).unwrap();
        let [a, b] = [1, 2].map(|seed| inputs::weight(format, &[9, k], seed, &host).unwrap());
        let scales: Vec<Vec<u8>> = b.parts()[1..].iter().map(|part| part.to_vec()).collect();
        let want = a.with_scales(&scales).unwrap().to_device(&gpu).unwrap();
        let got = a.to_device(&gpu).unwrap().with_scales(&scales).unwrap();
        let x = inputs::activations(&[3, k], FloatType::F32, 3, &gpu).unwrap();
        let [want, got] = [want, got]
            .map(|weight| values(&quantized_matmul(&x, &weight).unwrap().to_device(&host).unwrap()));
        numcheck::assert_bits("y", &got, &want);
    }
}

/// Sizes that tensor cores take, where there are any.
#[test]
fn many_rows_in_whole_blocks() {
    for format in gpu_formats() {
        check(format, (1, 1, 35, 38, 512), FloatType::F16);
    }
    for dtype in [FloatType::F16, FloatType::BF16] {
        for (m, n) in [(33, 2), (64, 126), (65, 128), (200, 130), (257, 258)] {
            check(Format::Q4_0, (1, 1, m, n, 128), dtype);
        }
    }
    check(Format::affine(3, 64, FloatType::BF16).unwrap(), (2, 2, 40, 44, 1408), FloatType::BF16);
}

/// K that ends within a block of tensor cores' tiles, after one run of it, two or three.
#[test]
fn many_rows_that_end_within_a_block() {
    let affine = |bits| Format::affine(bits, 32, FloatType::BF16).unwrap();
    for format in [Format::Q4_0, Format::Q8_0, affine(3), affine(4), Format::Mxfp4] {
        for k in [32, 96, 160, 704] {
            check(format, (1, 1, 40, 38, k), FloatType::F16);
        }
        check(format, (2, 2, 65, 130, 2880), FloatType::BF16);
    }
    check(Format::Float(FloatType::F16), (1, 1, 200, 130, 352), FloatType::F16);
    // Two parts of K, and the tile of the most rows.
    check(Format::Q4_0, (1, 1, 64, 16384, 160), FloatType::F16);
    check(Format::Q4_0, (1, 1, 512, 16640, 160), FloatType::F16);
}

/// The weight that a library of dense products gets.
#[test]
#[cfg(feature = "cuda")]
fn weights_decoded_to_16_bits() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    // More runs than a cube has units, and some left for a plane.
    let n = 69;
    for format in gpu_formats().into_iter().filter(|format| !matches!(format, Format::Float(_))) {
        let weight = inputs::weight(format, &[n, 256], 7, &host).unwrap();
        let want = reference::decoded(&weight, n).unwrap();
        for dtype in [FloatType::F16, FloatType::BF16] {
            let got =
                super::cuda::vendor_blas::decoded(queue, &weight.to_device(&gpu).unwrap(), dtype).unwrap();
            let shape = Tensor::allocate(&[n, 256], dtype.dtype(), &gpu).unwrap();
            let got = values(&shape.over(got, dtype.dtype()).to_device(&host).unwrap());
            // The product of scale and code is rounded or not: it is no larger than a value and a
            // group's offset, which is the value of code 0.
            let largest = want.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
            let product = |w: f32| f64::from(w.abs() + largest) * 2f64.powi(-24);
            let bound =
                |w: f32| product(w) + f64::from(w.abs()) * 2f64.powi(-24) + inputs::rounding(dtype, w.into());
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let error = f64::from(got - want).abs();
                assert!(error <= bound(*want), "{format} {dtype:?} [{i}]: {got}, {want} is wanted");
            }
        }
    }
}

/// Each size of tile: larger ones are chosen for products that fill a GPU.
#[test]
#[cfg(feature = "cuda")]
fn large_products() {
    let gpu = gpu();
    if !has_tensor_cores(&gpu) {
        return;
    }
    for (m, n) in [(64, 16384), (300, 9000), (512, 16640)] {
        for format in [Format::Q4_0, Format::affine(4, 64, FloatType::BF16).unwrap()] {
            check(format, (1, 1, m, n, 256), FloatType::BF16);
        }
    }
    // As many as a library of dense products is asked for.
    for (dtype, k) in [(FloatType::F16, 96), (FloatType::BF16, 512)] {
        check(Format::Q8_0, (1, 1, 4097, 136, k), dtype);
        check(Format::Float(dtype), (1, 1, 65, 136, k), dtype);
    }
}

/// Every way in which cooperative matrices cut a product, at sizes around its tiles: of the
/// matrices that the device has.
#[test]
fn cooperative_matrices_in_every_cut() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let f16 = FloatType::F16;
    let of = |format, sizes| CmmaTile::all(&queue.caps(), &Problem::example(format, [f16; 2], sizes));
    let cuts = of(Format::Q4_0, [64; 3]);
    // Metal has matrices, and lavapipe none; on CUDA tensor cores take these products.
    assert_eq!(!cuts.is_empty(), queue.caps().f16_matrices.is_some());
    assert!(cuts.len() == 5 || queue.to_string() != "msl", "{cuts:?}");
    for (i, config) in cuts.iter().enumerate() {
        let cut = config.cut;
        // A last step of one run, and of two; a row and a column past a tile, and one that is
        // missing.
        for (m, n, k) in [(cut.m_tile + 1, cut.n_tile - 1, 96), (cut.m_tile - 1, cut.n_tile + 1, 192)] {
            let format = [Format::Q4_0, Format::affine(3, 64, FloatType::BF16).unwrap()][k / 192];
            let config = of(format, [m, n, k])[i];
            let weight = inputs::weight(format, &[2, n, k], 7, &host).unwrap();
            let x = inputs::activations(&[2, m, k], f16, 8, &host).unwrap();
            let (x_on_gpu, y) = (x.to_device(&gpu).unwrap(), Tensor::empty(&[2, m, n], f16.dtype(), &gpu));
            let problem = Problem { batches: 2, ..Problem::example(format, [f16; 2], [m, n, k]) };
            let of_x = XOperands::new(&(&x_on_gpu).into()).unwrap();
            let on_gpu = weight.to_device(&gpu).unwrap();
            let operands = Operands { x: of_x, weight: &on_gpu, ids: None, y: &y, sum: None, widths: &[] };
            cmma_tile::launch(queue, config, &problem, &operands).unwrap();
            let (x, weight) = (values(&x), reference::decoded(&weight, 2 * n).unwrap());
            let batch = |i: usize| {
                let (x, weight) = (&x[i * m * k..][..m * k], &weight[i * n * k..][..n * k]);
                reference::matmul_bounded(x, weight, k, f16, Rounded::Weight(f16))
            };
            let mut want: Vec<_> = (0..2).flat_map(batch).collect();
            want.iter_mut().enumerate().for_each(|(index, expected)| expected.index = index);
            assert_expected(
                &format!("{format} {config:?} M={m} N={n} K={k}"),
                &y.to_device(&host).unwrap(),
                &want,
            );
        }
    }
}

/// The kernels for many rows: matrices take those of f16, and f32 stays f32.
#[test]
fn many_rows_of_f32_are_not_rounded() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let weight = inputs::weight(Format::Q4_0, &[64, 128], 7, &host).unwrap().to_device(&gpu).unwrap();
    for dtype in FLOATS {
        let x = inputs::activations(&[40, 128], dtype, 8, &gpu).unwrap();
        let plan = planned(&x, &weight, None, &[40, 64]);
        let in_matrices = matches!(plan.kernel, Kernel::CmmaTile(_));
        assert_eq!(in_matrices, queue.caps().matrices(dtype).is_some(), "{dtype:?}");
        assert!(dtype != FloatType::F32 || !rounds_weight(&plan), "{}", plan.explain());
    }
}

#[test]
fn many_rows_around_every_tile() {
    for m in [33, 39, 40, 41, 65] {
        check(Format::Q4_0, (1, 1, m, 13, 96), FloatType::F32);
    }
    for n in [1, 7, 8, 9, 64, 127, 129] {
        check(Format::Q6_K, (1, 1, 34, n, 256), FloatType::F16);
    }
    for k in [1, 33, 95] {
        check(Format::Float(FloatType::F32), (1, 1, 35, 5, k), FloatType::BF16);
    }
    check(Format::Q4_K, (3, 2, 19, 11, 256), FloatType::F32);
}

#[test]
fn a_view_starts_within_its_memory() {
    let (host, gpu) = (host(), gpu());
    let weight = inputs::weight(Format::Q4_0, &[19, 96], 1, &host).unwrap();
    let x = inputs::activations(&[5, 96], FloatType::F32, 2, &host).unwrap();
    let on_gpu = weight.to_device(&gpu).unwrap();
    for first in 0..5 {
        let (rows, all) = (x.rows(first, 5).unwrap(), x.to_device(&gpu).unwrap());
        let y = quantized_matmul(&all.rows(first, 5).unwrap(), &on_gpu).unwrap();
        let want =
            reference::matmul(&values(&rows), &reference::decoded(&weight, 19).unwrap(), 96, FloatType::F32);
        assert_expected(&format!("from row {first}"), &y.to_device(&host).unwrap(), &want);
    }
}

#[test]
fn nan_stays_in_its_row_and_empty_sizes_are_empty() {
    let (host, gpu) = (host(), gpu());
    let weight = |n, k| inputs::weight(Format::Q4_0, &[n, k], 1, &host).unwrap().to_device(&gpu).unwrap();
    let mut x = inputs::activations(&[2, 64], FloatType::F32, 2, &host).unwrap();
    x.as_mut_slice::<f32>().unwrap()[64 + 5] = f32::NAN;
    let y = quantized_matmul(&x.to_device(&gpu).unwrap(), &weight(13, 64)).unwrap();
    for (i, y) in values(&y.to_device(&host).unwrap()).iter().enumerate() {
        assert_eq!(y.is_nan(), i / 13 == 1, "[{i}] {y}");
    }
    let x = |m, k| inputs::activations(&[m, k], FloatType::F32, 2, &host).unwrap().to_device(&gpu).unwrap();
    assert_eq!(quantized_matmul(&x(0, 32), &weight(5, 32)).unwrap().shape(), [0, 5]);
    assert_eq!(quantized_matmul(&x(5, 32), &weight(0, 32)).unwrap().shape(), [5, 0]);
    let zero = quantized_matmul(&x(2, 0), &weight(5, 0)).unwrap().to_device(&host).unwrap();
    assert_eq!(values(&zero), [0.0; 10]);
}

#[test]
fn a_captured_pass_reads_what_is_there_when_it_is_replayed() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let weight = inputs::weight(Format::Q4_0, &[7, 64], 1, &host).unwrap().to_device(&gpu).unwrap();
    let x = inputs::activations(&[1, 64], FloatType::F32, 2, &host).unwrap().to_device(&gpu).unwrap();
    let mut y = None;
    let run = || {
        let first = quantized_matmul(&x, &weight)?;
        y = Some(first);
        Ok(())
    };
    let pass = queue.capture(run).unwrap();
    pass.replay().unwrap();
    let want = values(&quantized_matmul(&x, &weight).unwrap().to_device(&host).unwrap());
    assert_eq!(values(&y.unwrap().to_device(&host).unwrap()), want);
}

/// No more than one of them is in use at a time, and what is left of the last is what was asked
/// for.
#[test]
fn a_captured_pass_with_many_intermediates_takes_the_memory_of_a_few() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let weight = inputs::weight(Format::Q4_0, &[4096, 32], 1, &host).unwrap().to_device(&gpu).unwrap();
    let x = |seed| inputs::activations(&[128, 32], FloatType::F32, seed, &host)?.to_device(&gpu);
    let (x, other) = (x(2).unwrap(), x(3).unwrap());
    let mut y = None;
    let pass = queue.capture(|| {
        // 2 MiB each.
        for _ in 0..128 {
            quantized_matmul(&other, &weight)?;
        }
        y = Some(quantized_matmul(&x, &weight)?);
        quantized_matmul(&other, &weight).map(drop)
    });
    pass.unwrap().replay().unwrap();
    let want = values(&quantized_matmul(&x, &weight).unwrap().to_device(&host).unwrap());
    assert_eq!(values(&y.unwrap().to_device(&host).unwrap()), want);
}

#[test]
fn refusals_name_the_device() {
    let (host, gpu) = (host(), gpu());
    let x = inputs::activations(&[1, 32], FloatType::F32, 2, &host).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[7, 32], 1, &host).unwrap();
    let message = quantized_matmul(&x.to_device(&gpu).unwrap(), &weight).unwrap_err().to_string();
    assert_eq!(message, format!("quantized_matmul: weight is on cpu, but x is on {gpu}"));
    assert!(x.to_device(&gpu).unwrap().as_slice::<f32>().is_err());
}
