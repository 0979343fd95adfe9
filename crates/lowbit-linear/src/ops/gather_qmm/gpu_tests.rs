//! The op on a GPU against the reference.

use super::tests::{Case, products_of_one_x_are_each_their_own_on};
use super::{CHECK, gated_experts, gather_qmm};
use crate::bench::Expected;
use crate::ops::quantized_matmul::gpu::Experts;
use crate::ops::quantized_matmul::gpu_tests::planned;
use crate::ops::quantized_matmul::input_gpu_tests::{made, product};
use crate::ops::quantized_matmul::plan;
use crate::ops::quantized_matmul::problem::Routing;
use crate::ops::quantized_matmul::reference::{self, Rounded};
use crate::ops::quantized_matmul::tests::{assert_expected, gpu_formats};
use crate::ops::testing::{FLOATS, gpu, values};
use crate::ops::{Gate, Input};
use crate::{Device, KernelError, Tensor, inputs};
use lowbit_formats::{FloatType, Format};

fn host() -> Device {
    Device::cpu(Some(2)).unwrap()
}

/// The op on the GPU, its result brought back.
fn on_gpu(case: &Case) -> Result<Tensor, KernelError> {
    let gpu = gpu();
    let weight = case.weight.to_device(&gpu)?;
    gather_qmm(&case.x.to_device(&gpu)?, &weight, &case.ids.to_device(&gpu)?)?.to_device(&host())
}

fn check(format: Format, tokens: usize, slots: usize, dtype: FloatType) {
    let case = Case::new(&host(), format, tokens, slots, dtype);
    let y = on_gpu(&case).unwrap();
    assert_eq!((y.shape(), y.dtype()), (&[tokens, 3, 23][..], dtype.dtype()));
    assert_expected(&format!("{format} T={tokens} slots {slots} {dtype:?}"), &y, &case.want());
}

#[test]
fn every_format() {
    for format in gpu_formats() {
        check(format, 2, 3, FloatType::F16);
    }
}

#[test]
fn tokens_that_share_x_or_do_not() {
    for format in [Format::Q4_0, Format::affine(3, 64, FloatType::BF16).unwrap()] {
        for dtype in FLOATS {
            for (tokens, slots) in [(1, 1), (1, 3), (7, 1), (7, 3), (41, 1), (0, 1), (0, 3)] {
                check(format, tokens, slots, dtype);
            }
        }
    }
}

#[test]
fn products_of_one_x_are_each_their_own() {
    products_of_one_x_are_each_their_own_on(&[gpu()]);
}

/// Products with each pair's expert that make x themselves, where a kernel does: of rows of whole
/// runs, and of many.
#[test]
fn products_of_what_a_gate_makes() {
    let gpu = gpu();
    for (i, (format, k, tokens)) in [
        (Format::affine(4, 64, FloatType::BF16).unwrap(), 512, 1),
        (Format::affine(3, 64, FloatType::F16).unwrap(), 2112, 2),
        (Format::Q4_K, 4096, 1),
        (Format::Q4_0, 4128, 1),
        (Format::Q8_0, 512, 1),
        (Format::Q4_0, 96, 20),
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in FLOATS {
            let by = if dtype == FloatType::F16 { Gate::Silu } else { Gate::ALL[i % 4] };
            let case = Case::new(&host(), format, tokens, 3, dtype);
            let weight = inputs::weight(format, &[5, 23, k], 6, &host()).unwrap();
            let decoded = reference::decoded(&weight, weight.rows()).unwrap();
            let ids = case.ids.as_slice::<u32>().unwrap();
            let [gate, up] = [7, 8].map(|seed| {
                let x = inputs::activations(&[tokens, 3, k], dtype, seed, &host()).unwrap();
                x.to_device(&gpu).unwrap()
            });
            let x = Input::Glu { x: &up, gate: &gate, by };
            let y =
                gather_qmm(x, &weight.to_device(&gpu).unwrap(), &case.ids.to_device(&gpu).unwrap()).unwrap();
            let x = made(&x);
            let pair = |(pair, &id): (usize, &u32)| {
                let expert = &decoded[id as usize * 23 * k..][..23 * k];
                product(&x[pair * k..][..k], expert, k, [dtype; 2])
            };
            let mut want: Vec<Expected> = ids.iter().enumerate().flat_map(pair).collect();
            want.iter_mut().enumerate().for_each(|(index, expected)| expected.index = index);
            let y = y.to_device(&host()).unwrap();
            assert_expected(&format!("{by:?} {format} K={k} T={tokens} {dtype:?}"), &y, &want);
        }
    }
}

/// Tokens that choose experts with every degree of evenness, some of them none at all.
fn choosing(
    (tokens, experts, top_k, slots): (usize, usize, usize, usize),
    (format, dtype): (Format, FloatType),
    (n, k): (usize, usize),
) -> Case {
    let mut random = numcheck::Random::new(tokens as u64);
    let chosen =
        (0..tokens * top_k).map(|_| (random.below(experts) * random.below(experts) / experts) as u32);
    Case {
        x: inputs::activations(&[tokens, slots, k], dtype, 5, &host()).unwrap(),
        weight: inputs::weight(format, &[experts, n, k], 6, &host()).unwrap(),
        ids: Tensor::new(&chosen.collect::<Vec<_>>(), &[tokens, top_k], &host()).unwrap(),
    }
}

fn many(tokens: usize, experts: usize, top_k: usize, slots: usize) -> Case {
    choosing((tokens, experts, top_k, slots), (Format::Q4_0, FloatType::BF16), (134, 256))
}

/// The same in f16, which every device with matrix units multiplies.
fn on_matrices(tokens: usize, experts: usize, top_k: usize, slots: usize) -> Case {
    choosing(
        (tokens, experts, top_k, slots),
        (Format::affine(4, 32, FloatType::F16).unwrap(), FloatType::F16),
        (134, 256),
    )
}

type Made = fn(usize, usize, usize, usize) -> Case;

/// The kernel of a case.
fn kernel(case: &Case) -> plan::Kernel {
    let gpu = gpu();
    let (x, ids) = (case.x.to_device(&gpu).unwrap(), case.ids.to_device(&gpu).unwrap());
    let share = if x.dim(1) == 1 { ids.dim(1) } else { 1 };
    let routing = Routing { experts: case.weight.shape()[0], pairs: ids.len(), share };
    let shape = [ids.dim(0), ids.dim(1), case.weight.n()];
    let experts = Some(Experts { ids: &ids, routing });
    planned(&x, &case.weight.to_device(&gpu).unwrap(), experts, &shape).kernel
}

/// True if pairs are sorted by expert, and the weight rounded: on matrix units.
fn sorted(case: &Case) -> bool {
    use plan::Kernel::{ExpertCmmaTiles, ExpertMmaTiles, ExpertTiles};
    let Device::Gpu(gpu) = gpu() else { unreachable!() };
    let sorted = matches!(kernel(case), ExpertTiles(_) | ExpertMmaTiles(_) | ExpertCmmaTiles(_));
    let dtype = CHECK.float("x", &case.x).unwrap();
    assert_eq!(sorted, gpu.caps().tensor_cores || gpu.caps().matrices(dtype).is_some());
    sorted
}

/// That experts find their pairs, on tensor cores.
fn assert_found(case: &Case) {
    let Device::Gpu(gpu) = gpu() else { unreachable!() };
    let found = matches!(kernel(case), plan::Kernel::ExpertRows(_) | plan::Kernel::StreamExperts(_));
    assert_eq!(found, gpu.caps().tensor_cores);
}

#[test]
fn many_tokens_are_sorted_by_expert() {
    for (tokens, experts, top_k) in [(50, 3, 4), (65, 7, 2), (300, 9, 3), (150, 1, 1)] {
        for slots in [1, top_k] {
            for (case, dtype) in [
                (many(tokens, experts, top_k, slots), FloatType::BF16),
                (on_matrices(tokens, experts, top_k, slots), FloatType::F16),
            ] {
                let what = format!("T={tokens} E={experts} top_k={top_k} slots {slots} {dtype:?}");
                assert_expected(
                    &what,
                    &on_gpu(&case).unwrap(),
                    &case.bounded(Rounded::weight_if(sorted(&case), dtype)),
                );
            }
        }
    }
    // Codes that tensor cores do not take as integers.
    for (tokens, experts, top_k) in [(16, 40, 8), (100, 70, 3)] {
        for slots in [1, top_k] {
            let sizes = (134, 256);
            let case = choosing((tokens, experts, top_k, slots), (Format::Q6_K, FloatType::BF16), sizes);
            let what = format!("Q6_K T={tokens} E={experts} top_k={top_k} slots {slots}");
            assert_expected(
                &what,
                &on_gpu(&case).unwrap(),
                &case.bounded(Rounded::weight_if(sorted(&case), FloatType::BF16)),
            );
        }
    }
}

/// gpt-oss' and Gemma 4's experts have rows that end within a block.
#[test]
fn many_tokens_whose_rows_end_within_a_block() {
    for (format, dtype, k) in [
        (Format::Q4_0, FloatType::F16, 704),
        (Format::Mxfp4, FloatType::BF16, 2880),
        (Format::Q8_0, FloatType::F16, 96),
    ] {
        let case = choosing((100, 7, 4, 1), (format, dtype), (134, k));
        let want = case.bounded(Rounded::weight_if(sorted(&case), dtype));
        assert_expected(&format!("{format} K={k}"), &on_gpu(&case).unwrap(), &want);
    }
}

/// In a step a pair's bits are the same whatever tokens are beside it, and however many: experts
/// with less and with more than a cube takes at a time, and one that all tokens choose.
#[test]
#[cfg(feature = "cuda")]
fn pairs_of_a_step_do_not_depend_on_each_other() {
    let (host, gpu) = (host(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    if !queue.caps().tensor_cores || !queue.caps().overlaps {
        return;
    }
    let affine = |bits| Format::affine(bits, 64, FloatType::BF16).unwrap();
    for (i, format) in [affine(4), affine(2), Format::Q4_0].into_iter().enumerate() {
        for ((n, k), slots) in [((134, 512), 1), ((48, 2048), 4), ((2056, 512), 4)] {
            let dtype = if i == 0 { FloatType::F16 } else { FloatType::BF16 };
            let mut case = choosing((100, 40, 4, slots), (format, dtype), (n, k));
            case.ids.as_mut_slice::<u32>().unwrap().chunks_mut(4).for_each(|ids| ids[3] = 39);
            assert!(matches!(kernel(&case), plan::Kernel::StreamExperts(_)), "{format} {n} {k}");
            let whole = values(&on_gpu(&case).unwrap());
            for (first, last) in [(0, 4), (3, 8), (7, 16), (2, 40), (31, 100)] {
                let some = Case {
                    x: case.x.rows(first, last).unwrap(),
                    weight: case.weight.clone(),
                    ids: case.ids.rows(first, last).unwrap(),
                };
                let want = &whole[first * 4 * n..last * 4 * n];
                assert_eq!(values(&on_gpu(&some).unwrap()), want, "{format} {n} {k} {first}..{last}");
            }
            let mut ids = [3u32; 16];
            ids[0] = 40;
            let ids = Tensor::new(&ids, &[4, 4], &host).unwrap();
            let some = Case { x: case.x.rows(0, 4).unwrap(), weight: case.weight.clone(), ids };
            let wrong = values(&on_gpu(&some).unwrap());
            assert!(wrong[..n].iter().all(|y| y.is_nan()) && wrong[n..].iter().all(|y| y.is_finite()));
        }
    }
}

/// The gated layers of experts are those of their products as tensors, but for the sigmoid.
#[test]
fn gated_experts_are_their_products() {
    let (host, gpu) = (host(), gpu());
    for (tokens, inner, dtype) in
        [(1, 64, FloatType::F16), (9, 96, FloatType::BF16), (90, 512, FloatType::F16)]
    {
        let format = Format::affine(4, 64, FloatType::BF16).unwrap();
        let gate_up =
            inputs::weight(format, &[2, 30, inner, 1024], 7, &host).unwrap().to_device(&gpu).unwrap();
        let down = inputs::weight(format, &[30, 40, inner.next_multiple_of(64)], 8, &host).unwrap();
        let down = down.to_device(&gpu).unwrap();
        let case = choosing((tokens, 30, 3, 1), (format, dtype), (8, 1024));
        let [x, ids] = [&case.x, &case.ids].map(|x| x.to_device(&gpu).unwrap());
        let flat = x.reshape(&[tokens, 1024]).unwrap();
        for by in Gate::ALL {
            let both = gather_qmm(&x, &gate_up, &ids).unwrap();
            let half = |i: usize| both.rows(i, i + 1).unwrap().reshape(&both.shape()[1..]).unwrap();
            let hidden = crate::ops::glu(&half(1), &half(0), by).unwrap();
            if inner != down.k() {
                let refused = gated_experts(&flat, &gate_up, &down, &ids, by).unwrap_err().to_string();
                assert!(refused.starts_with("gather_qmm: x is [9, 3, 96], but"), "{refused}");
                continue;
            }
            let want = values(&gather_qmm(&hidden, &down, &ids).unwrap().to_device(&host).unwrap());
            let y = gated_experts(&flat, &gate_up, &down, &ids, by).unwrap();
            assert_eq!((y.shape(), y.dtype()), (&[tokens, 3, 40][..], dtype.dtype()));
            // Values of the inner layer may be rounded to their neighbours.
            let size = want.iter().fold(0.0f32, |size, y| size.max(y.abs()));
            let step = inputs::rounding(dtype, 1.0) as f32;
            for (i, (got, want)) in values(&y.to_device(&host).unwrap()).iter().zip(want).enumerate() {
                assert!((got - want).abs() <= 4.0 * step * size, "{by:?} T={tokens} [{i}]: {got}, {want}");
            }
        }
    }
}

/// Not so many that weights are rounded: experts without pairs, with some, and with more than a
/// cube takes at a time.
#[test]
fn experts_find_their_pairs() {
    let affine = |bits, group_size| Format::affine(bits, group_size, FloatType::BF16).unwrap();
    for (tokens, experts, top_k) in [(16, 40, 8), (43, 64, 3), (140, 35, 1), (100, 150, 6)] {
        let cases = [
            (affine(4, 64), FloatType::F16, (66, 1152)),
            (affine(4, 64), FloatType::BF16, (134, 512)),
            (affine(4, 32), FloatType::BF16, (22, 1344)),
            (affine(4, 128), FloatType::BF16, (23, 384)),
            (affine(6, 128), FloatType::BF16, (64, 512)),
            (affine(2, 64), FloatType::F16, (33, 256)),
            (Format::Q4_0, FloatType::F16, (129, 96)),
            (Format::Q4_1, FloatType::BF16, (16, 2080)),
            (Format::Q8_0, FloatType::F16, (1, 2048)),
            (Format::Q4_K, FloatType::BF16, (70, 2304)),
        ];
        for (i, (format, dtype, sizes)) in cases.into_iter().enumerate() {
            let slots = if i % 2 == 0 { top_k } else { 1 };
            let case = choosing((tokens, experts, top_k, slots), (format, dtype), sizes);
            let what =
                format!("{format} {dtype:?} T={tokens} E={experts} top_k={top_k} slots {slots} {sizes:?}");
            assert_found(&case);
            let rounded = matches!(kernel(&case), plan::Kernel::ExpertCmmaTiles(_));
            let want = case.bounded(Rounded::weight_if(rounded, dtype));
            assert_expected(&what, &on_gpu(&case).unwrap(), &want);
        }
    }
}

/// As many ids as cubes look through, and a token more; and experts that all tokens choose, beside
/// others that none does.
#[test]
fn as_many_ids_as_experts_look_through() {
    for tokens in [512, 513] {
        let mut case = choosing((tokens, 1100, 8, 1), (Format::Q4_0, FloatType::F16), (6, 128));
        if tokens == 512 {
            assert_found(&case);
        }
        for what in ["many experts", "8 experts"] {
            assert_expected(&format!("T={tokens}, {what}"), &on_gpu(&case).unwrap(), &case.want());
            for (pair, id) in case.ids.as_mut_slice::<u32>().unwrap().iter_mut().enumerate() {
                *id = pair as u32 % 8 * 31;
            }
        }
    }
}

#[test]
fn a_wrong_id_among_many_gives_nan_in_its_row_alone() {
    for (experts, many) in
        [9, 20, 70].into_iter().flat_map(|experts| [(experts, many as Made), (experts, on_matrices)])
    {
        let want = values(&on_gpu(&many(60, experts, 4, 1)).unwrap());
        let mut wrong = many(60, experts, 4, 1);
        for (at, id) in [(0, experts as u32), (77, u32::MAX), (239, 1 << 31)] {
            wrong.ids.as_mut_slice::<u32>().unwrap()[at] = id;
        }
        let got = values(&on_gpu(&wrong).unwrap());
        for (pair, (got, want)) in got.chunks(134).zip(want.chunks(134)).enumerate() {
            match pair {
                0 | 77 | 239 => assert!(got.iter().all(|y| y.is_nan()), "pair {pair}: {got:?}"),
                _ => assert_eq!(got, want, "{experts} experts, pair {pair}"),
            }
        }
    }
}

/// More of them than a cube takes at a time.
#[test]
fn ids_that_are_all_wrong_give_nan() {
    for mut case in [many(60, 70, 4, 1), on_matrices(60, 70, 4, 1)] {
        case.ids.as_mut_slice::<u32>().unwrap().fill(70);
        assert!(values(&on_gpu(&case).unwrap()).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn a_wrong_id_gives_nan_in_its_row_alone() {
    let right = Case::new(&host(), Format::Q4_K, 4, 1, FloatType::F32);
    let want = values(&on_gpu(&right).unwrap());
    let mut wrong = Case::new(&host(), Format::Q4_K, 4, 1, FloatType::F32);
    for (at, id) in [(0, 5), (4, u32::MAX), (11, 1 << 31)] {
        wrong.ids.as_mut_slice::<u32>().unwrap()[at] = id;
    }
    let got = values(&on_gpu(&wrong).unwrap());
    for (pair, (got, want)) in got.chunks(23).zip(want.chunks(23)).enumerate() {
        match pair {
            0 | 4 | 11 => assert!(got.iter().all(|y| y.is_nan()), "pair {pair}: {got:?}"),
            _ => assert_eq!(got, want, "pair {pair}"),
        }
    }
}

#[test]
fn rows_that_end_within_a_run() {
    let (host, gpu) = (host(), gpu());
    let weight = inputs::weight(Format::Float(FloatType::BF16), &[3, 5, 41], 1, &host).unwrap();
    let x = inputs::activations(&[2, 1, 41], FloatType::F32, 2, &host).unwrap();
    let ids = Tensor::new(&[2u32, 0, 1, 2], &[2, 2], &host).unwrap();
    let want = Case { x: x.clone(), weight: weight.clone(), ids: ids.clone() }.want();
    let weight = weight.to_device(&gpu).unwrap();
    let y = gather_qmm(&x.to_device(&gpu).unwrap(), &weight, &ids.to_device(&gpu).unwrap()).unwrap();
    assert_expected("K=41", &y.to_device(&host).unwrap(), &want);
}

/// An ancestor's checks of an expert-routed product's arguments.
#[test]
fn refusals_name_the_operand() {
    let (host, gpu) = (host(), gpu());
    let case = Case::new(&host, Format::Q4_0, 2, 1, FloatType::F32);
    let weight = case.weight.to_device(&gpu).unwrap();
    let (x, ids) = (case.x.to_device(&gpu).unwrap(), case.ids.to_device(&gpu).unwrap());
    let refuse = |x: &Tensor, ids: &Tensor| gather_qmm(x, &weight, ids).unwrap_err().to_string();
    let ids_of = |ids: Tensor| ids.to_device(&gpu).unwrap();

    let shape = "gather_qmm: x is [2, 1, 256], but ids are [3, 2] and weight is [5, 23, 256]";
    assert_eq!(refuse(&x, &ids_of(Tensor::new(&[0u32; 6], &[3, 2], &host).unwrap())), shape);
    let flat = ids_of(Tensor::new(&[0u32; 6], &[6], &host).unwrap());
    assert_eq!(refuse(&x, &flat), "gather_qmm: ids is [6], but [T, top_k] is wanted");
    let signed = ids_of(Tensor::new(&[0i32; 6], &[2, 3], &host).unwrap());
    assert_eq!(refuse(&x, &signed), "gather_qmm: ids is i32, but u32 is wanted");
    let integers = Tensor::new(&[0u32; 512], &[2, 1, 256], &host).unwrap().to_device(&gpu).unwrap();
    assert_eq!(refuse(&integers, &ids), "gather_qmm: x is u32, but f32, f16 or bf16 is wanted");
    assert_eq!(refuse(&x, &case.ids), format!("gather_qmm: ids is on cpu, but x is on {gpu}"));
    assert_eq!(refuse(&case.x, &ids), format!("gather_qmm: weight is on {gpu}, but x is on cpu"));
    let narrow = inputs::weight(Format::Q4_0, &[23, 256], 1, &host).unwrap().to_device(&gpu).unwrap();
    let message = gather_qmm(&x, &narrow, &ids).unwrap_err().to_string();
    assert_eq!(
        message,
        "gather_qmm: weight is [23, 256], but [E, N, K] or [P, E, N, K] with an expert at least is wanted"
    );
}
