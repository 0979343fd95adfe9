use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, normal};
use lowbit_formats::FloatType;
use numcheck::{Random, gamma};

#[test]
fn adds_to_some_logits() {
    adds_to_some_logits_on(&devices());
}

pub(super) fn adds_to_some_logits_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for (count, dtype) in [1, 17, 300, 1000].into_iter().zip(FLOATS.into_iter().cycle()) {
            let (logits, values) = normal(&mut random, &[1, count], dtype, device);
            // One is there twice, and one does not change.
            let mut biases: Vec<(u32, f32)> = (0..count as u32).step_by(3).map(|id| (id, 0.5)).collect();
            biases.extend([(0, -2.25), (count as u32 / 2, 0.0), (count as u32 - 1, 100.0)]);
            let bias = LogitBias::new(&biases, count, device).unwrap().unwrap();
            let want = reference::sums(&values, &biases);
            let y = logit_bias(&logits, &bias).unwrap();
            // The biases are exact; one f32 addition.
            assert_close(&y, &[1, count], FloatType::F32, &want, |i| gamma(1) * want[i].abs());
        }
    }
}

#[test]
fn an_infinite_bias_rules_a_token_out() {
    let device = device();
    let logits = Tensor::new(&[1.0f32, 2.0], &[2], &device).unwrap();
    let bias = LogitBias::new(&[(1, f32::NEG_INFINITY), (1, 4.0)], 2, &device).unwrap().unwrap();
    let y = logit_bias(&logits, &bias).unwrap();
    assert_eq!(y.as_slice::<f32>().unwrap(), [1.0, f32::NEG_INFINITY]);
    assert_eq!(logits.as_slice::<f32>().unwrap(), [1.0, 2.0]);
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    assert!(LogitBias::new(&[], 3, &device).unwrap().is_none());
    let refused =
        |biases: &[(u32, f32)]| LogitBias::new(biases, 3, &device).map(drop).unwrap_err().to_string();
    assert_eq!(
        refused(&[(0, 1.0), (3, 1.0)]),
        "logit_bias: ids[1] is 3, but there are 3 rows to choose from"
    );
    let want = "a finite number or -inf is wanted";
    assert_eq!(refused(&[(0, f32::NAN)]), format!("logit_bias: bias is NaN, but {want}"));
    assert_eq!(refused(&[(0, f32::INFINITY)]), format!("logit_bias: bias is inf, but {want}"));
    let bias = LogitBias::new(&[(2, 1.0)], 3, &device).unwrap().unwrap();
    let short = Tensor::new(&[1.0f32, 2.0], &[2], &device).unwrap();
    let message = logit_bias(&short, &bias).unwrap_err().to_string();
    assert_eq!(message, "logit_bias: ids[0] is 2, but there are 2 rows to choose from");
}
