//! Steps that verify guesses: replies are those of steps without any, and on a CPU, where matrices
//! are quantised, bit for bit.

use crate::support::thirds::Thirds;
use crate::support::{Answer, ask, checkpoint, exact, ids, load, options, patient, start};
use lowbit_engine::{Backend, Engine, Finish, Guesses, Predictor, Request};
use lowbit_models::{Model, Script};
use std::collections::HashMap;
use std::sync::Arc;

/// Small quantised models: attention, delta nets, experts, a window with floats of 4 and 8 bits.
const QUANTISED: [&str; 4] = ["qwen3-mlx-4bit", "qwen3_5-mlx-8bit", "qwen3_5_moe-mlx-4bit", "mistral-mlx-fp"];

/// The likeliest tokens of a reply, as bits.
type Bits = Vec<(u32, u64)>;

fn bits(answer: &Answer) -> Bits {
    let each = answer.logprobs.iter().map(|it| (it.token.id, it.token.logprob.to_bits()));
    assert_eq!(answer.logprobs.len(), answer.tokens.len());
    each.collect()
}

/// Requests that end at different times, greedy and drawn with penalties.
fn requests(model: &Model) -> Vec<Request> {
    let request = |index: u32| {
        let prompt = ids(model, index, 20 + 11 * index as usize);
        Request::new(prompt).with_options(options(index.into(), 9 + 2 * index as usize)).with_logprobs(1)
    };
    (0..7).map(request).collect()
}

/// Guesses of these texts, of which a share is right.
fn script(texts: &HashMap<Vec<u32>, Vec<u32>>, share: f64) -> Guesses {
    let texts = texts.clone();
    let guesses = Guesses::of_drafters(move |request| {
        let text = texts.get(&request.prompt).cloned().unwrap_or_default();
        Box::new(Script::new(text, share))
    });
    guesses.with_fixed_pace()
}

/// The answers to `requests`, side by side or one after the other.
fn answers(engine: &Engine, requests: &[Request], together: bool) -> Vec<Answer> {
    let asked = requests.iter().map(|request| ask(engine, request.clone()));
    match together {
        true => asked.collect::<Vec<_>>().into_iter().map(|asked| asked.answer()).collect(),
        false => asked.map(|asked| asked.answer()).collect(),
    }
}

fn texts(requests: &[Request], answers: &[Answer]) -> HashMap<Vec<u32>, Vec<u32>> {
    let text = |(request, answer): (&Request, &Answer)| {
        (request.prompt.clone(), [&request.prompt[..], &answer.tokens].concat())
    };
    requests.iter().zip(answers).map(text).collect()
}

#[test]
fn t13_guesses_change_no_bit() {
    for name in QUANTISED {
        let model = load(name, false);
        let requests = requests(&model);
        let plain = answers(&start(&model, patient(&model)), &requests, false);
        let texts = texts(&requests, &plain);
        for share in [1.0, 0.6, 0.0] {
            let engine = start(&model, patient(&model).with_guesses(script(&texts, share)));
            // Cold and alone, warm and alone, warm and side by side.
            for (together, what) in [(false, "cold"), (false, "warm"), (true, "batch")] {
                for (index, answer) in answers(&engine, &requests, together).iter().enumerate() {
                    let (want, case) = (&plain[index], format!("{name}, {share} right, {what}: {index}"));
                    assert_eq!(answer.tokens, want.tokens, "{case}");
                    assert_eq!(bits(answer), bits(want), "{case}");
                    let usage = answer.end.as_ref().unwrap().1;
                    assert_eq!(usage.completion_tokens, answer.tokens.len());
                    let all = usage.accepted_tokens == usage.drafted_tokens;
                    assert!(together || all || share < 1.0, "{name}: {usage:?}");
                }
            }
            let stats = engine.stats();
            assert!(stats.drafted_tokens > 0 && stats.accepted_tokens <= stats.drafted_tokens);
            assert!(share == 0.0 || stats.accepted_tokens > 0, "{name}: {stats:?}");
            assert!(share < 1.0 || stats.decode_passes < 3 * stats.completion_tokens / 4, "{stats:?}");
        }
    }
}

/// The layers of models that predict further tokens, by one that has recurrent states besides.
#[test]
fn t9_t13_a_models_own_guesses_change_nothing_and_prompts_sent_again_are_cached() {
    for name in ["qwen3_5", "glm4_moe", "deepseek_v3"] {
        let model = exact(name);
        let predictor = Predictor::load(&checkpoint(name), &model).unwrap();
        let mtp = || Guesses::mtp(predictor.clone()).with_fixed_pace();
        let engine = start(&model, patient(&model).with_guesses(mtp()));
        let plain = start(&model, patient(&model));
        let length = model.config().max_position_embeddings.min(450) - 30;
        let long = Request::new(ids(&model, 50, length)).with_options(options(0, 12));
        for (what, cached) in [("cold", 0), ("sent again", length - 64)] {
            let (guessed, want) = (ask(&engine, long.clone()).answer(), ask(&plain, long.clone()).answer());
            assert_eq!(guessed.tokens, want.tokens, "{name} {what}");
            assert!(guessed.cached >= cached, "{name}: {} of {length} {what}", guessed.cached);
            assert!(guessed.end.unwrap().1.drafted_tokens > 0, "{name} {what}");
        }
        let requests = requests(&model);
        let want = answers(&plain, &requests, false);
        for (together, what) in [(false, "alone"), (true, "batch")] {
            let got = answers(&engine, &requests, together);
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.tokens, want.tokens, "{name} {what}: {index}");
            }
        }
    }
}

#[test]
fn texts_that_repeat_themselves_guess_themselves() {
    let model = load("qwen3_5-mlx-8bit", false);
    let requests: Vec<_> = (0..3)
        .map(|index| {
            let prompt = ids(&model, index, 11).repeat(5);
            Request::new(prompt).with_options(options(index.into(), 24)).with_logprobs(1)
        })
        .collect();
    let want = answers(&start(&model, patient(&model)), &requests, false);
    let engine = start(&model, patient(&model).with_guesses(Guesses::ngrams().with_most(4)));
    for (got, want) in answers(&engine, &requests, true).iter().zip(&want) {
        assert_eq!(bits(got), bits(want));
    }
}

#[test]
fn t22_stops_and_grammars_hold_within_a_step() {
    let model = load("qwen3_5_moe-mlx-4bit", false);
    let cold = || patient(&model).with_prefix_cache(false);
    let held = |index: u32| {
        let vocab_size = model.config().vocab_size;
        let form = Arc::new(Thirds { vocab_size, length: 8 });
        let options = options(index.into(), 12).with_grammar(form);
        Request::new(ids(&model, index, 20)).with_options(options)
    };
    let requests: Vec<_> = (0..4).map(held).collect();
    let plain = answers(&start(&model, cold()), &requests, false);
    for share in [1.0, 0.6] {
        let engine = start(&model, cold().with_guesses(script(&texts(&requests, &plain), share)));
        for (got, want) in answers(&engine, &requests, true).iter().zip(&plain) {
            assert_eq!((&got.tokens, got.tokens.len()), (&want.tokens, 8));
            assert!(Thirds::fit(&got.tokens));
            assert_eq!(got.end.as_ref().unwrap().0, Finish::Stop);
        }
        assert!(engine.stats().accepted_tokens > 0);
    }
    // Ids that end a reply, at every place of a step, and limits.
    let free = Request::new(ids(&model, 9, 30)).with_options(options(1, 12));
    let whole = ask(&start(&model, cold()), free.clone()).answer().tokens;
    let texts = HashMap::from([(free.prompt.clone(), [&free.prompt[..], &whole].concat())]);
    let engine = start(&model, cold().with_guesses(script(&texts, 1.0)));
    for end in 0..whole.len() {
        let mut request = free.clone();
        request.options.stop_ids = vec![whole[end]];
        let first = whole.iter().position(|id| *id == whole[end]).unwrap();
        let answer = ask(&engine, request).answer();
        let (finish, usage) = answer.end.unwrap();
        assert_eq!((&answer.tokens[..], finish), (&whole[..first], Finish::Stop));
        assert_eq!(usage.completion_tokens, first + 1);
        let mut request = free.clone();
        request.options.max_tokens = end;
        let answer = ask(&engine, request).answer();
        assert_eq!((&answer.tokens[..], answer.end.unwrap().0), (&whole[..end], Finish::Length));
    }
}

#[test]
fn t31_preempted_requests_guess_what_they_would_have_written() {
    for name in ["qwen3", "qwen3_5", "gemma4"] {
        let model = exact(name);
        let size = model.cache_size().unwrap();
        let bytes = |tokens: usize| size.whole_per_token() * tokens + size.fixed;
        let budget = 3 * bytes(256) + (bytes(512) - bytes(256));
        let limited = patient(&model).with_cache_bytes(budget).with_reply_room(1);
        let requests: Vec<_> = (0..3)
            .map(|index: u32| {
                let prompt = ids(&model, index, 180 + 10 * index as usize);
                Request::new(prompt).with_options(options(index.into(), 120))
            })
            .collect();
        let plain = answers(&start(&model, patient(&model)), &requests, false);
        let engine = start(&model, limited.with_guesses(script(&texts(&requests, &plain), 0.7)));
        for (got, want) in answers(&engine, &requests, true).iter().zip(&plain) {
            assert_eq!(got.tokens, want.tokens, "{name}");
        }
        let stats = engine.stats();
        assert!(stats.preempted > 0 && stats.accepted_tokens > 0, "{name}: {stats:?}");
    }
}
