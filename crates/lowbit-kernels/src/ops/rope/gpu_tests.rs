use super::tests::{agrees_with_f64_on, many_tokens_reach_every_thread_on};
use crate::ops::testing::gpu;

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn heads_that_share_sines() {
    many_tokens_reach_every_thread_on(&[gpu()]);
}
