use super::*;
use crate::{
    bench::limits::kibibytes,
    simd::{
        Isa,
        peak::{self, Read},
    },
};

fn case(answer: f32, bound: f64) -> Case {
    let prepare = move |device: &Device, copies| -> Result<Prepared, KernelError> {
        let y = Tensor::new(&[0.0, answer], &[2], device)?;
        let run = || -> Run {
            let y = y.clone();
            Box::new(move || Ok(y.clone()))
        };
        let expected =
            vec![Expected { index: 0, value: 0.0, bound: 0.0 }, Expected { index: 1, value: 2.0, bound }];
        Ok(Prepared { runs: (0..copies).map(|_| run()).collect(), expected })
    };
    Case {
        op: "test",
        shape: "M=1".into(),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: 3_000_000,
        flops: 7,
        arithmetic: Arithmetic::F32,
        cold_bytes: 1 << 30,
        prepare: Box::new(prepare),
    }
}

const LIMITS: Limits =
    Limits { bytes_per_second: 1e9, f32_per_second: 1e9, bf16_per_second: None, int8_per_second: Some(4e9) };

#[test]
fn an_answer_within_its_bound_is_timed() {
    let device = Device::cpu(Some(1)).unwrap();
    let row = run(&case(2.5, 1.0), &device, &LIMITS).unwrap();
    assert_eq!(row.error_over_bound, 0.5);
    // 3 MB at 1 GB/s are 3,000 us.
    assert!((row.share_of_limit * row.median_us - 3000.0).abs() < 1e-6);
}

#[test]
fn a_wrong_answer_is_not_timed() {
    let device = Device::cpu(Some(1)).unwrap();
    for answer in [3.5, f32::NAN, f32::INFINITY] {
        let error = run(&case(answer, 1.0), &device, &LIMITS).unwrap_err().to_string();
        assert!(error.contains("2 within 1e0 is wanted"), "{error}");
    }
    assert!(run(&case(2.5, 0.0), &device, &LIMITS).is_err());
    assert!(run(&case(2.5, f64::NAN), &device, &LIMITS).is_err());
}

#[test]
fn a_case_is_compared_with_the_rate_of_its_arithmetic() {
    let seconds = |arithmetic, flops| LIMITS.seconds(&Case { arithmetic, flops, ..case(2.0, 1.0) });
    assert_eq!(seconds(Arithmetic::F32, 8_000_000), 8e-3);
    assert_eq!(seconds(Arithmetic::F32, 2_000_000), 3e-3);
    assert_eq!(seconds(Arithmetic::Int8, 16_000_000), 4e-3);
    assert_eq!(seconds(Arithmetic::Tiles, 16_000_000), 4e-3);
    // Of unknown rate: the bytes' time.
    assert_eq!(seconds(Arithmetic::Bf16, usize::MAX), 3e-3);
}

#[test]
fn every_instruction_set_has_limits() {
    let numbers: Vec<f32> = (0..1 << 12).map(|i| (i % 7) as f32).collect();
    let sum: f32 = numbers.iter().sum();
    for isa in Isa::all() {
        // No thread makes a thousand multiply-adds per nanosecond.
        let rate = peak::f32_operations_per_second(isa);
        assert!((1e6..2e12).contains(&rate), "{isa:?}: {rate}");
        let sums = [isa.dispatch(Read::<2, 0>(&numbers)), isa.dispatch(Read::<16, 1024>(&numbers))];
        assert_eq!(sums, [sum, sum], "{isa:?} reads all numbers once");
    }
}

#[test]
fn rows_are_lines_of_their_header() {
    // The median is 2 ms, and the distances from it are 0.5, 0 and 40 ms.
    let times = Times::new(vec![1.5e-3, 2e-3, 42e-3]);
    let row = Row::new(&case(2.0, 1.0), times, &LIMITS, 0.25);
    assert_eq!(row.csv(), "test,M=1,-,f32,2000.00,3000000,7,1.5000,0.2500,500.00");
    assert_eq!(row.csv().split(',').count(), Row::HEADER.split(',').count());
    assert_eq!(row.gigabytes_per_second(), 1.5);
}

#[test]
fn filters_want_every_word() {
    let device = Device::cpu(Some(1)).unwrap();
    assert!(cases("narrow f32", &device).iter().all(|case| case.op == "narrow"));
    assert_eq!(cases("narrow D=512", &device).len(), 1);
    assert!(cases("narrow D=512 bf16", &device).is_empty());
}

#[test]
fn cache_sizes() {
    assert_eq!(kibibytes("480K"), Some(480 << 10));
    assert_eq!(kibibytes("480M"), None);
    assert_eq!(kibibytes("K"), None);
    assert!(last_level_cache() >= 1 << 18);
}
