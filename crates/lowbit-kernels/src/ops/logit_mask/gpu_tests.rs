use super::tests::{masks_tokens_on, new_bits_on};
use super::{LogitMask, logit_mask};
use crate::ops::testing::{gpu, values};
use crate::{Device, Tensor};

#[test]
fn agrees_with_the_reference() {
    masks_tokens_on(&[gpu()]);
}

#[test]
fn new_bits_count_for_what_follows() {
    new_bits_on(&gpu());
}

/// A captured step reads the mask's memory: what is written there counts when it is replayed.
#[test]
fn a_replay_sees_new_bits() {
    let device = gpu();
    let Device::Gpu(gpu) = &device else { unreachable!("a GPU") };
    let logits = Tensor::new(&[1.0f32, 2.0, 3.0], &[3], &device).unwrap();
    let mut mask = LogitMask::new(3, &device).unwrap();
    let mut out = None;
    let pass = gpu
        .capture(|| {
            out = Some(logit_mask(&logits, &mask)?);
            Ok(())
        })
        .unwrap();
    assert!(pass.uses(mask.bits()));
    let out = out.unwrap();
    for (bits, want) in
        [(0b011, [1.0, 2.0, f32::NEG_INFINITY]), (0b100, [f32::NEG_INFINITY, f32::NEG_INFINITY, 3.0])]
    {
        mask.set(&[bits]).unwrap();
        pass.replay().unwrap();
        assert_eq!(values(&out), want);
    }
}
