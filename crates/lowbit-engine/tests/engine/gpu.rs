//! The engine on a GPU, whose caches are in a pool: on Vulkan, which a software driver gives
//! everywhere, or on what `LOWBIT_GPU` names.
#![cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]

use crate::support::{alone, ask, ids, options, patient, settle, start};
use lowbit_engine::{Backend, Guesses, Predictor, Request};
use lowbit_formats::FloatType;
use lowbit_models::{Model, Script};
use std::collections::HashMap;

/// Models of attention alone, with states, and with windows.
const MODELS: [&str; 3] = ["qwen3", "qwen3_5", "gemma4_small"];

fn small(name: &str) -> Model {
    crate::device::load(
        &crate::device::root().join("tests/vectors/models").join(name),
        &crate::device::gpu(),
        FloatType::F32,
    )
}

#[test]
fn replies_side_by_side_are_those_alone() {
    for name in MODELS {
        let model = small(name);
        let engine = start(&model, patient(&model).with_max_running(4));
        let requests: Vec<_> = [70, 9, 130, 64, 33]
            .into_iter()
            .enumerate()
            .map(|(seed, length)| {
                let (seed, tokens) = (seed as u32, 4 + 2 * seed);
                Request::new(ids(&model, seed, length)).with_options(options(seed.into(), tokens))
            })
            .collect();
        let asked: Vec<_> = requests.iter().map(|request| ask(&engine, request.clone())).collect();
        for (asked, request) in asked.into_iter().zip(&requests) {
            assert_eq!(asked.answer().tokens, alone(&model, request).0, "{name}");
        }
        settle(&engine);
        assert_eq!(engine.stats().running_bytes, 0);
    }
}

#[test]
fn a_prompt_seen_before_is_entered_where_it_was_left() {
    for name in MODELS {
        let model = small(name);
        let engine = start(&model, patient(&model));
        let first = Request::new(ids(&model, 1, 150)).with_options(options(0, 5));
        assert_eq!(ask(&engine, first.clone()).answer().tokens, alone(&model, &first).0);
        // Two go on from it at the same time: one takes its caches, the other shares their pages.
        let requests = [2, 3].map(|seed| {
            let prompt = [&first.prompt[..], &ids(&model, seed, 20)].concat();
            Request::new(prompt).with_options(options(seed.into(), 6)).with_logprobs(2)
        });
        let asked = requests.clone().map(|request| ask(&engine, request));
        for (asked, request) in asked.into_iter().zip(&requests) {
            let answer = asked.answer();
            assert_eq!((answer.cached, answer.logprobs.len()), (128, 6), "{name}");
            assert_eq!(answer.tokens, alone(&model, request).0, "{name}");
        }
    }
}

/// Passes over guesses are captured and replayed, and so are the moves of states behind them.
#[test]
fn guesses_change_no_reply() {
    for name in MODELS {
        let model = small(name);
        let request = |seed: u32| {
            let prompt = ids(&model, seed, 20 + 30 * seed as usize);
            Request::new(prompt).with_options(options(seed.into(), 12))
        };
        let requests: Vec<_> = (0..3).map(request).collect();
        let mut texts = HashMap::new();
        for request in &requests {
            let text = [&request.prompt[..], &alone(&model, request).0].concat();
            texts.insert(request.prompt.clone(), text);
        }
        let script =
            Guesses::of_drafters(move |request| Box::new(Script::new(texts[&request.prompt].clone(), 0.7)));
        let mut sources = vec![script];
        if name == "qwen3_5" {
            let checkpoint = crate::support::checkpoint(name);
            sources.push(Guesses::mtp(Predictor::load(&checkpoint, &model).unwrap()));
        }
        for guesses in sources {
            let engine = start(&model, patient(&model).with_guesses(guesses.with_fixed_pace()));
            let asked: Vec<_> = requests.iter().map(|request| ask(&engine, request.clone())).collect();
            for (asked, request) in asked.into_iter().zip(&requests) {
                assert_eq!(asked.answer().tokens, alone(&model, request).0, "{name}");
            }
            settle(&engine);
            let stats = engine.stats();
            assert!(stats.drafted_tokens > 0 && stats.running_bytes == 0, "{name}: {stats:?}");
        }
    }
}

#[test]
fn a_short_budget_preempts_and_changes_nothing() {
    // One whose windows take memory of their own runs one text at a time in so little.
    for name in &MODELS[..2] {
        let model = small(name);
        let limited = |bytes| start(&model, patient(&model).with_cache_bytes(bytes).with_reply_room(1));
        // Seven pages, for three texts of four that begin with three.
        let page = 64 * model.cache_size().unwrap().per_token;
        let longest = |pages| limited(pages * page);
        let engine = (7..).map(longest).find(|engine| engine.context() == 448).unwrap();
        let requests =
            [1, 2, 3].map(|seed| Request::new(ids(&model, seed, 180)).with_options(options(seed.into(), 20)));
        let asked = requests.clone().map(|request| ask(&engine, request));
        for (asked, request) in asked.into_iter().zip(&requests) {
            assert_eq!(asked.answer().tokens, alone(&model, request).0, "{name}");
        }
        settle(&engine);
        assert!(engine.stats().preempted > 0, "{name}");
    }
}
