use super::tests::adds_to_some_logits_on;
use crate::ops::testing::gpu;

#[test]
fn agrees_with_f64() {
    adds_to_some_logits_on(&[gpu()]);
}
