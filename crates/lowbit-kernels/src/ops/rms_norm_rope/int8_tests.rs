//! `rms_norm_rope_append` to caches of 8 bits: queries and keys are transformed, and keys and
//! values encoded.

use super::tests::rotation;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, devices, fetched, normal, rounding};
use crate::ops::{RopeLayout, expand_cache, gather_pages, hadamard_transform};
use lowbit_formats::{DType, FloatType};
use numcheck::{Random, gamma};

/// `rotary_dim`, `head_dim`, columns of a query head, and `Dv`.
const SIZES: [[usize; 4]; 6] = [
    [16, 32, 64, 48],
    [62, 64, 64, 64],
    [80, 80, 80, 16],
    [128, 128, 128, 144],
    [64, 256, 512, 256],
    [512, 512, 512, 512],
];

/// Values with the bounds of their errors.
type Bounded = Vec<(f64, f64)>;

/// Heads of `width`, transformed in f32 from what has these bounds, which was rounded to `dtype`.
fn transformed(heads: Bounded, width: usize, dtype: FloatType) -> Bounded {
    let rounded = |(y, bound): (f64, f64)| (y, bound + rounding(dtype, y.abs() + bound));
    let (values, bounds): (Vec<f64>, Vec<f64>) = heads.into_iter().map(rounded).unzip();
    let of = hadamard_transform::reference::hadamard_transform;
    let roundings = gamma(hadamard_transform::reference::roundings(width));
    let spread = of(&bounds, width).into_iter().map(|(_, sum)| sum);
    of(&values, width)
        .into_iter()
        .zip(spread)
        .map(|((y, sum), bound)| (y, bound + roundings * (sum + bound)))
        .collect()
}

/// The same, rounded to `dtype` and then to 8 bits.
fn encoded(heads: Bounded, width: usize, dtype: FloatType) -> Bounded {
    let group = CacheType::group(width);
    let of_group = |heads: &[(f64, f64)]| -> Bounded {
        let heads: Bounded =
            heads.iter().map(|&(y, bound)| (y, bound + rounding(dtype, y.abs() + bound))).collect();
        let greatest = heads.iter().fold(0.0, |greatest: f64, (y, bound)| greatest.max(y.abs() + bound));
        let step = greatest / 120.0 * (1.0 + 2f64.powi(-10)) + 2f64.powi(-31);
        let own = step * 0.5 + greatest * 2f64.powi(-11) + 2f64.powi(-25);
        heads.into_iter().map(|(y, bound)| (y, bound + own)).collect()
    };
    heads.chunks(width).flat_map(|head| head.chunks(group)).flat_map(of_group).collect()
}

fn heads_are_transformed_and_encoded_on(device: &Device) {
    let mut random = Random::new(9);
    let (tokens, heads, places) = (3, 3, [70u32, 0, 12]);
    for (i, [rotary_dim, head_dim, columns, value_dim]) in SIZES.into_iter().enumerate() {
        let dtype = FLOATS[i % 3];
        let rope = rotation(rotary_dim, [RopeLayout::HalfSplit, RopeLayout::Interleaved][i % 2]);
        let (k, ks) = normal(&mut random, &[tokens, heads, head_dim], dtype, device);
        let (v, vs) = normal(&mut random, &[tokens, heads, value_dim], dtype, device);
        let (q, qs) = normal(&mut random, &[tokens, 2 * heads, columns], dtype, device);
        let (weight, weights) = normal(&mut random, &[head_dim], FLOATS[0], device);
        let at = Tensor::new(&places, &[tokens], device).unwrap();
        let norm = Some((&weight, 1e-3));
        for [query_norm, norm] in [[norm; 2], [None; 2], [None, norm]] {
            let params = RmsNormRope { head_dim, norm, rope: &rope };
            let queries = RmsNormRope { norm: query_norm, ..params };
            let row = |width| CacheType::Int8.row(width);
            let zeros = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::I8, device).unwrap();
            let of_heads = |xs: &[f32], columns, params: &RmsNormRope<'_>| {
                let made = reference::rms_norm_rope(xs, columns, &weights, &places, params);
                transformed(made, head_dim, dtype)
            };
            let new_keys = encoded(of_heads(&ks, head_dim, &params), head_dim, dtype);
            let values = vs.iter().map(|&v| (f64::from(v), 0.0)).collect();
            let wanted = [(head_dim, new_keys), (value_dim, encoded(values, value_dim, dtype))];
            let (want, bounds): (Vec<f64>, Vec<f64>) = of_heads(&qs, columns, &queries).into_iter().unzip();
            // In a cache, and in pages that the table has in another order.
            let table = Tensor::new(&[1u32, 0], &[1, 2], device).unwrap();
            for paged in [false, true] {
                let shape =
                    |width| if paged { vec![2, heads, 64, row(width)] } else { vec![heads, 128, row(width)] };
                let [mut keys, mut cached] = [head_dim, value_dim].map(|width| zeros(&shape(width)));
                let (into, new, rotations) = ([&mut keys, &mut cached], [&q, &k, &v], [&queries, &params]);
                let y = match paged {
                    false => rms_norm_rope_append(into, new, [&at; 2], rotations),
                    true => {
                        let [keys, values] = into;
                        rms_norm_rope_append_paged(
                            PagesMut { keys, values, table: &table },
                            new,
                            &at,
                            rotations,
                        )
                    }
                };
                assert_close(&y.unwrap(), &[tokens, 2 * heads, head_dim], dtype, &want, |i| bounds[i]);
                for (cache, (width, wanted)) in [keys, cached].into_iter().zip(&wanted) {
                    let cache = match paged {
                        false => cache,
                        true => gather_pages(&cache, &table.reshape(&[2]).unwrap()).unwrap(),
                    };
                    let got = fetched(&expand_cache(&cache, DType::F32).unwrap());
                    let got = got.as_slice::<f32>().unwrap();
                    let mut want = vec![(0.0, 0.0); got.len()];
                    for (index, row) in wanted.chunks(*width).enumerate() {
                        let place = index % heads * 128 + places[index / heads] as usize;
                        want[place * width..][..*width].copy_from_slice(row);
                    }
                    for (i, (&got, (want, bound))) in got.iter().zip(want).enumerate() {
                        let bound = bound + rounding(FloatType::F32, want.abs() + bound);
                        assert!(
                            (f64::from(got) - want).abs() <= bound,
                            "[{i}] {got} is not {want} within {bound}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn heads_are_transformed_and_encoded() {
    devices().iter().for_each(heads_are_transformed_and_encoded_on);
}

#[cfg(feature = "gpu")]
#[test]
fn heads_are_transformed_and_encoded_on_a_gpu() {
    heads_are_transformed_and_encoded_on(&crate::ops::testing::gpu());
}
