//! The part of a prompt that is found in the caches of others, and its cost.

use super::super::fake::CONTEXT;
use super::{Simulation, asks, prompt, without_stop};
use crate::Event;
use crate::runner::BLOCK;
use std::time::Duration;

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
fn t2_prompts_of_128_tokens_and_more_are_found_and_counted() {
    for states in [0, 90] {
        for length in [128, 129, 191, 192, 193, 400] {
            let mut simulation = Simulation::new(states, 100_000, |options| options);
            let request = asks(prompt(0, length - 1, 0, 1), 5);
            assert_eq!((request.prompt.len(), simulation.cached(request.clone())), (length, 0));
            let cached = simulation.cached(request);
            assert!(cached >= 64 && cached >= length - BLOCK, "{states}: {cached} of {length}");
            let stats = simulation.scheduler.stats();
            assert_eq!((stats.prompt_tokens, stats.cached_tokens), (2 * length as u64, cached as u64));
        }
    }
}

/// The simulated time that unique prompts take, of `length` tokens and one more for each.
fn time_of_unique_prompts(states: usize, length: usize, (keeps, on_the_way): (bool, bool)) -> Duration {
    let mut simulation =
        Simulation::new(states, 20_000, |options| options.with_prefix_cache(keeps).with_max_running(4));
    simulation.fake.on_the_way.set(on_the_way);
    for own in 0..40 {
        simulation.submit(without_stop(prompt(own, length, own, 1 + own as usize), 60), None).unwrap();
    }
    simulation.finish();
    assert_eq!(simulation.scheduler.stats().cached_tokens, 0);
    simulation.fake.clock.get()
}

#[test]
fn t10_prompts_that_nobody_shares_cost_no_more() {
    for length in [100, 700, 1500] {
        let time = |states, how| time_of_unique_prompts(states, length, how);
        let plain = time(90, (false, false));
        assert_eq!(time(0, (true, false)), time(0, (false, false)), "{length}");
        // On GPUs a pass keeps states on its way.
        let kept = time(90, (true, true));
        assert!(kept <= plain.mul_f64(1.02), "{length}: {kept:?} for {plain:?}");
        // Elsewhere a prompt is cut where they are kept, at its end and every 384 tokens here,
        // which takes a pass more each time.
        let kept = time(90, (true, false));
        let passes = 2 + length as u32 / 384;
        assert!(kept <= plain + 40 * passes * Duration::from_millis(1), "{length}: {kept:?} for {plain:?}");
    }
}

/// Bytes in use after these prompts, one after the other, when the budget has been full for long.
fn bytes_in_use(states: usize, budget: usize, lengths: &[usize]) -> usize {
    let mut simulation = Simulation::new(states, budget, |options| options);
    for own in 0..500 {
        let length = lengths[own as usize % lengths.len()];
        simulation.cached(asks(prompt(own, length, own, 1), 3));
    }
    let stats = simulation.scheduler.stats();
    assert!(stats.evicted > 0, "the budget was full");
    stats.cached_bytes
}

#[test]
fn t11_short_and_long_prompts_fill_the_same_bytes() {
    let budget = 40_000;
    assert!(budget > 8 * CONTEXT);
    for states in [0, 90] {
        let mixes: [&[usize]; 4] = [&[100], &[3000], &[100, 3000], &[70, 2000, 300, 4000, 64]];
        for lengths in mixes {
            let used = bytes_in_use(states, budget, lengths);
            // A cache that does not fit any more goes whole.
            let largest = CONTEXT + BLOCK + 3 * states;
            assert!(used + largest >= budget, "{states}: {lengths:?} use {used} of {budget}");
        }
    }
}
