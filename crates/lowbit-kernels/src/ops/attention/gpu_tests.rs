//! Attention on a GPU against the reference.

use super::gpu::by_each_matrix_kernel;
use super::tests::{CASE, Case};
use super::{AttentionParams, attention};
use crate::ops::testing::{FLOATS, device, gpu, normal, values};
use crate::{Device, Tensor};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

const F32: FloatType = FloatType::F32;

fn positions(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn every_type_of_a_step_and_of_a_prompt() {
    // Rows of whole vectors, and rows that are not.
    for case in [CASE, Case { width: 32, value_width: 24, ..CASE }] {
        for (dtype, cache) in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| (dtype, cache))) {
            case.check(&[70], dtype, cache, &gpu());
            case.check(&positions(11..48), dtype, cache, &gpu());
        }
    }
}

#[test]
fn sizes_of_heads() {
    for (width, value_width) in
        [(1, 8), (7, 16), (64, 64), (80, 17), (128, 128), (256, 256), (512, 512), (512, 64)]
    {
        let case = Case { width, value_width, ..CASE };
        case.check(&positions(0..35), F32, F32, &gpu());
        case.check(&[90, 91], F32, FloatType::BF16, &gpu());
    }
}

/// Sizes that tensor cores take, where there are any.
fn prompts(dtype: FloatType) {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    let few = if queue.target().tensor_cores() { 6 } else { 1 };
    for (width, value_width) in
        [(64, 64), (16, 16), (80, 48), (128, 128), (256, 256), (192, 128)].into_iter().take(few)
    {
        let case = Case { width, value_width, capacity: 300, ..CASE };
        // 3 heads per token.
        for tokens in [4, 33, 100, 140] {
            case.check(&positions(150..150 + tokens), dtype, dtype, &gpu());
        }
        let case = Case { window: Some(40), ..case };
        case.check(&positions(90..190), dtype, dtype, &gpu());
        case.check(&[99, 3, 50, 3, 0, 149, 298, 299], dtype, dtype, &gpu());
    }
    let case = Case { spread: 100.0, width: 64, value_width: 64, ..CASE };
    case.check(&positions(0..100), dtype, dtype, &gpu());
    let case = Case { capacity: 3000, width: 64, value_width: 64, ..CASE };
    case.check(&[2876, 2900, 1, 2999], dtype, dtype, &gpu());
}

#[test]
fn prompts_of_f16() {
    prompts(FloatType::F16);
}

#[test]
fn prompts_of_bf16() {
    prompts(FloatType::BF16);
}

/// Every kernel on matrix units, where there are any, at positions `at`.
fn check_each_matrix_kernel(case: &Case, dtype: FloatType, at: &[u32]) {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    let caps = queue.target().caps();
    if caps.matrices(dtype).is_none() && !caps.tensor_cores {
        return;
    }
    case.check_each(at, (dtype, dtype.into()), &gpu(), |operands, sinks| {
        let all = by_each_matrix_kernel(&queue, operands, sinks, &case.params()).unwrap();
        assert!(!all.is_empty(), "{case:?}");
        all.into_iter().map(|y| (y, Some(dtype))).collect()
    });
}

/// At sizes around those of all tiles.
#[test]
fn every_kernel_on_matrix_units() {
    for dtype in [FloatType::F16, FloatType::BF16] {
        let check = |case: &Case, at: &[u32]| check_each_matrix_kernel(case, dtype, at);
        for (width, value_width) in [(64, 64), (16, 48), (80, 16), (128, 128), (256, 256), (96, 256)] {
            // 3 heads per token. Blocks of one row, of less and more than a plane's, and of more
            // than a cube's; tiles of keys below, at and above 16 to 64.
            let case = Case { width, value_width, capacity: 200, ..CASE };
            for (first, tokens) in [(30, 1), (31, 1), (64, 5), (0, 6), (100, 23), (60, 45)] {
                check(&case, &positions(first..first + tokens));
            }
            let case = Case { window: Some(40), ..case };
            check(&case, &positions(90..130));
            check(&case, &[99, 3, 50, 3, 0, 149, 198, 199]);
        }
        // Scores that grow from tile to tile, so that sums shrink, beside rows whose sums do not.
        let case = Case { spread: 100.0, width: 64, value_width: 80, ..CASE };
        check(&case, &positions(50..90));
        // Rows that see nothing of the first tiles.
        let case = Case { capacity: 1000, window: Some(30), width: 32, value_width: 32, ..CASE };
        check(&case, &[999, 0, 500, 29, 30, 31, 998, 64]);
    }
}

/// Keys around tiles of 80 and 128 that all rows see, rows around blocks of 128, and both ends of
/// windows: tiles that only NVIDIA's tensor cores have.
#[test]
fn many_rows_and_keys_on_tensor_cores() {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    if !queue.target().tensor_cores() {
        return;
    }
    for (width, value_width) in [(64, 64), (128, 128), (256, 256), (128, 64), (256, 128)] {
        let dtype = if value_width == 128 { FloatType::BF16 } else { FloatType::F16 };
        let check = |case: &Case, at: &[u32]| check_each_matrix_kernel(case, dtype, at);
        let case = Case { width, value_width, capacity: 900, ..CASE };
        for (first, tokens) in
            [(78, 43), (79, 42), (80, 2), (127, 43), (159, 44), (255, 86), (383, 7), (690, 90)]
        {
            check(&case, &positions(first..first + tokens));
        }
        for window in [100, 300] {
            let case = Case { window: Some(window), ..case };
            check(&case, &positions(600..690));
            check(&case, &[899, 898, 700, 701, 3, 840, 0, 555]);
        }
        let case = Case { spread: 30.0, ..case };
        check(&case, &positions(500..560));
    }
}

/// Steps of one token and of a few, whose keys are split among cubes in every way, with groups of
/// heads up to and beyond 8, and heads that the kernel for steps takes and leaves.
#[test]
fn steps_on_tensor_cores() {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    if !queue.target().tensor_cores() {
        return;
    }
    for (query_heads, width, value_width) in [
        (2, 256, 256),
        (6, 128, 128),
        (14, 64, 64),
        (16, 256, 64),
        (18, 64, 128),
        (32, 256, 256),
        (16, 512, 512),
        (6, 512, 128),
        (14, 64, 48),
        (18, 16, 16),
    ] {
        let dtype = if query_heads == 6 { FloatType::BF16 } else { FloatType::F16 };
        let case = Case { query_heads, width, value_width, capacity: 3500, ..CASE };
        let check = |case: &Case, at: &[u32]| check_each_matrix_kernel(case, dtype, at);
        for position in [0, 15, 16, 63, 64, 65, 700, 2111, 2112, 3499] {
            check(&case, &[position]);
        }
        // Tokens of several sequences would have any positions.
        check(&case, &[2999, 3000, 3001]);
        check(&case, &[3499, 0, 1700, 64]);
        let case = Case { window: Some(1000), ..case };
        check(&case, &[1500]);
        check(&case, &[1023, 1024, 1025]);
        let case = Case { spread: 30.0, ..case };
        check(&case, &[3001]);
    }
}

/// One key head alone: its keys are split among as many cubes as there may be, whose planes have
/// many tiles each.
#[test]
fn steps_after_long_texts_on_tensor_cores() {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    if !queue.target().tensor_cores() {
        return;
    }
    let long = [(4, 256, FloatType::F16), (8, 128, FloatType::BF16), (5, 64, FloatType::F16)];
    for (query_heads, width, dtype) in long {
        let case = Case { query_heads, heads: 1, width, value_width: width, capacity: 40_000, ..CASE };
        for at in [&[39_999][..], &[31_234, 31_235], &[25_000, 7]] {
            check_each_matrix_kernel(&case, dtype, at);
        }
        check_each_matrix_kernel(&Case { window: Some(20_000), ..case }, dtype, &[39_000]);
    }
}

/// Sinks beside keys that one cube has and that several share, in every kernel.
#[test]
fn sinks_are_in_the_denominator() {
    let case = Case { sinks: true, width: 64, value_width: 64, ..CASE };
    for (dtype, cache) in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| (dtype, cache))) {
        case.check(&[70], dtype, cache, &gpu());
        case.check(&positions(11..48), dtype, cache, &gpu());
    }
    let odd = Case { sinks: true, ..CASE };
    odd.check(&positions(60..99), F32, F32, &gpu());
    let long = Case { capacity: 3000, ..case };
    for case in [case, long, Case { window: Some(40), ..long }, Case { query_heads: 16, ..long }] {
        for dtype in [FloatType::F16, FloatType::BF16] {
            check_each_matrix_kernel(&case, dtype, &[149]);
            check_each_matrix_kernel(&case, dtype, &positions(60..105));
            check_each_matrix_kernel(&case, dtype, &[149, 3, 50, 0]);
        }
        case.check(&[149], F32, FloatType::F16, &gpu());
        case.check(&[149, 3, 50, 0], F32, FloatType::F16, &gpu());
    }
}

/// Soft caps and keys after a query's own, in every kernel, over keys that one cube has and that
/// several share.
#[test]
fn caps_and_keys_after_the_own() {
    let case = Case { width: 64, value_width: 64, ..CASE };
    let capped = |softcap, spread| Case { softcap: Some(softcap), spread, ..case };
    let ahead = |look_ahead, window| Case { look_ahead, window, ..case };
    let cases = [capped(50.0, 1.5), capped(4.0, 1.5), capped(3.0, 1000.0)];
    for case in cases.into_iter().chain([ahead(usize::MAX, None), ahead(30, Some(31)), ahead(1, Some(90))]) {
        for (dtype, cache) in [(F32, F32), (F32, FloatType::F16), (FloatType::BF16, F32)] {
            case.check(&[70], dtype, cache, &gpu());
            case.check(&positions(0..150), dtype, cache, &gpu());
            Case { width: 20, value_width: 13, ..case }.check(&positions(60..99), dtype, cache, &gpu());
        }
        for case in [case, Case { capacity: 3000, sinks: true, ..case }, Case { query_heads: 16, ..case }] {
            for dtype in [FloatType::F16, FloatType::BF16] {
                check_each_matrix_kernel(&case, dtype, &[149]);
                check_each_matrix_kernel(&case, dtype, &positions(0..150));
                check_each_matrix_kernel(&case, dtype, &[149, 3, 50, 0]);
            }
        }
        // The widths of Gemma 2: one token, and rows and tiles beyond a cube's.
        for width in [128, 256] {
            let case = Case { width, value_width: width, query_heads: 4, capacity: 900, ..case };
            check_each_matrix_kernel(&case, FloatType::BF16, &[899]);
            check_each_matrix_kernel(&case, FloatType::F16, &positions(700..830));
        }
    }
}

/// The rows of a token whose position is beyond the capacity are NaN with sinks, too.
#[test]
fn a_wrong_position_gives_nan_beside_sinks() {
    for (capacity, dtype) in [(20, DType::F32), (3000, DType::F32), (20, DType::F16), (3000, DType::F16)] {
        let [q, k, v] =
            [&[3, 2, 32], &[1, capacity, 32], &[1, capacity, 16]].map(|x| ones(x).cast(dtype).unwrap());
        let [q, k, v] = [q, k, v].map(|x| x.to_device(&gpu()).unwrap());
        let at = Tensor::new(&[2, capacity as u32, 7], &[3], &gpu()).unwrap();
        let sinks = Tensor::new(&[-1.0f32, 1.0], &[2], &gpu()).unwrap();
        let params = AttentionParams::causal(1.0);
        let y = attention(&q, &k, &v, &at, Some(&sinks), &params).unwrap().to_device(&device()).unwrap();
        for (row, y) in values(&y).chunks(16).enumerate() {
            let as_wanted = |y: &f32| if row / 2 == 1 { y.is_nan() } else { (0.9..=1.0).contains(y) };
            assert!(y.iter().all(as_wanted), "{row}: {y:?}");
        }
    }
}

#[test]
fn groups_of_heads() {
    for (query_heads, heads) in [(1, 1), (3, 3), (5, 1), (9, 3), (14, 2), (16, 1)] {
        let case = Case { query_heads, heads, ..CASE };
        case.check(&[120], F32, F32, &gpu());
        case.check(&positions(40..61), F32, F32, &gpu());
    }
}

#[test]
fn windows_and_positions_in_any_order() {
    for window in [1, 2, 15, 33, 500] {
        let case = Case { window: Some(window), ..CASE };
        case.check(&positions(60..99), F32, F32, &gpu());
        case.check(&[149], F32, F32, &gpu());
        case.check(&[99, 3, 50, 3, 0, 149], F32, F32, &gpu());
    }
    CASE.check(&[99, 3, 50, 3, 0, 149], F32, F32, &gpu());
}

#[test]
fn long_contexts_are_split() {
    let case = Case { capacity: 5000, query_heads: 3, heads: 1, ..CASE };
    for position in [0, 1, 31, 32, 63, 64, 4321, 4999] {
        case.check(&[position], F32, FloatType::BF16, &gpu());
    }
    case.check(&[4321, 4322], F32, F32, &gpu());
    let case = Case { window: Some(1000), ..case };
    case.check(&[4321, 17, 4322], FloatType::F16, FloatType::F16, &gpu());
}

#[test]
fn large_scores_do_not_overflow() {
    // Scores reach thousands: without the maximum taken off, exp overflows.
    let case = Case { spread: 1000.0, ..CASE };
    case.check(&positions(0..70), F32, F32, &gpu());
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::new(&vec![1f32; shape.iter().product()], shape, &device()).unwrap()
}

/// The rows of y, with all operands but q on the GPU made from ones.
fn rows(q: &Tensor, k: &Tensor, v: &Tensor, at: &[u32]) -> Vec<Vec<f32>> {
    let params = AttentionParams::causal(1.0);
    let [q, k, v] = [q, k, v].map(|x| x.to_device(&gpu()).unwrap());
    let at = Tensor::new(at, &[at.len()], &gpu()).unwrap();
    let y = attention(&q, &k, &v, &at, None, &params).unwrap().to_device(&device()).unwrap();
    values(&y).chunks(v.dim(2)).map(<[f32]>::to_vec).collect()
}

#[test]
fn nan_reaches_its_own_rows_only() {
    let (mut q, mut k, mut v) = (ones(&[3, 2, 4]), ones(&[1, 8, 4]), ones(&[1, 8, 5]));
    q.as_mut_slice::<f32>().unwrap()[3 * 4] = f32::NAN;
    for (row, y) in rows(&q, &k, &v, &[2, 3, 4]).iter().enumerate() {
        assert!(y.iter().all(|y| if row == 3 { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
    }
    // A later token's key and value: rows before it are in the same block, but do not see it.
    k.as_mut_slice::<f32>().unwrap()[4 * 4] = f32::NAN;
    v.as_mut_slice::<f32>().unwrap()[4 * 5] = f32::NAN;
    for (row, y) in rows(&ones(&[3, 2, 4]), &k, &v, &[2, 3, 4]).iter().enumerate() {
        assert!(y.iter().all(|y| if row >= 4 { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
    }
    assert!(rows(&q.rows(0, 0).unwrap(), &k, &v, &[]).is_empty());
}

#[test]
fn what_is_not_finite_reaches_its_own_rows_of_16_bits_only() {
    let values = [f32::NAN, f32::INFINITY];
    for (dtype, value) in [DType::BF16, DType::F16].into_iter().flat_map(|dtype| values.map(|it| (dtype, it)))
    {
        let (q, mut k, mut v) = (ones(&[40, 2, 32]), ones(&[1, 90, 32]), ones(&[1, 90, 16]));
        k.as_mut_slice::<f32>().unwrap()[60 * 32] = f32::NAN;
        v.as_mut_slice::<f32>().unwrap()[50 * 16] = value;
        // Nobody sees these.
        v.as_mut_slice::<f32>().unwrap()[70 * 16..].fill(f32::NAN);
        let [q, k, v] = [q, k, v].map(|x| x.cast(dtype).unwrap());
        let at = positions(30..70);
        for (row, y) in rows(&q, &k, &v, &at).iter().enumerate() {
            let position = at[row / 2];
            assert_eq!(!y[0].is_finite(), position >= 50, "{row}: {y:?}");
            assert!(position < 60 || y.iter().all(|y| !y.is_finite()), "{row}: {y:?}");
            assert!(position >= 50 || y.iter().all(|y| *y == 1.0), "{row}: {y:?}");
        }
    }
}

#[test]
fn a_wrong_position_gives_nan_in_its_rows() {
    for capacity in [8, 3000] {
        let (k, v) = (ones(&[1, capacity, 4]), ones(&[1, capacity, 5]));
        for at in [[2, capacity as u32, 7], [u32::MAX, 1, 2], [0, 1, capacity as u32 - 1]] {
            for (row, y) in rows(&ones(&[3, 2, 4]), &k, &v, &at).iter().enumerate() {
                let wrong = at[row / 2] >= capacity as u32;
                assert!(y.iter().all(|y| if wrong { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
            }
        }
        assert!(rows(&ones(&[1, 2, 4]), &k, &v, &[1 << 31]).iter().flatten().all(|y| y.is_nan()));
    }
}

#[test]
fn a_wrong_position_gives_nan_in_its_rows_of_16_bits() {
    for capacity in [20, 3000] {
        let [q, k, v] =
            [&[40, 2, 32], &[1, capacity, 32], &[1, capacity, 16]].map(|x| ones(x).cast(DType::F16).unwrap());
        let mut at = positions(0..20).repeat(2);
        for (i, position) in [(0, capacity as u32), (17, u32::MAX), (18, 1 << 31), (39, capacity as u32 + 7)]
        {
            at[i] = position;
        }
        for (row, y) in rows(&q, &k, &v, &at).iter().enumerate() {
            let wrong = at[row / 2] >= capacity as u32;
            assert!(y.iter().all(|y| if wrong { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
        }
        let wrong = vec![capacity as u32; 40];
        assert!(rows(&q, &k, &v, &wrong).iter().flatten().all(|y| y.is_nan()));
    }
}

#[test]
fn a_replay_sees_what_the_positions_say_by_then() {
    let (host, gpu) = (device(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let mut random = Random::new(3);
    let mut operand = |shape: &[usize]| normal(&mut random, shape, F32, &host).0.to_device(&gpu).unwrap();
    let (q, k, v) = (operand(&[1, 4, 16]), operand(&[2, 700, 16]), operand(&[2, 700, 16]));
    let at = |position: u32| Tensor::new(&[position], &[1], &gpu).unwrap();
    let params = AttentionParams::causal(0.25);
    let mut bits = Tensor::new(&[f32::from_bits(5)], &[1, 1, 1], &gpu).unwrap();
    let mut y = None;
    let pass = queue
        .capture(|| {
            let position = bits.over(bits.memory()?.0.clone(), DType::U32).reshape(&[1])?;
            y = Some(attention(&q, &k, &v, &position, None, &params)?);
            Ok(())
        })
        .unwrap();
    let y = y.unwrap();
    for position in [5, 699, 0, 123] {
        let value = Tensor::new(&[f32::from_bits(position)], &[1, 1, 1], &gpu).unwrap();
        crate::ops::kv_append(&mut bits, &value, &at(0)).unwrap();
        pass.replay().unwrap();
        let want = attention(&q, &k, &v, &at(position), None, &params).unwrap().to_device(&host).unwrap();
        assert_eq!(values(&y.to_device(&host).unwrap()), values(&want), "{position}");
    }
}
