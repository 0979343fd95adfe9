//! Requests of all kinds at once: each ends, within the budget, and hinders no other for long.

use super::super::fake::{BROKEN, CONTEXT, POISON, reply};
use super::{Simulation, asks, prompt, without_stop};
use crate::runner::GuessLimits;
use crate::{EngineError, Event, Finish, Request};
use proptest::prelude::*;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Op {
    Submit { request: Box<Request>, breaks: Option<usize> },
    Steps(usize),
    Cancel(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = prop_oneof![3 => 0usize..20, 1 => 100usize..1500];
    let request = (0u32..3, 0usize..400, 0u32..6, 0usize..300, tokens, -1i32..2, 0usize..500);
    let request = request.prop_map(|(family, shared, own, length, tokens, priority, place)| {
        asks(prompt(family, shared, own, length), tokens)
            .with_priority(priority)
            .with_checkpoints(vec![shared, place])
    });
    let breaks = proptest::option::weighted(0.1, 1usize..30);
    prop_oneof![
        4 => (request, breaks).prop_map(|(request, breaks)| Op::Submit { request: Box::new(request), breaks }),
        3 => (1usize..60).prop_map(Op::Steps),
        1 => (0usize..30).prop_map(Op::Cancel),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// T24, T27, T30, T31: whatever is submitted and cancelled, every request ends once, with the
    /// reply that it gets alone, within the budget, and nothing leaks.
    #[test]
    fn t24_t27_t30_t31_any_mix_ends_within_the_budget(
        ops in proptest::collection::vec(op(), 1..40),
        (states, budget, running) in (prop_oneof![Just(0usize), Just(90)], 700usize..4000, 1usize..9),
        // T29: sometimes the device has less than the budget says.
        memory in prop_oneof![3 => Just(usize::MAX), 1 => 500usize..2500],
        (chunk, on_the_way) in (prop_oneof![Just(64usize), Just(192), Just(512)], any::<bool>()),
        parts in prop_oneof![Just(1usize), Just(usize::MAX)],
        // Steps guess, or do not.
        (guesses, right, fixed) in (prop_oneof![Just(0usize), Just(3), Just(8)], 0u32..=10, any::<bool>()),
    ) {
        let mut simulation = Simulation::new(states, budget, |options| {
            options.with_max_running(running).with_prefill_chunk(chunk)
        });
        simulation.fake.memory.set(memory);
        simulation.fake.on_the_way.set(on_the_way);
        simulation.fake.most_parts.set(parts);
        simulation.fake.limits.set(GuessLimits { most: guesses, rows: 16, fixed });
        simulation.fake.right.set(right);
        let (mut cancelled, mut breaking) = (vec![], vec![]);
        for op in ops {
            match op {
                Op::Submit { request, breaks } => match simulation.submit(*request, breaks) {
                    Ok(id) => breaking.extend(breaks.map(|_| id)),
                    Err(error) => assert!(matches!(error, EngineError::TooLarge { .. }), "{error}"),
                },
                Op::Steps(steps) => (0..steps).for_each(|_| simulation.step()),
                Op::Cancel(id) => {
                    simulation.scheduler.cancel(id as u64);
                    cancelled.push(id);
                    simulation.check();
                }
            }
        }
        simulation.finish();
        let context = simulation.fake.sizes.fitting(CONTEXT, budget);
        for id in 0..simulation.requests.len() {
            let (tokens, _, end) = simulation.outcome(id);
            let (expected, finish) = reply(&simulation.requests[id].0, context);
            prop_assert!(expected.starts_with(&tokens), "{id}");
            let failed = matches!(simulation.events(id).last(), Some(Event::Failed(_)));
            prop_assert!(!failed || memory < budget, "{}", id);
            if !failed && !cancelled.contains(&id) && !breaking.contains(&id) {
                prop_assert_eq!((&tokens, end), (&expected, Some(finish)), "{}", id);
            }
            let ends = |event: &Event| matches!(event, Event::Finished { .. } | Event::Failed(_));
            let count = simulation.events(id).iter().filter(|event| ends(event)).count();
            prop_assert!(count == 1 || (count == 0 && breaking.contains(&id)), "{id}");
        }
        let all = |pass: &Vec<usize>| pass.iter().sum::<usize>() <= chunk && pass.len() <= parts;
        prop_assert!(simulation.fake.passes.borrow().iter().all(all), "a pass has no more than that");
        let stats = simulation.scheduler.stats();
        prop_assert!(stats.preempted <= 2 * stats.submitted);
        prop_assert_eq!(stats.finished + stats.cancelled + stats.failed, stats.submitted);
        simulation.empty();
    }
}

#[test]
fn t26_a_long_prompt_neither_stops_replies_nor_short_prompts() {
    let mut simulation =
        Simulation::new(0, 100_000, |options| options.with_target_inter_token(Duration::from_millis(10)));
    let writer = simulation.submit(without_stop(prompt(0, 0, 0, 10), 900), None).unwrap();
    (0..20).for_each(|_| simulation.step());
    let long = simulation.submit(without_stop(prompt(1, 0, 1, 4000), 5), None).unwrap();
    (0..3).for_each(|_| simulation.step());
    let short = simulation.submit(without_stop(prompt(2, 0, 2, 40), 5), None).unwrap();
    let asked = simulation.fake.clock.get();
    simulation.finish();
    let longest = simulation.gaps(writer).into_iter().max().unwrap();
    assert!(longest <= Duration::from_millis(15), "{longest:?}");
    let first = |id| simulation.time(id, |event| matches!(event, Event::Token { .. })).unwrap();
    assert!(first(short) < first(long));
    assert!(first(short) - asked <= Duration::from_millis(40), "{:?}", first(short) - asked);
}

#[test]
fn steps_save_time_for_passes_that_pay() {
    let mut simulation = Simulation::new(0, 100_000, |options| {
        options.with_target_inter_token(Duration::from_millis(20)).with_prefill_chunk(4096)
    });
    simulation.fake.fixed.set(8000);
    let writer = simulation.submit(without_stop(prompt(0, 0, 0, 300), 500), None).unwrap();
    simulation.step();
    // Lengths that differ, so that what a pass costs without tokens is known.
    for own in 1..5 {
        simulation.submit(without_stop(prompt(1, 0, own, 100 * own as usize), 0), None).unwrap();
        (0..20).for_each(|_| simulation.step());
    }
    let (told, before) = (simulation.gaps(writer).len(), simulation.fake.passes.borrow().len());
    let long = simulation.submit(without_stop(prompt(2, 0, 9, 4000), 0), None).unwrap();
    while simulation.outcome(long).2.is_none() {
        simulation.step();
    }
    // By the target alone a pass would have (20 - 2.1 - 8) / 0.01 tokens, and cost as much again.
    let passes = simulation.fake.passes.borrow()[before..].to_vec();
    assert!(passes.len() <= 3, "{passes:?}");
    let gaps = &simulation.gaps(writer)[told..];
    let (longest, sum) = (gaps.iter().max().unwrap(), gaps.iter().sum::<Duration>());
    assert!(*longest <= Duration::from_millis(40), "{gaps:?}");
    assert!(sum / gaps.len() as u32 <= Duration::from_millis(24), "{gaps:?}");
    // A short prompt takes what was saved, and waits for no more.
    (0..10).for_each(|_| simulation.step());
    let short = simulation.submit(without_stop(prompt(3, 0, 10, 40), 0), None).unwrap();
    simulation.step();
    assert!(simulation.outcome(short).2.is_some());
}

#[test]
fn what_a_pass_costs_without_tokens_is_an_eighth_of_it() {
    let mut simulation = Simulation::new(0, 100_000, |options| {
        options.with_target_inter_token(Duration::from_millis(5)).with_prefill_chunk(4096)
    });
    simulation.fake.fixed.set(500);
    for own in 0..10 {
        simulation.submit(without_stop(prompt(0, 0, own, 20 * own as usize), 3000), None).unwrap();
    }
    (0..40).for_each(|_| simulation.step());
    let before = simulation.scheduler.stats();
    simulation.submit(without_stop(prompt(1, 0, 20, 3000), 0), None).unwrap();
    (0..40).for_each(|_| simulation.step());
    // A step takes 3 ms and leaves 2, of which a pass would have 150 tokens.
    let stats = simulation.scheduler.stats();
    let (passes, tokens) =
        (stats.prefill_passes - before.prefill_passes, stats.prefill_tokens - before.prefill_tokens);
    assert!(tokens / passes >= 250, "{tokens} tokens in {passes} passes");
    let time = (stats.prefill_time - before.prefill_time).as_micros() as u64;
    assert_eq!(time, 500 * passes + 10 * tokens);
    assert_eq!(
        (stats.decode_rows - before.decode_rows, stats.decode_passes - before.decode_passes),
        (400, 40)
    );
    assert_eq!(stats.decode_time - before.decode_time, 40 * Duration::from_micros(3000));
}

#[test]
fn a_pass_that_compiled_a_kernel_does_not_shorten_the_next_ones() {
    let passes = |compiles: usize| {
        let mut simulation = Simulation::new(0, 100_000, |options| {
            options.with_target_inter_token(Duration::from_millis(20)).with_prefill_chunk(4096)
        });
        simulation.submit(without_stop(prompt(0, 0, 0, 300), 500), None).unwrap();
        simulation.step();
        // While others write, the first of several prompts compiles.
        simulation.fake.uncompiled.set(compiles);
        for own in 1..8 {
            simulation.submit(without_stop(prompt(1, 0, own, 600), 0), None).unwrap();
            (0..5).for_each(|_| simulation.step());
        }
        simulation.finish();
        simulation.fake.passes.take()
    };
    assert_eq!(passes(1), passes(0));
}

#[test]
fn t31_a_request_is_preempted_twice_at_most() {
    let mut simulation = Simulation::new(0, 1600, |options| options);
    let ids: Vec<_> = (0..6)
        .map(|own| simulation.submit(without_stop(prompt(0, 0, own, 30), 1400), None).unwrap())
        .collect();
    simulation.finish();
    let stats = simulation.scheduler.stats();
    assert!(stats.preempted > 0, "the budget is short");
    for id in ids {
        assert_eq!(simulation.outcome(id).0.len(), 1400);
    }
    assert!(stats.preempted <= 12);
}

#[test]
fn a_low_priority_request_is_started_under_a_stream_of_others() {
    let mut simulation = Simulation::new(0, 100_000, |options| {
        options.with_max_running(1).with_ageing(Duration::from_millis(500))
    });
    let low = simulation.submit(asks(prompt(0, 0, 0, 30), 5).with_priority(-3), None).unwrap();
    for own in 0..800 {
        let request = without_stop(prompt(1, 0, own, 30), 5);
        let _ = simulation.submit(request, None).unwrap();
        (0..4).for_each(|_| simulation.step());
    }
    let started = simulation.time(low, |event| matches!(event, Event::Started { .. }));
    let started = started.expect("it starts while others keep coming");
    assert!(started > Duration::from_millis(1500), "three ages later: {started:?}");
    assert!(simulation.scheduler.stats().waiting > 0);
}

#[test]
fn a_failed_draw_fails_its_request_alone() {
    let mut simulation = Simulation::new(90, 100_000, |options| options);
    let mut poisoned = prompt(0, 100, 0, 20);
    poisoned.push(POISON);
    let bad = simulation.submit(asks(poisoned, 5), None).unwrap();
    let good = simulation.submit(asks(prompt(0, 100, 1, 20), 5), None).unwrap();
    simulation.finish();
    assert!(matches!(simulation.events(bad).last(), Some(Event::Failed(_))));
    assert_eq!(simulation.outcome(good).0, reply(&simulation.requests[good].0, CONTEXT).0);
    simulation.empty();
}

#[test]
fn a_pass_has_parts_of_several_prompts_in_the_order_of_their_rank() {
    let plain: &[&[usize]] = &[&[200, 300], &[100, 384], &[128], &[88]];
    // With states, places cut a prompt, and not the pass: after 192, 256, 64 and 384 tokens.
    let states: &[&[usize]] = &[&[192, 256, 64], &[8, 44, 36, 384]];
    for (bytes, on_the_way, passes) in [(0, false, plain), (90, false, states), (90, true, plain)] {
        let mut simulation = Simulation::new(bytes, 100_000, |options| options.with_prefill_chunk(512));
        simulation.fake.on_the_way.set(on_the_way);
        let lengths = [200, 300, 100, 600];
        for (own, length) in (0..).zip(lengths) {
            simulation.submit(without_stop(prompt(0, 0, own, length), 50), None).expect("it fits");
        }
        simulation.step();
        assert_eq!(*simulation.fake.passes.borrow(), passes[..1], "new requests have their turn");
        simulation.step();
        assert_eq!(*simulation.fake.passes.borrow(), passes);
        simulation.finish();
        for id in 0..lengths.len() {
            assert_eq!(simulation.outcome(id).0, reply(&simulation.requests[id].0, CONTEXT).0);
        }
    }
}

#[test]
fn a_failed_pass_fails_the_prompts_in_it_alone() {
    let mut simulation = Simulation::new(90, 100_000, |options| options);
    let writes = simulation.submit(without_stop(prompt(0, 0, 0, 20), 30), None).unwrap();
    simulation.step();
    let mut broken = prompt(0, 0, 1, 20);
    broken.push(BROKEN);
    let bad = [broken, prompt(0, 0, 2, 40)].map(|prompt| simulation.submit(asks(prompt, 5), None).unwrap());
    simulation.step();
    let later = simulation.submit(asks(prompt(0, 0, 3, 20), 5), None).unwrap();
    simulation.finish();
    for id in bad {
        let Some(Event::Failed(error)) = simulation.events(id).pop() else { panic!("it was in the pass") };
        assert!(error.to_string().contains("the pass failed"), "{error}");
    }
    for id in [writes, later] {
        assert_eq!(simulation.outcome(id).0, reply(&simulation.requests[id].0, CONTEXT).0);
    }
    simulation.empty();
}

#[test]
fn t24_a_cancelled_request_frees_its_memory_at_once() {
    let mut simulation = Simulation::new(0, 100_000, |options| options.with_prefix_cache(false));
    let id = simulation.submit(without_stop(prompt(0, 0, 0, 2000), 900), None).unwrap();
    let waits = simulation.submit(without_stop(prompt(0, 0, 1, 2000), 900), None).unwrap();
    simulation.scheduler.cancel(waits as u64);
    simulation.step();
    assert!(simulation.fake.bytes.get() > 0, "it reads its prompt");
    simulation.scheduler.cancel(id as u64);
    assert_eq!(simulation.fake.bytes.get(), 0);
    let decoding = simulation.submit(without_stop(prompt(0, 0, 2, 10), 900), None).unwrap();
    (0..20).for_each(|_| simulation.step());
    simulation.scheduler.cancel(decoding as u64);
    assert_eq!((simulation.fake.bytes.get(), simulation.scheduler.is_idle()), (0, true));
    for id in [id, waits, decoding] {
        assert_eq!(simulation.outcome(id).2, Some(Finish::Interrupted));
    }
}

#[test]
fn t29_a_device_without_the_memory_fails_one_request() {
    let mut simulation = Simulation::new(0, 100_000, |options| options);
    simulation.fake.memory.set(1000);
    // Kept caches make way.
    simulation.cached(asks(prompt(0, 0, 0, 600), 5));
    assert_eq!(simulation.cached(asks(prompt(1, 0, 1, 600), 5)), 0);
    assert_eq!(simulation.scheduler.stats().evicted, 1);
    let runs = simulation.submit(without_stop(prompt(0, 0, 0, 200), 600), None).unwrap();
    (0..5).for_each(|_| simulation.step());
    let fails = simulation.submit(asks(prompt(2, 0, 2, 600), 5), None).unwrap();
    simulation.finish();
    let Some(Event::Failed(error)) = simulation.events(fails).pop() else { panic!("it does not fit") };
    assert_eq!(error.to_string(), "fake: out of memory");
    assert_eq!(simulation.outcome(runs).0.len(), 600);
    simulation.empty();
}

#[test]
fn what_can_never_run_is_refused() {
    let mut simulation = Simulation::new(10, 1000, |options| options);
    let error = simulation.submit(asks(prompt(0, 0, 0, 5000), 5), None).unwrap_err();
    assert_eq!(error.to_string(), "the prompt has 5000 tokens, but a text may have 4096 at most");
    let error = simulation.submit(asks(prompt(0, 0, 0, 990), 5), None).unwrap_err();
    assert_eq!(error.to_string(), "the request needs 1034 bytes of caches, but the budget is 1000");
    // A reply that outgrows the budget ends there, as at the end of the context.
    let id = simulation.submit(without_stop(prompt(0, 0, 0, 300), 3000), None).unwrap();
    simulation.finish();
    let (tokens, _, end) = simulation.outcome(id);
    assert_eq!((tokens.len(), end), (960 - 300 + 1, Some(Finish::Length)));
}
