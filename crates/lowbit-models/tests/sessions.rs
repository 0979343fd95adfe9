//! Replies after one another in one session, on the CPU and, in builds that have one, on a GPU: what a session keeps
//! from reply to reply changes nothing about them.

mod support;

use lowbit_formats::FloatType;
use lowbit_kernels::Device;
use lowbit_kernels::ops::SampleParams;
use lowbit_models::{Finish, Generation, GenerationOptions, Logits, Model, ModelError, Session, Target};
use std::ops::ControlFlow::{Break, Continue};
use support::{PROMPT, load, load_with_cache, root};

fn models() -> Vec<Model> {
    let devices = [Device::cpu(Some(2)).unwrap()];
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    let devices = [&devices[..], &[support::gpu()]].concat();
    let path = root().join("models/demo-4bit");
    let mut models: Vec<_> = devices.iter().map(|device| load(&path, device, FloatType::F32)).collect();
    models.push(load_with_cache(&path, &devices[0], FloatType::F16));
    models
}

/// Greedy; drawn with a penalty on the last tokens; the same with another seed.
fn samplings() -> [SampleParams; 3] {
    let drawn = SampleParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.3,
        seed: 7,
        ..Default::default()
    };
    [SampleParams::default(), drawn, SampleParams { seed: 8, ..drawn }]
}

fn options(sampling: SampleParams, max_tokens: usize) -> GenerationOptions {
    GenerationOptions::default()
        .with_sampling(sampling)
        .with_max_tokens(max_tokens)
        .with_repetition_context(9)
}

fn reply(session: &mut Session<'_>, prompt: &[u32], options: &GenerationOptions) -> Generation {
    let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
    let before = session.tokens().len();
    let reply = session.generate(logits, options, |_| Continue(())).unwrap();
    assert!(session.tokens()[before..].starts_with(&reply.tokens), "what is drawn becomes text");
    reply
}

/// The reply of a session that keeps nothing but the text.
fn fresh(model: &Model, text: &[u32], options: &GenerationOptions) -> Vec<u32> {
    reply(&mut Session::new(model), text, options).tokens
}

/// That the reply to `prompt` is that of a fresh session after the same text.
fn goes_on(model: &Model, session: &mut Session<'_>, prompt: &[u32], options: &GenerationOptions) {
    let text = [session.tokens(), prompt].concat();
    let got = reply(session, prompt, options).tokens;
    let what = format!("{} {options:?} after {} tokens", model.device(), text.len());
    assert_eq!(got, fresh(model, &text, options), "{what}");
}

/// Prompts of different lengths, so that the ring of the last tokens begins anywhere.
const PROMPTS: [&[u32]; 4] = [&PROMPT, &[5, 640, 77], &[8100], &[254, 19, 3111, 61, 908]];

#[test]
fn replies_are_those_of_fresh_sessions() {
    for model in models() {
        for sampling in samplings() {
            let mut session = Session::new(&model);
            for prompt in PROMPTS {
                goes_on(&model, &mut session, prompt, &options(sampling, 11));
            }
        }
    }
}

#[test]
fn each_reply_is_drawn_as_it_asks() {
    for model in models() {
        let mut session = Session::new(&model);
        let [greedy, drawn, other] = samplings();
        let colder = SampleParams { temperature: 0.3, ..drawn };
        for (sampling, window) in
            [(greedy, 9), (drawn, 9), (other, 9), (other, 64), (colder, 64), (greedy, 0)]
        {
            let options = options(sampling, 8).with_repetition_context(window);
            goes_on(&model, &mut session, &PROMPT[..4], &options);
        }
    }
}

#[test]
fn a_fork_goes_its_own_way() {
    for model in models() {
        let greedy = options(SampleParams::default(), 8);
        let logits = |session: &mut Session<'_>| {
            let logits = session.prefill(&PROMPT[..5], |_| Continue(())).unwrap().unwrap();
            logits.to_device(model.host()).unwrap().as_slice::<f32>().unwrap().to_vec()
        };
        let mut session = Session::new(&model);
        let start = session.prefill(&PROMPT, |_| Continue(())).unwrap().unwrap();
        let mut fork = session.clone();
        let first = session.generate(start.clone(), &greedy, |_| Continue(())).unwrap();
        let second = fork.generate(start, &greedy, |_| Continue(())).unwrap();
        assert_eq!(first.tokens, second.tokens);
        // And on, after what was written: the replayed steps left the caches as single steps would have.
        assert_eq!(logits(&mut session), logits(&mut fork));

        // Between replies: whichever goes on first, the other one stays where it was.
        let mut session = Session::new(&model);
        reply(&mut session, &PROMPT, &greedy);
        for fork_first in [true, false] {
            let (mut fork, kept) = (session.clone(), session.clone());
            let texts = [&PROMPTS[1], &PROMPTS[3]].map(|prompt| [session.tokens(), prompt].concat());
            let mut replies = [vec![], vec![]];
            for i in if fork_first { [1, 0] } else { [0, 1] } {
                let one = if i == 0 { &mut session } else { &mut fork };
                replies[i] = reply(one, [PROMPTS[1], PROMPTS[3]][i], &greedy).tokens;
            }
            assert_eq!(replies, texts.map(|text| fresh(&model, &text, &greedy)), "{}", model.device());
            goes_on(&model, &mut kept.clone(), PROMPTS[1], &greedy);
            drop((fork, kept));
            // Alone again.
            goes_on(&model, &mut session, PROMPTS[2], &greedy);
        }
    }
}

#[test]
fn a_cleared_session_is_a_new_one() {
    for model in models() {
        for sampling in samplings().into_iter().take(2) {
            let options = options(sampling, 12);
            let mut session = Session::new(&model);
            session.clear().unwrap();
            for prompt in [&PROMPT[..], &PROMPT[..7]] {
                let got = reply(&mut session, prompt, &options).tokens;
                assert_eq!(got, fresh(&model, prompt, &options), "{}", model.device());
                let mut kept = session.clone();
                session.clear().unwrap();
                assert!(session.tokens().is_empty() && session.cache().position() == 0);
                assert_eq!(kept.tokens().len(), prompt.len() + 12, "a fork keeps its text");
                goes_on(&model, &mut kept, PROMPTS[1], &options);
            }
        }
    }
}

#[test]
fn a_cache_grows_in_the_middle_of_a_reply() {
    // Caches begin with 256 places, and double.
    for model in models() {
        let long: Vec<u32> = PROMPT.into_iter().cycle().take(240).collect();
        let mut session = Session::new(&model);
        let options = options(samplings()[1], 24);
        for prompt in [&long[..], &PROMPT[..3]] {
            goes_on(&model, &mut session, prompt, &options);
        }
    }
}

#[test]
fn all_devices_leave_the_same_text_however_a_reply_ends() {
    let mut texts = vec![];
    for model in models() {
        let greedy = options(SampleParams::default(), 10);
        let written = fresh(&model, &PROMPT, &greedy);
        // Neither is among those before it.
        let at =
            (4..10).find(|&i| !written[..i].contains(&written[i])).expect("the model does not repeat itself");
        let stop = greedy.clone().with_stop_ids(vec![written[at]]);
        let first = greedy.clone().with_stop_ids(vec![written[0]]);
        for (options, most, finish, count) in [
            (&greedy, 11, Finish::Length, 10),
            (&options(SampleParams::default(), 1), 11, Finish::Length, 1),
            (&stop, 11, Finish::Stop, at + 1),
            (&first, 11, Finish::Stop, 1),
            (&greedy, 6, Finish::Interrupted, 6),
            (&greedy, 1, Finish::Interrupted, 1),
        ] {
            let mut session = Session::new(&model);
            for turn in 0..2 {
                session.clear().unwrap();
                let logits = session.prefill(&PROMPT, |_| Continue(())).unwrap().unwrap();
                let mut calls = 0;
                let each = |_| {
                    calls += 1;
                    if calls == most { Break(()) } else { Continue(()) }
                };
                let reply = session.generate(logits, options, each).unwrap();
                let what = format!("{} {finish:?} of {count}, turn {turn}", model.device());
                assert_eq!(reply.finish, finish, "{what}");
                assert_eq!(reply.tokens, written[..count - usize::from(finish == Finish::Stop)], "{what}");
                assert_eq!(session.tokens(), [&PROMPT[..], &written[..count]].concat(), "{what}");
                let seen = session.cache().position();
                assert!((0..2).contains(&(session.tokens().len() - seen)), "{what}: {seen} tokens seen");
                assert!(matches!(session.prefill(&[], |_| Continue(())), Err(ModelError::NoTokens)));
            }
            // What has not been run counts for no one but the session.
            let text = [session.tokens(), PROMPTS[3]].concat();
            let mut done = vec![];
            let logits = session.prefill(PROMPTS[3], |tokens| {
                done.push(tokens);
                Continue(())
            });
            assert_eq!(done, [PROMPTS[3].len()]);
            assert_eq!(session.tokens(), text);
            let next = session.generate(logits.unwrap().unwrap(), &greedy, |_| Continue(())).unwrap().tokens;
            assert_eq!(next, fresh(&model, &text, &greedy), "{} {finish:?} of {count}", model.device());
            texts.push((model.device().to_string(), session.tokens().to_vec()));
        }
    }
    let (cpu, others) = texts.split_at(6);
    for (i, (device, text)) in others.iter().enumerate() {
        assert_eq!(text, &cpu[i % 6].1, "{device}");
    }
}

/// Keys and values cached in f16 are half as many bytes, and change logits little.
#[test]
fn an_f16_cache_stays_close() {
    let (path, device) = (root().join("models/demo-4bit"), Device::cpu(Some(2)).unwrap());
    let text: Vec<u32> = PROMPT.into_iter().cycle().take(300).collect();
    let logits = |cache| {
        let model = load_with_cache(&path, &device, cache);
        // A prompt, then single tokens over the end of the cache's first 256 places.
        let mut cache = model.cache();
        let (prompt, steps) = text.split_at(240);
        let mut all = vec![];
        for tokens in std::iter::once(prompt).chain(steps.chunks(1)) {
            let logits = model.forward(tokens, &mut cache, Logits::All).unwrap().unwrap();
            all.extend_from_slice(logits.as_slice::<f32>().unwrap());
        }
        (all, cache.size_bytes())
    };
    let ((want, bytes), (got, half)) = (logits(FloatType::F32), logits(FloatType::F16));
    // The states of gated delta nets stay in f32.
    assert!(half < bytes, "{half} of {bytes}");
    let rms = |x: &mut dyn Iterator<Item = f64>| (x.map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let size = rms(&mut want.iter().map(|&x| f64::from(x)));
    let error = rms(&mut got.iter().zip(&want).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    println!("rms error {error:e} of rms {size:e}: {:e}", error / size);
    // Each layer's keys and values err by half a unit in the last place of f16, 2^-11 at most.
    assert!(error > 0.0 && error <= size * 2f64.powi(-11), "{error:e} of {size:e}");
}
