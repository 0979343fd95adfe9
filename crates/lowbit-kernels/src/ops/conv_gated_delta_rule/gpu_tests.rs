//! The op on a GPU against the reference, and against the two ops that it is.

use super::tests::{Case, ODD, STEPS, Shape, Tokens, usual};
use super::*;
use crate::Device;
use crate::ops::gated_delta_rule::{Form, HeadMap};
use crate::ops::testing::{FLOATS, device, fetched, gpu, values};
use lowbit_formats::FloatType;

/// What models have, with fewer heads.
const MODEL: Shape = Shape { key_heads: 2, key_dim: 128, value_heads: 4, value_dim: 128, width: 4 };

impl Case {
    fn is_one_kernel(&self, tokens: &Tokens) -> bool {
        let Device::Gpu(gpu) = gpu() else { unreachable!() };
        let inputs = self.inputs(tokens);
        let dims = check(&inputs, [&self.conv_state, &self.state], &self.params).unwrap();
        gpu::convolves(&gpu, &inputs, &self.state, dims, &self.params)
    }
}

#[test]
fn agrees_with_the_reference_in_every_convention() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for state_layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
            let params = GatedDeltaRule { head_map, state_layout, ..usual(19) };
            for raw in [true, false] {
                let case = Case { raw, ..Case::new(ODD, 3, FloatType::F32, params) };
                case.check_on(&[gpu()], &STEPS);
            }
            let params = GatedDeltaRule { scale: 0.1, ..params };
            Case::new(MODEL, 1, FloatType::F32, params).check_on(&[gpu()], &[&[1], &[1], &[1]]);
        }
    }
}

#[test]
fn every_type_and_width() {
    for dtype in FLOATS {
        for width in [1, 2, 3, 4, 5] {
            let shape = Shape { width, ..ODD };
            let mut case = Case::new(shape, 3, dtype, usual(19));
            case.check_on(&[gpu()], &STEPS);
            case.activation = None;
            case.check_on(&[gpu()], &STEPS[1..3]);
        }
        Case::new(MODEL, 3, dtype, usual(128)).check_on(&[gpu()], &STEPS);
    }
}

#[test]
fn head_sizes_below_at_and_above_each_tile() {
    for (key_dim, value_dim) in [(1, 1), (32, 16), (4, 20), (33, 15), (36, 68), (64, 64), (128, 40)] {
        let shape = Shape { key_heads: 1, key_dim, value_heads: 3, value_dim, width: 4 };
        Case::new(shape, 2, FloatType::F32, usual(key_dim)).check_on(&[gpu()], &[&[1, 1], &[2, 0], &[1, 1]]);
    }
}

#[test]
fn single_tokens_are_one_kernel() {
    let case = |shape: Shape, sequences, form| {
        let params = GatedDeltaRule { form, ..usual(shape.key_dim) };
        Case::new(shape, sequences, FloatType::BF16, params)
    };
    for (shape, lengths, form, want) in [
        (MODEL, &[1][..], Form::Auto, true),
        (ODD, &[1, 1, 1], Form::Recurrent, true),
        (ODD, &[2, 0, 1], Form::Auto, true),
        (ODD, &[1, 1, 1], Form::Chunked, false),
        (ODD, &[2], Form::Auto, false),
        (Shape { width: 5, ..MODEL }, &[1], Form::Auto, false),
    ] {
        let case = case(shape, lengths.len(), form);
        let tokens = case.tokens(lengths, 1);
        assert_eq!(case.is_one_kernel(&tokens), want, "{shape:?} {lengths:?} {form:?}");
    }
}

#[test]
fn a_replayed_step_goes_on() {
    let Device::Gpu(queue) = gpu() else { unreachable!() };
    let case = Case::new(MODEL, 1, FloatType::F16, usual(128));
    let tokens = case.tokens(&[1], 1).on(&gpu());
    let (mut captured, mut direct) = (case.on(&gpu()), case.on(&gpu()));
    let mut y = None;
    // Captured work has run once.
    let pass = queue.capture(|| {
        y = Some(captured.run(&tokens)?);
        Ok(())
    });
    let pass = pass.unwrap();
    direct.run(&tokens).unwrap();
    for _ in 0..20 {
        pass.replay().unwrap();
        let want = direct.run(&tokens).unwrap();
        assert_eq!(fetched(y.as_ref().unwrap()).bytes(), fetched(&want).bytes());
        assert_eq!(fetched(&captured.conv_state).bytes(), fetched(&direct.conv_state).bytes());
        assert_eq!(fetched(&captured.state).bytes(), fetched(&direct.state).bytes());
    }
}

#[test]
fn clones_of_the_states_keep_what_they_were() {
    let case = Case::new(MODEL, 2, FloatType::F32, usual(128)).on(&gpu());
    let tokens = case.tokens(&[1, 1], 1).on(&gpu());
    let before = [&case.conv_state, &case.state].map(values);
    let mut run = case.clone();
    run.run(&tokens).unwrap();
    assert_eq!([&case.conv_state, &case.state].map(values), before);
    let after = [&run.conv_state, &run.state].map(values);
    assert!(after[0] != before[0] && after[1] != before[1]);
}

#[test]
fn wrong_offsets_leave_a_sequence_out() {
    let case = Case::new(ODD, 2, FloatType::F32, usual(19));
    let run = |offsets: &[u32]| {
        let mut tokens = case.tokens(&[1, 1], 1);
        tokens.cu_seqlens = Tensor::new(offsets, &[3], &device()).unwrap();
        let mut case = case.on(&gpu());
        let y = case.run(&tokens.on(&gpu())).unwrap();
        [y, case.conv_state, case.state].map(|x| values(&x))
    };
    let [y, conv_state, state] = run(&[0, 1, 2]);
    for wrong in [[0, 1, 3], [0, 1, 0], [0, 1, u32::MAX]] {
        let [got_y, got_conv_state, got_state] = run(&wrong);
        for (got, right, before) in
            [(got_conv_state, &conv_state, &case.conv_state), (got_state, &state, &case.state)]
        {
            let half = right.len() / 2;
            assert_eq!(got[..half], right[..half], "{wrong:?}");
            assert_eq!(got[half..], values(before)[half..], "{wrong:?}");
        }
        assert_eq!(got_y[..y.len() / 2], y[..y.len() / 2], "{wrong:?}");
    }
}

#[test]
fn refusals_name_the_device() {
    let case = Case::new(ODD, 1, FloatType::F32, usual(19));
    let tokens = case.tokens(&[1], 1).on(&gpu());
    let mut mixed = Case { weight: case.weight.clone(), ..case.on(&gpu()) };
    let message = mixed.run(&tokens).unwrap_err().to_string();
    assert_eq!(message, format!("conv_gated_delta_rule: weight is on cpu, but x is on {}", gpu()));
}
