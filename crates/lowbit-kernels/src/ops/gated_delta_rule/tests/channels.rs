//! The rule with a decay per channel of the keys, as Kimi Delta Attention has it.

use super::*;

impl Case {
    /// The same with a decay for each channel of the keys.
    pub(in super::super) fn with_channel_decays(mut self, decay: Decay) -> Self {
        let mut random = Random::new(17);
        let shape = [self.beta.shape(), &[self.k.dim(2)]].concat();
        let all: Vec<f32> = (0..shape.iter().product()).map(|_| decay.draw(&mut random)).collect();
        self.log_decay = Tensor::new(&all, &shape, self.q.device()).unwrap();
        self
    }

    /// The same with gates to compute, and a decay per channel.
    pub(in super::super) fn with_channel_gates(self, decay: ChannelDecay) -> Self {
        let case = self.with_channel_decays(Decay::Usual).with_raw_gates();
        let Some([_, b, a_log, _]) = case.raw.clone() else { unreachable!("it has raw gates") };
        let mut random = Random::new(6);
        let mut normal = |shape: &[usize]| {
            Tensor::new(&random.normal(shape.iter().product(), 1.0), shape, case.q.device()).unwrap()
        };
        let (heads, channels) = (b.dim(1), case.k.dim(2));
        let raw = Some([normal(case.log_decay.shape()), b, a_log, normal(&[heads, channels])]);
        Self { raw, made: Made::Channels(decay), ..case }
    }
}

/// The two formulas of a channel's decay.
pub(in super::super) const DECAYS: [ChannelDecay; 2] = [ChannelDecay::Softplus, ChannelDecay::Bounded(-5.0)];

#[test]
fn agrees_with_the_reference_for_both_rules_and_maps_of_heads() {
    for rule in [Rule::Delta, Rule::Additive] {
        for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
            for form in forms() {
                let params = GatedDeltaRule { rule, head_map, form, ..GatedDeltaRule::new(RAGGED.key_dim) };
                Case::new(RAGGED, Decay::Usual, params).with_channel_decays(Decay::Usual).check();
            }
        }
    }
}

#[test]
fn head_sizes_below_at_and_above_each_tile() {
    for (key_dim, value_dim) in [(1, 1), (16, 64), (7, 8), (33, 15), (64, 129), (24, 80), (128, 40)] {
        let shape = Sizes { lengths: &[2, 67, 130], key_heads: 1, key_dim, value_heads: 2, value_dim };
        for form in [Form::Auto, Form::Recurrent, Form::Chunked] {
            Case::new(shape, Decay::Usual, rule(form, key_dim)).with_channel_decays(Decay::Usual).check();
        }
    }
}

/// Decays of one channel to nothing, next to channels that keep all.
#[test]
fn no_decay_and_decay_to_nothing() {
    for decay in [Decay::None, Decay::Strong] {
        for form in forms() {
            let mut case = ragged(form).with_channel_decays(decay);
            case.check();
            let decays = case.log_decay.as_mut_slice::<f32>().unwrap();
            decays.iter_mut().step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
            case.check();
        }
    }
}

#[test]
fn computes_the_gates_and_norms_where_asked() {
    for dtype in FLOATS {
        for (decay, form) in DECAYS.into_iter().zip(forms()) {
            let params = GatedDeltaRule { qk_norm: QK_NORM, ..rule(form, RAGGED.key_dim) };
            let case = Case::new(RAGGED, Decay::Usual, params).with_channel_gates(decay);
            case.with_keys_times(2.5).rounded(dtype).check();
        }
    }
}

/// A decay per head, given for each channel.
#[test]
fn channels_that_decay_alike_decay_like_their_head() {
    for form in forms() {
        let case = ragged(form);
        let want = case.reference();
        let each: Vec<f32> =
            values(&case.log_decay).into_iter().flat_map(|x| std::iter::repeat_n(x, 19)).collect();
        let log_decay = Tensor::new(&each, &[79, 6, 19], case.q.device()).unwrap();
        Case { log_decay, ..case }.check_on(&devices(), want);
    }
}

#[test]
fn a_nan_reaches_no_token_before_its_own() {
    for (form, first) in NANS {
        let case = Case::new(NAN, Decay::Usual, rule(form, NAN.key_dim)).with_channel_decays(Decay::Usual);
        for device in devices() {
            check_nan(
                &case,
                first,
                |case| [&mut case.k, &mut case.log_decay],
                |case| values(&case.on(&device).run().unwrap().0),
            );
        }
    }
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for form in forms() {
        for shape in [RAGGED, Sizes { lengths: &[1; 5], ..RAGGED }] {
            let case = Case::new(shape, Decay::Usual, rule(form, RAGGED.key_dim));
            let case = case.with_channel_decays(Decay::Usual);
            devices().iter().for_each(|device| case.check_pool(device));
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let case = ragged(Form::Auto);
    let device = case.q.device().clone();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let refused = |case: Case| case.run().unwrap_err().to_string();
    assert_eq!(
        refused(Case { log_decay: zeros(&[79, 6, 18]), ..case.clone() }),
        "gated_delta_rule: log_decay is [79, 6, 18], but v [79, 6, 37] wants [79, 6, 19]"
    );
    let raw = case.clone().with_channel_gates(ChannelDecay::Softplus);
    let Some([a, b, a_log, dt_bias]) = raw.raw.clone() else { unreachable!() };
    let with = |raw: [Tensor; 4]| Case {
        raw: Some(raw),
        made: Made::Channels(ChannelDecay::Softplus),
        ..case.clone()
    };
    assert_eq!(
        refused(with([zeros(&[79, 6, 20]), b.clone(), a_log.clone(), dt_bias])),
        "gated_delta_rule: a is [79, 6, 20], but v [79, 6, 37] wants [79, 6, 19]"
    );
    assert_eq!(
        refused(with([a, b, a_log, zeros(&[6])])),
        "gated_delta_rule: dt_bias is [6], but a [79, 6, 19] wants [6, 19]"
    );
    let case = case.clone().with_channel_decays(Decay::Usual);
    let gradient = gated_delta_rule_backward(&case.inputs(), &case.state, &case.params, &case.v);
    assert_eq!(
        gradient.unwrap_err().to_string(),
        "gated_delta_rule_backward: log_decay is per channel, but gradients are those of a decay per head"
    );
}
