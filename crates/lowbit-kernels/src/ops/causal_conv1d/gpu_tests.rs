//! The convolution on a GPU against the reference.

use super::tests::{Case, Sizes, check_pool};
use super::{Activation, SlotState, causal_conv1d};
use crate::ops::testing::{FLOATS, device, gpu, values};
use crate::{Device, Tensor};
use lowbit_formats::FloatType;

fn check(shape: Sizes, dtype: FloatType, biased: bool, activation: Option<Activation>) {
    Case::new(shape, dtype).check_on(&[gpu()], shape, dtype, (biased, activation));
}

#[test]
fn agrees_with_the_reference_at_every_width() {
    for width in [1, 2, 3, 4, 5, 8, 40] {
        let shape = Sizes { lengths: &[5, 0, 1, 2, 13, 3, 41], channels: 37, width };
        check(shape, FloatType::F32, true, Some(Activation::Silu));
        check(shape, FloatType::F32, false, None);
    }
}

#[test]
fn every_type_and_channels_around_a_cube() {
    for dtype in FLOATS {
        for channels in [1, 255, 257] {
            let shape = Sizes { lengths: &[3, 64], channels, width: 4 };
            check(shape, dtype, true, Some(Activation::Silu));
        }
    }
}

#[test]
fn lengths_around_a_piece_in_any_order() {
    for lengths in [&[31, 32, 33, 0, 63, 64, 65][..], &[0, 0, 1], &[200], &[1; 70], &[0, 97, 0, 0, 2]] {
        check(Sizes { lengths, channels: 11, width: 4 }, FloatType::F32, false, Some(Activation::Silu));
    }
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for dtype in FLOATS {
        check_pool(&gpu(), dtype, &[5, 0, 1, 2, 41], &[7, 1, 3, 0, 8]);
        check_pool(&gpu(), dtype, &[1; 6], &[2, 8, 5, 0, 3, 4]);
    }
}

/// A sequence whose slot the pool lacks is left out; the other is computed.
#[test]
fn a_wrong_slot_leaves_a_sequence_out() {
    let gpu = gpu();
    let x = Tensor::new(&[2.0f32; 18], &[9, 2], &gpu).unwrap();
    let weight = Tensor::new(&[1.0f32; 6], &[2, 3], &gpu).unwrap();
    let offsets = Tensor::new(&[0u32, 5, 9], &[3], &gpu).unwrap();
    for wrong in [3, u32::MAX] {
        let slots = Tensor::new(&[1, wrong], &[2], &gpu).unwrap();
        let mut pool = Tensor::new(&[1.0f32; 12], &[3, 2, 2], &gpu).unwrap();
        let state = SlotState { state: &mut pool, slots: Some(&slots) };
        let y = causal_conv1d(&x, &weight, None, state, &offsets, None).unwrap();
        assert_eq!(values(&y)[..10], [4., 4., 5., 5., 6., 6., 6., 6., 6., 6.], "{wrong}");
        assert_eq!(values(&pool), [1., 1., 1., 1., 2., 2., 2., 2., 1., 1., 1., 1.], "{wrong}");
    }
}

/// Runs over `offsets` for 9 tokens of 2 channels: the result and the state, which starts as ones.
fn of_offsets(offsets: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let gpu = gpu();
    let x = Tensor::new(&[2.0f32; 18], &[9, 2], &gpu).unwrap();
    let weight = Tensor::new(&[1.0f32; 6], &[2, 3], &gpu).unwrap();
    let sequences = offsets.len() - 1;
    let mut state = Tensor::new(&vec![1.0f32; sequences * 4], &[sequences, 2, 2], &gpu).unwrap();
    let offsets = Tensor::new(offsets, &[sequences + 1], &gpu).unwrap();
    let y = causal_conv1d(&x, &weight, None, &mut state, &offsets, None).unwrap();
    let host = |x: &Tensor| values(&x.to_device(&device()).unwrap());
    (host(&y), host(&state))
}

#[test]
fn wrong_offsets_leave_a_sequence_out() {
    let whole = |y: &[f32]| assert_eq!(y, [4., 4., 5., 5.].into_iter().chain([6.; 14]).collect::<Vec<_>>());
    let (y, state) = of_offsets(&[0, 9]);
    whole(&y);
    assert_eq!(state, [2.0; 4]);
    for wrong in [[0, 10], [0, u32::MAX], [u32::MAX, 9], [9, 0]] {
        assert_eq!(of_offsets(&wrong).1, [1.0; 4], "{wrong:?}");
    }
    for wrong in [[0, 9, 10], [0, 9, 4], [0, 9, u32::MAX]] {
        let (y, state) = of_offsets(&wrong);
        whole(&y);
        assert_eq!(state, [2., 2., 2., 2., 1., 1., 1., 1.], "{wrong:?}");
    }
}

#[test]
fn a_clone_of_the_state_keeps_what_it_was() {
    let gpu = gpu();
    let x = Tensor::new(&[2.0f32; 3], &[1, 3], &gpu).unwrap();
    let weight = Tensor::new(&[1.0f32; 6], &[3, 2], &gpu).unwrap();
    let offsets = Tensor::new(&[0u32, 1], &[2], &gpu).unwrap();
    let mut state = Tensor::new(&[1.0f32; 3], &[1, 3, 1], &gpu).unwrap();
    let before = state.clone();
    causal_conv1d(&x, &weight, None, &mut state, &offsets, None).unwrap();
    let host = |x: &Tensor| values(&x.to_device(&device()).unwrap());
    assert_eq!((host(&before), host(&state)), (vec![1.0; 3], vec![2.0; 3]));
}

#[test]
fn nan_stays_in_its_channel_and_empty_sizes_are_empty() {
    let gpu = gpu();
    let run = |x: &[f32], channels: usize, offsets: &[u32]| {
        let x = Tensor::new(x, &[x.len() / channels.max(1), channels], &gpu).unwrap();
        let weight = Tensor::new(&vec![0.5f32; 3 * channels], &[channels, 3], &gpu).unwrap();
        let sequences = offsets.len() - 1;
        let mut state = Tensor::zeros(&[sequences, channels, 2], lowbit_formats::DType::F32, &gpu);
        let offsets = Tensor::new(offsets, &[sequences + 1], &gpu).unwrap();
        let y = causal_conv1d(&x, &weight, None, &mut state, &offsets, Some(Activation::Silu)).unwrap();
        values(&y.to_device(&device()).unwrap())
    };
    let mut x = [1.0; 20];
    x[9] = f32::NAN;
    let nan: Vec<usize> =
        run(&x, 2, &[0, 10]).iter().enumerate().filter(|(_, y)| y.is_nan()).map(|(i, _)| i).collect();
    assert_eq!(nan, [9, 11, 13]);
    assert!(run(&[], 2, &[0, 0]).is_empty());
    assert!(run(&[], 0, &[0, 0]).is_empty());
    assert!(run(&[], 2, &[0]).is_empty());
}

#[test]
fn refusals_name_the_device() {
    let (host, gpu) = (device(), gpu());
    let zeros = |shape: &[usize], device: &Device| Tensor::zeros(shape, lowbit_formats::DType::F32, device);
    let offsets = Tensor::new(&[0u32, 5], &[2], &host).unwrap();
    let mut state = zeros(&[1, 7, 3], &gpu);
    let x = zeros(&[5, 7], &gpu);
    let message =
        causal_conv1d(&x, &zeros(&[7, 4], &gpu), None, &mut state, &offsets, None).unwrap_err().to_string();
    assert_eq!(message, format!("causal_conv1d: cu_seqlens is on cpu, but x is on {gpu}"));
}
