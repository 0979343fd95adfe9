//! Queues, cancelling, ending, and what goes wrong.

use crate::support::tiny::Tiny;
use crate::support::{alone, ask, exact, ids, options, patient, settle, start};
use lowbit_engine::{Backend, Engine, EngineError, Event, Finish, Request};
use lowbit_kernels::Device;
use lowbit_models::{Model, Target};
use std::ops::ControlFlow::Continue;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn is_token(event: &Event) -> bool {
    matches!(event, Event::Token { .. })
}

/// A request that writes for long.
fn long(model: &Model, seed: u32) -> Request {
    Request::new(ids(model, seed, 40)).with_options(options(0, 400))
}

#[test]
fn t24_t30_dropped_handles_free_their_memory() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model).with_max_running(1).with_prefix_cache(false));
    let mut decoding = ask(&engine, long(&model, 1));
    decoding.until(is_token);
    let mut queued = ask(&engine, long(&model, 2));
    queued.handle = None;
    let end = queued.answer();
    assert!(end.tokens.is_empty());
    assert_eq!(end.end.unwrap().0, Finish::Interrupted);
    decoding.handle = None;
    assert_eq!(decoding.answer().end.unwrap().0, Finish::Interrupted);
    settle(&engine);
    assert_eq!((engine.stats().running_bytes, engine.stats().cancelled), (0, 2));
    // The next one is answered as ever.
    let request = Request::new(ids(&model, 3, 30)).with_options(options(1, 5));
    assert_eq!(ask(&engine, request.clone()).answer().tokens, alone(&model, &request).0);
}

#[test]
fn t24_a_prompt_is_given_up_between_its_parts() {
    let model = exact("demo-4bit");
    let engine = start(&model, patient(&model).with_prefill_chunk(64).with_prefix_cache(false));
    let mut asked = ask(&engine, Request::new(ids(&model, 1, 20_000)));
    asked.until(|event| matches!(event, Event::Prompt { .. }));
    asked.handle = None;
    let Event::Finished { finish, .. } = asked.until(|event| matches!(event, Event::Finished { .. })) else {
        unreachable!()
    };
    settle(&engine);
    assert_eq!((finish, engine.stats().running_bytes), (Finish::Interrupted, 0));
}

#[test]
fn t24_a_sink_that_breaks_or_panics_ends_its_request_alone() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model));
    let other = ask(&engine, long(&model, 1));
    let kept: Vec<_> = [true, false]
        .map(|panics| {
            let sink = Box::new(move |event: Event| {
                assert!(!(panics && is_token(&event)), "a sink that panics");
                if is_token(&event) { std::ops::ControlFlow::Break(()) } else { Continue(()) }
            });
            engine.submit(long(&model, 2), sink).unwrap()
        })
        .into();
    let request = long(&model, 1);
    assert_eq!(other.answer().tokens, alone(&model, &request).0);
    settle(&engine);
    assert_eq!((engine.stats().cancelled, engine.stats().finished), (2, 1));
    drop(kept);
}

#[test]
fn t27_the_queue_is_bounded() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model).with_max_running(1).with_max_waiting(2));
    let running = ask(&engine, long(&model, 0));
    running.until(is_token);
    // It counts as waiting until the step that drew the token has ended.
    while engine.stats().waiting > 0 {
        std::thread::yield_now();
    }
    let mut waiting: Vec<_> = (1..3).map(|seed| ask(&engine, long(&model, seed))).collect();
    let refused = engine.submit(long(&model, 3), Box::new(|_| Continue(()))).unwrap_err();
    assert_eq!(refused.to_string(), "2 requests are waiting, and 2 may wait at most");
    // Those who go away make room at once.
    let mut gone = waiting.remove(0);
    gone.handle = None;
    assert_eq!(gone.answer().end.unwrap().0, Finish::Interrupted);
    while engine.stats().waiting == 2 {
        std::thread::yield_now();
    }
    drop(ask(&engine, long(&model, 4)));
}

#[test]
fn t32_draining_answers_what_was_taken_and_stopping_does_not() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model).with_max_running(1));
    let asked = [ask(&engine, long(&model, 1)), ask(&engine, long(&model, 2))];
    engine.drain();
    let refused = engine.submit(long(&model, 3), Box::new(|_| Continue(()))).unwrap_err();
    assert!(matches!(refused, EngineError::Draining), "{refused}");
    for asked in asked {
        assert_eq!(asked.answer().tokens.len(), 400);
    }
    settle(&engine);
    assert!(engine.stats().draining);

    let engine = start(&model, patient(&model).with_max_running(1));
    let asked = [ask(&engine, long(&model, 1)), ask(&engine, long(&model, 2))];
    engine.stop();
    for asked in asked {
        assert_eq!(asked.answer().end.unwrap_err().to_string(), "the engine is shutting down");
    }
    // So does dropping it.
    let engine = start(&model, patient(&model));
    let asked = ask(&engine, long(&model, 1));
    drop(engine);
    assert!(matches!(asked.answer().end, Err(EngineError::Draining)));
}

#[test]
fn t34_wrong_requests_are_refused_with_both_sides() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model).with_cache_bytes(2 << 20));
    let refused = |engine: &Engine, request: Request| {
        engine.submit(request, Box::new(|_| Continue(()))).unwrap_err().to_string()
    };
    assert_eq!(refused(&engine, Request::new(vec![])), "there are no tokens to start from");
    assert_eq!(refused(&engine, Request::new(vec![1, 900])), "token 1 is 900, but the vocabulary has 275");
    assert_eq!(
        refused(&engine, Request::new(vec![1; 600])),
        "the prompt has 600 tokens, but a text may have 512 at most"
    );
    let bias = options(0, 1).with_logit_bias(vec![(275, 1.0)]);
    assert_eq!(
        refused(&engine, Request::new(vec![1]).with_options(bias)),
        "logit_bias: ids[0] is 275, but there are 275 rows to choose from"
    );
    let small = start(&model, patient(&model).with_cache_bytes(1000));
    let size = model.cache_size().unwrap();
    let bytes = size.bytes(1 + 256);
    assert_eq!(
        refused(&small, Request::new(vec![1])),
        format!("the request needs {bytes} bytes of caches, but the budget is 1000")
    );
    assert_eq!((engine.context(), small.context()), (512, 0));
}

#[test]
fn a_row_of_nan_fails_its_request_alone() {
    const BAD: u32 = 5;
    let mut tiny = Tiny::open("llama2");
    let (_, shape, bytes) = tiny.tensor("model.embed_tokens.weight");
    let row = bytes.len() / shape[0];
    bytes[BAD as usize * row..][..row].fill(0xff);
    let (checkpoint, _folder) = tiny.checkpoint();
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
    let model = Model::load_for(&checkpoint.unwrap(), target).unwrap();
    let without = |request: Request| {
        let bias = request.options.clone().with_logit_bias(vec![(BAD, f32::NEG_INFINITY)]);
        request.with_options(bias)
    };
    let good = |seed: u32| {
        let prompt = ids(&model, seed, 30).into_iter().filter(|&id| id != BAD).collect();
        without(Request::new(prompt).with_options(options(seed.into(), 40)))
    };
    let engine = start(&model, patient(&model));
    let asked: Vec<_> = (0..3).map(|seed| ask(&engine, good(seed))).collect();
    let bad = [vec![1, BAD], ids(&model, 9, 70), vec![BAD]].concat();
    let bad = ask(&engine, Request::new(bad).with_options(options(0, 40))).answer();
    let error = bad.end.unwrap_err();
    assert!(matches!(error, EngineError::Model(_)), "{error}");
    assert!(error.to_string().starts_with("after 73 tokens: sample: logits"), "{error}");
    for (seed, asked) in asked.into_iter().enumerate() {
        assert_eq!(asked.answer().tokens, alone(&model, &good(seed as u32)).0);
    }
}

#[test]
fn turns_are_between_steps_and_in_order() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model));
    let asked = ask(&engine, long(&model, 1));
    asked.until(is_token);
    let held = engine.turn().unwrap();
    // Tokens of the last step are here; none comes while the turn lives.
    while asked.events.try_recv().is_ok() {}
    std::thread::sleep(Duration::from_millis(50));
    assert!(asked.events.try_recv().is_err());
    let (order, engine) = (Mutex::new(vec![]), &engine);
    std::thread::scope(|scope| {
        for name in 0..9 {
            let order = &order;
            scope.spawn(move || {
                let _turn = engine.turn().unwrap();
                order.lock().unwrap().push((name, engine.stats().steps));
            });
            // Until it has asked.
            std::thread::sleep(Duration::from_millis(30));
        }
        drop(held);
    });
    let order = order.into_inner().unwrap();
    let names: Vec<u64> = order.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    // The reply went on between two turns.
    assert!(order.windows(2).all(|pair| pair[0].1 < pair[1].1), "{order:?}");
    drop(asked.handle);
    settle(engine);
    // Without requests the engine waits for turns alone.
    assert!(engine.turn().is_ok() && engine.turn().is_ok());
    engine.drain();
    assert!(engine.turn().is_ok());
    engine.stop();
    assert!(matches!(engine.turn().unwrap_err(), EngineError::Draining));
}

#[test]
fn clients_share_the_places() {
    let model = exact("qwen3");
    let engine = start(&model, patient(&model).with_max_running(2));
    let order = Arc::new(Mutex::new(vec![]));
    let held = engine.turn().unwrap();
    let mut handles = vec![];
    // The first client asks for five replies, before another asks for one.
    for (name, client) in [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1), ("a5", 1), ("b1", 2)] {
        let (order, started) = (order.clone(), Request::new(ids(&model, 3, 20)).with_options(options(0, 30)));
        let sink = Box::new(move |event: Event| {
            if matches!(event, Event::Started { .. }) {
                order.lock().unwrap().push(name);
            }
            Continue(())
        });
        handles.push(engine.submit(started.with_client(client), sink).unwrap());
    }
    drop(held);
    settle(&engine);
    assert_eq!(*order.lock().unwrap(), ["a1", "b1", "a2", "a3", "a4", "a5"]);
}
