//! Chunks in tiles of bf16, by the model of a unit and by the processor's own if it has one.

use super::*;
use crate::Device;
use crate::ops::gated_delta_rule::rounded::{self, Rounding};
use crate::ops::gated_delta_rule::tests::{Case, Decay, NAN, RAGGED, Sizes, check_nan};
use crate::ops::gated_delta_rule::{HeadMap, Rule, check};
use crate::ops::testing::{devices, values};
use crate::simd::tiles::{Model, TileUnit};
use numcheck::assert_within;

const CHUNKED: GatedDeltaRule = GatedDeltaRule {
    rule: Rule::Delta,
    qk_norm: None,
    scale: 0.3,
    head_map: HeadMap::Grouped,
    form: Form::Chunked,
    exact: false,
};

/// `y` and the last state, in f32, of a case whose gates are computed.
fn run_on(device: &Device, unit: impl TileUnit, case: &Case) -> [Vec<f32>; 2] {
    let cpu = device.as_cpu("test").unwrap();
    let dims = check(&case.inputs(), &case.state, &case.params).unwrap();
    let [q, k, v, log_decay, beta] = [&case.q, &case.k, &case.v, &case.log_decay, &case.beta].map(values);
    let [mut y, mut state] = [vec![0.0; v.len()], values(&case.state)];
    let offsets = case.cu_seqlens.as_slice::<u32>().unwrap();
    let sequences: Vec<_> = offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize).collect();
    let params = &case.params;
    let decay = super::Decay::Heads(&log_decay);
    let problem = Problem { q: &q, k: &k, v: &v, decay, beta: &beta, dims, params, slots: None };
    let chunks = |chunked: Chunked<'_, '_, '_>| unit.dispatch(cpu.isa(), chunked);
    problem.run_by(cpu, &sequences, (&mut y, &mut state), chunks);
    [y, state]
}

fn check_case(case: Case) {
    let rounding = (Rounding::on_cpu(), CHUNK);
    let (y, state) =
        rounded::gated_delta_rule(&case.inputs(), &case.state, &case.params, rounding, |_, _| true).unwrap();
    for device in devices() {
        let check = |[got_y, got_state]: [Vec<f32>; 2]| {
            assert_within(&got_y, &y.values, |i| y.bounds[i]);
            assert_within(&got_state, &state.values, |i| state.bounds[i]);
        };
        check(run_on(&device, Model, &case));
        #[cfg(target_arch = "x86_64")]
        device
            .as_cpu("test")
            .unwrap()
            .isa()
            .tiles()
            .into_iter()
            .for_each(|amx| check(run_on(&device, amx, &case)));
    }
}

#[test]
fn agrees_with_the_reference_for_both_maps_of_heads() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        check_case(Case::new(RAGGED, Decay::Usual, GatedDeltaRule { head_map, ..CHUNKED }));
    }
}

#[test]
fn head_sizes_and_lengths_around_every_tile() {
    for (key_dim, value_dim) in
        [(1, 1), (16, 64), (31, 8), (32, 15), (33, 16), (64, 129), (72, 80), (128, 40)]
    {
        // In place, and copied.
        let shape = Sizes { lengths: &[2, 67, 130], key_heads: 1, key_dim, value_heads: 2, value_dim };
        check_case(Case::new(shape, Decay::Usual, CHUNKED));
    }
}

#[test]
fn every_decay() {
    for decay in [Decay::None, Decay::Strong] {
        check_case(Case::new(RAGGED, decay, CHUNKED));
    }
}

/// The results of tiles are not within f32's rounding of the reference: tiles did compute them.
#[test]
fn tiles_round() {
    let case = Case::new(RAGGED, Decay::Usual, CHUNKED);
    let (y, _) = case.reference();
    let device = Device::cpu(Some(1)).unwrap();
    assert!(y.rejects(&run_on(&device, Model, &case)[0]));
}

#[test]
fn a_nan_reaches_no_token_before_its_own() {
    let (case, device) = (Case::new(NAN, Decay::Usual, CHUNKED), Device::cpu(Some(1)).unwrap());
    for first in [20, 9, 3] {
        check_nan(
            &case,
            first,
            |case| [&mut case.q, &mut case.k, &mut case.v, &mut case.beta],
            |case| run_on(&device, Model, case).into_iter().next().unwrap(),
        );
    }
}
