//! Replies of real models: those of a session, whoever runs beside them and whatever was cached.

use crate::support::thirds::Thirds;
use crate::support::{alone, ask, exact, ids, load, options, patient, start};
use lowbit_engine::{Backend, EngineError, Finish, Request};
use lowbit_models::Model;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model of attention alone, two with recurrent states, and two with windows, which keep 320
/// tokens.
const MODELS: [&str; 5] = ["qwen3", "qwen3_5", "demo-4bit", "gemma4", "mistral"];

#[test]
fn t12_replies_alone_are_those_of_a_session() {
    for name in MODELS {
        let model = exact(name);
        let engine = start(&model, patient(&model).with_prefix_cache(false));
        for (index, length) in [1, 64, 100, 200].into_iter().enumerate() {
            let request =
                Request::new(ids(&model, index as u32, length)).with_options(options(index as u64, 16));
            let answer = ask(&engine, request.clone()).answer();
            let (finish, usage) = answer.end.unwrap();
            assert_eq!((answer.tokens, finish), alone(&model, &request), "{name} after {length}");
            assert_eq!((usage.prompt_tokens, usage.completion_tokens), (length, 16));
        }
    }
}

#[test]
fn t12_t33_twelve_side_by_side_each_equal_themselves_alone() {
    for name in MODELS {
        let model = exact(name);
        let request = |index: u32| {
            let length = 20 + 13 * index as usize;
            // They end at different times.
            let options = options(index.into(), 6 + 2 * index as usize);
            Request::new(ids(&model, index, length)).with_options(options).with_logprobs(2)
        };
        let scored = |engine: &lowbit_engine::Engine, index| ask(engine, request(index)).answer();
        let engine = start(&model, patient(&model).with_prefix_cache(false));
        let each: Vec<_> = (0..12).map(|index| scored(&engine, index)).collect();
        let asked: Vec<_> = (0..12).map(|index| ask(&engine, request(index))).collect();
        let together: Vec<_> = asked.into_iter().map(|asked| asked.answer()).collect();
        let (mut equal, mut all, mut worst) = (0, 0, 0.0f64);
        for (index, (alone, beside)) in each.iter().zip(&together).enumerate() {
            assert_eq!(alone.tokens, beside.tokens, "{name}: request {index}");
            assert_eq!(beside.logprobs.len(), beside.tokens.len());
            for (a, b) in alone.logprobs.iter().zip(&beside.logprobs) {
                assert_eq!(a.top.len(), 2);
                let (a, b) = (a.token.logprob, b.token.logprob);
                all += 1;
                equal += usize::from(a == b);
                worst = worst.max((a - b).abs());
            }
            let (finish, usage) = beside.end.as_ref().unwrap();
            assert_eq!((*finish, usage.completion_tokens), (Finish::Length, 6 + 2 * index));
        }
        println!(
            "{name}: {equal} of {all} log-probabilities have the same bits, the worst is {worst:e} away"
        );
        assert!(worst <= 1e-4, "{name}: {worst:e}");
        assert!(engine.stats().last_batch > 0);
    }
}

#[test]
fn t22_grammars_hold_their_own_requests_alone() {
    for name in MODELS {
        let model = exact(name);
        let engine = start(&model, patient(&model).with_prefix_cache(false));
        let request = |index: u32| {
            // Every second one is held; the last one's grammar fails.
            let vocab_size = if index == 7 { 0 } else { model.config().vocab_size };
            let mut options = options(index.into(), 12);
            if index % 2 == 1 {
                options = options.with_grammar(Arc::new(Thirds { vocab_size, length: 8 }));
            }
            Request::new(ids(&model, index, 20 + index as usize)).with_options(options)
        };
        let asked: Vec<_> = (0..8).map(|index| ask(&engine, request(index))).collect();
        for (index, asked) in (0..8).zip(asked) {
            let answer = asked.answer();
            if index == 7 {
                let error = answer.end.unwrap_err();
                assert!(matches!(error, EngineError::Model(_)), "{error}");
                assert_eq!(error.to_string(), "the grammar: no token is left");
                continue;
            }
            let finish = answer.end.unwrap().0;
            assert_eq!((answer.tokens.clone(), finish), alone(&model, &request(index)), "{name}: {index}");
            let (length, end) = if index % 2 == 1 { (8, Finish::Stop) } else { (12, Finish::Length) };
            assert_eq!((answer.tokens.len(), finish), (length, end), "{name}: {index}");
            assert!(index % 2 == 0 || Thirds::fit(&answer.tokens), "{name}: {index}");
        }
    }
}

#[test]
fn t1_t4_t5_t13_what_is_cached_changes_no_reply() {
    for name in MODELS {
        let model = exact(name);
        let engine = start(&model, patient(&model));
        let cold = start(&model, patient(&model).with_prefix_cache(false));
        let same = |request: &Request, cached: usize, what: &str| {
            let (warm, fresh) =
                (ask(&engine, request.clone()).answer(), ask(&cold, request.clone()).answer());
            assert_eq!(warm.tokens, fresh.tokens, "{name}: {what}");
            assert_eq!(warm.cached, cached, "{name}: {what}");
            assert_eq!(warm.end.unwrap().1.cached_tokens, cached);
            warm.tokens
        };
        let system = ids(&model, 1, 140);
        let user = |seed: u32, length: usize| [&system[..], &ids(&model, seed, length)].concat();
        let request = |prompt: Vec<u32>, index| {
            Request::new(prompt).with_options(options(index, 12)).with_checkpoints(vec![system.len()])
        };
        let first = request(user(2, 40), 0);
        let reply = same(&first, 0, "cold");
        same(&first, 128, "sent again");
        same(&request(user(3, 70), 1), 128, "another message after the same system prompt");
        // The reply is read again: what steps computed is not cached.
        let turn = [&first.prompt[..], &reply, &ids(&model, 4, 30)].concat();
        let reply = same(&request(turn.clone(), 2), 128, "a turn");
        let turn = [&turn[..], &reply, &ids(&model, 5, 9)].concat();
        same(&request(turn, 3), 192, "another turn");
    }
}

/// A text whose windows have moved on is entered where a window was kept.
#[test]
fn windows_are_kept_for_others() {
    for name in ["gemma4", "mistral"] {
        let model = exact(name);
        let engine = start(&model, patient(&model));
        let system = ids(&model, 1, 140);
        let request = |seed: u32, length: usize| {
            let prompt = [&system[..], &ids(&model, seed, length)].concat();
            Request::new(prompt).with_options(options(seed.into(), 16)).with_checkpoints(vec![system.len()])
        };
        for (request, cached) in [
            (request(2, 300), 0),
            (request(3, 250), 128),
            (request(2, 300), 384),
            (request(4, 20), 128),
            (request(3, 250), 384),
        ] {
            let answer = ask(&engine, request.clone()).answer();
            assert_eq!(answer.cached, cached, "{name}");
            assert_eq!(answer.tokens, alone(&model, &request).0, "{name}: {cached} cached");
        }
    }
}

#[test]
fn replies_to_one_prompt_read_it_once_and_differ_by_their_seeds() {
    let model = exact("qwen3_5");
    let engine = start(&model, patient(&model));
    let request = |index| Request::new(ids(&model, 1, 200)).with_options(options(2 * index + 1, 12));
    let asked: Vec<_> = (0..4).map(|index| ask(&engine, request(index))).collect();
    let answers: Vec<_> = asked.into_iter().map(|asked| asked.answer()).collect();
    for (index, answer) in answers.iter().enumerate() {
        assert_eq!(answer.tokens, alone(&model, &request(index as u64)).0, "{index}");
    }
    assert_ne!(answers[0].tokens, answers[1].tokens);
    assert_eq!(answers.iter().map(|answer| answer.cached).sum::<usize>(), 3 * 192);
}

#[test]
fn t31_preempted_requests_write_what_they_would_have_written() {
    for name in ["qwen3", "qwen3_5", "gemma4"] {
        let model = exact(name);
        let size = model.cache_size().unwrap();
        // Three start, and one of them has room to grow.
        let budget = 3 * size.bytes(256) + (size.bytes(512) - size.bytes(256));
        let request = |index: u32| {
            let length = 180 + 10 * index as usize;
            Request::new(ids(&model, index, length)).with_options(crate::support::options(index.into(), 120))
        };
        let expected: Vec<_> = (0..3).map(|index| alone(&model, &request(index)).0).collect();
        // On a busy machine the last may come when the first has grown: then it waits instead.
        let preempts = |_| {
            let options = patient(&model).with_cache_bytes(budget).with_reply_room(1);
            let engine = start(&model, options);
            let asked: Vec<_> = (0..3).map(|index| ask(&engine, request(index))).collect();
            for (index, asked) in asked.into_iter().enumerate() {
                assert_eq!(asked.answer().tokens, expected[index], "{name}: {index}");
            }
            let stats = engine.stats();
            assert_eq!(stats.preempted > 0, stats.recomputed_tokens > 0, "{name}: {stats:?}");
            stats.preempted > 0
        };
        assert!((0..20).any(preempts), "{name}");
    }
}

/// The price of a cache for prompts that nobody shares: T10 wants at most 2 %.
#[test]
#[ignore = "it is timed"]
fn t10_unique_prompts_are_timed() {
    for (name, lengths) in [("qwen3", [100, 300, 450]), ("demo-4bit", [100, 400, 1500])] {
        time_unique_prompts(&load(name, false), lengths);
    }
}

fn time_unique_prompts(model: &Model, lengths: [usize; 3]) {
    let engines = [true, false].map(|keeps| start(model, patient(model).with_prefix_cache(keeps)));
    // Spread over all bits: `ids` takes few of them.
    let mut seeds = (0u32..).map(|index| index.wrapping_mul(2_654_435_761));
    for length in lengths {
        let mut times = [vec![], vec![]];
        // By turns, so that what else the machine does falls on both.
        for _ in 0..21 {
            for (engine, times) in engines.iter().zip(&mut times) {
                let begin = Instant::now();
                let asked: Vec<_> = seeds
                    .by_ref()
                    .take(4)
                    .map(|seed| {
                        ask(engine, Request::new(ids(model, seed, length)).with_options(options(0, 32)))
                    })
                    .collect();
                assert!(asked.into_iter().all(|asked| asked.answer().cached == 0));
                times.push(begin.elapsed());
            }
        }
        let [with, without] = times.map(|mut times: Vec<Duration>| {
            times.sort();
            times[times.len() / 2].as_secs_f64()
        });
        let cost = (with / without - 1.0) * 100.0;
        println!("4 prompts of {length} tokens: {with:.4} s, {without:.4} s without a cache ({cost:+.1} %)");
    }
}
