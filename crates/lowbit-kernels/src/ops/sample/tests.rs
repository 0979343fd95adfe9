use super::*;
use crate::ops::testing::{FLOATS, device, devices, rounded, values};
use numcheck::Random;

pub(super) const PARAMS: SampleParams = SampleParams {
    temperature: 0.8,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    seed: 7,
};

/// Filters alone and together, with and without penalties.
pub(super) fn settings() -> Vec<SampleParams> {
    let mut all = vec![];
    for (index, (top_k, top_p, min_p)) in [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (20, 1.0, 0.0),
        (100_000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.01, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (30, 0.8, 0.02),
    ]
    .into_iter()
    .enumerate()
    {
        let base = SampleParams { top_k, top_p, min_p, seed: 3, ..PARAMS };
        all.push(base);
        let penalised = SampleParams { temperature: 1.7, repetition_penalty: 1.3, ..base };
        all.push(match index % 3 {
            0 => penalised,
            1 => SampleParams { presence_penalty: 1.5, ..penalised },
            _ => SampleParams { presence_penalty: 0.2, frequency_penalty: -0.3, ..penalised },
        });
    }
    all
}

#[test]
fn draws_as_the_sorted_f64_distribution_says() {
    for device in devices() {
        for count in [1, 17, 64, 65, 1000] {
            for (params, dtype) in settings().into_iter().zip(FLOATS.into_iter().cycle()) {
                let logits = rounded(&Random::new(count as u64).normal(count, 3.0), &[count], dtype, &device);
                let history: Vec<u32> = (0..count as u32).step_by(3).chain([0, 0]).collect();
                let expected = reference::distribution(&values(&logits), &history, &params);
                for step in 0..40 {
                    let id = sample(&logits, &history, &params, step).unwrap();
                    let uniform = philox::uniform(step, params.seed);
                    let place = expected.iter().position(|&(other, _)| other == id);
                    let place = place.unwrap_or_else(|| panic!("{params:?}: {id} is filtered out"));
                    let below: f64 = expected[..place].iter().map(|(_, p)| p).sum();
                    // A weight errs by exp's ulp and its argument's roundings, |x| / T < 40 ulp; so
                    // do sums.
                    let slack = 64.0 * f64::from(f32::EPSILON);
                    let (low, high) = (below - slack, below + expected[place].1 + slack);
                    assert!(
                        (low..=high).contains(&uniform),
                        "{params:?}: {id} at {uniform}, not {low}..{high}"
                    );
                }
            }
        }
    }
}

/// Pearson's statistic of `draws` against `expected`, over its degrees of freedom.
fn chi_square(expected: &[(u32, f64)], draws: &[u32]) -> f64 {
    let n = draws.len() as f64;
    let term = |&(id, p): &(u32, f64)| {
        let seen = draws.iter().filter(|&&draw| draw == id).count() as f64;
        (seen - n * p).powi(2) / (n * p)
    };
    expected.iter().map(term).sum::<f64>() / (expected.len() - 1) as f64
}

#[test]
fn frequencies_follow_the_probabilities() {
    let device = device();
    let logits: Vec<f32> = (0..12).map(|i| ((i * 7) % 12) as f32 * 0.25).collect();
    let x = Tensor::new(&logits, &[1, 12], &device).unwrap();
    for params in
        [PARAMS, SampleParams { top_k: 9, ..PARAMS }, SampleParams { top_p: 0.85, min_p: 0.1, ..PARAMS }]
    {
        let expected = reference::distribution(&logits, &[3, 5], &params);
        assert!(expected.len() > 5);
        for seed in [1, 2, u64::MAX] {
            let params = SampleParams { seed, ..params };
            let draws: Vec<u32> =
                (0..20_000).map(|step| sample(&x, &[3, 5], &params, step).unwrap()).collect();
            // With 5 degrees of freedom or more, one in ten thousand reaches 5.2 times their
            // number.
            let statistic = chi_square(&expected, &draws);
            assert!(statistic < 5.2, "{params:?}: {statistic}");
            let swapped: Vec<u32> =
                draws.iter().map(|&id| if id == expected[0].0 { expected[1].0 } else { id }).collect();
            assert!(chi_square(&expected, &swapped) > 5.2, "the statistic tells nothing");
        }
    }
}

/// The ids that come up in many draws, sorted.
fn drawn(logits: &[f32], history: &[u32], params: SampleParams) -> Vec<u32> {
    let logits = Tensor::new(logits, &[logits.len()], &device()).unwrap();
    let mut ids: Vec<u32> = (0..500).map(|step| sample(&logits, history, &params, step).unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[test]
fn ties_are_kept_by_top_p_and_broken_by_top_k() {
    let logits = [1.0, 2.0, 1.0, 2.0, 2.0, -f32::INFINITY, 1.0];
    assert_eq!(drawn(&logits, &[], SampleParams { top_k: 2, ..PARAMS }), [1, 3]);
    assert_eq!(drawn(&logits, &[], SampleParams { top_k: 4, ..PARAMS }), [0, 1, 3, 4]);
    assert_eq!(drawn(&logits, &[], SampleParams { top_p: 0.1, ..PARAMS }), [1, 3, 4]);
    assert_eq!(drawn(&logits, &[], SampleParams { top_p: 0.0, ..PARAMS }), [1, 3, 4]);
    // The three twos have 0.73 together, so 0.75 wants one more, and its two equals stay.
    assert_eq!(drawn(&logits, &[], SampleParams { top_p: 0.75, ..PARAMS }), [0, 1, 2, 3, 4, 6]);
    assert_eq!(drawn(&logits, &[], SampleParams { min_p: 1.0, ..PARAMS }), [1, 3, 4]);
    assert_eq!(drawn(&logits, &[], PARAMS), [0, 1, 2, 3, 4, 6]);
    let zeros = [0.0, -0.0, 0.0, -1.0];
    assert_eq!(drawn(&zeros, &[], SampleParams { top_k: 2, ..PARAMS }), [0, 1]);
}

#[test]
fn the_nucleus_is_found_however_large_it_is() {
    for device in devices() {
        // Flat: top-p must grow past its first guess. Steps of 1e-4 keep ties away.
        let count = 5000;
        let logits: Vec<f32> = (0..count).map(|i| ((i * 1237) % count) as f32 * 1e-4).collect();
        let x = Tensor::new(&logits, &[count], &device).unwrap();
        for top_p in [0.02, 0.3, 0.9, 0.999] {
            let params = SampleParams { top_p, temperature: 1.0, ..PARAMS };
            let expected = reference::distribution(&logits, &[], &params);
            for step in 0..20 {
                let id = sample(&x, &[], &params, step).unwrap();
                let place = expected.iter().position(|&(other, _)| other == id).expect("in the nucleus");
                let below: f64 = expected[..place].iter().map(|(_, p)| p).sum();
                // One candidate more or less at the nucleus' end shifts all by its probability.
                let slack = 2.0 * expected[0].1;
                assert!((below - philox::uniform(step, params.seed)).abs() < slack);
            }
        }
    }
}

#[test]
fn greedy_takes_the_first_of_the_greatest() {
    let greedy = SampleParams::default();
    assert_eq!(drawn(&[1.0, 3.0, 3.0, f32::NEG_INFINITY], &[], greedy), [1]);
    // 3 / 1.6 is less than 2; -1 * 1.6 is less than -1.5; once, however often it is in the history.
    let penalised = SampleParams { repetition_penalty: 1.6, ..greedy };
    assert_eq!(drawn(&[2.0, 3.0], &[1], penalised), [0]);
    assert_eq!(drawn(&[-1.5, -1.0], &[1], penalised), [0]);
    assert_eq!(drawn(&[1.5, 3.0], &[1, 1, 1], penalised), [1]);
    assert_eq!(drawn(&[1.5, 3.0], &[], penalised), [1]);
    // Once for presence, as often as it is there for frequency, after the repetition penalty.
    let present = SampleParams { presence_penalty: 1.0, ..greedy };
    assert_eq!(drawn(&[2.0, 2.5], &[1, 1, 1], present), [0]);
    assert_eq!(drawn(&[1.0, 2.5], &[1, 1, 1], present), [1]);
    let frequent = SampleParams { frequency_penalty: 0.5, ..greedy };
    assert_eq!(drawn(&[1.0, 2.25], &[1, 1, 0], frequent), [1]);
    assert_eq!(drawn(&[1.0, 2.25], &[1, 1, 1], frequent), [0]);
    let all =
        SampleParams { repetition_penalty: 2.0, presence_penalty: 1.0, frequency_penalty: 0.5, ..greedy };
    assert_eq!(drawn(&[-0.55, 3.0], &[1, 1], all), [1]);
    assert_eq!(drawn(&[-0.45, 3.0], &[1, 1], all), [0]);
    assert_eq!(drawn(&[-4.45, -1.25], &[1, 1], all), [0]);
    assert_eq!(drawn(&[-4.55, -1.25], &[1, 1], all), [1]);
}

#[test]
fn steps_and_seeds_reproduce() {
    let x = Tensor::new(&[0f32; 1000], &[1000], &device()).unwrap();
    let draw = |seed, step| sample(&x, &[], &SampleParams { seed, ..PARAMS }, step).unwrap();
    let first: Vec<u32> = (0..20).map(|step| draw(1, step)).collect();
    assert_eq!(first, (0..20).map(|step| draw(1, step)).collect::<Vec<_>>());
    assert_ne!(first, (0..20).map(|step| draw(2, step)).collect::<Vec<_>>());
    // A tiny temperature leaves the greatest alone.
    assert_eq!(drawn(&[1.0, 1.1, 1.0], &[], SampleParams { temperature: 1e-40, ..PARAMS }), [1]);
}

#[test]
fn bad_logits_and_parameters() {
    let device = device();
    let refused = |logits: &[f32], history: &[u32], params: SampleParams| {
        let logits = Tensor::new(logits, &[logits.len()], &device).unwrap();
        sample(&logits, history, &params, 0).unwrap_err().to_string()
    };
    for params in [SampleParams::default(), PARAMS, SampleParams { top_k: 1, ..PARAMS }] {
        let error = refused(&[0.0, f32::NAN], &[], params);
        assert_eq!(error, "sample: logits is NaN at 1, but numbers are wanted");
        let error = refused(&[f32::INFINITY, 0.0], &[], params);
        assert_eq!(error, "sample: logits is inf at 0, but numbers are wanted");
        let error = refused(&[f32::NEG_INFINITY; 2], &[], params);
        assert_eq!(error, "sample: logits is -inf everywhere, but one must be finite");
        let error = refused(&[1.0, 2.0], &[1, 2], params);
        assert_eq!(error, "sample: history[1] is 2, but there are 2 rows to choose from");
    }
    let bad = |params| refused(&[1.0, 2.0], &[], params);
    for temperature in [-1.0, f32::NAN, f32::INFINITY] {
        let error = bad(SampleParams { temperature, ..PARAMS });
        assert_eq!(
            error,
            format!("sample: temperature is {temperature}, but a finite number from 0 is wanted")
        );
    }
    for top_p in [-0.1, 1.1, f32::NAN] {
        let want = "0 to 1 is wanted (1 keeps all, 0 the most likely alone)";
        assert_eq!(bad(SampleParams { top_p, ..PARAMS }), format!("sample: top_p is {top_p}, but {want}"));
    }
    for min_p in [-0.1, 1.1, f32::NAN] {
        let want = "0 to 1 is wanted (0 keeps all)";
        assert_eq!(bad(SampleParams { min_p, ..PARAMS }), format!("sample: min_p is {min_p}, but {want}"));
    }
    for repetition_penalty in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = bad(SampleParams { repetition_penalty, ..PARAMS });
        let want = "a positive finite number is wanted (1 changes nothing)";
        assert_eq!(error, format!("sample: repetition_penalty is {repetition_penalty}, but {want}"));
    }
    let infinite = bad(SampleParams { presence_penalty: f32::INFINITY, ..PARAMS });
    assert_eq!(
        infinite,
        "sample: presence_penalty is inf, but a finite number is wanted (0 changes nothing)"
    );
    assert!(bad(SampleParams { frequency_penalty: f32::NAN, ..PARAMS }).contains("frequency_penalty is NaN"));
    assert_eq!(refused(&[], &[], PARAMS), "sample: logits is [0], but one row [V] is wanted");
    let two = Tensor::new(&[0f32; 4], &[2, 2], &device).unwrap();
    assert!(sample(&two, &[], &PARAMS, 0).is_err());
    assert!(sample(&Tensor::new(&[0u32], &[1], &device).unwrap(), &[], &PARAMS, 0).is_err());
}
