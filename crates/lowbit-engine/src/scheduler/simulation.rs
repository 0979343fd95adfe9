//! The scheduler with a model that writes integers, whose memory is counted and whose clock is
//! simulated.

use super::fake::{BROKEN, CONTEXT, Fake, POISON, reply};
use super::{Scheduler, check_size};
use crate::runner::BLOCK;
use crate::{EngineError, EngineOptions, Event, Finish, Request, Sink};
use lowbit_kernels::Device;
use lowbit_models::GenerationOptions;
use proptest::prelude::*;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const STOP: u32 = 7;

type Events = Arc<Mutex<Vec<(Duration, Event)>>>;

/// Simulated requests and what happened to them.
struct Simulation {
    fake: Fake,
    scheduler: Scheduler<Fake>,
    options: EngineOptions,
    requests: Vec<(Request, Events)>,
    /// The clock as sinks see it.
    clock: Arc<Mutex<Duration>>,
}

impl Simulation {
    fn new(states: usize, budget: usize, change: impl Fn(EngineOptions) -> EngineOptions) -> Self {
        let fake = Fake::new(states);
        let device = Device::cpu(None).expect("a CPU");
        let options = change(EngineOptions::new(&device).with_cache_bytes(budget));
        let scheduler = fake.scheduler(options.clone());
        Self { fake, scheduler, options, requests: vec![], clock: Arc::default() }
    }

    /// Submits a request, and returns its number; `breaks` events on, its sink wants no more.
    fn submit(&mut self, request: Request, breaks: Option<usize>) -> Result<usize, EngineError> {
        check_size(&self.fake.sizes, CONTEXT, &self.options, &request)?;
        let (events, clock) = (Events::default(), self.clock.clone());
        let told = events.clone();
        let sink: Sink = Box::new(move |event| {
            let mut told = told.lock().unwrap();
            told.push((*clock.lock().unwrap(), event));
            if Some(told.len()) == breaks { Break(()) } else { Continue(()) }
        });
        let id = self.requests.len();
        self.scheduler.submit(id as u64, request.clone(), sink, self.fake.clock.get());
        self.requests.push((request, events));
        Ok(id)
    }

    fn step(&mut self) {
        self.scheduler.step().expect("the device lives");
        *self.clock.lock().unwrap() = self.fake.clock.get();
        self.check();
    }

    /// Every byte is counted, once, and the budget holds.
    fn check(&self) {
        let stats = self.scheduler.stats();
        assert_eq!(self.fake.bytes.get(), stats.running_bytes + stats.cached_bytes);
        assert!(self.fake.bytes.get() <= self.options.cache_bytes, "{stats:?}");
    }

    /// Steps until all is done; too many mean that nothing gets on.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            if self.scheduler.is_idle() {
                return;
            }
            self.step();
        }
        panic!("no end: {:?}", self.scheduler.stats());
    }

    fn events(&self, id: usize) -> Vec<Event> {
        self.requests[id].1.lock().unwrap().iter().map(|(_, event)| event.clone()).collect()
    }

    fn time(&self, id: usize, is: impl Fn(&Event) -> bool) -> Option<Duration> {
        self.requests[id].1.lock().unwrap().iter().find(|(_, event)| is(event)).map(|(time, _)| *time)
    }

    /// The times between the tokens of a reply.
    fn gaps(&self, id: usize) -> Vec<Duration> {
        let events = self.requests[id].1.lock().unwrap();
        let tokens = events.iter().filter(|(_, event)| matches!(event, Event::Token { .. }));
        let times: Vec<Duration> = tokens.map(|(time, _)| *time).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// A request's result: tokens, cached tokens, and its end.
    fn outcome(&self, id: usize) -> (Vec<u32>, usize, Option<Finish>) {
        let (mut tokens, mut cached, mut end) = (vec![], 0, None);
        for event in self.events(id) {
            match event {
                Event::Token { id, .. } => tokens.push(id),
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Finished { finish, usage, .. } => {
                    assert_eq!(usage.cached_tokens, cached);
                    end = Some(finish);
                }
                _ => {}
            }
        }
        (tokens, cached, end)
    }

    /// Runs one request to its end, and returns its cached tokens.
    fn cached(&mut self, request: Request) -> usize {
        let id = self.submit(request, None).expect("it fits");
        self.finish();
        self.outcome(id).1
    }

    /// Nothing is left once everything is evicted.
    fn empty(mut self) {
        let now = self.fake.clock.get();
        while self.scheduler.store.evict(None, now) {}
        assert_eq!((self.fake.bytes.get(), self.scheduler.store.tree.len()), (0, 0));
    }
}

/// A prompt of `shared` tokens that all prompts of a family have, and others of its own.
fn prompt(family: u32, shared: usize, own: u32, length: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..shared as u32).map(|i| 1000 + family * 100 + i % 50).collect();
    ids.extend((0..length.max(1) as u32).map(|i| 5000 + own * 97 + i));
    ids
}

fn asks(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let options = GenerationOptions::default().with_max_tokens(max_tokens).with_stop_ids(vec![STOP]);
    Request::new(prompt).with_options(options)
}

fn without_stop(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request::new(prompt).with_options(GenerationOptions::default().with_max_tokens(max_tokens))
}

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
    ) {
        let mut simulation = Simulation::new(states, budget, |options| {
            options.with_max_running(running).with_prefill_chunk(chunk)
        });
        simulation.fake.memory.set(memory);
        simulation.fake.on_the_way.set(on_the_way);
        simulation.fake.most_parts.set(parts);
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
fn t1_a_prompt_sent_again_is_cached_but_for_its_last_block() {
    for states in [0, 90] {
        for length in [1000, 1024] {
            let mut simulation = Simulation::new(states, 100_000, |options| options);
            let request = asks(prompt(0, length, 0, 1), 5);
            assert_eq!(simulation.cached(request.clone()), 0);
            assert!(simulation.cached(request) >= length - BLOCK);
        }
    }
}

#[test]
fn t3_shared_starts_of_200_tokens_hit() {
    let mut plain = Simulation::new(0, 100_000, |options| options);
    plain.cached(asks(prompt(0, 200, 0, 300), 5));
    assert_eq!(plain.cached(asks(prompt(0, 200, 1, 300), 5)), 192);
    // With states, the second leaves a place for the third.
    let mut states = Simulation::new(90, 100_000, |options| options);
    states.cached(asks(prompt(0, 200, 0, 300), 5));
    assert_eq!(states.cached(asks(prompt(0, 200, 1, 300), 5)), 0);
    assert_eq!(states.cached(asks(prompt(0, 200, 2, 300), 5)), 192);
}

#[test]
fn t4_the_second_request_hits_the_system_prompt() {
    for states in [0, 90] {
        let mut simulation = Simulation::new(states, 100_000, |options| options);
        let request = |own| asks(prompt(0, 500, own, 300), 5).with_checkpoints(vec![500]);
        simulation.cached(request(0));
        assert_eq!(simulation.cached(request(1)), 448);
    }
}

#[test]
fn eight_replies_to_one_prompt_read_it_once() {
    for states in [0, 90] {
        let mut simulation =
            Simulation::new(states, 100_000, |options| options.with_target_inter_token(Duration::ZERO));
        for index in 0..8 {
            let mut request = asks(prompt(0, 1000, 0, 1), 20);
            request.options.max_tokens += index;
            simulation.submit(request, None).expect("it fits");
        }
        // One that begins otherwise does not wait for them.
        let other = simulation.submit(asks(prompt(1, 0, 1, 30), 5), None).expect("it fits");
        simulation.step();
        assert!(matches!(simulation.events(other)[..], [Event::Started { .. }, ..]));
        simulation.finish();
        let stats = simulation.scheduler.stats();
        let computed = stats.prompt_tokens - stats.cached_tokens;
        assert!(computed <= 1001 + 30 + 7 * BLOCK as u64, "{computed}");
    }
}

#[test]
fn t5_a_turn_runs_its_own_tokens_and_a_block() {
    for states in [0, 90] {
        let mut simulation = Simulation::new(states, 100_000, |options| options);
        let mut text = prompt(0, 150, 0, 150);
        for turn in 0..20 {
            let before = text.len();
            let id = simulation.submit(asks(text.clone(), 30), None).expect("it fits");
            simulation.finish();
            let (reply, cached, _) = simulation.outcome(id);
            if turn > 0 {
                let new = 30 + 23;
                assert!(before - cached <= new + BLOCK, "turn {turn}: {cached} of {before}");
            }
            text.extend(reply);
            text.extend(prompt(1, 0, turn, 23));
        }
        // A turn takes the last one's caches over.
        assert_eq!(simulation.scheduler.stats().cached_texts, 1);
    }
}

#[test]
fn t6_a_dropped_reply_hits_to_the_last_message() {
    let mut simulation = Simulation::new(90, 100_000, |options| options);
    let first = prompt(0, 700, 0, 50);
    simulation
        .cached(asks([first.clone(), prompt(1, 0, 1, 200)].concat(), 5).with_checkpoints(vec![first.len()]));
    let next = [first.clone(), prompt(1, 0, 2, 300)].concat();
    assert_eq!(simulation.cached(asks(next, 5)), first.len() / BLOCK * BLOCK);
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
