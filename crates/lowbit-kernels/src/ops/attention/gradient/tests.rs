use super::*;
use crate::Device;
use crate::ops::attention;
use crate::ops::attention::reference::Operands;
use crate::ops::testing::{
    FLOATS, assert_close, assert_derivatives, coarse, device, devices, dot, host, normal, values,
};
use numcheck::{Random, assert_bits};

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let mut random = Random::new(1);
    // Hq, Hkv, capacity, D, Dv; two queries of one cache, out of order.
    let (sizes, positions) = ([4, 2, 5, 3, 2], [3, 1]);
    let [query_heads, heads, capacity, width, value_width] = sizes;
    let q = coarse(&mut random, 2 * query_heads * width);
    let k = coarse(&mut random, heads * capacity * width);
    let v = coarse(&mut random, heads * capacity * value_width);
    let dy = coarse(&mut random, 2 * query_heads * value_width);
    let causal = AttentionParams::causal(0.5);
    for params in [
        causal,
        AttentionParams { sliding_window: Some(2), ..causal },
        AttentionParams { softcap: Some(0.7), ..causal },
        AttentionParams { sliding_window: Some(2), look_ahead: 1, softcap: Some(2.0), ..causal },
    ] {
        let loss = |q: &[f32], k: &[f32], v: &[f32]| {
            dot(&Operands { q, k, v, positions: &positions, sinks: &[], sizes }.attention(&params).y, &dy)
        };
        let of = Operands { q: &q, k: &k, v: &v, positions: &positions, sinks: &[], sizes };
        let [dq, dk, dv] = reference::attention_backward(&of, &dy, &params);
        assert_derivatives("dq", &q, &dq.values, |q| loss(q, &k, &v));
        assert_derivatives("dk", &k, &dk.values, |k| loss(&q, k, &v));
        assert_derivatives("dv", &v, &dv.values, |v| loss(&q, &k, v));
    }
}

/// A call's operands and dy; keys and values that no query sees are NaN.
fn operands(device: &Device, sizes: [usize; 5], positions: &[u32], params: &AttentionParams) -> [Tensor; 5] {
    let [query_heads, heads, capacity, width, value_width] = sizes;
    let mut random = Random::new(positions.len() as u64);
    let mut float = |shape: &[usize]| normal(&mut random, shape, FLOATS[0], &host(device)).0;
    let (q, dy) =
        (float(&[positions.len(), query_heads, width]), float(&[positions.len(), query_heads, value_width]));
    let (mut k, mut v) = (float(&[heads, capacity, width]), float(&[heads, capacity, value_width]));
    let seen = |j: usize| positions.iter().any(|&position| params.visible(position, capacity).contains(&j));
    for (x, width) in [(&mut k, width), (&mut v, value_width)] {
        for (row, x) in x.as_mut_slice::<f32>().unwrap().chunks_mut(width).enumerate() {
            x.iter_mut().filter(|_| !seen(row % capacity)).for_each(|x| *x = f32::NAN);
        }
    }
    let at = Tensor::new(positions, &[positions.len()], &host(device)).unwrap();
    [q, k, v, dy, at].map(|x| x.to_device(device).unwrap())
}

/// Causal attention with a window.
fn windowed(sliding_window: Option<usize>) -> AttentionParams {
    AttentionParams { sliding_window, ..AttentionParams::causal(0.3) }
}

/// The op's result in f32, on the host: a GPU's own may be further from f64 than the reference's
/// bounds have y.
fn forward([q, k, v, at]: [&Tensor; 4], params: &AttentionParams) -> Tensor {
    let host = host(q.device());
    let [on_q, on_k, on_v, on_at] = [q, k, v, at].map(|x| x.to_device(&host).unwrap());
    attention(&on_q, &on_k, &on_v, &on_at, None, params).unwrap().to_device(q.device()).unwrap()
}

fn check(device: &Device, sizes: [usize; 5], positions: &[u32], window: Option<usize>) {
    check_with(device, sizes, positions, &windowed(window));
}

fn check_with(device: &Device, sizes: [usize; 5], positions: &[u32], params: &AttentionParams) {
    let [q, k, v, dy, at] = operands(device, sizes, positions, params);
    let y = forward([&q, &k, &v, &at], params);
    let got = attention_backward([&q, &k, &v], &at, params, [&y, &dy]).unwrap();
    compare([&q, &k, &v, &dy], sizes, (positions, params), &got);
}

/// With the reference.
fn compare(
    [q, k, v, dy]: [&Tensor; 4],
    sizes: [usize; 5],
    (positions, params): (&[u32], &AttentionParams),
    got: &AttentionGradient,
) {
    let [qs, ks, vs, dys] = [q, k, v, dy].map(values);
    let of = Operands { q: &qs, k: &ks, v: &vs, positions, sinks: &[], sizes };
    let [dq, dk, dv] = reference::attention_backward(&of, &dys, params);
    for (got, like, want) in [(&got.dq, q, dq), (&got.dk, k, dk), (&got.dv, v, dv)] {
        assert_close(got, like.shape(), FLOATS[0], &want.values, |i| want.bounds[i]);
    }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    for device in devices {
        let prefill: Vec<u32> = (0..75).collect();
        check(device, [6, 2, 150, 20, 13], &prefill, None);
        check(device, [6, 2, 150, 20, 13], &prefill, Some(10));
        check(device, [3, 3, 140, 16, 32], &(60..130).collect::<Vec<u32>>(), None);
        check(device, [2, 1, 100, 65, 7], &[99, 3, 64, 63], Some(40));
        check(device, [70, 1, 9, 5, 3], &[8, 0], None);
        check(device, [1, 1, 1, 1, 1], &[0], None);
        for softcap in [0.5, 4.0, 50.0] {
            let params = AttentionParams { softcap: Some(softcap), ..windowed(Some(40)) };
            check_with(device, [6, 2, 150, 20, 13], &prefill, &params);
        }
        let both = AttentionParams { look_ahead: 12, ..windowed(Some(13)) };
        check_with(device, [6, 2, 75, 20, 13], &prefill, &both);
        check_with(device, [2, 1, 75, 8, 7], &prefill, &AttentionParams { look_ahead: usize::MAX, ..both });
    }
}

#[cfg(feature = "gpu")]
mod gpu_tests {
    use super::*;
    use crate::ops::testing::gpu;
    use lowbit_formats::DType;

    #[test]
    fn gpu_agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    /// Several cubes each way, and rows of keys' gradients that are split.
    #[test]
    fn gpu_agrees_with_f64_in_many_tiles() {
        let positions: Vec<u32> = (30..230).collect();
        check(&gpu(), [6, 2, 250, 36, 44], &positions, None);
        check(&gpu(), [4, 4, 250, 36, 44], &positions, Some(70));
    }

    /// Blocks of 7 tokens, the last one shorter; and of one, since not even that fits.
    #[test]
    fn gpu_agrees_with_f64_in_blocks_of_tokens() {
        let (device, sizes) = (gpu(), [6, 2, 90, 12, 8]);
        let Device::Gpu(queue) = &device else { unreachable!() };
        let positions: Vec<u32> = (0..80).rev().collect();
        for (pairs, window) in [(7 * 6 * 96, None), (1, Some(17))] {
            let params = windowed(window);
            let [q, k, v, dy, at] = operands(&device, sizes, &positions, &params);
            let y = forward([&q, &k, &v, &at], &params);
            let [q, k, v, dy] = [&q, &k, &v, &dy];
            let of = super::super::Operands {
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                y,
                dy: dy.clone(),
                positions: &at,
            };
            let got = super::super::gpu::backward(queue, &of, &params, pairs).unwrap();
            compare([q, k, v, dy], sizes, (&positions, &params), &got);
        }
    }

    #[test]
    fn gpu_repeats_every_bit() {
        let positions: Vec<u32> = (0..200).collect();
        let params = windowed(None);
        let [q, k, v, dy, at] = operands(&gpu(), [4, 2, 210, 16, 16], &positions, &params);
        let run = || {
            let got = attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
            [got.dq, got.dk, got.dv].map(|x| values(&x))
        };
        let one = run();
        for (got, want) in run().iter().zip(&one) {
            assert_bits("a second time", got, want);
        }
    }

    /// A token whose position is beyond the capacity changes nothing but its own rows.
    #[test]
    fn gpu_wrong_positions_give_nan_in_their_rows_of_dq() {
        let sizes = [4, 2, 30, 8, 4];
        for wrong in [30, u32::MAX] {
            let positions: Vec<u32> = (0..25).collect();
            let params = windowed(None);
            let [q, k, v, dy, at] = operands(&gpu(), sizes, &positions, &params);
            let y = forward([&q, &k, &v, &at], &params);
            let with = |token: u32| {
                let at: Vec<u32> = positions.iter().map(|&at| if at == 12 { token } else { at }).collect();
                let at = Tensor::new(&at, &[25], &gpu()).unwrap();
                let got = attention_backward([&q, &k, &v], &at, &params, [&y, &dy]).unwrap();
                [got.dq, got.dk, got.dv].map(|x| values(&x))
            };
            let ([dq, dk, dv], [want, ..]) = (with(wrong), with(12));
            for (row, (got, want)) in dq.chunks(8).zip(want.chunks(8)).enumerate() {
                if row / 4 == 12 {
                    assert!(got.iter().all(|x| x.is_nan()), "{row}: {got:?}");
                } else {
                    assert_bits("another row", got, want);
                }
            }
            // As if dy were 0 there.
            let mut zeroed = values(&dy);
            zeroed[12 * 4 * 4..13 * 4 * 4].fill(0.0);
            let zeroed = Tensor::new(&zeroed, dy.shape(), &gpu()).unwrap();
            let want = attention_backward([&q, &k, &v], &at, &params, [&y, &zeroed]).unwrap();
            assert_bits("dk", &dk, &values(&want.dk));
            assert_bits("dv", &dv, &values(&want.dv));
        }
    }

    #[test]
    fn gpu_types_and_empty() {
        let device = gpu();
        let params = windowed(None);
        let [q, k, v, dy, at] = operands(&device, [4, 2, 6, 3, 5], &[5, 0], &params);
        let [q, k, v, dy] = [q, k, v, dy].map(|x| x.cast(DType::BF16).unwrap());
        let narrow = attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
        let [q, k, v, dy] = [q, k, v, dy].map(|x| x.cast(DType::F32).unwrap());
        let wide = attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
        for (narrow, wide) in [(narrow.dq, wide.dq), (narrow.dk, wide.dk), (narrow.dv, wide.dv)] {
            assert_eq!(narrow.dtype(), DType::BF16);
            assert_bits("rounded", &values(&narrow), &values(&wide.cast(DType::BF16).unwrap()));
        }
        let [q, dy, at] = [&q, &dy, &at].map(|x| x.rows(0, 0).unwrap());
        let got = attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
        assert_eq!(
            (got.dq.shape(), values(&got.dk), values(&got.dv)),
            (&[0, 4, 3][..], vec![0.0; 36], vec![0.0; 60])
        );
    }
}

#[test]
fn the_same_for_every_number_of_threads() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        let positions: Vec<u32> = (0..130).collect();
        let params = windowed(None);
        let [q, k, v, dy, at] = operands(&device, [4, 2, 130, 24, 16], &positions, &params);
        // The forward op's stretches do depend on it.
        let AttentionGradient { dq, dk, dv } =
            attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
        [dq, dk, dv].map(|x| values(&x))
    };
    let one = of(1);
    for (got, want) in of(3).iter().zip(&one) {
        assert_bits("threads", got, want);
    }
}

#[test]
fn empty_and_refused() {
    let device = device();
    let params = windowed(None);
    let [q, k, v, dy, at] = operands(&device, [4, 2, 6, 3, 5], &[5], &params);
    let error = attention_backward([&q, &k, &v], &at, &params, [&dy, &q]).unwrap_err().to_string();
    assert_eq!(
        error,
        "attention_backward: dy is [1, 4, 3], but q [1, 4, 3] with v [2, 6, 5] wants [1, 4, 5]"
    );
    let [q, dy, at] = [&q, &dy, &at].map(|x| x.rows(0, 0).unwrap());
    let got = attention_backward([&q, &k, &v], &at, &params, [&dy, &dy]).unwrap();
    assert_eq!(
        (got.dq.shape(), values(&got.dk), values(&got.dv)),
        (&[0, 4, 3][..], vec![0.0; 36], vec![0.0; 60])
    );
}
