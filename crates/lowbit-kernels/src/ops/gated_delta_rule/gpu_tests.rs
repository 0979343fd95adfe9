//! The rule on a GPU against the reference.

use super::reference::Bounded;
use super::rounded::Rounding;
use super::tests::{CHANNEL_DECAYS, Case, Decay, QK_NORM, RAGGED, Sizes, additive, rule};
use super::*;
use crate::ops::testing::{FLOATS, device, fetched, gpu, values};
use lowbit_formats::FloatType;

impl Case {
    /// Runs on the GPU and compares with the reference, or with what chunks may make of it.
    #[track_caller]
    fn check_gpu(&self) {
        let device = gpu();
        let Device::Gpu(queue) = &device else { unreachable!() };
        let dims = check(&self.inputs(), &self.state, &self.params).unwrap();
        let chunk = gpu::chunk_tokens(queue, &self.inputs(), dims, &self.params).unwrap();
        let expected = match chunk {
            Some(tokens) => self.composed(&device).rounded_reference(tokens),
            None => self.reference(),
        };
        self.check_on(&[device], expected);
    }

    /// The case without what the rule does besides, which ops have done on `device`.
    fn composed(&self, device: &Device) -> Self {
        let on = self.on(device);
        let [q, k] = [&on.q, &on.k].map(|x| fetched(&self.params.normalised(x).unwrap()));
        let (log_decay, beta) = on.inputs().gates.computed().unwrap();
        let (log_decay, beta) = (fetched(&log_decay), fetched(&beta));
        let params = GatedDeltaRule { qk_norm: None, ..self.params };
        Self { q, k, log_decay, beta, raw: None, params, ..self.clone() }
    }

    fn rounded_reference(&self, chunk: usize) -> (Bounded, Bounded) {
        let float = FloatType::from_dtype(self.q.dtype()).unwrap();
        let rounding = (Rounding::of(float), chunk);
        rounded::gated_delta_rule(&self.inputs(), &self.state, &self.params, rounding, |_, _| true).unwrap()
    }
}

#[test]
fn agrees_with_the_reference_for_both_maps_of_heads() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        let params = GatedDeltaRule { scale: 0.3, head_map, ..rule(Form::Recurrent, RAGGED.key_dim) };
        Case::new(RAGGED, Decay::Usual, params).check_gpu();
    }
}

#[test]
fn head_sizes_below_at_and_above_each_tile() {
    for (key_dim, value_dim) in [(1, 1), (32, 16), (4, 20), (33, 15), (36, 68), (128, 40), (256, 12)] {
        let shape = Sizes { lengths: &[2, 7], key_heads: 1, key_dim, value_heads: 2, value_dim };
        Case::new(shape, Decay::Usual, rule(Form::Recurrent, key_dim)).check_gpu();
    }
}

#[test]
fn activations_of_every_type() {
    let shape = Sizes { lengths: &[9, 1], key_heads: 2, key_dim: 32, value_heads: 4, value_dim: 24 };
    for dtype in FLOATS {
        for shape in [shape, RAGGED] {
            Case::new(shape, Decay::Usual, GatedDeltaRule::new(shape.key_dim)).rounded(dtype).check_gpu();
        }
    }
}

#[test]
fn normalises_q_and_k_where_asked() {
    for dtype in FLOATS {
        for (shape, form) in [(RAGGED, Form::Auto), (STEP, Form::Auto), (CHUNKS, Form::Chunked)] {
            let params = GatedDeltaRule { qk_norm: QK_NORM, ..rule(form, shape.key_dim) };
            Case::new(shape, Decay::Usual, params).with_keys_times(2.5).rounded(dtype).check_gpu();
        }
    }
}

#[test]
fn computes_the_gates_where_asked() {
    for dtype in FLOATS {
        for (shape, form) in [(RAGGED, Form::Auto), (STEP, Form::Auto), (CHUNKS, Form::Chunked)] {
            let case =
                Case::new(shape, Decay::Usual, rule(form, shape.key_dim)).with_raw_gates().rounded(dtype);
            case.check_gpu();
            let [a, b, a_log, dt_bias] = case.raw.clone().unwrap();
            let raw = Some([a.cast(DType::F32).unwrap(), b, a_log, dt_bias]);
            Case { raw, ..case }.check_gpu();
        }
    }
}

#[test]
fn without_a_correction_in_every_form() {
    let mamba = Sizes { lengths: &[70, 1, 130], key_heads: 1, key_dim: 128, value_heads: 3, value_dim: 64 };
    for (shape, form) in [
        (RAGGED, Form::Auto),
        (STEP, Form::Auto),
        (CHUNKS, Form::Chunked),
        (mamba, Form::Chunked),
        // A width of heads that tensor cores have no chunks for.
        (Sizes { value_dim: 80, ..mamba }, Form::Chunked),
        (mamba, Form::Recurrent),
    ] {
        for dtype in FLOATS {
            let case = Case::new(shape, Decay::Usual, additive(form)).with_keys_times(2.5);
            case.clone().rounded(dtype).check_gpu();
            case.with_steps().rounded(dtype).check_gpu();
        }
    }
}

#[test]
fn without_a_correction_a_pool_of_states_gives_the_same_bits() {
    for (shape, form) in [(STEP, Form::Auto), (CHUNKS, Form::Chunked)] {
        for dtype in FLOATS {
            Case::new(shape, Decay::Usual, additive(form)).with_steps().rounded(dtype).check_pool(&gpu());
        }
    }
}

#[test]
fn no_decay_and_decay_to_nothing() {
    for decay in [Decay::None, Decay::Strong] {
        Case::new(RAGGED, decay, GatedDeltaRule::new(19)).check_gpu();
    }
    let mut case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19));
    case.log_decay.as_mut_slice::<f32>().unwrap()[..60].fill(f32::NEG_INFINITY);
    case.check_gpu();
}

/// One token, each column of whose state several units share.
const STEP: Sizes = Sizes { lengths: &[1], key_heads: 2, key_dim: 128, value_heads: 4, value_dim: 24 };
const CHUNKS: Sizes =
    Sizes { lengths: &[70, 0, 129, 1, 64], key_heads: 2, key_dim: 64, value_heads: 4, value_dim: 32 };

/// Types of activations that devices have chunks for: NVIDIA for both, others for those that they
/// have matrices of.
const HALVES: [FloatType; 2] = [FloatType::F16, FloatType::BF16];

#[test]
fn chunks_for_both_maps_of_heads() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        let params = GatedDeltaRule { scale: 0.3, head_map, ..rule(Form::Chunked, CHUNKS.key_dim) };
        for dtype in HALVES {
            Case::new(CHUNKS, Decay::Usual, params).rounded(dtype).check_gpu();
        }
    }
}

#[test]
fn chunks_of_every_type_decay_and_size() {
    for dtype in FLOATS {
        for decay in [Decay::None, Decay::Usual, Decay::Strong] {
            Case::new(CHUNKS, decay, rule(Form::Chunked, 64)).rounded(dtype).check_gpu();
        }
        let shape = Sizes { lengths: &[63, 200], key_heads: 1, key_dim: 128, value_heads: 2, value_dim: 64 };
        Case::new(shape, Decay::Usual, rule(Form::Chunked, 128)).rounded(dtype).check_gpu();
    }
}

#[test]
fn sequences_below_at_and_above_each_chunk() {
    for key_dim in [64, 128] {
        let lengths = &[1, 15, 16, 17, 31, 0, 32, 33, 48, 63, 65];
        let shape = Sizes { lengths, key_heads: 2, key_dim, value_heads: 2, value_dim: 32 };
        Case::new(shape, Decay::Usual, rule(Form::Chunked, key_dim)).rounded(FloatType::F16).check_gpu();
    }
}

/// The state is read once per chunk and kept in f32: what a chunk adds is still right after many.
#[test]
fn many_chunks_one_after_the_other() {
    let shape = Sizes { lengths: &[700], key_heads: 1, key_dim: 128, value_heads: 1, value_dim: 32 };
    for decay in [Decay::None, Decay::Usual] {
        Case::new(shape, decay, rule(Form::Chunked, 128)).rounded(FloatType::F16).check_gpu();
    }
}

#[test]
fn wrong_offsets_leave_a_sequence_of_chunks_out() {
    let shape = Sizes { lengths: &[40, 20], key_heads: 1, key_dim: 64, value_heads: 1, value_dim: 32 };
    let right = Case::new(shape, Decay::Usual, rule(Form::Chunked, 64)).rounded(FloatType::F16);
    let on = |case: &Case| {
        let (y, state) = case.on(&gpu()).run().unwrap();
        (values(&y.to_device(&device()).unwrap()), values(&state.to_device(&device()).unwrap()))
    };
    let (y, state) = on(&right);
    let (y, state) = (&y[..40 * 32], &state[..64 * 32]);
    for wrong in [[0u32, 40, 61], [0, 40, 39], [0, 40, u32::MAX]] {
        let cu_seqlens = Tensor::new(&wrong, &[3], &device()).unwrap();
        let (got_y, got_state) = on(&Case { cu_seqlens, ..right.clone() });
        assert_eq!((&got_y[..y.len()], &got_state[..state.len()]), (y, state));
        assert_eq!(got_state[state.len()..], values(&right.state)[state.len()..]);
    }
}

#[test]
fn the_values_of_the_rounded_reference_are_the_references() {
    let shape = Sizes { lengths: &[9, 0, 23], key_heads: 2, key_dim: 7, value_heads: 4, value_dim: 5 };
    for decay in [Decay::None, Decay::Usual, Decay::Strong] {
        let case = Case::new(shape, decay, GatedDeltaRule::new(7)).rounded(FloatType::BF16);
        let ((y, state), (want_y, want_state)) = (case.rounded_reference(8), case.reference());
        for (got, want) in [(y, want_y), (state, want_state)] {
            for ((a, b), (rounded, exact)) in
                got.values.iter().zip(&want.values).zip(got.bounds.iter().zip(&want.bounds))
            {
                assert!((a - b).abs() <= 1e-12 * (1.0 + b.abs()), "{a} {b}");
                assert!(rounded >= exact, "{rounded:e} {exact:e}");
            }
        }
    }
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for (shape, form) in [(RAGGED, Form::Auto), (STEP, Form::Auto), (CHUNKS, Form::Chunked)] {
        for dtype in FLOATS {
            Case::new(shape, Decay::Usual, rule(form, shape.key_dim)).rounded(dtype).check_pool(&gpu());
        }
    }
}

/// A sequence whose slot the pool lacks is left out; the others are computed.
#[test]
fn a_wrong_slot_leaves_a_sequence_out() {
    for (shape, form) in [(Sizes { lengths: &[6, 4], ..RAGGED }, Form::Recurrent), (CHUNKS, Form::Chunked)] {
        let right = Case::new(shape, Decay::Usual, rule(form, shape.key_dim)).rounded(FloatType::F16);
        let rows = right.state.dim(0) as u32;
        let on = |last: u32| {
            let slots: Vec<u32> = (0..rows - 1).chain([last]).collect();
            let slots = Some(Tensor::new(&slots, &[slots.len()], &device()).unwrap());
            let (y, state) = Case { slots, ..right.clone() }.on(&gpu()).run().unwrap();
            (values(&y), values(&state))
        };
        let (y, state) = on(rows - 1);
        let tokens = right.q.dim(0) - shape.lengths[shape.lengths.len() - 1];
        let (y, kept) =
            (&y[..tokens * y.len() / right.q.dim(0)], state.len() / rows as usize * (rows as usize - 1));
        for wrong in [rows, u32::MAX] {
            let (got_y, got_state) = on(wrong);
            assert_eq!((&got_y[..y.len()], &got_state[..kept]), (y, &state[..kept]), "{wrong}");
            assert_eq!(got_state[kept..], values(&right.state)[kept..], "{wrong}");
        }
    }
}

/// A step's bits are its own, whatever steps are taken beside it.
#[test]
fn a_step_in_a_pool_is_the_same_alone_and_among_many() {
    let shape = Sizes { lengths: &[1; 80], key_heads: 2, key_dim: 128, value_heads: 4, value_dim: 64 };
    for dtype in FLOATS {
        let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(128)).rounded(dtype);
        let (pool, slots) = case.in_pool(1);
        let pool = pool.on(&gpu());
        let (y, state) = pool.run().unwrap();
        for (at, slot) in [(0, slots[0]), (37, slots[37]), (79, slots[79])] {
            let rows = |x: &Tensor| x.rows(at, at + 1).unwrap();
            let slot_row = |x: &Tensor| values(&x.rows(slot, slot + 1).unwrap());
            let alone = Case {
                q: rows(&pool.q),
                k: rows(&pool.k),
                v: rows(&pool.v),
                log_decay: rows(&pool.log_decay),
                beta: rows(&pool.beta),
                cu_seqlens: Tensor::new(&[0u32, 1], &[2], &gpu()).unwrap(),
                slots: Some(rows(pool.slots.as_ref().unwrap())),
                ..pool.clone()
            };
            let (alone_y, alone_state) = alone.run().unwrap();
            numcheck::assert_bits("y", &values(&alone_y), &values(&rows(&y)));
            numcheck::assert_bits("state", &slot_row(&alone_state), &slot_row(&state));
        }
    }
}

#[test]
fn wrong_offsets_leave_a_sequence_out() {
    let shape = Sizes { lengths: &[6, 4], key_heads: 1, key_dim: 8, value_heads: 1, value_dim: 8 };
    let right = Case::new(shape, Decay::Usual, GatedDeltaRule::new(8));
    let on = |case: &Case| {
        let (y, state) = case.on(&gpu()).run().unwrap();
        (values(&y.to_device(&device()).unwrap()), values(&state.to_device(&device()).unwrap()))
    };
    let (y, state) = on(&right);
    for wrong in [[0u32, 6, 11], [0, 6, 5], [0, 6, u32::MAX]] {
        let cu_seqlens = Tensor::new(&wrong, &[3], &device()).unwrap();
        let (got_y, got_state) = on(&Case { cu_seqlens, ..right.clone() });
        assert_eq!((&got_y[..6 * 8], &got_state[..64]), (&y[..6 * 8], &state[..64]));
        assert_eq!(got_state[64..], values(&right.state)[64..]);
    }
}

#[test]
fn a_clone_of_the_state_keeps_what_it_was() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19)).on(&gpu());
    let before = values(&case.state.to_device(&device()).unwrap());
    let (_, after) = case.run().unwrap();
    assert_eq!(values(&case.state.to_device(&device()).unwrap()), before);
    assert_ne!(values(&after.to_device(&device()).unwrap()), before);
}

#[test]
fn nan_stays_in_its_column() {
    let shape = Sizes { lengths: &[5], key_heads: 1, key_dim: 8, value_heads: 2, value_dim: 12 };
    let mut case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(8));
    case.beta.as_mut_slice::<f32>().unwrap().fill(0.5);
    // Token 2, head 1, column 7.
    case.v.as_mut_slice::<f32>().unwrap()[(2 * 2 + 1) * 12 + 7] = f32::NAN;
    let (y, state) = case.on(&gpu()).run().unwrap();
    for (i, y) in values(&y.to_device(&device()).unwrap()).into_iter().enumerate() {
        assert_eq!(y.is_nan(), i >= 2 * 24 && i % 24 == 12 + 7, "y[{i}] is {y}");
    }
    for (i, s) in values(&state.to_device(&device()).unwrap()).into_iter().enumerate() {
        assert_eq!(s.is_nan(), i >= 96 && i % 12 == 7, "state[{i}] is {s}");
    }
}

/// In chunks it may reach the tokens that share a tile's sixteen with it.
#[test]
fn nan_reaches_no_token_before_its_sixteen() {
    let shape = Sizes { lengths: &[70, 66], key_heads: 1, key_dim: 64, value_heads: 1, value_dim: 32 };
    let right = Case::new(shape, Decay::Usual, rule(Form::Chunked, 64));
    for (token, dtype) in [20, 69].into_iter().flat_map(|token| HALVES.map(|dtype| (token, dtype))) {
        let mut case = right.clone();
        case.k.as_mut_slice::<f32>().unwrap()[token * 64 + 5] = f32::NAN;
        let (y, _) = case.rounded(dtype).on(&gpu()).run().unwrap();
        for (i, y) in values(&y.to_device(&device()).unwrap()).into_iter().enumerate() {
            if i / 32 < token / 16 * 16 || i / 32 >= token {
                assert_eq!(
                    y.is_nan(),
                    (token..70).contains(&(i / 32)),
                    "NaN at {token} in {dtype:?}: y[{i}] is {y}"
                );
            }
        }
    }
}

#[test]
fn no_tokens_leave_the_state() {
    let shape = Sizes { lengths: &[0, 0], key_heads: 1, key_dim: 4, value_heads: 1, value_dim: 3 };
    let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(4));
    let (y, state) = case.on(&gpu()).run().unwrap();
    assert!(y.is_empty());
    assert_eq!(values(&state.to_device(&device()).unwrap()), values(&case.state));
}

#[test]
fn refusals_name_the_device() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19));
    let gpu = gpu();
    let mixed = Case { beta: case.beta.clone(), ..case.on(&gpu) };
    let message = mixed.run().unwrap_err().to_string();
    assert_eq!(message, format!("gated_delta_rule: beta is on cpu, but x is on {gpu}"));
}

#[test]
fn a_decay_per_channel_for_both_rules_and_maps_of_heads() {
    for (head_map, shape) in [(HeadMap::Grouped, STEP), (HeadMap::Tiled, RAGGED)] {
        for rule in [Rule::Delta, Rule::Additive] {
            let params = GatedDeltaRule { rule, head_map, ..GatedDeltaRule::new(shape.key_dim) };
            Case::new(shape, Decay::Usual, params).with_channel_decays(Decay::Usual).check_gpu();
        }
    }
    let params = rule(Form::Chunked, 64);
    for (dtype, decay) in FLOATS.into_iter().zip([Decay::None, Decay::Usual, Decay::Strong]) {
        let case = Case::new(CHUNKS, Decay::Usual, params).with_channel_decays(decay).rounded(dtype);
        case.check_gpu();
        case.check_pool(&gpu());
    }
}

#[test]
fn computes_the_gates_of_channels_where_asked() {
    for (dtype, decay) in FLOATS.into_iter().flat_map(|dtype| CHANNEL_DECAYS.map(|decay| (dtype, decay))) {
        for shape in [RAGGED, STEP] {
            let params = GatedDeltaRule { qk_norm: QK_NORM, ..GatedDeltaRule::new(shape.key_dim) };
            let case = Case::new(shape, Decay::Usual, params).with_channel_gates(decay);
            case.with_keys_times(2.5).rounded(dtype).check_gpu();
        }
    }
}
