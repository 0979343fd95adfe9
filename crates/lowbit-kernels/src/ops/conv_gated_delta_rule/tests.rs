use super::*;
use crate::Device;
use crate::ops::gated_delta_rule::{CHUNK, DecaySign, HeadMap};
use crate::ops::testing::{FLOATS, devices, rounded, rounding, values};
use crate::ops::{L2Norm, L2NormConvention};
use lowbit_formats::FloatType;
use numcheck::{Random, assert_bits, assert_within};

/// What a case is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_heads: usize,
    pub value_dim: usize,
    pub width: usize,
}

pub(super) const ODD: Shape = Shape { key_heads: 2, key_dim: 19, value_heads: 6, value_dim: 37, width: 4 };

impl Shape {
    fn channels(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// A call's operands but for its tokens.
#[derive(Clone)]
pub(super) struct Case {
    pub shape: Shape,
    pub dtype: FloatType,
    pub activation: Option<Activation>,
    pub params: GatedDeltaRule,
    /// Whether the gates are to be computed.
    pub raw: bool,
    pub weight: Tensor,
    pub conv_state: Tensor,
    pub state: Tensor,
}

/// The tokens of one call.
pub(super) struct Tokens {
    pub qkv: Tensor,
    /// What gates come as.
    pub gates: [Tensor; 4],
    pub cu_seqlens: Tensor,
}

/// The conventions of models: everything is done here.
pub(super) fn usual(key_dim: usize) -> GatedDeltaRule {
    let norm = L2Norm { eps: 1e-6, convention: L2NormConvention::Sum };
    GatedDeltaRule { qk_norm: Some(norm), ..GatedDeltaRule::new(key_dim) }
}

impl Case {
    pub(super) fn new(shape: Shape, sequences: usize, dtype: FloatType, params: GatedDeltaRule) -> Self {
        let device = Device::cpu(Some(1)).unwrap();
        let mut random = Random::new(shape.channels() as u64);
        let mut some = |shape: &[usize], scale: f32| {
            Tensor::new(&random.normal(shape.iter().product(), scale), shape, &device).unwrap()
        };
        let Shape { key_dim, value_heads, value_dim, width, .. } = shape;
        let inner = match params.state_layout {
            StateLayout::KeyValue => [key_dim, value_dim],
            StateLayout::ValueKey => [value_dim, key_dim],
        };
        Self {
            shape,
            dtype,
            activation: Some(Activation::Silu),
            params,
            raw: true,
            weight: some(&[shape.channels(), width], 0.5),
            conv_state: some(&[sequences, shape.channels(), width - 1], 1.0),
            state: some(&[sequences, value_heads, inner[0], inner[1]], 0.5),
        }
    }

    /// Tokens for sequences of these lengths.
    pub(super) fn tokens(&self, lengths: &[usize], seed: u64) -> Tokens {
        let host = self.weight.device();
        let mut random = Random::new(seed);
        let (tokens, heads) = (lengths.iter().sum::<usize>(), self.shape.value_heads);
        let qkv = random.normal(tokens * self.shape.channels(), 1.0);
        let gates = if self.raw {
            let mut normal = |shape: &[usize], dtype| {
                rounded(&random.normal(shape.iter().product(), 1.0), shape, dtype, host)
            };
            let [a, b] = [(); 2].map(|()| normal(&[tokens, heads], self.dtype));
            let [a_log, dt_bias] = [(); 2].map(|()| normal(&[heads], FloatType::F32));
            [a, b, a_log, dt_bias]
        } else {
            let sign = if self.params.sign == DecaySign::Rate { 0.1 } else { -0.1 };
            let mut gate = |scale: f32| {
                let values: Vec<f32> =
                    (0..tokens * heads).map(|_| scale * (random.uniform() + 1.0)).collect();
                Tensor::new(&values, &[tokens, heads], host).unwrap()
            };
            let (log_decay, beta) = (gate(sign), gate(0.5));
            [log_decay.clone(), beta.clone(), log_decay, beta]
        };
        let offsets: Vec<u32> =
            (0..=lengths.len()).map(|s| lengths[..s].iter().sum::<usize>() as u32).collect();
        Tokens {
            qkv: rounded(&qkv, &[tokens, self.shape.channels()], self.dtype, host),
            gates,
            cu_seqlens: Tensor::new(&offsets, &[offsets.len()], host).unwrap(),
        }
    }

    pub(super) fn inputs<'a>(&'a self, tokens: &'a Tokens) -> ConvGatedDeltaInputs<'a> {
        let Tokens { qkv, gates: [a, b, a_log, dt_bias], cu_seqlens } = tokens;
        let gates = match self.raw {
            true => DeltaGates::Raw { a, b, a_log, dt_bias },
            false => DeltaGates::Computed { log_decay: a, beta: b },
        };
        ConvGatedDeltaInputs { qkv, weight: &self.weight, activation: self.activation, gates, cu_seqlens }
    }

    pub(super) fn on(&self, device: &Device) -> Self {
        let [weight, conv_state, state] =
            [&self.weight, &self.conv_state, &self.state].map(|x| x.to_device(device).unwrap());
        Self { weight, conv_state, state, ..self.clone() }
    }

    pub(super) fn run(&mut self, tokens: &Tokens) -> Result<Tensor, KernelError> {
        let Self { weight, conv_state, state, activation, params, raw, .. } = self;
        let Tokens { qkv, gates: [a, b, a_log, dt_bias], cu_seqlens } = tokens;
        let gates = match raw {
            true => DeltaGates::Raw { a, b, a_log, dt_bias },
            false => DeltaGates::Computed { log_decay: a, beta: b },
        };
        let inputs = ConvGatedDeltaInputs { qkv, weight, activation: *activation, gates, cu_seqlens };
        conv_gated_delta_rule(&inputs, [conv_state, state], params)
    }

    /// The same by the two ops.
    pub(super) fn run_composed(&mut self, tokens: &Tokens) -> Tensor {
        let mut states = [self.conv_state.clone(), self.state.clone()];
        let inputs = self.inputs(tokens);
        let [conv_state, state] = &mut states;
        let dims = check(&inputs, [conv_state, state], &self.params).unwrap();
        let y = composed(&inputs, [conv_state, state], dims, &self.params).unwrap();
        [self.conv_state, self.state] = states;
        y
    }

    /// Runs steps of these lengths on each device, each from where the last one ended, and compares them with the
    /// reference; the convolution's state with the two ops'.
    #[track_caller]
    pub(super) fn check_on(&self, devices: &[Device], steps: &[&[usize]]) {
        let host = self.weight.device();
        for device in devices {
            let (mut here, mut other) = (self.on(device), self.on(device));
            for (step, &lengths) in steps.iter().enumerate() {
                let tokens = self.tokens(lengths, step as u64);
                let before = [&here.conv_state, &here.state].map(|x| x.to_device(host).unwrap());
                let float = (self.dtype, CHUNK);
                let (y, state) = reference::conv_gated_delta_rule(
                    &self.inputs(&tokens),
                    before.each_ref(),
                    &self.params,
                    float,
                    |_, _| true,
                )
                .unwrap();
                let tokens = tokens.on(device);
                let got = here.run(&tokens).unwrap();
                let composed = other.run_composed(&tokens);
                let Shape { value_heads, value_dim, .. } = self.shape;
                let shape = [tokens.qkv.dim(0), value_heads, value_dim];
                assert_eq!((got.dtype(), got.shape()), (self.dtype.dtype(), &shape[..]));
                let bound = |i: usize| y.bounds[i] + rounding(self.dtype, y.values[i].abs() + y.bounds[i]);
                for y_of in [&got, &composed] {
                    assert_within(&values(y_of), &y.values, bound);
                }
                assert_within(&values(&here.state), &state.values, |i| state.bounds[i]);
                assert_bits("conv_state", &values(&here.conv_state), &values(&other.conv_state));
                // Both go on from one state, so that their errors do not add up.
                other.state = here.state.clone();
            }
        }
    }
}

impl Tokens {
    pub(super) fn on(&self, device: &Device) -> Self {
        let Self { qkv, gates, cu_seqlens } = self;
        Self {
            qkv: qkv.to_device(device).unwrap(),
            gates: gates.each_ref().map(|x| x.to_device(device).unwrap()),
            cu_seqlens: cu_seqlens.to_device(device).unwrap(),
        }
    }
}

/// Ragged steps, and steps of about a token each.
pub(super) const STEPS: [&[usize]; 5] = [&[3, 0, 21], &[1, 1, 1], &[1, 1, 1], &[0, 2, 1], &[1, 1, 0]];

#[test]
fn agrees_with_the_reference_in_every_convention() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for state_layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
            for (raw, sign) in
                [(true, DecaySign::LogDecay), (false, DecaySign::LogDecay), (false, DecaySign::Rate)]
            {
                let params = GatedDeltaRule { head_map, state_layout, sign, ..usual(19) };
                let case = Case::new(ODD, 3, FloatType::F32, params);
                Case { raw, ..case }.check_on(&devices(), &STEPS[..2]);
            }
        }
    }
}

#[test]
fn every_type_and_width() {
    for dtype in FLOATS {
        for width in [1, 4, 6] {
            let shape = Shape { width, ..ODD };
            let mut case = Case::new(shape, 3, dtype, usual(19));
            case.check_on(&devices(), &STEPS);
            case.activation = None;
            case.check_on(&devices(), &STEPS[..2]);
        }
    }
}

#[test]
fn is_the_two_ops_bit_for_bit() {
    for dtype in FLOATS {
        let mut case = Case::new(ODD, 3, dtype, usual(19));
        let mut other = case.clone();
        for (step, lengths) in STEPS.into_iter().enumerate() {
            let tokens = case.tokens(lengths, step as u64);
            let (got, want) = (case.run(&tokens).unwrap(), other.run_composed(&tokens));
            assert_eq!(got.bytes(), want.bytes(), "{lengths:?}");
            assert_eq!(case.conv_state.bytes(), other.conv_state.bytes(), "{lengths:?}");
            assert_eq!(case.state.bytes(), other.state.bytes(), "{lengths:?}");
        }
    }
}

#[test]
fn the_comparison_rejects_a_wrong_order_of_heads() {
    let case = Case::new(ODD, 1, FloatType::BF16, usual(19));
    let tokens = case.tokens(&[1], 1);
    let states = [&case.conv_state, &case.state];
    let float = (case.dtype, CHUNK);
    let want =
        reference::conv_gated_delta_rule(&case.inputs(&tokens), states, &case.params, float, |_, _| true);
    let (y, _) = want.unwrap();
    let params = GatedDeltaRule { head_map: HeadMap::Tiled, ..case.params };
    let got = values(&Case { params, ..case }.run(&tokens).unwrap());
    let far = got.iter().zip(&y.values).zip(&y.bounds).filter(|((got, y), bound)| {
        (f64::from(**got) - **y).abs() > **bound + rounding(FloatType::BF16, y.abs() + **bound)
    });
    assert!(far.count() > got.len() / 4);
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let run = |qkv: &[usize],
               weight: &[usize],
               past: &[usize],
               state: &[usize],
               gates: &[usize],
               offsets: &[u32]| {
        let (qkv, weight) = (zeros(qkv, DType::BF16), zeros(weight, DType::F32));
        let [log_decay, beta] = [(); 2].map(|()| zeros(gates, DType::F32));
        let inputs = ConvGatedDeltaInputs {
            qkv: &qkv,
            weight: &weight,
            activation: None,
            gates: DeltaGates::Computed { log_decay: &log_decay, beta: &beta },
            cu_seqlens: &Tensor::new(offsets, &[offsets.len()], &device).unwrap(),
        };
        let [mut past, mut state] = [past, state].map(|shape| zeros(shape, DType::F32));
        let y = conv_gated_delta_rule(&inputs, [&mut past, &mut state], &GatedDeltaRule::new(3));
        y.map_err(|error| error.to_string())
    };
    // Two key heads of 3 and four value heads of 5 are 32 columns.
    let right = (&[7, 32][..], &[32, 4][..], &[2, 32, 3][..], &[2, 4, 3, 5][..], &[7, 4][..], &[0, 2, 7][..]);
    let (qkv, weight, past, state, gates, offsets) = right;
    assert_eq!(run(qkv, weight, past, state, gates, offsets).unwrap().shape(), [7, 4, 5]);
    let heads = |state: &str| {
        format!(
            "columns of queries, keys and values are wanted whose value heads, those of state {state} in KeyValue, are a \
             multiple of the key heads"
        )
    };
    for (got, message) in [
        (
            run(&[7, 32, 1], weight, past, state, gates, offsets),
            "qkv is [7, 32, 1], but [T, C] is wanted".into(),
        ),
        (
            run(qkv, &[31, 4], past, state, gates, offsets),
            "weight is [31, 4], but qkv [7, 32] wants [32, 4]".into(),
        ),
        (
            run(qkv, &[32, 0], past, state, gates, offsets),
            "weight is [32, 0], but at least one tap is wanted".into(),
        ),
        (
            run(qkv, weight, &[2, 32, 4], state, gates, offsets),
            "conv_state is [2, 32, 4], but weight [32, 4] with state [2, 4, 3, 5] wants [2, 32, 3]".into(),
        ),
        (
            run(qkv, weight, &[3, 32, 3], state, gates, offsets),
            "conv_state is [3, 32, 3], but weight [32, 4] with state [2, 4, 3, 5] wants [2, 32, 3]".into(),
        ),
        (
            run(qkv, weight, past, &[2, 4, 5, 5], gates, offsets),
            format!("qkv is [7, 32], but {}", heads("[2, 4, 5, 5]")),
        ),
        (
            // Three key heads would be left.
            run(&[7, 38], &[38, 4], past, state, gates, offsets),
            format!("qkv is [7, 38], but {}", heads("[2, 4, 3, 5]")),
        ),
        (
            run(&[7, 20], &[20, 4], past, state, gates, offsets),
            format!("qkv is [7, 20], but {}", heads("[2, 4, 3, 5]")),
        ),
        (
            run(qkv, weight, past, state, &[7, 3], offsets),
            "log_decay is [7, 3], but qkv [7, 32] with state [2, 4, 3, 5] wants [7, 4]".into(),
        ),
        (
            run(qkv, weight, past, state, gates, &[0, 7]),
            "cu_seqlens is [2], but state [2, 4, 3, 5] wants [3]".into(),
        ),
    ] {
        assert_eq!(got.unwrap_err(), format!("conv_gated_delta_rule: {message}"));
    }
}
