use super::tests::{
    agrees_with_f64_on, keys_and_values_go_to_their_positions_on, rotation, tokens_go_to_their_pages_on,
};
use super::*;
use crate::ops::testing::{FLOATS, assert_close, gpu, normal, values};
use crate::ops::{self, RopeLayout};
use lowbit_formats::DType;
use numcheck::Random;

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

#[test]
fn keys_and_values_go_to_their_positions_and_nowhere_else() {
    keys_and_values_go_to_their_positions_on(&[gpu()], &[69, 70, 0, u32::MAX, 12]);
}

#[test]
fn tokens_go_to_their_pages() {
    tokens_go_to_their_pages_on(&[gpu()]);
}

#[test]
fn tokens_without_a_page_go_nowhere() {
    let device = gpu();
    let pool = || Tensor::zeros(&[2, 1, 64, 2], DType::F32, &device);
    let (mut keys, mut cached) = (pool(), pool());
    let x = Tensor::new(&[5f32, 6.0].repeat(4), &[4, 1, 2], &device).unwrap();
    // A page beyond the pool, a position beyond the table, and two tokens that have places.
    let table = Tensor::new(&[2u32, 0, 1, 0, u32::MAX, 1, 0, 1], &[4, 2], &device).unwrap();
    let at = Tensor::new(&[3u32, 128, 65, 7], &[4], &device).unwrap();
    let rope = rotation(0, RopeLayout::HalfSplit);
    let params = RmsNormRope { head_dim: 2, norm: None, rope: &rope };
    let into = ops::PagesMut { keys: &mut keys, values: &mut cached, table: &table };
    rms_norm_rope_append_paged(into, [&x, &x, &x], &at, [&params; 2]).unwrap();
    let mut want = vec![0f32; 2 * 64 * 2];
    for place in [64 + 1, 7] {
        want[2 * place..][..2].copy_from_slice(&[5.0, 6.0]);
    }
    for pool in [keys, cached] {
        assert_eq!(values(&pool), want);
    }
}

#[test]
fn forked_caches_keep_what_they_had() {
    let device = gpu();
    let zeros = || Tensor::zeros(&[1, 2, 2], DType::F32, &device);
    let (mut keys, mut cached) = (zeros(), zeros());
    let forks = [keys.clone(), cached.clone()];
    let x = Tensor::new(&[5f32, 6.0], &[1, 1, 2], &device).unwrap();
    let (at, rope) = (Tensor::new(&[1u32], &[1], &device).unwrap(), rotation(0, RopeLayout::HalfSplit));
    let params = RmsNormRope { head_dim: 2, norm: None, rope: &rope };
    rms_norm_rope_append([&mut keys, &mut cached], [&x, &x, &x], [&at; 2], [&params; 2]).unwrap();
    for cache in [keys, cached] {
        assert_eq!(values(&cache), [0.0, 0.0, 5.0, 6.0]);
    }
    for fork in forks {
        assert_eq!(values(&fork), [0.0; 4]);
    }
}

#[test]
fn many_heads() {
    let device = gpu();
    let (x, xs) = normal(&mut Random::new(2), &[301, 7, 48], FLOATS[1], &device);
    let (weight, weights) = normal(&mut Random::new(3), &[40], FLOATS[0], &device);
    let positions: Vec<u32> = (0..301).rev().collect();
    let rope = rotation(32, RopeLayout::HalfSplit);
    let params = RmsNormRope { head_dim: 40, norm: Some((&weight, 1e-6)), rope: &rope };
    let want = reference::rms_norm_rope(&xs, 48, &weights, &positions, &params);
    let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
    let y = rms_norm_rope(&x, &Tensor::new(&positions, &[301], &device).unwrap(), &params).unwrap();
    assert_close(&y, &[301, 7, 40], FLOATS[1], &want, |i| bounds[i]);
}

#[test]
fn nan_stays_in_its_head() {
    let device = gpu();
    let mut x = vec![1f32; 5 * 20];
    // The head's, and one that is no part of another head.
    (x[2 * 20 + 1], x[4 * 20 + 13]) = (f32::NAN, f32::NAN);
    let x = Tensor::new(&x, &[5, 1, 20], &device).unwrap();
    let weight = Tensor::new(&[1f32; 12], &[12], &device).unwrap();
    let at = Tensor::new(&[3u32; 5], &[5], &device).unwrap();
    let rope = rotation(6, RopeLayout::Interleaved);
    let params = RmsNormRope { head_dim: 12, norm: Some((&weight, 1e-6)), rope: &rope };
    for (i, y) in values(&rms_norm_rope(&x, &at, &params).unwrap()).iter().enumerate() {
        assert_eq!(y.is_nan(), i / 12 == 2, "[{i}] {y}");
    }
    let (none, at) = (x.rows(0, 0).unwrap(), at.rows(0, 0).unwrap());
    assert_eq!(rms_norm_rope(&none, &at, &params).unwrap().shape(), [0, 1, 12]);
}
