use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, normal, rounding, tensor};
use crate::ops::{self, RopeLayout, RopeParams, RopeScaling, Yarn};
use lowbit_formats::DType;
use numcheck::Random;

pub(super) fn rotation(rotary_dim: usize, layout: RopeLayout) -> Rope {
    let scaling = RopeScaling::Yarn(Yarn { attention_factor: Some(1.3), ..Yarn::new(4.0, 512) });
    Rope::new(&RopeParams { theta: 1e4, rotary_dim, layout, scaling, freq_factors: None }).unwrap()
}

/// `rotary_dim`, `head_dim` and the columns of a head: whole vectors and others, a gate behind the
/// query or none, and more pairs than a plane has units.
pub(super) const SIZES: [[usize; 3]; 9] = [
    [0, 3, 3],
    [2, 2, 5],
    [6, 11, 11],
    [16, 17, 34],
    [16, 32, 64],
    [64, 70, 70],
    [64, 256, 512],
    [128, 128, 128],
    [62, 301, 301],
];

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    let positions = [0u32, 77, 1_000_000];
    for (i, [rotary_dim, head_dim, columns]) in SIZES.into_iter().enumerate() {
        for (layout, dtype) in [RopeLayout::HalfSplit, RopeLayout::Interleaved].into_iter().zip(FLOATS) {
            let dtype = FLOATS[(dtype as usize + i) % 3];
            let rope = rotation(rotary_dim, layout);
            for device in devices {
                let (x, xs) = normal(&mut random, &[3, 5, columns], dtype, device);
                let (weight, weights) = normal(&mut random, &[head_dim], FLOATS[i % 3], device);
                let at = Tensor::new(&positions, &[3], device).unwrap();
                for norm in [Some((&weight, 1e-3)), None] {
                    let params = RmsNormRope { head_dim, norm, rope: &rope };
                    let want = reference::rms_norm_rope(&xs, columns, &weights, &positions, &params);
                    let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
                    let y = rms_norm_rope(&x, &at, &params).unwrap();
                    assert_close(&y, &[3, 5, head_dim], dtype, &want, |i| bounds[i]);
                }
            }
        }
    }
}

#[test]
fn keys_and_values_go_to_their_positions() {
    keys_and_values_go_to_their_positions_on(&devices(), &[69, 0, 12]);
}

/// Rows for positions beyond the cache go nowhere.
pub(super) fn keys_and_values_go_to_their_positions_on(devices: &[Device], positions: &[u32]) {
    let mut random = Random::new(1);
    let (tokens, heads, capacity) = (positions.len(), 3, 70);
    for (i, [rotary_dim, head_dim, columns]) in SIZES.into_iter().enumerate() {
        let (dtype, cached, value_dim) = (FLOATS[i % 3], FLOATS[i / 3], columns);
        let rope = rotation(rotary_dim, [RopeLayout::HalfSplit, RopeLayout::Interleaved][i % 2]);
        for device in devices {
            let (k, ks) = normal(&mut random, &[tokens, heads, head_dim], dtype, device);
            let (v, vs) = normal(&mut random, &[tokens, heads, value_dim], dtype, device);
            let (q, qs) = normal(&mut random, &[tokens, 2 * heads, columns], dtype, device);
            let (query_weight, query_weights) = normal(&mut random, &[head_dim], FLOATS[1], device);
            let (weight, weights) = normal(&mut random, &[head_dim], FLOATS[0], device);
            let at = Tensor::new(positions, &[tokens], device).unwrap();
            // Of queries, and of keys.
            let norms = [Some((&query_weight, 2e-3)), Some((&weight, 1e-3))];
            for [query_norm, norm] in [norms, [None; 2], [None, norms[1]]] {
                let params = RmsNormRope { head_dim, norm, rope: &rope };
                let queries = RmsNormRope { norm: query_norm, ..params };
                let [mut keys, mut values] = [head_dim, value_dim].map(|width| {
                    tensor(&vec![9.0; heads * capacity * width], &[heads, capacity, width], cached, device).0
                });
                let caches = [&mut keys, &mut values];
                let y = rms_norm_rope_append(caches, [&q, &k, &v], &at, [&queries, &params]).unwrap();
                let made = reference::rms_norm_rope(&qs, columns, &query_weights, positions, &queries);
                let (want, bounds): (Vec<f64>, Vec<f64>) = made.into_iter().unzip();
                assert_close(&y, &[tokens, 2 * heads, head_dim], dtype, &want, |i| bounds[i]);
                let made = reference::rms_norm_rope(&ks, head_dim, &weights, positions, &params);
                let made = made.into_iter().map(|(y, bound)| (y, bound + rounding(dtype, y.abs() + bound)));
                let copied = vs.iter().map(|&v| (f64::from(v), 0.0));
                for (cache, rows) in [(keys, made.collect::<Vec<_>>()), (values, copied.collect())] {
                    let width = cache.dim(2);
                    let mut want = vec![(9.0, 0.0); heads * capacity * width];
                    for (row, values) in rows.chunks(width).enumerate() {
                        let position = positions[row / heads] as usize;
                        if position < capacity {
                            want[(row % heads * capacity + position) * width..][..width]
                                .copy_from_slice(values);
                        }
                    }
                    let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
                    assert_close(&cache, &[heads, capacity, width], cached, &want, |i| bounds[i]);
                }
            }
        }
    }
}

#[test]
fn the_cpu_computes_its_parts() {
    let device = device();
    let (x, _) = normal(&mut Random::new(2), &[2, 3, 16], FLOATS[0], &device);
    let (weight, _) = normal(&mut Random::new(3), &[8], FLOATS[0], &device);
    let (at, rope) = (Tensor::new(&[5u32, 9], &[2], &device).unwrap(), rotation(4, RopeLayout::HalfSplit));
    let params = RmsNormRope { head_dim: 8, norm: Some((&weight, 1e-6)), rope: &rope };
    let queries = ops::rms_norm(&ops::narrow(&x, 0, 8).unwrap(), &weight, 1e-6).unwrap();
    let want = ops::rope(&queries, &at, &rope).unwrap();
    assert_eq!(rms_norm_rope(&x, &at, &params).unwrap().bytes(), want.bytes());
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let (x, at, rope) =
        (zeros(&[2, 3, 8]), Tensor::zeros(&[2], DType::U32, &device), rotation(4, RopeLayout::HalfSplit));
    let refused = |x: &Tensor, at: &Tensor, head_dim: usize, weight: &Tensor, eps: f32| {
        let params = RmsNormRope { head_dim, norm: Some((weight, eps)), rope: &rope };
        rms_norm_rope(x, at, &params).unwrap_err().to_string()
    };
    let weight = zeros(&[8]);
    assert_eq!(
        refused(&x, &at, 9, &zeros(&[9]), 0.0),
        "rms_norm_rope: x is [2, 3, 8], but heads of 9 are wanted"
    );
    assert_eq!(refused(&x, &at, 7, &weight, 0.0), "rms_norm_rope: weight is [8], but head_dim 7 wants [7]");
    assert_eq!(
        refused(&x, &at, 3, &zeros(&[3]), 0.0),
        "rms_norm_rope: x is [2, 3, 8], but heads of at least 4 are rotated"
    );
    assert_eq!(
        refused(&x, &at.rows(0, 1).unwrap(), 8, &weight, 0.0),
        "rms_norm_rope: positions is [1], but x [2, 3, 8] wants [2]"
    );
    assert_eq!(
        refused(&x, &at, 8, &weight, -1.0),
        "rms_norm_rope: eps is -1, but a finite number from 0 is wanted"
    );
    refused(&zeros(&[6, 8]), &at, 8, &weight, 0.0);
    refused(&x, &zeros(&[2]), 8, &weight, 0.0);
}

#[test]
fn refusals_leave_the_caches_alone() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let ones = Tensor::new(&[1f32; 24], &[1, 3, 8], &device).unwrap();
    let rope = rotation(4, RopeLayout::HalfSplit);
    let params = RmsNormRope { head_dim: 8, norm: None, rope: &rope };
    let mut keys = zeros(&[3, 5, 8]);
    let mut refused = |values: &[usize], v: &Tensor, position: u32| {
        let at = Tensor::new(&[position], &[1], &device).unwrap();
        rms_norm_rope_append([&mut keys, &mut zeros(values)], [&ones, &ones, v], &at, [&params; 2])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused(&[3, 5, 8], &ones, 5),
        "rms_norm_rope_append: positions[0] is 5, but there are 5 rows to choose from"
    );
    assert_eq!(
        refused(&[3, 6, 8], &ones, 0),
        "rms_norm_rope_append: values is [3, 6, 8], but keys [3, 5, 8] wants [3, 5, 8]"
    );
    assert_eq!(
        refused(&[3, 5, 8], &zeros(&[1, 2, 8]), 0),
        "rms_norm_rope_append: v is [1, 2, 8], but values [3, 5, 8] wants [1, 3, 8]"
    );
    refused(&[3, 5, 8], &ones.cast(DType::F16).unwrap(), 0);
    let at = Tensor::new(&[0u32], &[1], &device).unwrap();
    let half = ones.cast(DType::F16).unwrap();
    let error =
        rms_norm_rope_append([&mut keys, &mut zeros(&[3, 5, 8])], [&half, &ones, &ones], &at, [&params; 2]);
    assert_eq!(error.unwrap_err().to_string(), "rms_norm_rope_append: q is f16, but f32 is wanted");
    assert!(keys.as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
}

#[test]
fn values_that_do_not_fit_leave_both_caches_alone() {
    let device = device();
    let mut caches = [(); 2].map(|()| Tensor::zeros(&[1, 4, 2], DType::F16, &device));
    let x = |x: f32| Tensor::new(&[1.0, x], &[1, 1, 2], &device).unwrap();
    let (q, rope) = (x(1.0), rotation(2, RopeLayout::HalfSplit));
    let at = Tensor::new(&[1u32], &[1], &device).unwrap();
    let params = RmsNormRope { head_dim: 2, norm: None, rope: &rope };
    let [keys, values] = &mut caches;
    let append = rms_norm_rope_append([keys, values], [&q, &x(2.0), &x(1e5)], &at, [&params, &params]);
    let want = "rms_norm_rope_append: v is 100000, but f16, the cache's type, ends at 65520";
    assert_eq!(append.unwrap_err().to_string(), want);
    for cache in caches {
        let cache = cache.cast(DType::F32).unwrap();
        assert!(cache.as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
    }
}
