use super::reference::gated_delta_rule_backward as reference;
use super::*;
use crate::Device;
use crate::ops::gated_delta_rule::reference::Bounded;
use crate::ops::gated_delta_rule::reference::gated_delta_rule as forward_reference;
use crate::ops::gated_delta_rule::tests::{Case, Decay, RAGGED, Sizes};
use crate::ops::gated_delta_rule::{HeadMap, Rule, cpu};
use crate::ops::testing::{assert_derivatives, coarse, devices, moved, values};
use numcheck::{Random, assert_bits, assert_within};
use std::ops::Range;

fn dy(case: &Case) -> Tensor {
    Tensor::new(&Random::new(9).normal(case.v.len(), 1.0), case.v.shape(), case.v.device()).unwrap()
}

fn sequences(case: &Case) -> Vec<Range<usize>> {
    let offsets = case.cu_seqlens.as_slice::<u32>().unwrap();
    offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect()
}

/// `[dq, dk, dv, dlog_decay, dbeta]` of a case whose gates are there.
fn wanted(case: &Case, dy: &Tensor) -> [Bounded; 5] {
    let dims = crate::ops::gated_delta_rule::check(&case.inputs(), &case.state, &case.params).unwrap();
    let problem = Problem {
        q: case.q.as_slice().unwrap(),
        k: case.k.as_slice().unwrap(),
        v: case.v.as_slice().unwrap(),
        decay: cpu::Decay::Heads(case.log_decay.as_slice().unwrap()),
        beta: case.beta.as_slice().unwrap(),
        dims,
        params: &case.params,
        slots: None,
    };
    let (state, dy) = (case.state.as_slice().unwrap(), dy.as_slice().unwrap());
    reference(&problem, &sequences(case), state, dy)
}

/// The op's, in the same order.
fn gradients(case: &Case, dy: &Tensor) -> [Tensor; 5] {
    let got = gated_delta_rule_backward(&case.inputs(), &case.state, &case.params, dy).unwrap();
    let GatesGradient::Computed { dlog_decay, dbeta } = got.dgates else { panic!("{:?}", got.dgates) };
    [got.dq, got.dk, got.dv, dlog_decay, dbeta]
}

#[test]
fn formulas_are_the_derivatives_of_the_forward_reference() {
    let shape = Sizes { lengths: &[3, 0, 2], key_heads: 2, key_dim: 2, value_heads: 4, value_dim: 3 };
    let mut random = Random::new(1);
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        let params = GatedDeltaRule { scale: 0.5, head_map, ..GatedDeltaRule::new(2) };
        let mut case = Case::new(shape, Decay::Usual, params);
        for x in [&mut case.q, &mut case.k, &mut case.v, &mut case.log_decay, &mut case.beta] {
            let exact = coarse(&mut random, x.len());
            x.write(&exact).unwrap();
        }
        let dy = dy(&case);
        let dys = values(&dy);
        let want = wanted(&case, &dy);
        let loss = |case: &Case| {
            let (y, _) =
                forward_reference(&case.inputs(), &case.state, &case.params, 1, |_, _| true).unwrap();
            y.values.iter().zip(&dys).map(|(y, &dy)| y * f64::from(dy)).sum::<f64>()
        };
        type Part = fn(&mut Case) -> &mut Tensor;
        let parts: [(&str, Part); 5] = [
            ("dq", |case| &mut case.q),
            ("dk", |case| &mut case.k),
            ("dv", |case| &mut case.v),
            ("dlog_decay", |case| &mut case.log_decay),
            ("dbeta", |case| &mut case.beta),
        ];
        for ((what, part), want) in parts.into_iter().zip(want) {
            let x = values(part(&mut case.clone()));
            assert_derivatives(what, &x, &want.values, |x| {
                let mut case = case.clone();
                part(&mut case).write(x).unwrap();
                loss(&case)
            });
        }
    }
}

fn check_on(case: &Case, devices: &[Device]) {
    let dy = dy(case);
    let want = wanted(case, &dy);
    for device in devices {
        let got = gradients(&case.on(device), &moved(&dy, device));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let [shape, gates] = [[&case.q, &case.k, &case.v], [&case.beta; 3]];
            assert_eq!(got.shape(), if i < 3 { shape[i].shape() } else { gates[0].shape() });
            assert_within(&values(got), &want.values, |i| want.bounds[i]);
        }
    }
}

#[test]
fn agrees_with_the_reference_for_both_maps_of_heads() {
    for_both_maps_of_heads(&devices());
}

fn for_both_maps_of_heads(devices: &[Device]) {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        let params = GatedDeltaRule { scale: 0.3, head_map, ..GatedDeltaRule::new(RAGGED.key_dim) };
        check_on(&Case::new(RAGGED, Decay::Usual, params), devices);
    }
}

#[test]
fn every_decay_and_tokens_around_a_chunk() {
    around_a_chunk(cpu::CHUNK, &devices());
}

fn around_a_chunk(chunk: usize, devices: &[Device]) {
    for decay in [Decay::None, Decay::Usual, Decay::Strong] {
        let lengths = &[chunk - 1, chunk, chunk + 1, 2 * chunk + 1];
        let shape = Sizes { lengths, key_heads: 1, key_dim: 16, value_heads: 1, value_dim: 9 };
        check_on(&Case::new(shape, decay, GatedDeltaRule::new(16)), devices);
    }
}

#[test]
fn bounds_say_something() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(RAGGED.key_dim));
    for want in wanted(&case, &dy(&case)) {
        let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!(
            length(&want.bounds) < 1e-2 * length(&want.values),
            "{} {}",
            length(&want.bounds),
            length(&want.values)
        );
    }
}

/// They are made of ops whose gradients are tested alone.
#[test]
fn normalisation_and_gates_inside_are_those_outside() {
    inside_are_those_outside(&devices());
}

fn inside_are_those_outside(devices: &[Device]) {
    const EPS: f32 = 1e-3;
    for device in devices {
        let params = GatedDeltaRule { qk_norm: Some(EPS), ..GatedDeltaRule::new(RAGGED.key_dim) };
        let case = Case::new(RAGGED, Decay::Usual, params).with_keys_times(1.7).with_raw_gates().on(device);
        let dy = dy(&case);
        let got = gated_delta_rule_backward(&case.inputs(), &case.state, &case.params, &dy).unwrap();
        let mut alone = case.clone();
        let [a, b, a_log, dt_bias] = alone.raw.take().unwrap();
        alone.params.qk_norm = None;
        (alone.q, alone.k) = (params.normalised(&case.q).unwrap(), params.normalised(&case.k).unwrap());
        (alone.log_decay, alone.beta) = case.inputs().gates.computed().unwrap();
        let [dq, dk, dv, dlog_decay, dbeta] = gradients(&alone, &dy);
        let want = delta_gates_backward([&a, &b], [&a_log, &dt_bias], [&dlog_decay, &dbeta]).unwrap();
        let GatesGradient::Raw(gates) = got.dgates else { panic!("{:?}", got.dgates) };
        for (got, want) in [
            (got.dq, l2_norm_backward(&case.q, EPS, &dq).unwrap()),
            (got.dk, l2_norm_backward(&case.k, EPS, &dk).unwrap()),
            (got.dv, dv),
            (gates.da, want.da),
            (gates.db, want.db),
            (gates.da_log, want.da_log),
            (gates.ddt_bias, want.ddt_bias),
        ] {
            assert_bits("inside", &values(&got), &values(&want));
        }
    }
}

#[test]
fn the_same_for_every_number_of_threads() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(RAGGED.key_dim));
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        gradients(&case.on(&device), &moved(&dy(&case), &device)).map(|x| values(&x))
    };
    let one = of(1);
    for (got, want) in of(3).iter().zip(&one) {
        assert_bits("threads", got, want);
    }
}

#[test]
fn empty_and_refused() {
    let shape = Sizes { lengths: &[0, 2], key_heads: 1, key_dim: 3, value_heads: 2, value_dim: 5 };
    let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(3));
    let error = gated_delta_rule_backward(&case.inputs(), &case.state, &case.params, &case.q).unwrap_err();
    assert_eq!(
        error.to_string(),
        "gated_delta_rule_backward: dy is [2, 1, 3], but v [2, 2, 5] wants [2, 2, 5]"
    );
    let refused = |case: &Case| {
        let dy = dy(case);
        let result = gated_delta_rule_backward(&case.inputs(), &case.state, &case.params, &dy);
        result.unwrap_err().to_string()
    };
    let params = GatedDeltaRule { rule: Rule::Additive, ..case.params };
    assert_eq!(
        refused(&Case { params, ..case.clone() }),
        "gated_delta_rule_backward: rule is Additive, but gradients are those of Delta"
    );
    assert_eq!(
        refused(&case.with_steps()),
        "gated_delta_rule_backward: gates is Steps, but gradients are those of Computed and Raw"
    );
    let shape = Sizes { lengths: &[0, 0], ..shape };
    let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(3));
    assert!(gradients(&case, &dy(&case)).iter().all(Tensor::is_empty));
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::super::gpu::CHUNK;
    use super::*;
    use crate::ops::testing::{FLOATS, gpu, rounding};

    #[test]
    fn agrees_with_the_reference_for_both_maps_of_heads() {
        for_both_maps_of_heads(&[gpu()]);
    }

    #[test]
    fn every_decay_and_tokens_around_a_chunk() {
        around_a_chunk(CHUNK, &[gpu()]);
    }

    /// One and two tiles of rows, vectors and none, and more columns than a cube has.
    #[test]
    fn head_sizes_below_at_and_above_each_tile() {
        for (key_dim, value_dim) in [(1, 1), (32, 32), (4, 20), (33, 15), (64, 68), (128, 40), (132, 12)] {
            let shape = Sizes { lengths: &[2, 70], key_heads: 1, key_dim, value_heads: 2, value_dim };
            check_on(&Case::new(shape, Decay::Usual, GatedDeltaRule::new(key_dim)), &[gpu()]);
        }
    }

    #[test]
    fn states_that_are_gone() {
        let mut case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(RAGGED.key_dim));
        let heads = RAGGED.value_heads;
        case.log_decay.as_mut_slice::<f32>().unwrap()[20 * heads..23 * heads].fill(f32::NEG_INFINITY);
        check_on(&case, &[gpu()]);
    }

    /// Each is rounded once, and so is what it is made of.
    #[test]
    fn activations_of_every_type() {
        let device = gpu();
        for float in FLOATS {
            let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(RAGGED.key_dim)).rounded(float);
            let dy = dy(&case).cast(float.dtype()).unwrap();
            let got = gradients(&case.on(&device), &moved(&dy, &device));
            let wide = |x: &Tensor| x.cast(DType::F32).unwrap();
            let same = Case { q: wide(&case.q), k: wide(&case.k), v: wide(&case.v), ..case };
            for (i, (got, want)) in got.iter().zip(wanted(&same, &wide(&dy))).enumerate() {
                assert_eq!(got.dtype(), if i < 3 { float.dtype() } else { DType::F32 });
                let once = |i: usize| rounding(float, want.values[i].abs() + want.bounds[i]);
                let bound = |at: usize| want.bounds[at] + if i < 3 { once(at) } else { 0.0 };
                assert_within(&values(got), &want.values, bound);
            }
        }
    }

    #[test]
    fn normalisation_and_gates_inside_are_those_outside() {
        inside_are_those_outside(&[gpu()]);
    }

    #[test]
    fn the_same_in_every_launch() {
        let (device, case) = (gpu(), Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(RAGGED.key_dim)));
        let (case, dy) = (case.on(&device), moved(&dy(&case), &device));
        let first = gradients(&case, &dy);
        for (got, want) in gradients(&case, &dy).iter().zip(&first) {
            assert_bits("launches", &values(got), &values(want));
        }
    }

    /// And its tokens' gradients are 0.
    #[test]
    fn wrong_offsets_leave_a_sequence_out() {
        let shape = Sizes { lengths: &[6, 4], key_heads: 1, key_dim: 8, value_heads: 1, value_dim: 8 };
        let (device, right) = (gpu(), Case::new(shape, Decay::Usual, GatedDeltaRule::new(8)));
        let of = |case: &Case| gradients(&case.on(&device), &moved(&dy(case), &device)).map(|x| values(&x));
        let want = of(&right);
        for wrong in [[0u32, 6, 11], [0, 6, 5], [0, 6, u32::MAX]] {
            let cu_seqlens = Tensor::new(&wrong, &[3], right.q.device()).unwrap();
            for (got, want) in of(&Case { cu_seqlens, ..right.clone() }).iter().zip(&want) {
                let first = want.len() / 10 * 6;
                assert_bits("the other", &got[..first], &want[..first]);
                assert!(got[first..].iter().all(|&x| x == 0.0), "{got:?}");
            }
        }
    }

    #[test]
    fn no_tokens() {
        let shape = Sizes { lengths: &[0, 0], key_heads: 1, key_dim: 3, value_heads: 2, value_dim: 5 };
        let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(3)).on(&gpu());
        assert!(gradients(&case, &dy(&case)).iter().all(Tensor::is_empty));
    }
}
