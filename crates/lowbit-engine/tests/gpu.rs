//! The engine on a GPU, whose caches are in a pool: on Vulkan, which a software driver gives
//! everywhere, or on what `LOWBIT_GPU` names.
#![cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]

#[path = "../../lowbit-models/tests/support/mod.rs"]
mod device;
mod support;

use lowbit_engine::{Backend, Request};
use lowbit_formats::FloatType;
use lowbit_models::{Model, Target};
use support::{alone, ask, ids, options, patient, settle, start};

/// Models of attention alone, with states, and with windows.
const MODELS: [&str; 3] = ["qwen3", "qwen3_5", "gemma4_small"];

fn small(name: &str) -> Model {
    device::load(&device::root().join("tests/vectors/models").join(name), &device::gpu(), FloatType::F32)
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
