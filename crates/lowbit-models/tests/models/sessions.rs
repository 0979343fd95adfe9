//! Replies after one another in one session, on the CPU and, in builds that have one, on a GPU:
//! what a session keeps from reply to reply changes nothing about them.

use crate::support::{PROMPT, load, load_with_cache, root};
use crate::thirds::Thirds;
use lowbit_formats::FloatType;
use lowbit_kernels::Device;
use lowbit_kernels::ops::{CacheType, SampleParams};
use lowbit_models::{Finish, Generation, GenerationOptions, Logits, Model, ModelError, Session, Target};
use std::collections::BTreeMap;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::Arc;

/// The demo model on the CPU, also with its cache in f16 and in 8 bits, and on a GPU. On software
/// that stands for one, a small model of the same architecture, there and on the CPU.
fn models() -> Vec<Model> {
    let host = Device::cpu(Some(2)).unwrap();
    let demo = root().join("models/demo-4bit");
    let with_cache = |cache: CacheType| load_with_cache(&demo, &host, cache);
    let models = vec![
        load(&demo, &host, FloatType::F32),
        with_cache(FloatType::F16.into()),
        with_cache(CacheType::Int8),
    ];
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    let models = {
        let mut models = models;
        let device = crate::support::gpu();
        if crate::support::is_software(&device) {
            let small = root().join("tests/vectors/models/qwen3_5_moe-mlx-4bit");
            models.extend([&host, &device].map(|device| load(&small, device, FloatType::F32)));
        } else {
            models.push(load(&demo, &device, FloatType::F32));
        }
        models
    };
    models
}

/// Ids of the demo model as those of `model`.
fn ids(model: &Model, ids: &[u32]) -> Vec<u32> {
    let size = model.config().vocab_size as u32;
    ids.iter().map(|id| id % size).collect()
}

/// Greedy; drawn with a penalty on the last tokens; the same with another seed.
fn samplings() -> [SampleParams; 3] {
    let drawn = SampleParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.3,
        frequency_penalty: 0.2,
        seed: 7,
        ..Default::default()
    };
    [SampleParams::default(), drawn, SampleParams { seed: 8, ..drawn }]
}

/// Of replies whose penalties see the last nine tokens.
pub(crate) fn options(sampling: SampleParams, max_tokens: usize) -> GenerationOptions {
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
                goes_on(&model, &mut session, &ids(&model, prompt), &options(sampling, 11));
            }
            let replies = PROMPTS.map(|prompt| fresh(&model, &ids(&model, prompt), &options(sampling, 11)));
            assert!(
                replies.iter().skip(1).all(|reply| *reply != replies[0]),
                "what is said before does not matter"
            );
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
            goes_on(&model, &mut session, &ids(&model, &PROMPT[..4]), &options);
        }
    }
}

#[test]
fn a_fork_goes_its_own_way() {
    for model in models() {
        let prompts = PROMPTS.map(|prompt| ids(&model, prompt));
        let greedy = options(SampleParams::default(), 8);
        let logits = |session: &mut Session<'_>| {
            let logits = session.prefill(&prompts[0][..5], |_| Continue(())).unwrap().unwrap();
            logits.to_device(model.host()).unwrap().as_slice::<f32>().unwrap().to_vec()
        };
        let mut session = Session::new(&model);
        let start = session.prefill(&prompts[0], |_| Continue(())).unwrap().unwrap();
        let mut fork = session.clone();
        let first = session.generate(start.clone(), &greedy, |_| Continue(())).unwrap();
        let second = fork.generate(start, &greedy, |_| Continue(())).unwrap();
        assert_eq!(first.tokens, second.tokens);
        // And on, after what was written: the replayed steps left the caches as single steps would
        // have.
        assert_eq!(logits(&mut session), logits(&mut fork));

        // Between replies: whichever goes on first, the other one stays where it was.
        let mut session = Session::new(&model);
        reply(&mut session, &prompts[0], &greedy);
        for fork_first in [true, false] {
            let (mut fork, kept) = (session.clone(), session.clone());
            let texts = [&prompts[1], &prompts[3]].map(|prompt| [session.tokens(), prompt].concat());
            let mut replies = [vec![], vec![]];
            for i in if fork_first { [1, 0] } else { [0, 1] } {
                let one = if i == 0 { &mut session } else { &mut fork };
                replies[i] = reply(one, [&prompts[1], &prompts[3]][i], &greedy).tokens;
            }
            assert_eq!(replies, texts.map(|text| fresh(&model, &text, &greedy)), "{}", model.device());
            goes_on(&model, &mut kept.clone(), &prompts[1], &greedy);
            drop((fork, kept));
            // Alone again.
            goes_on(&model, &mut session, &prompts[2], &greedy);
        }
    }
}

/// The demo has gated delta nets and goes back to marks; a model of attention alone goes back
/// anywhere.
#[test]
fn a_session_that_went_back_is_one_that_never_went_on() {
    let attention = root().join("tests/vectors/models/qwen3");
    let attention = load(&attention, &Device::cpu(Some(2)).unwrap(), FloatType::F32);
    let all: Vec<Model> = models().into_iter().chain([attention]).collect();
    for (index, model) in all.iter().enumerate() {
        let [first, second, ..] = PROMPTS.map(|prompt| ids(model, prompt));
        let greedy = options(SampleParams::default(), 8);
        let mut session = Session::new(model);
        let anywhere = session.goes_back_anywhere().unwrap();
        assert_eq!(anywhere, index + 1 == all.len());
        session.prefill(&first[..4], |_| Continue(())).unwrap().unwrap();
        session.mark().unwrap();
        reply(&mut session, &first[4..], &greedy);
        let (length, tokens) = (session.tokens().len(), session.tokens().to_vec());
        assert_eq!(session.go_back(length).unwrap(), length, "the whole text stays");
        goes_on(model, &mut session, &second, &greedy);

        let want = if anywhere { first.len() } else { 4 };
        assert_eq!(session.go_back(first.len()).unwrap(), want);
        assert_eq!(session.tokens(), &tokens[..want]);
        goes_on(model, &mut session, &second, &greedy);
        assert_eq!(session.go_back(4).unwrap(), 4, "a mark stays while the text before it does");
        goes_on(model, &mut session, &second, &greedy);
        assert_eq!(session.go_back(3).unwrap(), if anywhere { 3 } else { 0 });
        goes_on(model, &mut session, &second, &greedy);
    }
}

#[test]
fn the_first_mark_and_the_last_ones_are_kept() {
    let demo = load(&root().join("models/demo-4bit"), &Device::cpu(Some(2)).unwrap(), FloatType::F32);
    let mut session = Session::new(&demo);
    for id in 1..=6 {
        session.prefill(&[id], |_| Continue(())).unwrap().unwrap();
        session.mark().unwrap();
        session.mark().unwrap();
    }
    let reached: Vec<usize> = (1..=6).rev().map(|tokens| session.go_back(tokens).unwrap()).collect();
    assert_eq!(reached, [6, 5, 4, 1, 1, 1]);
}

#[test]
fn a_cleared_session_is_a_new_one() {
    for model in models() {
        let [first, second, ..] = PROMPTS.map(|prompt| ids(&model, prompt));
        for sampling in samplings().into_iter().take(2) {
            let options = options(sampling, 12);
            let mut session = Session::new(&model);
            session.clear().unwrap();
            for prompt in [&first[..], &first[..7]] {
                let got = reply(&mut session, prompt, &options).tokens;
                assert_eq!(got, fresh(&model, prompt, &options), "{}", model.device());
                let mut kept = session.clone();
                session.clear().unwrap();
                assert!(session.tokens().is_empty() && session.cache().position() == 0);
                assert_eq!(kept.tokens().len(), prompt.len() + 12, "a fork keeps its text");
                goes_on(&model, &mut kept, &second, &options);
            }
        }
    }
}

#[test]
fn a_cache_grows_in_the_middle_of_a_reply() {
    // Caches begin with 256 places, and double.
    for model in models() {
        let prompt = ids(&model, &PROMPT);
        let long: Vec<u32> = prompt.iter().copied().cycle().take(240).collect();
        let mut session = Session::new(&model);
        let options = options(samplings()[1], 24);
        for prompt in [&long[..], &prompt[..3]] {
            goes_on(&model, &mut session, prompt, &options);
        }
    }
}

#[test]
fn all_devices_leave_the_same_text_however_a_reply_ends() {
    // By the size of the vocabulary, which each model has its own of.
    let mut texts = BTreeMap::<usize, Vec<(String, Vec<Vec<u32>>)>>::new();
    for model in models() {
        let [prompt, _, _, another] = PROMPTS.map(|prompt| ids(&model, prompt));
        let mut of_model = vec![];
        let greedy = options(SampleParams::default(), 10);
        let written = fresh(&model, &prompt, &greedy);
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
                let logits = session.prefill(&prompt, |_| Continue(())).unwrap().unwrap();
                let mut calls = 0;
                let each = |_| {
                    calls += 1;
                    if calls == most { Break(()) } else { Continue(()) }
                };
                let reply = session.generate(logits, options, each).unwrap();
                let what = format!("{} {finish:?} of {count}, turn {turn}", model.device());
                assert_eq!(reply.finish, finish, "{what}");
                assert_eq!(reply.tokens, written[..count - usize::from(finish == Finish::Stop)], "{what}");
                assert_eq!(session.tokens(), [&prompt[..], &written[..count]].concat(), "{what}");
                let seen = session.cache().position();
                assert!((0..2).contains(&(session.tokens().len() - seen)), "{what}: {seen} tokens seen");
                assert!(matches!(session.prefill(&[], |_| Continue(())), Err(ModelError::NoTokens)));
            }
            // Tokens that have not been run count for no one but the session.
            let text = [session.tokens(), &another].concat();
            let mut done = vec![];
            let logits = session.prefill(&another, |tokens| {
                done.push(tokens);
                Continue(())
            });
            assert_eq!(done, [another.len()]);
            assert_eq!(session.tokens(), text);
            let next = session.generate(logits.unwrap().unwrap(), &greedy, |_| Continue(())).unwrap().tokens;
            assert_eq!(next, fresh(&model, &text, &greedy), "{} {finish:?} of {count}", model.device());
            of_model.push(session.tokens().to_vec());
        }
        let name = model.device().to_string();
        texts.entry(model.config().vocab_size).or_default().push((name, of_model));
    }
    for texts in texts.values() {
        let (_, of_cpu) = &texts[0];
        assert!(texts.len() > 1);
        texts.iter().for_each(|(device, texts)| assert_eq!(texts, of_cpu, "{device}"));
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

/// With layers that have keys and values, and with layers whose state does not grow.
#[test]
fn the_size_of_a_cache_is_known_before_there_is_one() {
    for model in models() {
        let size = model.cache_size().unwrap();
        let layers = model.config().num_hidden_layers;
        assert!(size.attention_layers > 0 && size.attention_layers < layers && size.fixed > 0, "{size:?}");
        for tokens in [1, 300] {
            let mut cache = model.cache();
            model.forward(&vec![1; tokens], &mut cache, Logits::None).unwrap();
            assert_eq!(cache.size_bytes(), size.bytes(tokens), "{tokens} tokens");
        }
    }
}

#[test]
fn a_bias_decides_what_is_written() {
    for model in models() {
        let prompt = ids(&model, PROMPTS[0]);
        let write = |biases: &[(u32, f32)]| {
            let options = options(SampleParams::default(), 6).with_logit_bias(biases.to_vec());
            fresh(&model, &prompt, &options)
        };
        let plain = write(&[]);
        assert_eq!(write(&[(plain[0], 0.0)]), plain);
        assert_eq!(write(&[(7, 1e4)]), [7; 6]);
        let never: Vec<_> = plain.iter().map(|&id| (id, f32::NEG_INFINITY)).collect();
        assert!(!write(&never).iter().any(|id| plain.contains(id)));
        let mut session = Session::new(&model);
        let logits = session.prefill(&prompt, |_| Continue(())).unwrap().unwrap();
        let vocabulary = model.config().vocab_size;
        let beyond = options(SampleParams::default(), 6).with_logit_bias(vec![(vocabulary as u32, 1.0)]);
        let message = session.generate(logits, &beyond, |_| Continue(())).unwrap_err().to_string();
        assert!(message.contains(&format!("{vocabulary} rows")), "{message}");
    }
}

/// Replies in turn with a grammar and without one: none is held to another's.
#[test]
fn a_grammar_decides_what_is_written() {
    for model in models() {
        let vocab_size = model.config().vocab_size;
        let mut session = Session::new(&model);
        for (turn, sampling) in samplings().into_iter().enumerate() {
            let prompt = ids(&model, PROMPTS[turn % PROMPTS.len()]);
            let free = options(sampling, 9);
            let held = free.clone().with_grammar(Arc::new(Thirds { vocab_size, length: 6 }));
            let what = format!("{} turn {turn}", model.device());
            let before = [session.tokens(), &prompt].concat();
            let got = reply(&mut session, &prompt, &held);
            assert_eq!((got.tokens.len(), got.finish), (6, Finish::Stop), "{what}");
            assert!(Thirds::fit(&got.tokens), "{what}: {:?}", got.tokens);
            assert_eq!(got.tokens, fresh(&model, &before, &held), "{what}");
            assert_eq!(got.tokens[0], first_of(&model, &before, &held), "{what}");
            let cut = reply(&mut session, &prompt, &held.clone().with_max_tokens(4));
            assert_eq!((cut.tokens.len(), cut.finish), (4, Finish::Length), "{what}");
            goes_on(&model, &mut session, &prompt, &free);
            assert_eq!(reply(&mut session, &prompt, &free).tokens.len(), 9, "{what}");
        }
    }
}

/// The first token of a greedy reply in [`Thirds`], by a bias against all that it forbids; any
/// other reply's own.
fn first_of(model: &Model, text: &[u32], held: &GenerationOptions) -> u32 {
    if held.sampling != SampleParams::default() {
        return fresh(model, text, held)[0];
    }
    let forbidden = (0..model.config().vocab_size as u32).filter(|id| id % 3 != 0);
    let biases = forbidden.map(|id| (id, f32::NEG_INFINITY)).collect();
    fresh(model, text, &options(held.sampling, 1).with_logit_bias(biases))[0]
}

#[test]
fn a_grammar_that_fails_ends_the_reply() {
    let model = &models()[0];
    let mut session = Session::new(model);
    let logits = session.prefill(&ids(model, PROMPTS[0]), |_| Continue(())).unwrap().unwrap();
    // It forbids what it must take next.
    let broken = Thirds { vocab_size: 0, length: 6 };
    let held = options(SampleParams::default(), 6).with_grammar(Arc::new(broken));
    let error = session.generate(logits, &held, |_| Continue(())).unwrap_err();
    assert_eq!(error.to_string(), "the grammar: no token is left");
}

/// 8 bits take little more than half of what f16 does, and leave the logits near.
#[test]
fn a_cache_of_8_bits_is_small_and_near() {
    let host = Device::cpu(Some(2)).unwrap();
    let demo = root().join("models/demo-4bit");
    let [half, small] =
        [FloatType::F16.into(), CacheType::Int8].map(|cache| load_with_cache(&demo, &host, cache));
    let [whole, less] = [&half, &small].map(|model| model.cache_size().unwrap());
    // Heads of 64: 80 bytes for 128.
    assert_eq!(less.per_token * 128, whole.per_token * 80);
    assert_eq!((less.fixed, less.attention_layers), (whole.fixed, whole.attention_layers));
    let logits = [&half, &small].map(|model| {
        let mut cache = model.cache();
        model.forward(&PROMPT, &mut cache, Logits::Last).unwrap();
        let logits = model.forward(&[11], &mut cache, Logits::Last).unwrap().unwrap();
        assert_eq!(cache.size_bytes(), model.cache_size().unwrap().bytes(PROMPT.len() + 1));
        logits.as_slice::<f32>().unwrap().to_vec()
    });
    let chances = logits.map(|logits| {
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        logits.iter().map(|&x| f64::from(x).exp() / total).collect::<Vec<_>>()
    });
    let divergence: f64 = chances[0].iter().zip(&chances[1]).map(|(p, q)| p * (p / q).ln()).sum();
    assert!((0.0..1e-3).contains(&divergence), "{divergence:e}");
    assert!(divergence > 1e-12, "the cache was not in 8 bits");
}

#[test]
fn heads_and_latents_that_8_bits_do_not_take_are_refused() {
    let refusal = |name: &str| {
        let checkpoint =
            lowbit_files::Checkpoint::open(&root().join("tests/vectors/models").join(name)).unwrap();
        let target = Target::new(&Device::cpu(Some(1)).unwrap(), None).unwrap().with_cache(CacheType::Int8);
        Model::load_for(&checkpoint, target).unwrap_err().to_string()
    };
    assert_eq!(
        refusal("qwen3"),
        "attention: the type of cache is q8_0, but heads of 24 take f32, f16 and bf16: 8 bits take multiples of 16 up to 512"
    );
    assert_eq!(
        refusal("deepseek_v3"),
        "latent_attention: the type of cache is q8_0, but latents take f32, f16 and bf16"
    );
}
