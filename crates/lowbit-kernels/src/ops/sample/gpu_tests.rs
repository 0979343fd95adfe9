use super::tests::{PARAMS, settings};
use super::*;
use crate::ops::testing::{FLOATS, device, gpu, rounded, values};
use numcheck::Random;

/// Draws on `device` with a history that the draws join, and the history before each.
fn draws(logits: &Tensor, history: &[u32], params: &SampleParams, count: usize) -> Vec<(Vec<u32>, u32)> {
    let host = device();
    let mut state = DecodeState::new(history, history.len(), logits.device()).unwrap();
    let mut text = history.to_vec();
    let draw = |step: usize| {
        sample_next(logits, &mut state, params).unwrap();
        let id = state.drawn().unwrap().wait().unwrap();
        let before = text[text.len() - history.len()..].to_vec();
        text.push(id);
        let position = state.position().to_device(&host).unwrap().as_slice::<u32>().unwrap()[0];
        assert_eq!(position as usize, history.len() + step, "the token's place in the text");
        (before, id)
    };
    (0..count).map(draw).collect()
}

#[test]
fn draws_on_a_gpu_as_the_f64_distribution_says() {
    let (host, gpu) = (device(), gpu());
    for count in [1, 17, 129, 3000] {
        for (params, dtype) in settings().into_iter().zip(FLOATS.into_iter().cycle()) {
            let logits = rounded(&Random::new(count as u64).normal(count, 3.0), &[count], dtype, &host);
            let history: Vec<u32> = (0..count as u32).step_by(3).chain([0, 0]).take(40).collect();
            let on_gpu = logits.to_device(&gpu).unwrap();
            for (step, (history, id)) in draws(&on_gpu, &history, &params, 6).into_iter().enumerate() {
                let expected = reference::distribution(&values(&logits), &history, &params);
                let uniform = philox::uniform(step as u64, params.seed);
                let place = expected.iter().position(|&(other, _)| other == id);
                let place = place.unwrap_or_else(|| panic!("{params:?}: {id} of {count} is filtered out"));
                let below: f64 = expected[..place].iter().map(|(_, p)| p).sum();
                // Sums and exponentials in f32, and the random number's 24 bits.
                let slack = 256.0 * f64::from(f32::EPSILON);
                let (low, high) = (below - slack, below + expected[place].1 + slack);
                assert!((low..=high).contains(&uniform), "{params:?}: {id} at {uniform}, not {low}..{high}");
            }
        }
    }
}

#[test]
fn a_restarted_state_draws_as_a_new_one() {
    let logits: Vec<f32> = (0..50).map(|i| ((i * 7) % 50) as f32 * 0.05).collect();
    let params = SampleParams { repetition_penalty: 2.0, frequency_penalty: 0.1, ..PARAMS };
    for device in [device(), gpu()] {
        let logits = Tensor::new(&logits, &[50], &device).unwrap();
        for window in [0, 1, 5, 64] {
            let mut state = DecodeState::new(&[3; 7], window, &device).unwrap();
            // Of a length that leaves the ring's first place in its middle, and of fewer tokens
            // than the window.
            for text in [&[1u32, 2, 3, 4, 5, 6, 7, 8][..], &[9, 8], &[7]] {
                state.restart(text).unwrap();
                let mut new = DecodeState::new(text, window, &device).unwrap();
                let drawn = [&mut state, &mut new].map(|state| {
                    let draw = |_| {
                        sample_next(&logits, state, &params).unwrap();
                        state.drawn().unwrap().wait().unwrap()
                    };
                    (0..12).map(draw).collect::<Vec<_>>()
                });
                assert_eq!(drawn[0], drawn[1], "{device}: window {window} after {text:?}");
            }
        }
    }
}

#[test]
fn a_draw_is_what_it_was_when_it_was_asked_for() {
    let gpu = gpu();
    let [one, two] = [[1.0f32, 0.0], [0.0, 1.0]].map(|logits| Tensor::new(&logits, &[2], &gpu).unwrap());
    let mut state = DecodeState::new(&[0], 4, &gpu).unwrap();
    let greedy = SampleParams::default();
    sample_next(&two, &mut state, &greedy).unwrap();
    let first = state.drawn().unwrap();
    sample_next(&one, &mut state, &greedy).unwrap();
    let second = state.drawn().unwrap();
    sample_next(&two, &mut state, &greedy).unwrap();
    drop(state.drawn().unwrap());
    assert_eq!((second.wait().unwrap(), first.wait().unwrap()), (0, 1));
}

#[test]
fn a_pass_uses_what_it_reads_and_writes_unless_others_share_it() {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    let logits = Tensor::new(&[0.0f32, 1.0], &[2], &gpu()).unwrap();
    let [mut state, other] = [(); 2].map(|()| DecodeState::new(&[0], 4, &gpu()).unwrap());
    let pass = queue.capture(|| sample_next(&logits, &mut state, &PARAMS)).unwrap();
    assert!(pass.uses(&logits) && state.tensors().iter().all(|tensor| pass.uses(tensor)));
    assert!(!other.tensors().iter().any(|tensor| pass.uses(tensor)));
    let fork = logits.clone();
    assert!(!pass.uses(&logits) && !pass.uses(&fork));
    drop(fork);
    assert!(pass.uses(&logits));
    state.restart(&[1, 1, 1]).unwrap();
    assert!(state.tensors().iter().all(|tensor| pass.uses(tensor)), "it starts anew where it is");
    pass.replay().unwrap();
    let position = state.position().to_device(&device()).unwrap();
    assert_eq!(position.as_slice::<u32>().unwrap(), [3]);
}

#[test]
fn greedy_on_a_gpu_and_on_the_cpu_are_the_same() {
    let greedy = SampleParams {
        temperature: 0.0,
        repetition_penalty: 1.2,
        presence_penalty: 0.1,
        frequency_penalty: 0.3,
        ..PARAMS
    };
    for count in [1, 7, 128, 129, 5000] {
        let host = device();
        let logits = rounded(&Random::new(3).normal(count, 3.0), &[1, count], FLOATS[1], &host);
        let [cpu, gpu] = [host, gpu()]
            .map(|device| draws(&logits.to_device(&device).unwrap(), &[0, count as u32 - 1], &greedy, 5));
        assert_eq!(cpu, gpu);
    }
    let ties = Tensor::new(&[1.0f32, 3.0, -0.0, 3.0], &[4], &gpu()).unwrap();
    assert_eq!(draws(&ties, &[2], &SampleParams { temperature: 0.0, ..PARAMS }, 1)[0].1, 1);
    let zeros = Tensor::new(&[f32::NEG_INFINITY, 0.0, -0.0], &[3], &gpu()).unwrap();
    assert_eq!(draws(&zeros, &[2], &SampleParams { temperature: 0.0, ..PARAMS }, 1)[0].1, 1);
}

#[test]
fn ties_on_a_gpu_are_kept_by_top_p_and_broken_by_top_k() {
    let logits = [1.0, 2.0, 1.0, 2.0, 2.0, f32::NEG_INFINITY, 1.0];
    let logits = Tensor::new(&logits, &[7], &gpu()).unwrap();
    let drawn = |params: SampleParams| {
        let mut ids: Vec<u32> = draws(&logits, &[6], &params, 60).into_iter().map(|(_, id)| id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let hot = SampleParams { temperature: 5.0, ..PARAMS };
    assert_eq!(drawn(SampleParams { top_k: 2, ..hot }), [1, 3]);
    assert_eq!(drawn(SampleParams { top_k: 4, ..hot }), [0, 1, 3, 4]);
    assert_eq!(drawn(SampleParams { top_p: 0.1, ..hot }), [1, 3, 4]);
    assert_eq!(drawn(SampleParams { min_p: 1.0, ..hot }), [1, 3, 4]);
    assert_eq!(drawn(hot), [0, 1, 2, 3, 4, 6]);
}

#[test]
fn logits_without_an_answer_show_on_a_gpu() {
    let gpu = gpu();
    for bad in [[f32::NAN, 1.0], [1.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
        for temperature in [0.0, 1.0] {
            let logits = Tensor::new(&bad, &[2], &gpu).unwrap();
            let mut state = DecodeState::new(&[0], 4, &gpu).unwrap();
            sample_next(&logits, &mut state, &SampleParams { temperature, ..PARAMS }).unwrap();
            let message = state.drawn().unwrap().wait().unwrap_err().to_string();
            assert!(message.starts_with("sample: logits is NaN, infinite, or -inf"), "{message}");
        }
    }
}

/// Both devices' samples after the same text. Tokens of it that V does not have do not count.
fn on_both(logits: &Tensor, text: &[u32], params: &SampleParams, count: usize) -> [Vec<u32>; 2] {
    let text: Vec<u32> = text.iter().map(|id| id % logits.len() as u32).collect();
    [device(), gpu()].map(|device| {
        let logits = logits.to_device(&device).unwrap();
        draws(&logits, &text, params, count).into_iter().map(|(_, id)| id).collect()
    })
}

#[test]
fn draws_what_the_cpu_draws() {
    for count in [1, 17, 64, 65, 1000, 5000] {
        for (params, dtype) in settings().into_iter().zip(FLOATS.into_iter().cycle()) {
            let logits = rounded(&Random::new(count as u64).normal(count, 3.0), &[count], dtype, &device());
            let [cpu, gpu] = on_both(&logits, &[0, 5, 3], &params, 4);
            assert_eq!(gpu, cpu, "V={count} {params:?} {dtype:?}");
        }
    }
}

#[test]
fn ties_at_the_thresholds() {
    let base = SampleParams { temperature: 0.8, ..SampleParams::default() };
    let mut random = Random::new(9);
    let coarse: Vec<f32> = (0..700).map(|_| random.below(4) as f32).collect();
    let zeros: Vec<f32> = (0..40).map(|i| if i % 3 == 0 { -0.0 } else { 0.0 }).collect();
    for logits in [&[1.0, 2.0, 1.0, 2.0, 2.0, -f32::INFINITY, 1.0][..], &coarse, &zeros] {
        let x = Tensor::new(logits, &[logits.len()], &device()).unwrap();
        for params in [
            SampleParams { top_k: 2, ..base },
            SampleParams { top_k: 4, ..base },
            SampleParams { top_k: 33, ..base },
            SampleParams { top_k: 300, top_p: 0.9, ..base },
            SampleParams { top_k: 3, top_p: 0.1, ..base },
            SampleParams { top_p: 0.75, ..base },
            SampleParams { top_k: 5, min_p: 1.0, ..base },
            SampleParams { top_k: 2, temperature: 1e-40, ..base },
        ] {
            let [cpu, gpu] = on_both(&x, &[1], &params, 12);
            assert_eq!(gpu, cpu, "{params:?}");
        }
    }
}
