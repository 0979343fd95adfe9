use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, fetched, normal, rounding, tensor};
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
            // Heads are rotated by positions that are not their places, as in a cache that forgot.
            let turns: Vec<u32> = positions.iter().map(|&place| place % 1000 + 64).collect();
            let turned = Tensor::new(&turns, &[tokens], device).unwrap();
            // Of queries, and of keys.
            let norms = [Some((&query_weight, 2e-3)), Some((&weight, 1e-3))];
            for [query_norm, norm] in [norms, [None; 2], [None, norms[1]]] {
                let params = RmsNormRope { head_dim, norm, rope: &rope };
                let queries = RmsNormRope { norm: query_norm, ..params };
                let [mut keys, mut values] = [head_dim, value_dim].map(|width| {
                    tensor(&vec![9.0; heads * capacity * width], &[heads, capacity, width], cached, device).0
                });
                let caches = [&mut keys, &mut values];
                let norms = [&queries, &params];
                let y = rms_norm_rope_append(caches, [&q, &k, &v], [&turned, &at], norms).unwrap();
                let made = reference::rms_norm_rope(&qs, columns, &query_weights, &turns, &queries);
                let (want, bounds): (Vec<f64>, Vec<f64>) = made.into_iter().unzip();
                assert_close(&y, &[tokens, 2 * heads, head_dim], dtype, &want, |i| bounds[i]);
                let made = reference::rms_norm_rope(&ks, head_dim, &weights, &turns, &params);
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
fn tokens_go_to_their_pages() {
    tokens_go_to_their_pages_on(&devices());
}

/// Three sequences of two tokens each, in pages in any order: each token is where the table says,
/// and no other place is written.
pub(super) fn tokens_go_to_their_pages_on(devices: &[Device]) {
    const POSITIONS: [u32; 6] = [0, 1, 63, 64, 130, 129];
    let (heads, pages, columns) = (3, 9, 3);
    // Entries behind a sequence's pages are not read.
    let table = [5, u32::MAX, 99, 8, 1, u32::MAX, 0, 7, 2];
    let mut random = Random::new(4);
    for (i, [rotary_dim, head_dim, columns_of_q]) in SIZES.into_iter().enumerate() {
        let (dtype, cached, value_dim) = (FLOATS[i % 3], FLOATS[i / 3], columns_of_q);
        let rope = rotation(rotary_dim, [RopeLayout::HalfSplit, RopeLayout::Interleaved][i % 2]);
        for device in devices {
            let (k, ks) = normal(&mut random, &[6, heads, head_dim], dtype, device);
            let (v, vs) = normal(&mut random, &[6, heads, value_dim], dtype, device);
            let (q, qs) = normal(&mut random, &[6, 2 * heads, columns_of_q], dtype, device);
            let (weight, weights) = normal(&mut random, &[head_dim], FLOATS[0], device);
            let norm = (i % 4 != 0).then_some((&weight, 1e-3));
            let params = RmsNormRope { head_dim, norm, rope: &rope };
            let at = Tensor::new(&POSITIONS, &[6], device).unwrap();
            let table = Tensor::new(&table, &[3, columns], device).unwrap();
            let [mut keys, mut values] = [head_dim, value_dim].map(|width| {
                let shape = [pages, heads, ops::PAGE_TOKENS, width];
                tensor(&vec![9.0; shape.iter().product()], &shape, cached, device).0
            });
            let into = ops::PagesMut { keys: &mut keys, values: &mut values, table: &table };
            let y = rms_norm_rope_append_paged(into, [&q, &k, &v], &at, [&params; 2]).unwrap();
            let made = reference::rms_norm_rope(&qs, columns_of_q, &weights, &POSITIONS, &params);
            let (want, bounds): (Vec<f64>, Vec<f64>) = made.into_iter().unzip();
            assert_close(&y, &[6, 2 * heads, head_dim], dtype, &want, |i| bounds[i]);
            let made = reference::rms_norm_rope(&ks, head_dim, &weights, &POSITIONS, &params);
            let made = made.into_iter().map(|(y, bound)| (y, bound + rounding(dtype, y.abs() + bound)));
            let copied = vs.iter().map(|&v| (f64::from(v), 0.0));
            for (pool, rows) in [(keys, made.collect::<Vec<_>>()), (values, copied.collect())] {
                let width = pool.dim(3);
                let mut want = vec![(9.0, 0.0); pool.len()];
                for (row, values) in rows.chunks(width).enumerate() {
                    let (token, head) = (row / heads, row % heads);
                    let position = POSITIONS[token] as usize;
                    let page =
                        fetched(&table).as_slice::<u32>().unwrap()[token / 2 * columns + position / 64];
                    let place = (page as usize * heads + head) * 64 + position % 64;
                    want[place * width..][..width].copy_from_slice(values);
                }
                let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
                assert_close(&pool, &[pages, heads, 64, width], cached, &want, |i| bounds[i]);
            }
            // A token alone, in other pages of another pool, has the same bits.
            let of_token = |x: &Tensor| x.rows(3, 4).unwrap();
            let [mut keys, mut values] = [head_dim, value_dim]
                .map(|width| Tensor::zeros(&[3, heads, ops::PAGE_TOKENS, width], cached.dtype(), device));
            let table = Tensor::new(&[0u32, 2], &[1, 2], device).unwrap();
            let into = ops::PagesMut { keys: &mut keys, values: &mut values, table: &table };
            let new = [of_token(&q), of_token(&k), of_token(&v)];
            let alone =
                rms_norm_rope_append_paged(into, new.each_ref(), &of_token(&at), [&params; 2]).unwrap();
            assert_eq!(fetched(&alone).bytes(), fetched(&of_token(&y)).bytes());
        }
    }
}

#[test]
fn pages_refuse_what_has_no_place() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let (mut keys, mut values) = (zeros(&[4, 3, 64, 8]), zeros(&[4, 3, 64, 8]));
    let rope = rotation(4, RopeLayout::HalfSplit);
    let params = RmsNormRope { head_dim: 8, norm: None, rope: &rope };
    let ones = Tensor::new(&[1f32; 24], &[1, 3, 8], &device).unwrap();
    let mut refused = |k: &Tensor, v: &Tensor, table: &[u32], position: u32| {
        let table = Tensor::new(table, &[1, table.len()], &device).unwrap();
        let at = Tensor::new(&[position], &[1], &device).unwrap();
        let into = ops::PagesMut { keys: &mut keys, values: &mut values, table: &table };
        rms_norm_rope_append_paged(into, [&ones, k, v], &at, [&params; 2]).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&ones, &ones, &[1, 2], 128),
        "rms_norm_rope_append_paged: positions[0] is 128, but there are 128 rows to choose from"
    );
    assert_eq!(
        refused(&ones, &ones, &[1, 4], 64),
        "rms_norm_rope_append_paged: table[1] is 4, but there are 4 rows to choose from"
    );
    assert_eq!(
        refused(&ones, &zeros(&[1, 2, 8]), &[1], 0),
        "rms_norm_rope_append_paged: v is [1, 2, 8], but the pool [4, 3, 64, 8] wants [1, 3, 8]"
    );
    assert!(keys.as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
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
        rms_norm_rope_append([&mut keys, &mut zeros(values)], [&ones, &ones, v], [&at; 2], [&params; 2])
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
    let caches = [&mut keys, &mut zeros(&[3, 5, 8])];
    let error = rms_norm_rope_append(caches, [&half, &ones, &ones], [&at; 2], [&params; 2]);
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
    let append = rms_norm_rope_append([keys, values], [&q, &x(2.0), &x(1e5)], [&at; 2], [&params; 2]);
    let want = "rms_norm_rope_append: v is 100000, but f16, the cache's type, ends at 65520";
    assert_eq!(append.unwrap_err().to_string(), want);
    for cache in caches {
        let cache = cache.cast(DType::F32).unwrap();
        assert!(cache.as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
    }
}
