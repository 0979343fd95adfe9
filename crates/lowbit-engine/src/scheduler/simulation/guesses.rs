//! Steps that guess tokens: replies are those of steps that do not, and come no later.

use super::super::fake::{CONTEXT, reply};
use super::{Simulation, asks, prompt, without_stop};
use crate::runner::GuessLimits;
use crate::{Event, Finish};
use std::time::Duration;

/// The limits of a GPU.
const LIMITS: GuessLimits = GuessLimits { most: 3, rows: 64, fixed: false };

/// The simulated time that `count` replies take side by side, where so many tenths of guesses are
/// right and a row takes so many microseconds.
fn time(count: u32, limits: GuessLimits, (right, row): (u32, usize)) -> Duration {
    let mut simulation = Simulation::new(0, 200_000, |options| options);
    simulation.fake.limits.set(limits);
    simulation.fake.right.set(right);
    simulation.fake.row.set(row);
    for own in 0..count {
        simulation.submit(without_stop(prompt(own, 0, own, 20), 500), None).unwrap();
    }
    simulation.finish();
    for id in 0..count as usize {
        assert_eq!(simulation.outcome(id).0, reply(&simulation.requests[id].0, CONTEXT).0);
    }
    let stats = simulation.scheduler.stats();
    assert!(stats.accepted_tokens <= stats.drafted_tokens);
    simulation.fake.clock.get()
}

/// The gain by guesses.
fn gain(count: u32, how: (u32, usize)) -> f64 {
    let without = time(count, GuessLimits::default(), how);
    without.as_secs_f64() / time(count, LIMITS, how).as_secs_f64()
}

#[test]
fn guesses_are_made_where_they_pay() {
    // A step takes 2 ms, and 100 microseconds for each row.
    assert!(gain(1, (7, 100)) > 1.8, "{}", gain(1, (7, 100)));
    assert!(gain(4, (7, 100)) > 1.5, "{}", gain(4, (7, 100)));
    assert!(gain(16, (9, 20)) > 1.5, "{}", gain(16, (9, 20)));
    // Whatever rows cost, and however few guesses are right, nobody waits longer.
    for count in [1, 16, 40] {
        for right in [0, 3, 7, 10] {
            for row in [10, 100, 1000, 4000] {
                let gain = gain(count, (right, row));
                assert!(gain > 0.98, "{gain} of {count} with {right} tenths right, {row} per row");
            }
        }
    }
}

#[test]
fn a_guess_behind_a_replys_end_is_not_seen() {
    let fixed = GuessLimits { most: 8, rows: 64, fixed: true };
    let mut simulation = Simulation::new(90, 100_000, |options| options);
    simulation.fake.limits.set(fixed);
    simulation.fake.right.set(10);
    // Limits and stop ids at every place of a step.
    for most in 0..20 {
        for own in 0..5 {
            let id = simulation.submit(asks(prompt(0, 0, own, 30), most), None).unwrap();
            simulation.finish();
            let (tokens, _, end) = simulation.outcome(id);
            let (expected, finish) = reply(&simulation.requests[id].0, CONTEXT);
            assert_eq!((tokens, end), (expected, Some(finish)), "{most}");
        }
    }
    // A sink that wants no more in the middle of a step: `Started`, `Prompt`, and tokens.
    for events in 3..14 {
        let id = simulation.submit(without_stop(prompt(1, 0, 1, 30), 40), Some(events)).unwrap();
        simulation.finish();
        assert_eq!(simulation.events(id).len(), events);
    }
    // The end of the context.
    let id = simulation.submit(without_stop(prompt(2, 0, 2, CONTEXT - 5), 100), None).unwrap();
    simulation.finish();
    let (tokens, _, end) = simulation.outcome(id);
    assert_eq!((tokens.len(), end), (6, Some(Finish::Length)));
    let usage = |event: &Event| matches!(event, Event::Finished { usage, .. } if usage.accepted_tokens == 4);
    assert!(simulation.events(id).iter().any(usage));
    simulation.empty();
}
