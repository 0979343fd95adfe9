//! `rope` against f64 from the same f32 angles, factors of frequencies, and errors.

use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, normal};
use numcheck::{Random, gamma};

const PARAMS: RopeParams = RopeParams {
    theta: 1e4,
    rotary_dim: 6,
    layout: RopeLayout::HalfSplit,
    scaling: RopeScaling::None,
    freq_factors: None,
};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    let positions = [0u32, 1, 77, 4096, 1_000_000];
    for device in devices {
        for (rotary_dim, width) in
            [(0, 3), (2, 2), (6, 11), (14, 14), (16, 17), (18, 40), (32, 64), (34, 34), (64, 70)]
        {
            for (layout, dtype) in [RopeLayout::HalfSplit, RopeLayout::Interleaved]
                .into_iter()
                .flat_map(|layout| FLOATS.map(|dtype| (layout, dtype)))
            {
                let scaling = RopeScaling::Yarn(Yarn { attention_factor: Some(1.3), ..Yarn::new(4.0, 512) });
                let rotation = Rope::new(&RopeParams { rotary_dim, layout, scaling, ..PARAMS }).unwrap();
                let shape = [5, 3, width];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let at = Tensor::new(&positions, &[5], device).unwrap();
                let want = reference::rope(&xs, width, &positions, &rotation);
                let y = rope(&x, &at, &rotation).unwrap();
                assert_close(&y, &shape, dtype, &want, |i| {
                    let row = i / width * width;
                    let pair = match i - row {
                        d if d >= rotary_dim => return 0.0,
                        d if layout == RopeLayout::Interleaved => [d, d ^ 1],
                        d => [d, (d + rotary_dim / 2) % rotary_dim],
                    };
                    gamma(reference::ROUNDINGS)
                        * 1.3
                        * pair.iter().map(|d| f64::from(xs[row + d].abs())).sum::<f64>()
                });
            }
        }
    }
}

#[test]
fn many_tokens_reach_every_thread() {
    many_tokens_reach_every_thread_on(&devices());
}

pub(super) fn many_tokens_reach_every_thread_on(devices: &[Device]) {
    for device in devices {
        let positions: Vec<u32> = (0..301).rev().collect();
        let rotation = Rope::new(&RopeParams { rotary_dim: 32, ..PARAMS }).unwrap();
        let (x, xs) = normal(&mut Random::new(3), &[301, 8, 48], FLOATS[0], device);
        let y = rope(&x, &Tensor::new(&positions, &[301], device).unwrap(), &rotation).unwrap();
        let want = reference::rope(&xs, 48, &positions, &rotation);
        // As above, with every pair's sum of magnitudes under twice the greatest.
        let greatest = xs.iter().fold(0f32, |a, b| a.max(b.abs()));
        assert_close(&y, &[301, 8, 48], FLOATS[0], &want, |_| {
            gamma(reference::ROUNDINGS) * 2.0 * f64::from(greatest)
        });
    }
}

#[test]
fn frequency_factors_divide() {
    let plain = Rope::new(&PARAMS).unwrap();
    let factors = Some(vec![1.0, 2.0, 8.0]);
    let divided = Rope::new(&RopeParams { freq_factors: factors, ..PARAMS }).unwrap();
    let [a, b, c] = plain.inv_freq() else { panic!("three pairs") };
    assert_eq!(divided.inv_freq(), [*a, b / 2.0, c / 8.0]);
    assert_eq!((divided.rotary_dim(), divided.attention_factor()), (6, 1.0));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let rotation = Rope::new(&PARAMS).unwrap();
    let x = Tensor::new(&[0f32; 14], &[2, 1, 7], &device).unwrap();
    let at = Tensor::new(&[0u32, 1], &[2], &device).unwrap();
    let refused = |x: &Tensor, at: &Tensor| rope(x, at, &rotation).unwrap_err().to_string();
    let narrow = Tensor::new(&[0f32; 10], &[2, 1, 5], &device).unwrap();
    assert_eq!(refused(&narrow, &at), "rope: x is [2, 1, 5], but heads of at least 6 are rotated");
    assert_eq!(refused(&x, &at.rows(0, 1).unwrap()), "rope: positions is [1], but x [2, 1, 7] wants [2]");
    assert_eq!(refused(&x.reshape(&[2, 7]).unwrap(), &at), "rope: x is [2, 7], but [T, H, D] is wanted");
    let at = Tensor::new(&[0i32, 1], &[2], &device).unwrap();
    assert_eq!(refused(&x, &at), "rope: positions is i32, but u32 is wanted");
}

#[test]
fn parameters_that_make_no_sense() {
    let refused = |params: RopeParams| Rope::new(&params).unwrap_err().to_string();
    assert_eq!(
        refused(RopeParams { rotary_dim: 5, ..PARAMS }),
        "rope: rotary_dim is 5, but an even number is wanted, since pairs are rotated"
    );
    assert_eq!(
        refused(RopeParams { theta: 0.0, ..PARAMS }),
        "rope: theta is 0, but a positive finite number is wanted"
    );
    assert_eq!(
        refused(RopeParams { freq_factors: Some(vec![1.0]), ..PARAMS }),
        "rope: freq_factors is 1 numbers, but rotary_dim 6 wants 3"
    );
    assert_eq!(
        refused(RopeParams { freq_factors: Some(vec![1.0, 0.0, f32::INFINITY]), ..PARAMS }),
        "rope: freq_factors is 0, but a number above 0 is wanted"
    );
    let scaled = |scaling| refused(RopeParams { scaling, ..PARAMS });
    assert_eq!(
        scaled(RopeScaling::Linear { factor: f32::NAN }),
        "rope: factor is NaN, but a positive finite number is wanted"
    );
    let llama3 = Llama3 {
        factor: 8.0,
        low_freq_factor: 4.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(
        scaled(RopeScaling::Llama3(llama3)),
        "rope: high_freq_factor is 4, but it must be more than low_freq_factor, 4"
    );
    assert_eq!(
        scaled(RopeScaling::Yarn(Yarn::new(4.0, 0))),
        "rope: original_max_position_embeddings is 0, but a positive finite number is wanted"
    );
    assert_eq!(
        scaled(RopeScaling::Yarn(Yarn { beta_slow: -1.0, ..Yarn::new(4.0, 512) })),
        "rope: beta_slow is -1, but a positive finite number is wanted"
    );
}
