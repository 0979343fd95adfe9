use super::*;
use crate::ops::testing::{FLOATS, device, devices, normal, values};
use numcheck::Random;

#[test]
fn masks_tokens() {
    masks_tokens_on(&devices());
}

pub(super) fn masks_tokens_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for (count, dtype) in [1, 17, 31, 32, 33, 300, 1000].into_iter().zip(FLOATS.into_iter().cycle()) {
            let (logits, rounded) = normal(&mut random, &[1, count], dtype, device);
            // Bits beyond the last token are set here and there.
            let words = count.div_ceil(32) as u32;
            let bits: Vec<u32> = (1..=words).map(|word| word.wrapping_mul(0x9e37_79b1)).collect();
            let mut mask = LogitMask::new(count, device).unwrap();
            mask.set(&bits).unwrap();
            let y = logit_mask(&logits, &mask).unwrap();
            assert_eq!((y.shape(), y.dtype()), (&[1, count][..], DType::F32));
            let got: Vec<f64> = values(&y).into_iter().map(f64::from).collect();
            assert_eq!(got, reference::masked(&rounded, &bits), "{count} tokens, {dtype:?}");
        }
    }
}

#[test]
fn new_bits_count() {
    new_bits_on(&device());
}

pub(super) fn new_bits_on(device: &Device) {
    let logits = Tensor::new(&[f32::NAN, 2.0, 3.0], &[3], device).unwrap();
    let mut mask = LogitMask::new(3, device).unwrap();
    let all = values(&logit_mask(&logits, &mask).unwrap());
    assert!(all[0].is_nan() && all[1..] == [2.0, 3.0], "a new mask allows all: {all:?}");
    let off = f32::NEG_INFINITY;
    for (bits, want) in [(0b110, [off, 2.0, 3.0]), (0b100, [off, off, 3.0]), (0, [off; 3])] {
        mask.set(&[bits]).unwrap();
        assert_eq!(values(&logit_mask(&logits, &mask).unwrap()), want);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let mut mask = LogitMask::new(33, &device).unwrap();
    assert_eq!(mask.set(&[1]).unwrap_err().to_string(), "logit_mask: bits is [1], but 33 tokens want [2]");
    let short = Tensor::new(&[1.0f32, 2.0], &[2], &device).unwrap();
    let message = logit_mask(&short, &mask).unwrap_err().to_string();
    assert_eq!(message, "logit_mask: logits is [2], but the mask is of 33 tokens");
    let ids = Tensor::new(&[1u32, 2], &[2], &device).unwrap();
    assert!(matches!(logit_mask(&ids, &mask), Err(KernelError::Value { .. })));
}
