//! The rule without its correction, as Mamba-2 has it.

use super::*;

/// The rule without a correction, in this form.
pub(in super::super) fn additive(form: Form) -> GatedDeltaRule {
    GatedDeltaRule { form, ..GatedDeltaRule::additive() }
}

#[test]
fn without_a_correction_in_every_form() {
    for params in [Form::Auto, Form::Recurrent, Form::Chunked].map(additive) {
        for decay in [Decay::None, Decay::Usual, Decay::Strong] {
            // Keys that are not normalised, as Mamba-2's are.
            Case::new(RAGGED, decay, params).with_keys_times(2.5).check();
        }
        for dtype in FLOATS {
            Case::new(RAGGED, Decay::Usual, params).with_steps().rounded(dtype).check();
        }
        let shape = Sizes { lengths: &[2, 67], key_heads: 1, key_dim: 128, value_heads: 2, value_dim: 64 };
        Case::new(shape, Decay::Usual, params).check();
    }
}

/// The state's infinity does not reach `delta`: it is not read for that.
#[test]
fn without_a_correction_delta_is_independent_of_the_state() {
    for form in forms() {
        let mut case = Case::new(RAGGED, Decay::Usual, additive(form));
        case.state.as_mut_slice::<f32>().unwrap().fill(f32::INFINITY);
        case.q.as_mut_slice::<f32>().unwrap().fill(0.0);
        case.log_decay.as_mut_slice::<f32>().unwrap().fill(0.0);
        let (_, state) = case.run().unwrap();
        assert!(values(&state).iter().all(|&s| s == f32::INFINITY), "{form:?}");
    }
}

#[test]
fn the_correction_makes_a_difference() {
    let case = Case::new(RAGGED, Decay::Usual, additive(Form::Recurrent));
    let (y, _) = case.reference();
    let params = GatedDeltaRule { rule: Rule::Delta, ..case.params };
    assert!(y.rejects(&values(&Case { params, ..case }.run().unwrap().0)));
}
