//! Appending on a GPU against what the op says.

use super::kv_append;
use crate::ops::testing::{FLOATS, device, gpu, normal, values};
use crate::{Device, Tensor};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

/// Appends to a cache of NaN; positions beyond it are written nowhere.
fn check([heads, capacity, width]: [usize; 3], positions: &[u32], from: FloatType, to: FloatType) {
    let (host, gpu) = (device(), gpu());
    let (x, xs) = normal(&mut Random::new(1), &[positions.len() + 1, heads, width], from, &host);
    let mut cache = Tensor::new(&vec![f32::NAN; heads * capacity * width], &[heads, capacity, width], &host)
        .and_then(|cache| cache.cast(to.dtype())?.to_device(&gpu))
        .unwrap();
    // A view that starts within its memory.
    let x = x.to_device(&gpu).unwrap().rows(1, positions.len() + 1).unwrap();
    let at = Tensor::new(positions, &[positions.len()], &gpu).unwrap();
    kv_append(&mut cache, &x, &at).unwrap();
    let mut want = vec![f32::NAN; heads * capacity * width];
    for (i, &x) in xs[heads * width..].iter().enumerate() {
        let (h, d, position) = (i / width % heads, i % width, positions[i / width / heads] as usize);
        if position < capacity {
            want[(h * capacity + position) * width + d] = to.round(x);
        }
    }
    for (i, (got, want)) in values(&cache.to_device(&host).unwrap()).iter().zip(&want).enumerate() {
        assert!(
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
            "{from:?} to {to:?}, [{i}]: {got} {want}"
        );
    }
}

#[test]
fn rows_go_to_their_positions_and_nowhere_else() {
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        check([3, 70, 37], &[69, 0, 12, 13], from, to);
        check([2, 33, 20], &[32, 33, 0, u32::MAX, 7], from, to);
    }
    check([2, 90, 1], &(3..80).rev().collect::<Vec<_>>(), FloatType::F32, FloatType::F16);
    check([5, 9, 64], &[8], FloatType::BF16, FloatType::BF16);
}

#[test]
fn nothing_is_appended_to_nothing() {
    for shape in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        check(shape, &[], FloatType::F32, FloatType::F32);
        check(shape, &[1, 2], FloatType::F32, FloatType::F16);
    }
    check([2, 3, 4], &[], FloatType::F32, FloatType::F32);
}

#[test]
fn a_forked_cache_keeps_what_it_had() {
    let (host, gpu) = (device(), gpu());
    let mut cache = Tensor::zeros(&[1, 2, 1], DType::F32, &gpu);
    let fork = cache.clone();
    let x = Tensor::new(&[5f32], &[1, 1, 1], &gpu).unwrap();
    kv_append(&mut cache, &x, &Tensor::new(&[1u32], &[1], &gpu).unwrap()).unwrap();
    assert_eq!(values(&cache.to_device(&host).unwrap()), [0.0, 5.0]);
    assert_eq!(values(&fork.to_device(&host).unwrap()), [0.0, 0.0]);
}

#[test]
fn a_replay_appends_where_the_positions_say_by_then() {
    let (host, gpu) = (device(), gpu());
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let mut cache = Tensor::zeros(&[1, 4, 1], DType::F32, &gpu);
    let mut at = Tensor::new(&[1f32], &[1, 1, 1], &gpu).unwrap();
    let position = Tensor::new(&[0u32], &[1], &gpu).unwrap();
    let x = Tensor::new(&[2f32], &[1, 1, 1], &gpu).unwrap();
    // The position itself is written between replays, as bits of a float.
    let pass = queue
        .capture(|| {
            let ids = at.over(at.memory()?.0.clone(), DType::U32).reshape(&[1])?;
            kv_append(&mut cache, &x, &ids)
        })
        .unwrap();
    let next = Tensor::new(&[f32::from_bits(3)], &[1, 1, 1], &gpu).unwrap();
    kv_append(&mut at, &next, &position).unwrap();
    pass.replay().unwrap();
    assert_eq!(values(&cache.to_device(&host).unwrap()), [0.0, 0.0, 0.0, 2.0]);
}
