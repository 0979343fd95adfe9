mod channels;
mod peers;
mod without_correction;

#[cfg(feature = "gpu")]
pub(super) use channels::DECAYS as CHANNEL_DECAYS;
#[cfg(feature = "gpu")]
pub(super) use without_correction::additive;

use super::reference::{Bounded, gated_delta_rule as reference};
use super::*;
use crate::ops::testing::{FLOATS, devices, moved, rounding, values};
use lowbit_formats::FloatType;
use numcheck::{Random, assert_bits, assert_within};

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

impl Decay {
    /// Its logarithm for one token.
    fn draw(self, random: &mut Random) -> f32 {
        match self {
            Self::None => 0.0,
            Self::Usual => (random.uniform() - 1.0) * 0.2,
            Self::Strong if random.below(5) == 0 => -200.0,
            Self::Strong => (random.uniform() - 1.0) * 30.0,
        }
    }
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
        let log_decay: Vec<f32> = (0..gates).map(|_| decay.draw(&mut random)).collect();
        let beta: Vec<f32> = (0..gates)
            .map(|_| match random.below(6) {
                0 => 0.0,
                1 => 1.0,
                _ => random.uniform() * 0.5 + 0.5,
            })
            .collect();
        let state_shape = [shape.lengths.len(), value_heads, key_dim, value_dim];
        let state = random.normal(state_shape.iter().product(), 0.5);
        let mut offsets = vec![0u32];
        shape.lengths.iter().for_each(|&n| offsets.push(offsets[offsets.len() - 1] + n as u32));
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

/// The usual rule for keys of this size.
pub(super) fn rule(form: Form, key_dim: usize) -> GatedDeltaRule {
    GatedDeltaRule { form, ..GatedDeltaRule::new(key_dim) }
}

/// The usual case of ragged sequences.
fn ragged(form: Form) -> Case {
    Case::new(RAGGED, Decay::Usual, rule(form, RAGGED.key_dim))
}

impl Bounded {
    /// True if `got` is further away than the bounds allow.
    pub(super) fn rejects(&self, got: &[f32]) -> bool {
        let off = |((&got, want), bound): ((&f32, &f64), &f64)| (f64::from(got) - want).abs() > *bound;
        got.iter().zip(&self.values).zip(&self.bounds).any(off)
    }
}

/// Checks that with NaN in `x` from token `first` on, y is NaN from there on, and the same bits
/// before.
pub(super) fn check_nan<const N: usize>(
    case: &Case,
    first: usize,
    x: impl Fn(&mut Case) -> [&mut Tensor; N],
    run: impl Fn(&Case) -> Vec<f32>,
) {
    let tokens = case.q.dim(0);
    let mut poisoned = case.clone();
    for x in x(&mut poisoned) {
        let row = x.len() / tokens;
        x.as_mut_slice::<f32>().unwrap()[first * row..].fill(f32::NAN);
    }
    let [want, got] = [case, &poisoned].map(run);
    let (before, after) = got.split_at(first * want.len() / tokens);
    assert_bits(&format!("{:?} before {first}", case.params.form), before, &want[..before.len()]);
    assert!(after.iter().all(|x| x.is_nan()), "{:?} from {first}", case.params.form);
}

/// Forms, and the token of a case of [`NAN`]'s sizes from which on its operands are NaN.
const NANS: [(Form, usize); 4] =
    [(Form::Recurrent, 20), (Form::Chunked, 20), (Form::Chunked, 9), (Form::Chunked, 3)];
pub(super) const NAN: Sizes =
    Sizes { lengths: &[37], key_heads: 1, key_dim: 16, value_heads: 2, value_dim: 16 };

#[test]
fn agrees_with_the_reference_for_both_maps_of_heads() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for form in forms() {
            let params = GatedDeltaRule { scale: 0.3, head_map, ..rule(form, RAGGED.key_dim) };
            Case::new(RAGGED, Decay::Usual, params).check();
        }
    }
}

#[test]
fn head_sizes_below_at_and_above_each_tile() {
    for (key_dim, value_dim) in [(1, 1), (16, 64), (7, 8), (33, 15), (64, 129), (24, 80), (128, 40)] {
        let shape = Sizes { lengths: &[2, 67], key_heads: 1, key_dim, value_heads: 2, value_dim };
        forms().iter().for_each(|&form| Case::new(shape, Decay::Usual, rule(form, key_dim)).check());
    }
}

#[test]
fn lengths_from_which_the_state_is_copied() {
    let shape = Sizes { lengths: &[127, 128, 145], key_heads: 2, key_dim: 16, value_heads: 4, value_dim: 48 };
    Case::new(shape, Decay::Usual, rule(Form::Chunked, 16)).check();
}

#[test]
fn lengths_below_at_and_above_a_chunk() {
    let lengths = [63, 64, 65, 129, 1, 15, 16, 17, 31, 32, 33];
    let shape = Sizes { lengths: &lengths, key_heads: 1, key_dim: 12, value_heads: 3, value_dim: 20 };
    for form in [Form::Auto, Form::Recurrent, Form::Chunked] {
        Case::new(shape, Decay::Usual, rule(form, 12)).check();
    }
}

#[test]
fn no_decay_and_decay_to_nothing() {
    for form in forms() {
        for decay in [Decay::None, Decay::Strong] {
            Case::new(RAGGED, decay, rule(form, RAGGED.key_dim)).check();
        }
        let mut case = ragged(form);
        case.log_decay.as_mut_slice::<f32>().unwrap()[..60].fill(f32::NEG_INFINITY);
        case.check();
    }
}

#[test]
fn a_nan_reaches_no_token_before_its_own() {
    for (form, first) in NANS {
        let case = Case::new(NAN, Decay::Usual, rule(form, NAN.key_dim));
        for device in devices() {
            check_nan(
                &case,
                first,
                |case| [&mut case.q, &mut case.k, &mut case.v, &mut case.beta],
                |case| values(&case.on(&device).run().unwrap().0),
            );
        }
    }
}

#[test]
fn keys_that_are_not_normalised() {
    // |1 - beta |k|^2| reaches 3: the state grows, and so do error and bound.
    let shape = Sizes { lengths: &[9, 17], key_heads: 3, key_dim: 18, value_heads: 3, value_dim: 21 };
    for form in forms() {
        Case::new(shape, Decay::Usual, rule(form, 18)).with_keys_times(2.0).check();
    }
}

/// An eps of the norm of q and k that shows.
pub(super) const QK_NORM: Option<f32> = Some(0.3);

#[test]
fn activations_of_every_type_with_norm_or_gates_computed_and_without() {
    for dtype in FLOATS {
        for form in forms() {
            let case = ragged(form);
            case.clone().rounded(dtype).check();
            case.clone().with_raw_gates().rounded(dtype).check();
            let params = GatedDeltaRule { qk_norm: QK_NORM, ..case.params };
            Case { params, ..case }.with_keys_times(2.5).rounded(dtype).check();
        }
    }
}

#[test]
fn any_split_carries_the_state() {
    let tokens = 70;
    let shape = Sizes { lengths: &[tokens], key_heads: 2, key_dim: 9, value_heads: 4, value_dim: 17 };
    for form in forms() {
        let whole = Case::new(shape, Decay::Usual, rule(form, 9));
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
                    cu_seqlens: Tensor::new(&offsets, &[2], whole.q.device()).unwrap(),
                    state: state.clone(),
                    ..whole.clone()
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
    let case = ragged(Form::Auto);
    let (y, _) = case.reference();
    let params = GatedDeltaRule { head_map: HeadMap::Tiled, ..case.params };
    assert!(y.rejects(&values(&Case { params, ..case }.run().unwrap().0)));
}

#[test]
fn refusals_name_both_sides() {
    let case = ragged(Form::Auto);
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, case.q.device());
    let of = |shape: &[usize]| zeros(shape, DType::F32);
    let raw = |a: &[usize], heads: usize| {
        let raw = Some([zeros(a, DType::F16), zeros(a, DType::F16), of(&[6]), of(&[heads])]);
        Case { raw, ..case.clone() }
    };
    let params = GatedDeltaRule { qk_norm: Some(f32::NAN), ..case.params };
    for (case, want) in [
        (
            Case { k: of(&[79, 2, 20]), ..case.clone() },
            "k is [79, 2, 20], but q [79, 2, 19] wants [79, 2, 19]",
        ),
        (
            Case { v: of(&[79, 5, 37]), ..case.clone() },
            "v is [79, 5, 37], but its heads are to be a multiple of the key heads of q [79, 2, 19]",
        ),
        (Case { beta: zeros(&[79, 6], DType::BF16), ..case.clone() }, "beta is bf16, but f32 is wanted"),
        (
            Case { state: of(&[5, 6, 37, 19]), ..case.clone() },
            "state is [5, 6, 37, 19], but q [79, 2, 19] and v [79, 6, 37] wants [5, 6, 19, 37]",
        ),
        (
            Case { state: zeros(&[5, 6, 19, 37], DType::F16), ..case.clone() },
            "state is f16, but f32 is wanted",
        ),
        (
            Case { state: of(&[4, 6, 19, 37]), ..case.clone() },
            "cu_seqlens is [6], but state [4, 6, 19, 37] wants [5]",
        ),
        (Case { params, ..case.clone() }, "eps is NaN, but a finite number from 0 is wanted"),
        (raw(&[78, 6], 6), "a is [78, 6], but v [79, 6, 37] wants [79, 6]"),
        (raw(&[79, 6], 5), "dt_bias is [5], but a [79, 6] wants [6]"),
        (
            Case { q: of(&[79, 0, 19]), k: of(&[79, 0, 19]), ..case.clone() },
            "q is [79, 0, 19], but at least one key head of one element is wanted",
        ),
    ] {
        assert_eq!(case.run().unwrap_err().to_string(), format!("gated_delta_rule: {want}"));
    }
    for offsets in
        [[0u32, 3, 3, 73, 74, 78], [0, 3, 2, 73, 74, 79], [1, 3, 3, 73, 74, 79], [0, 3, 80, 73, 74, 79]]
    {
        let cu_seqlens = Tensor::new(&offsets, &[6], case.q.device()).unwrap();
        let want = format!(
            "gated_delta_rule: cu_seqlens is {offsets:?}, but it rises from 0 to the number of tokens, 79"
        );
        assert_eq!(Case { cu_seqlens, ..case.clone() }.run().unwrap_err().to_string(), want);
    }
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for form in forms() {
        for shape in [RAGGED, Sizes { lengths: &[1; 5], ..RAGGED }] {
            let case = Case::new(shape, Decay::Usual, rule(form, RAGGED.key_dim));
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
    let case = ragged(Form::Auto);
    let device = case.q.device();
    let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], device).unwrap();
    let with = |slots: Tensor| Case { slots: Some(slots), ..case.clone() };
    for (slots, want) in [
        (ids(&[0, 1, 2, 3, 5]), "slots[4] is 5, but there are 5 rows to choose from"),
        (ids(&[0, 1, 2, 3]), "cu_seqlens is [6], but slots [4] wants [5]"),
        (Tensor::zeros(&[5], DType::F32, device), "slots is f32, but u32 is wanted"),
        (ids(&[0; 5]).reshape(&[5, 1]).unwrap(), "slots is [5, 1], but [S] is wanted"),
    ] {
        assert_eq!(with(slots).run().unwrap_err().to_string(), format!("gated_delta_rule: {want}"));
    }
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
