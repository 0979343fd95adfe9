//! The pool on a CPU, which computes what a GPU does: whole engines, with guesses and without.

use super::*;
use crate::{Backend, Engine, Event};
use lowbit_files::Checkpoint;
use lowbit_kernels::ops::SampleParams;
use lowbit_models::{Model, Script, Target};
use std::collections::HashMap;
use std::ops::ControlFlow::Continue;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

fn checkpoint(name: &str) -> Checkpoint {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
    Checkpoint::open(&models.join(name)).unwrap()
}

fn load(name: &str) -> Model {
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
    Model::load_for(&checkpoint(name), target).unwrap()
}

/// Greedy ones, drawn ones with penalties, and a biased one, of different lengths.
fn requests(model: &Model, count: u32) -> Vec<Request> {
    let size = model.config().vocab_size as u32;
    let request = |seed: u32| {
        let id = |i: u32| (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)).rotate_left(7) % size;
        let drawn = SampleParams {
            temperature: 0.9,
            top_k: 30,
            repetition_penalty: 1.2,
            seed: seed.into(),
            ..Default::default()
        };
        let sampling = if seed.is_multiple_of(2) { SampleParams::default() } else { drawn };
        let options = GenerationOptions::default()
            .with_sampling(sampling)
            .with_max_tokens(8 + 3 * seed as usize)
            .with_repetition_context(20)
            .with_logit_bias(if seed == 2 { vec![(3, 2.0)] } else { vec![] });
        Request::new((0..40 + 33 * seed).map(id).collect()).with_options(options)
    };
    (0..count).map(request).collect()
}

/// The replies to `requests`, which are submitted together, and the prompts' cached tokens.
fn replies(engine: &Engine, requests: &[Request]) -> Vec<(Vec<u32>, usize)> {
    let mut asked = vec![];
    for request in requests {
        let (sender, events) = channel();
        let sink = Box::new(move |event| {
            let _ = sender.send(event);
            Continue(())
        });
        asked.push((engine.submit(request.clone(), sink).unwrap(), events));
    }
    let mut all = vec![];
    for (_handle, events) in asked {
        let (mut tokens, mut cached) = (vec![], 0);
        for event in events {
            match event {
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Token { id, .. } => tokens.push(id),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        all.push((tokens, cached));
    }
    all
}

fn start(model: &Model, guesses: Option<Guesses>) -> Engine {
    let mut options = EngineOptions::new(model.device())
        .with_max_running(6)
        .with_cache_bytes(64 << 20)
        .with_target_inter_token(Duration::from_secs(60));
    options.guesses = guesses;
    Engine::start_pooled(model.clone(), options).unwrap()
}

#[test]
fn guesses_in_a_pool_change_no_reply() {
    for name in ["qwen3", "qwen3_5", "gemma4_small", "granite_hybrid"] {
        let model = load(name);
        let requests = requests(&model, 5);
        let want = replies(&start(&model, None), &requests);
        let mut texts = HashMap::new();
        for (request, (tokens, _)) in requests.iter().zip(&want) {
            texts.insert(request.prompt.clone(), [&request.prompt[..], tokens].concat());
        }
        for share in [1.0, 0.6] {
            let texts = texts.clone();
            let script = Guesses::of_drafters(move |request| {
                Box::new(Script::new(texts[&request.prompt].clone(), share))
            });
            let engine = start(&model, Some(script.with_fixed_pace()));
            let got = replies(&engine, &requests);
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.0, want.0, "{name}, {share} right: {index}");
            }
            let stats = engine.stats();
            assert!(stats.accepted_tokens > 0 && stats.accepted_tokens <= stats.drafted_tokens);
            assert_eq!(stats.accepted_tokens == stats.drafted_tokens, share == 1.0, "{name}: {stats:?}");
        }
    }
}

/// T9: the layer's keys and values are in the pages that prompts share.
#[test]
fn t9_a_models_own_guesses_in_a_pool_change_no_reply() {
    for name in ["qwen3_5", "glm4_moe", "deepseek_v3"] {
        let model = load(name);
        let requests = requests(&model, 5);
        let want = replies(&start(&model, None), &requests);
        let mtp = || Guesses::mtp(Predictor::load(&checkpoint(name), &model).unwrap());
        for (guesses, fixed) in [(mtp().with_fixed_pace(), true), (mtp().with_most(2), false)] {
            let engine = start(&model, Some(guesses));
            for what in ["cold", "warm"] {
                for (index, (got, want)) in replies(&engine, &requests).iter().zip(&want).enumerate() {
                    assert_eq!(got.0, want.0, "{name} {what}: {index}");
                    let length = requests[index].prompt.len();
                    assert!(what == "cold" || got.1 + 64 + length % 64 >= length, "{name}: {} cached", got.1);
                }
            }
            assert!(engine.stats().drafted_tokens > 0 || !fixed, "{name}");
        }
    }
}

#[test]
fn a_budget_is_cut_into_states_and_pages() {
    let size = |per_token, fixed| {
        let mut size = CacheSize::default();
        (size.per_token, size.fixed, size.widest) = (per_token, fixed, 1024);
        size
    };
    // 9B: 32 KiB a token, 50 MiB of states; 48 GiB hold what the budget says, less a fifth.
    let (token, states) = (32 << 10, 50 << 20);
    let parts = Parts::of(&size(token, states), 48 << 30, [64, 4096]);
    let some = |slots, marks, pages| Parts { slots, marks, pages, window_pages: 0 };
    assert_eq!(parts, some(64, 196, 18_050));
    let bytes = (parts.slots + 1 + parts.marks) * states + (parts.pages + 1) * 64 * token;
    assert!(bytes <= 48 << 30 && bytes + 64 * token > 48 << 30);
    // A small budget runs fewer; one that is far too small runs none of any length.
    let of = |size: CacheSize, bytes| Parts::of(&size, bytes, [64, 4096]);
    assert_eq!(of(size(token, states), 1 << 30), some(5, 4, 261));
    assert_eq!(of(size(token, states), 1 << 20), some(1, 0, 0));
    // Attention alone takes all for pages, as many as 32 bits count elements of.
    assert_eq!(of(size(token, 0), 4 << 30), some(64, 0, 2047));
    assert_eq!(of(size(token, 0), 1 << 50).pages, 65_534);
    // Gemma 4 31B: 50 layers of 16 KiB a token that keep 18 pages for windows of 1,024, and
    // 10 of 8 KiB that keep all.
    let mut windowed = size(80 << 10, 0);
    (windowed.windowed, windowed.window) = (800 << 10, 1344);
    let parts = of(windowed, 48 << 30);
    let window_pages = parts.slots * 20 + parts.marks * 18 + 64;
    assert_eq!(parts, Parts { slots: 12, marks: 10, pages: 4789, window_pages });
    let bytes = ((parts.pages + 1) * (80 << 10) + (window_pages + 20) * (800 << 10)) * 64;
    assert!(bytes <= 48 << 30 && bytes + 64 * (80 << 10) > 48 << 30, "{bytes}");
}
