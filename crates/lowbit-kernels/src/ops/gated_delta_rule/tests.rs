mod channels;
mod peers;
mod without_correction;

#[cfg(feature = "gpu")]
pub(super) use channels::DECAYS as CHANNEL_DECAYS;
#[cfg(feature = "gpu")]
pub(super) use without_correction::additive;

use super::reference::{Bounded, gated_delta_rule as reference};
use super::*;
use crate::ops::L2NormConvention;
use crate::ops::testing::{FLOATS, devices, moved, rounding, values};
use lowbit_formats::FloatType;
use numcheck::{Random, assert_within};

/// Operands of one call, on one device.
#[derive(Clone)]
pub(super) struct Case {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub log_decay: Tensor,
    pub beta: Tensor,
    /// `a`, `b`, `a_log` and `dt_bias`, which the gates are computed from instead.
    pub raw: Option<[Tensor; 4]>,
    pub made: Made,
    pub cu_seqlens: Tensor,
    pub state: Tensor,
    /// For a state that is a pool.
    pub slots: Option<Tensor>,
    pub params: GatedDeltaRule,
}

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes<'a> {
    pub lengths: &'a [usize],
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_heads: usize,
    pub value_dim: usize,
}

/// The way that gates are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Made {
    Raw,
    /// Of the first operand as steps of time, within [`LIMITS`].
    Steps,
    Channels(ChannelDecay),
}

/// The strength of the state's decay.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decay {
    None,
    Usual,
    /// Over a few tokens the state underflows.
    Strong,
}

/// Limits that cut some steps.
const LIMITS: StepLimits = StepLimits { least: 0.05, most: 2.0 };

pub(super) const RAGGED: Sizes =
    Sizes { lengths: &[3, 0, 70, 1, 5], key_heads: 2, key_dim: 19, value_heads: 6, value_dim: 37 };

impl Case {
    /// Exact, since the reference's bounds are those of f32.
    pub(super) fn new(shape: Sizes, decay: Decay, params: GatedDeltaRule) -> Self {
        let device = Device::cpu(Some(1)).unwrap();
        let mut random = Random::new(shape.key_dim as u64 * 131 + shape.value_dim as u64);
        let tokens: usize = shape.lengths.iter().sum();
        let Sizes { key_heads, key_dim, value_heads, value_dim, .. } = shape;
        let mut unit = |scale: f32| {
            let mut x = random.normal(tokens * key_heads * key_dim, 1.0);
            for row in x.chunks_exact_mut(key_dim) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                row.iter_mut().for_each(|x| *x *= scale / norm);
            }
            Tensor::new(&x, &[tokens, key_heads, key_dim], &device).unwrap()
        };
        let (q, k) = (unit(1.5), unit(1.0));
        let v = Tensor::new(
            &random.normal(tokens * value_heads * value_dim, 1.0),
            &[tokens, value_heads, value_dim],
            &device,
        );
        let gates = tokens * value_heads;
        let sign = params.decay_factor();
        let log_decay: Vec<f32> = (0..gates)
            .map(|_| match decay {
                Decay::None => 0.0,
                Decay::Usual => sign * (random.uniform() - 1.0) * 0.2,
                Decay::Strong if random.below(5) == 0 => sign * -200.0,
                Decay::Strong => sign * (random.uniform() - 1.0) * 30.0,
            })
            .collect();
        let beta: Vec<f32> = (0..gates)
            .map(|_| match random.below(6) {
                0 => 0.0,
                1 => 1.0,
                _ => random.uniform() * 0.5 + 0.5,
            })
            .collect();
        let inner = match params.state_layout {
            StateLayout::KeyValue => [key_dim, value_dim],
            StateLayout::ValueKey => [value_dim, key_dim],
        };
        let state_shape = [shape.lengths.len(), value_heads, inner[0], inner[1]];
        let state = random.normal(state_shape.iter().product(), 0.5);
        let mut offsets = vec![0u32];
        offsets.extend(shape.lengths.iter().scan(0, |end, &n| {
            *end += n as u32;
            Some(*end)
        }));
        Self {
            q,
            k,
            v: v.unwrap(),
            log_decay: Tensor::new(&log_decay, &[tokens, value_heads], &device).unwrap(),
            beta: Tensor::new(&beta, &[tokens, value_heads], &device).unwrap(),
            raw: None,
            made: Made::Raw,
            cu_seqlens: Tensor::new(&offsets, &[offsets.len()], &device).unwrap(),
            state: Tensor::new(&state, &state_shape, &device).unwrap(),
            slots: None,
            params: GatedDeltaRule { exact: true, ..params },
        }
    }

    fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        let Self { q, k, v, log_decay, beta, raw, made, cu_seqlens, state, slots, params } = self;
        let [q, k, v, log_decay, beta, cu_seqlens, state] =
            [q, k, v, log_decay, beta, cu_seqlens, state].map(&f);
        let slots = slots.as_ref().map(&f);
        let raw = raw.as_ref().map(|raw| raw.each_ref().map(f));
        Self { q, k, v, log_decay, beta, raw, made: *made, cu_seqlens, state, slots, params: *params }
    }

    pub(super) fn on(&self, device: &Device) -> Self {
        self.map(|x| moved(x, device))
    }

    pub(super) fn rounded(mut self, dtype: FloatType) -> Self {
        for x in [&mut self.q, &mut self.k, &mut self.v].into_iter().chain(self.raw.iter_mut().flatten()) {
            *x = x.cast(dtype.dtype()).unwrap();
        }
        self
    }

    /// The same with gates to compute.
    pub(super) fn with_raw_gates(self) -> Self {
        let mut random = Random::new(5);
        let (shape, heads) = (self.beta.shape(), self.beta.dim(1));
        let mut normal = |shape: &[usize], scale: f32| {
            Tensor::new(&random.normal(shape.iter().product(), scale), shape, self.q.device()).unwrap()
        };
        let (a, b) = (normal(shape, 2.0), normal(shape, 2.0));
        let raw = Some([a, b, normal(&[heads], 1.0), normal(&[heads], 1.0)]);
        Self { raw, ..self }
    }

    /// The same with steps of time to compute the gates of.
    pub(super) fn with_steps(self) -> Self {
        Self { made: Made::Steps, ..self.with_raw_gates() }
    }

    pub(super) fn with_keys_times(mut self, factor: f32) -> Self {
        self.k.as_mut_slice::<f32>().unwrap().iter_mut().for_each(|k| *k *= factor);
        self
    }

    pub(super) fn inputs(&self) -> GatedDeltaInputs<'_> {
        let Self { q, k, v, log_decay, beta, raw, cu_seqlens, slots, .. } = self;
        let gates = match (raw, self.made) {
            (None, _) => DeltaGates::Computed { log_decay, beta },
            (Some([a, b, a_log, dt_bias]), Made::Raw) => DeltaGates::Raw { a, b, a_log, dt_bias },
            (Some([dt, _, a_log, dt_bias]), Made::Steps) => {
                DeltaGates::Steps { dt, a_log, dt_bias, limits: LIMITS }
            }
            (Some([a, b, a_log, dt_bias]), Made::Channels(decay)) => {
                DeltaGates::Channels { a, b, a_log, dt_bias, decay }
            }
        };
        GatedDeltaInputs { q, k, v, gates, cu_seqlens, slots: slots.as_ref() }
    }

    /// The same with its states in a pool with `rows` rows more, in another order; and the rows
    /// that they have. 7 must not divide the number of rows.
    pub(super) fn in_pool(&self, rows: usize) -> (Self, Vec<usize>) {
        let (sequences, len) = (self.state.dim(0), self.state.len() / self.state.dim(0).max(1));
        let all = sequences + rows;
        let slots: Vec<usize> = (0..sequences).map(|s| (7 * s + 2) % all).collect();
        let mut pool = Random::new(11).normal(all * len, 0.5);
        for (&slot, state) in slots.iter().zip(values(&self.state).chunks_exact(len)) {
            pool[slot * len..][..len].copy_from_slice(state);
        }
        let ids: Vec<u32> = slots.iter().map(|&slot| slot as u32).collect();
        let device = self.q.device();
        let shape = [&[all], &self.state.shape()[1..]].concat();
        let state = Tensor::new(&pool, &shape, device).unwrap();
        let ids = Some(Tensor::new(&ids, &[sequences], device).unwrap());
        (Self { state, slots: ids, ..self.clone() }, slots)
    }

    /// Checks on `device` that the case in a pool gives the same bits and leaves all other rows.
    #[track_caller]
    pub(super) fn check_pool(&self, device: &Device) {
        let (pool, slots) = self.in_pool(3);
        let ([want, states], [got, pooled]) = (self.bits_on(device), pool.bits_on(device));
        assert_eq!(got, want, "y on {device}");
        let len = states.len() / slots.len();
        let mut expected: Vec<u32> = values(&pool.state).into_iter().map(f32::to_bits).collect();
        for (&slot, state) in slots.iter().zip(states.chunks_exact(len)) {
            expected[slot * len..][..len].copy_from_slice(state);
        }
        assert_eq!(pooled, expected, "the pool on {device}");
    }

    /// The bits of `y` and the last state, as f32.
    fn bits_on(&self, device: &Device) -> [Vec<u32>; 2] {
        let (y, state) = self.on(device).run().unwrap();
        [y, state].map(|x| values(&x).into_iter().map(f32::to_bits).collect())
    }

    /// `y` and the last state.
    pub(super) fn run(&self) -> Result<(Tensor, Tensor), KernelError> {
        let mut state = self.state.clone();
        let y = gated_delta_rule(&self.inputs(), &mut state, &self.params)?;
        Ok((y, state))
    }

    pub(super) fn reference(&self) -> (Bounded, Bounded) {
        let chunk = match self.params.form {
            Form::Recurrent => 1,
            Form::Auto | Form::Chunked => cpu::CHUNK,
        };
        reference(&self.inputs(), &self.state, &self.params, chunk, |_, _| true).unwrap()
    }

    /// Runs on every processor and compares with the reference.
    #[track_caller]
    fn check(&self) {
        self.check_on(&devices(), self.reference());
    }

    /// Runs on `devices` and compares with what is wanted.
    #[track_caller]
    pub(super) fn check_on(&self, devices: &[Device], (y, state): (Bounded, Bounded)) {
        let dtype = FloatType::from_dtype(self.q.dtype()).unwrap();
        for device in devices {
            let (got_y, got_state) = self.on(device).run().unwrap();
            assert_eq!((got_y.dtype(), got_y.shape()), (self.q.dtype(), self.v.shape()));
            let bound = |i: usize| y.bounds[i] + rounding(dtype, y.values[i].abs() + y.bounds[i]);
            let host = |x: Tensor| values(&x.to_device(self.q.device()).unwrap());
            assert_within(&host(got_y), &y.values, bound);
            assert_within(&host(got_state), &state.values, |i| state.bounds[i]);
        }
    }
}

fn forms() -> [Form; 2] {
    [Form::Recurrent, Form::Chunked]
}

#[test]
fn agrees_with_the_reference_in_every_convention() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for state_layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
            for sign in [DecaySign::LogDecay, DecaySign::Rate] {
                for form in forms() {
                    let rule = GatedDeltaRule::mlx_native();
                    let params = GatedDeltaRule { scale: 0.3, head_map, state_layout, sign, form, ..rule };
                    Case::new(RAGGED, Decay::Usual, params).check();
                }
            }
        }
    }
}

#[test]
fn head_sizes_below_at_and_above_each_tile() {
    for (key_dim, value_dim) in [(1, 1), (16, 64), (7, 8), (33, 15), (64, 129), (24, 80), (128, 40)] {
        let shape = Sizes { lengths: &[2, 67], key_heads: 1, key_dim, value_heads: 2, value_dim };
        for form in forms() {
            for state_layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
                let params = GatedDeltaRule { state_layout, form, ..GatedDeltaRule::new(key_dim) };
                Case::new(shape, Decay::Usual, params).check();
            }
        }
    }
}

#[test]
fn lengths_from_which_the_state_is_copied() {
    let shape = Sizes { lengths: &[127, 128, 145], key_heads: 2, key_dim: 16, value_heads: 4, value_dim: 48 };
    let params = GatedDeltaRule { form: Form::Chunked, ..GatedDeltaRule::new(16) };
    Case::new(shape, Decay::Usual, params).check();
}

#[test]
fn lengths_below_at_and_above_a_chunk() {
    let lengths = [63, 64, 65, 129, 1, 15, 16, 17, 31, 32, 33];
    let shape = Sizes { lengths: &lengths, key_heads: 1, key_dim: 12, value_heads: 3, value_dim: 20 };
    for form in [Form::Auto, Form::Recurrent, Form::Chunked] {
        Case::new(shape, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(12) }).check();
    }
}

#[test]
fn no_decay_and_decay_to_nothing() {
    for decay in [Decay::None, Decay::Strong] {
        for form in forms() {
            Case::new(RAGGED, decay, GatedDeltaRule { form, ..GatedDeltaRule::new(19) }).check();
            Case::new(RAGGED, decay, GatedDeltaRule { form, ..GatedDeltaRule::mlx_native() }).check();
        }
    }
}

#[test]
fn infinite_decay_forgets() {
    for form in forms() {
        let mut case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(19) });
        case.log_decay.as_mut_slice::<f32>().unwrap()[..60].fill(f32::NEG_INFINITY);
        case.check();
    }
}

#[test]
fn a_nan_reaches_no_token_before_its_own() {
    let shape = Sizes { lengths: &[37], key_heads: 1, key_dim: 16, value_heads: 2, value_dim: 16 };
    for (form, first) in [(Form::Recurrent, 20), (Form::Chunked, 20), (Form::Chunked, 9), (Form::Chunked, 3)]
    {
        let case = Case::new(shape, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(16) });
        let mut poisoned = case.clone();
        let Case { q, k, v, beta, .. } = &mut poisoned;
        for (x, row) in [(q, 16), (k, 16), (v, 32), (beta, 2)] {
            x.as_mut_slice::<f32>().unwrap()[first * row..].fill(f32::NAN);
        }
        for device in devices() {
            let [want, got] = [&case, &poisoned].map(|case| values(&case.on(&device).run().unwrap().0));
            let got_bits = got[..first * 32].iter().map(|x| x.to_bits());
            assert!(got_bits.eq(want[..first * 32].iter().map(|x| x.to_bits())), "{form:?} from {first}");
            assert!(got[first * 32..].iter().all(|x| x.is_nan()), "{form:?} from {first}");
        }
    }
}

#[test]
fn keys_that_are_not_normalised() {
    // |1 - beta |k|^2| reaches 3: the state grows, and so do error and bound.
    let shape = Sizes { lengths: &[9, 17], key_heads: 3, key_dim: 18, value_heads: 3, value_dim: 21 };
    for form in forms() {
        let case = Case::new(shape, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(18) });
        case.with_keys_times(2.0).check();
    }
}

/// Normalisations of q and k, with an eps that shows.
pub(super) fn norms() -> [L2Norm; 3] {
    [L2NormConvention::Sum, L2NormConvention::Mean, L2NormConvention::Max]
        .map(|convention| L2Norm { eps: 0.3, convention })
}

#[test]
fn normalises_q_and_k_where_asked() {
    for (norm, dtype) in norms().into_iter().zip(FLOATS) {
        for form in forms() {
            let params = GatedDeltaRule { qk_norm: Some(norm), form, ..GatedDeltaRule::new(19) };
            let case = Case::new(RAGGED, Decay::Usual, params).with_keys_times(2.5).rounded(dtype);
            case.check();
        }
    }
}

#[test]
fn computes_the_gates_where_asked() {
    for dtype in FLOATS {
        for form in forms() {
            let params = GatedDeltaRule { form, ..GatedDeltaRule::new(19) };
            Case::new(RAGGED, Decay::Usual, params).with_raw_gates().rounded(dtype).check();
        }
    }
}

#[test]
fn activations_of_every_type() {
    for dtype in FLOATS {
        for form in forms() {
            Case::new(RAGGED, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(19) })
                .rounded(dtype)
                .check();
        }
    }
}

#[test]
fn any_split_carries_the_state() {
    let tokens = 70;
    let shape = Sizes { lengths: &[tokens], key_heads: 2, key_dim: 9, value_heads: 4, value_dim: 17 };
    for form in forms() {
        let whole = Case::new(shape, Decay::Usual, GatedDeltaRule { form, ..GatedDeltaRule::new(9) });
        let (y, state) = whole.reference();
        for split in [0, 1, 2, 31, 63, 64, 65, 69] {
            let part = |start: usize, end: usize, state: &Tensor| {
                let offsets = [0, (end - start) as u32];
                let rows = |x: &Tensor| x.rows(start, end).unwrap();
                Case {
                    q: rows(&whole.q),
                    k: rows(&whole.k),
                    v: rows(&whole.v),
                    log_decay: rows(&whole.log_decay),
                    beta: rows(&whole.beta),
                    raw: None,
                    made: Made::Raw,
                    cu_seqlens: Tensor::new(&offsets, &[2], whole.q.device()).unwrap(),
                    state: state.clone(),
                    slots: None,
                    params: whole.params,
                }
            };
            let (head, between) = part(0, split, &whole.state).run().unwrap();
            let (tail, last) = part(split, tokens, &between).run().unwrap();
            let got = [values(&head), values(&tail)].concat();
            assert_within(&got, &y.values, |i| y.bounds[i]);
            assert_within(&values(&last), &state.values, |i| state.bounds[i]);
        }
    }
}

#[test]
fn the_comparison_rejects_a_wrong_head_map() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19));
    let (y, _) = case.reference();
    let wrong = GatedDeltaRule { head_map: HeadMap::Tiled, ..case.params };
    let (got, _) = Case { params: wrong, ..case }.run().unwrap();
    let got = values(&got);
    assert!(
        got.iter()
            .zip(&y.values)
            .zip(&y.bounds)
            .any(|((&got, want), bound)| (f64::from(got) - want).abs() > *bound)
    );
}

#[test]
fn refusals_name_both_sides() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19));
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let refused = |case: Case| case.run().unwrap_err().to_string();
    assert_eq!(
        refused(Case { k: zeros(&[79, 2, 20], DType::F32), ..case.clone() }),
        "gated_delta_rule: k is [79, 2, 20], but q [79, 2, 19] wants [79, 2, 19]"
    );
    assert_eq!(
        refused(Case { v: zeros(&[79, 5, 37], DType::F32), ..case.clone() }),
        "gated_delta_rule: v is [79, 5, 37], but its heads are to be a multiple of the key heads of q [79, 2, 19]"
    );
    assert_eq!(
        refused(Case { beta: zeros(&[79, 6], DType::BF16), ..case.clone() }),
        "gated_delta_rule: beta is bf16, but f32 is wanted"
    );
    assert_eq!(
        refused(Case { state: zeros(&[5, 6, 37, 19], DType::F32), ..case.clone() }),
        "gated_delta_rule: state is [5, 6, 37, 19], but KeyValue with q [79, 2, 19] and v [79, 6, 37] wants \
         [5, 6, 19, 37]"
    );
    assert_eq!(
        refused(Case { state: zeros(&[5, 6, 19, 37], DType::F16), ..case.clone() }),
        "gated_delta_rule: state is f16, but f32 is wanted"
    );
    assert_eq!(
        refused(Case { state: zeros(&[4, 6, 19, 37], DType::F32), ..case.clone() }),
        "gated_delta_rule: cu_seqlens is [6], but state [4, 6, 19, 37] wants [5]"
    );
    let norm = L2Norm { eps: f32::NAN, ..norms()[0] };
    assert_eq!(
        refused(Case { params: GatedDeltaRule { qk_norm: Some(norm), ..case.params }, ..case.clone() }),
        "gated_delta_rule: eps is NaN, but a finite number from 0 is wanted"
    );
    let raw = case.clone().with_raw_gates();
    assert_eq!(
        refused(Case { params: GatedDeltaRule { sign: DecaySign::Rate, ..case.params }, ..raw.clone() }),
        "gated_delta_rule: sign is Rate, but raw gates give LogDecay"
    );
    let of = |a: &[usize], heads: usize| {
        let [a, b] = [(); 2].map(|()| zeros(a, DType::F16));
        Some([a, b, zeros(&[6], DType::F32), zeros(&[heads], DType::F32)])
    };
    assert_eq!(
        refused(Case { raw: of(&[78, 6], 6), ..case.clone() }),
        "gated_delta_rule: a is [78, 6], but v [79, 6, 37] wants [79, 6]"
    );
    assert_eq!(
        refused(Case { raw: of(&[79, 6], 5), ..case.clone() }),
        "gated_delta_rule: dt_bias is [5], but a [79, 6] wants [6]"
    );
    for offsets in
        [[0u32, 3, 3, 73, 74, 78], [0, 3, 2, 73, 74, 79], [1, 3, 3, 73, 74, 79], [0, 3, 80, 73, 74, 79]]
    {
        let cu_seqlens = Tensor::new(&offsets, &[6], &device).unwrap();
        assert_eq!(
            refused(Case { cu_seqlens, ..case.clone() }),
            format!(
                "gated_delta_rule: cu_seqlens is {offsets:?}, but it rises from 0 to the number of tokens, 79"
            )
        );
    }
    let none = Case { q: zeros(&[79, 0, 19], DType::F32), k: zeros(&[79, 0, 19], DType::F32), ..case };
    assert_eq!(
        refused(none),
        "gated_delta_rule: q is [79, 0, 19], but at least one key head of one element is wanted"
    );
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for form in forms() {
        let params = GatedDeltaRule { form, ..GatedDeltaRule::new(19) };
        for case in
            [RAGGED, Sizes { lengths: &[1; 5], ..RAGGED }].map(|shape| Case::new(shape, Decay::Usual, params))
        {
            devices().iter().for_each(|device| case.check_pool(device));
        }
    }
}

#[test]
fn sequences_that_share_a_slot_start_alike() {
    let shape = Sizes { lengths: &[0, 4, 9, 4], ..RAGGED };
    let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(19));
    let device = Device::cpu(Some(2)).unwrap();
    // Its states are row 1 of the pool, but for the third's.
    let alike = |state: &Tensor| {
        let rows = [1, 1, 2, 1].map(|row| state.rows(row, row + 1).unwrap());
        crate::ops::concat_rows(&rows).unwrap()
    };
    let (want, states) = Case { state: alike(&case.state), ..case.clone() }.run().unwrap();
    let slots = Some(Tensor::new(&[1u32, 1, 2, 1], &[4], &device).unwrap());
    let (got, pool) = Case { slots, ..case.clone() }.run().unwrap();
    assert_eq!(got.bytes(), want.bytes());
    let row = |x: &Tensor, row| x.rows(row, row + 1).unwrap().bytes().to_vec();
    assert_eq!(row(&pool, 1), row(&states, 1), "the first with tokens leaves its state");
    assert_eq!(row(&pool, 2), row(&states, 2));
    for other in [0, 3] {
        assert_eq!(row(&pool, other), row(&case.state, other));
    }
}

#[test]
fn refusals_of_slots_name_both_sides() {
    let case = Case::new(RAGGED, Decay::Usual, GatedDeltaRule::new(19));
    let device = Device::cpu(Some(1)).unwrap();
    let with = |slots: Tensor| Case { slots: Some(slots), ..case.clone() };
    let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &device).unwrap();
    let refused = |slots| with(slots).run().unwrap_err().to_string();
    assert_eq!(
        refused(ids(&[0, 1, 2, 3, 5])),
        "gated_delta_rule: slots[4] is 5, but there are 5 rows to choose from"
    );
    assert_eq!(refused(ids(&[0, 1, 2, 3])), "gated_delta_rule: cu_seqlens is [6], but slots [4] wants [5]");
    assert_eq!(
        refused(Tensor::zeros(&[5], DType::F32, &device)),
        "gated_delta_rule: slots is f32, but u32 is wanted"
    );
    assert_eq!(
        refused(ids(&[0; 5]).reshape(&[5, 1]).unwrap()),
        "gated_delta_rule: slots is [5, 1], but [S] is wanted"
    );
    let pooled = with(ids(&[0, 1, 2, 3, 4]));
    let gradient = gated_delta_rule_backward(&pooled.inputs(), &pooled.state, &pooled.params, &pooled.v);
    assert_eq!(
        gradient.unwrap_err().to_string(),
        "gated_delta_rule_backward: slots is [5], but gradients take none: state [5, 6, 19, 37] has one row \
         per sequence"
    );
}

#[test]
fn no_tokens_leave_the_state() {
    let shape = Sizes { lengths: &[0, 0], key_heads: 1, key_dim: 4, value_heads: 1, value_dim: 3 };
    let case = Case::new(shape, Decay::Usual, GatedDeltaRule::new(4));
    let (y, state) = case.run().unwrap();
    assert!(y.is_empty());
    assert_eq!(state.bytes(), case.state.bytes());
}
