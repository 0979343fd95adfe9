//! The ops of [`lowbit_kernels::ops`] on [`Var`]s, each with the rule that a tape records. Operands
//! and errors are the op's.

use super::shapes::{each, or_zeros, reshape};
use super::{Named, Tape, Var};
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{
    self, Activation, CausalConv1dInputs, ChannelDecay, DeltaGates, Gate, GatedDeltaInputs, GatedDeltaRule,
    GatesGradient, Operand, Rope, RouterParams, SlotState, StepLimits, WeightGradient, WeightPart,
};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

type Result<T> = std::result::Result<T, KernelError>;

/// A product's x, which a tape may record.
pub type Input<'a> = ops::Input<'a, Var>;
/// The norm of a sum, which a tape may record.
pub type AddRmsNorm<'a> = ops::AddRmsNorm<'a, Var>;
/// A norm, whose weight a tape may ask for by name.
pub type Norm<'a> = ops::Norm<'a, Var>;

impl Operand for Var {
    type Parameter = Named<Tensor>;

    fn reshape(&self, shape: &[usize]) -> Result<Self> {
        reshape(self, shape)
    }

    fn glu(x: &Self, gate: &Self, by: Gate) -> Result<Self> {
        glu(x, gate, by)
    }

    fn gated_rms_norm(x: &Self, gate: &Self, norm: Norm<'_>) -> Result<Self> {
        gated_rms_norm(x, gate, norm)
    }

    fn add_rms_norm(x: &AddRmsNorm<'_>) -> Result<(Self, Self)> {
        add_rms_norm(x)
    }
}

/// The tape that records an input.
fn tape<'a>(x: impl Into<Input<'a>>) -> Option<&'a Tape> {
    let (x, other) = x.into().operands();
    x.tape().or(other.and_then(Var::tape))
}

/// True if a tape records the sum.
pub(crate) fn is_recorded(x: &AddRmsNorm<'_>) -> bool {
    tape(*x).is_some()
}

/// [`ops::add_rms_norm()`].
fn add_rms_norm(x: &AddRmsNorm<'_>) -> Result<(Var, Var)> {
    let AddRmsNorm { h, x: update, norm: Norm { weight, eps } } = *x;
    let Some(tape) = tape(*x) else {
        let (sum, y) = ops::add_rms_norm(&h.tensor, &update.tensor, &weight.value, eps)?;
        return Ok((sum.into(), y.into()));
    };
    let (weight, name) = tape.tensor(weight);
    let (sum, y) = ops::add_rms_norm(&h.tensor, &update.tensor, &weight, eps)?;
    let (h, x, kept) = (h.slot(), update.slot(), sum.clone());
    let results = tape.record([sum, y], move |[dsum, dy], gradients| {
        let [dsum, dy] = [or_zeros(dsum, &kept)?, or_zeros(dy, &kept)?];
        let ops::AddRmsNormGradient { dsum, dweight } =
            ops::add_rms_norm_backward(&kept, &weight, eps, [&dsum, &dy])?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(h, dsum.clone())?;
        gradients.add(x, dsum)
    });
    Ok(results.into())
}

/// [`ops::quantized_matmul_to()`]; in x's type without `to`.
pub(crate) fn quantized_matmul(
    x: Input<'_>,
    weight: &Named<QuantizedTensor>,
    to: Option<FloatType>,
) -> Result<Var> {
    let product = |x: Input<'_>, weight: &QuantizedTensor| match to {
        None => ops::quantized_matmul(x, weight),
        Some(dtype) => ops::quantized_matmul_to(x, weight, dtype),
    };
    let Some(tape) = tape(x) else { return Ok(product(x, &weight.value)?.into()) };
    let ((x, _), weight) = (x.make()?, tape.weight(weight));
    let y = product((&x).into(), &weight.value)?;
    let slot = x.slot();
    Ok(tape.record_one(y, move |dy, gradients| {
        let dweight = match weight.wanted {
            None => None,
            Some(WeightPart::Scales) => {
                let scales = ops::quantized_matmul_backward_scales(&x.tensor, &weight.value, dy)?;
                Some(WeightGradient::Scales(scales))
            }
            Some(WeightPart::Values) => {
                let shape = weight.value.shape();
                let values = ops::quantized_matmul_backward_weight(&x.tensor, dy, shape)?;
                Some(WeightGradient::Values(values))
            }
        };
        gradients.add_weight(&weight, dweight)?;
        gradients.add(slot, ops::quantized_matmul_backward_x(dy, &weight.value)?)
    }))
}

/// [`ops::quantized_matmul_and_sum()`]; nothing records it.
pub(crate) fn quantized_matmul_and_sum(
    x: AddRmsNorm<'_>,
    weight: &Named<QuantizedTensor>,
) -> Result<(Var, Var)> {
    let (sum, y) = ops::quantized_matmul_and_sum(x, &weight.value)?;
    Ok((sum.into(), y.into()))
}

/// [`ops::quantized_matmul_each()`].
pub(crate) fn quantized_matmul_each<const N: usize>(
    x: &Var,
    weights: [&Named<QuantizedTensor>; N],
) -> Result<[Var; N]> {
    if x.tape().is_none() {
        let products = ops::quantized_matmul_each(&x.tensor, &weights.map(|weight| &weight.value))?;
        let products: Vec<Var> = products.into_iter().map(Var::from).collect();
        return Ok(products.try_into().expect("one for each weight"));
    }
    each(weights.map(|weight| quantized_matmul(x.into(), weight, None)))
}

/// [`ops::quantized_matmul_parts()`]; nothing records it.
pub(crate) fn quantized_matmul_parts<const N: usize>(
    x: &Var,
    weight: &Named<QuantizedTensor>,
    widths: [usize; N],
) -> Result<[Var; N]> {
    let parts = ops::quantized_matmul_parts(&x.tensor, &weight.value, &widths)?;
    Ok(parts.into_iter().map(Var::from).collect::<Vec<_>>().try_into().expect("one for each width"))
}

/// [`ops::quantized_matmul_glu()`]; nothing records it.
pub(crate) fn quantized_matmul_glu(x: &Var, weight: &Named<QuantizedTensor>, by: Gate) -> Result<Var> {
    Ok(ops::quantized_matmul_glu(&x.tensor, &weight.value, by)?.into())
}

/// [`ops::gated_mlp()`]; nothing records it.
pub(crate) fn gated_mlp(x: &Var, weights: [&Named<QuantizedTensor>; 3], by: Gate) -> Result<Var> {
    Ok(ops::gated_mlp(&x.tensor, weights.map(|weight| &weight.value), by)?.into())
}

/// [`ops::gated_experts()`] of gate and up, and down; nothing records it.
pub(crate) fn gated_experts(
    x: &Var,
    [gate_up, down]: [&Named<QuantizedTensor>; 2],
    ids: &Tensor,
    by: Gate,
) -> Result<Var> {
    Ok(ops::gated_experts(&x.tensor, &gate_up.value, &down.value, ids, by)?.into())
}

/// [`ops::gather_qmm()`]; ids are constants.
pub(crate) fn gather_qmm(x: Input<'_>, weight: &Named<QuantizedTensor>, ids: &Tensor) -> Result<Var> {
    let Some(tape) = tape(x) else { return Ok(ops::gather_qmm(x, &weight.value, ids)?.into()) };
    let ((x, _), weight, ids) = (x.make()?, tape.weight(weight), ids.clone());
    let y = ops::gather_qmm(&x.tensor, &weight.value, &ids)?;
    let slot = x.slot();
    Ok(tape.record_one(y, move |dy, gradients| {
        let dweight = match weight.wanted {
            None => None,
            Some(WeightPart::Scales) => {
                let scales = ops::gather_qmm_backward_scales(&x.tensor, &weight.value, &ids, dy)?;
                Some(WeightGradient::Scales(scales))
            }
            Some(WeightPart::Values) => {
                let values = ops::gather_qmm_backward_weight(&x.tensor, &weight.value, &ids, dy)?;
                Some(WeightGradient::Values(values))
            }
        };
        gradients.add_weight(&weight, dweight)?;
        gradients.add(slot, ops::gather_qmm_backward_x(dy, &weight.value, &ids, x.tensor.dim(1))?)
    }))
}

/// The bias of each expert in `ids`, a row of `biases`, added to its row of x: `[.., N]` for `ids`
/// `[..]`.
pub(crate) fn add_expert_biases(x: &Var, biases: &Named<QuantizedTensor>, ids: &Tensor) -> Result<Var> {
    add(x, &dequant_gather(x.tape(), biases, ids)?)
}

/// [`ops::dequant_gather()`] in f32.
pub(crate) fn dequant_gather(
    tape: Option<&Tape>,
    table: &Named<QuantizedTensor>,
    ids: &Tensor,
) -> Result<Var> {
    let Some(tape) = tape else {
        return Ok(ops::dequant_gather(&table.value, ids, FloatType::F32)?.into());
    };
    let (table, ids) = (tape.weight(table), ids.clone());
    let y = ops::dequant_gather(&table.value, &ids, FloatType::F32)?;
    Ok(tape.record_one(y, move |dy, gradients| {
        let dtable = match table.wanted {
            None => None,
            Some(WeightPart::Scales) => {
                Some(WeightGradient::Scales(ops::dequant_gather_backward_scales(&table.value, &ids, dy)?))
            }
            Some(WeightPart::Values) => {
                Some(WeightGradient::Values(ops::dequant_gather_backward_values(&table.value, &ids, dy)?))
            }
        };
        gradients.add_weight(&table, dtable)
    }))
}

/// [`ops::add()`] of two of one shape.
pub(crate) fn add(x: &Var, y: &Var) -> Result<Var> {
    let sum = ops::add(&x.tensor, &y.tensor)?;
    let Some(tape) = x.tape().or(y.tape()) else { return Ok(sum.into()) };
    let (x, y) = (x.slot(), y.slot());
    Ok(tape.record_one(sum, move |dy, gradients| {
        gradients.add(x, dy.clone())?;
        gradients.add(y, dy.clone())
    }))
}

/// [`ops::mul()`].
pub(crate) fn mul(x: &Var, y: &Var) -> Result<Var> {
    let z = ops::mul(&x.tensor, &y.tensor)?;
    let Some(tape) = x.tape().or(y.tape()) else { return Ok(z.into()) };
    let (x, y, slots) = (x.tensor.clone(), y.tensor.clone(), [x.slot(), y.slot()]);
    Ok(tape.record_one(z, move |dz, gradients| {
        let ops::MulGradient { dx, dy } = ops::mul_backward(&x, &y, dz)?;
        gradients.add(slots[0], dx)?;
        gradients.add(slots[1], dy)
    }))
}

/// [`ops::softcap()`] with constant caps.
pub(crate) fn softcap(x: &Var, caps: &Tensor) -> Result<Var> {
    let z = ops::softcap(&x.tensor, caps)?;
    let Some(tape) = x.tape() else { return Ok(z.into()) };
    let (input, caps, x) = (x.tensor.clone(), caps.clone(), x.slot());
    Ok(tape.record_one(z, move |dz, gradients| gradients.add(x, ops::softcap_backward(&input, &caps, dz)?)))
}

/// [`ops::add()`] of a bias to each row.
pub(crate) fn add_bias(x: &Var, bias: &Named<Tensor>) -> Result<Var> {
    let Some(tape) = x.tape() else { return Ok(ops::add(&x.tensor, &bias.value)?.into()) };
    let (bias, name) = tape.tensor(bias);
    let (sum, x) = (ops::add(&x.tensor, &bias)?, x.slot());
    Ok(tape.record_one(sum, move |dy, gradients| {
        if name.is_some() {
            gradients.add_tensor(name.as_ref(), ops::sum_rows(dy)?)?;
        }
        gradients.add(x, dy.clone())
    }))
}

/// [`ops::glu()`].
pub(crate) fn glu(x: &Var, gate: &Var, by: Gate) -> Result<Var> {
    let y = ops::glu(&x.tensor, &gate.tensor, by)?;
    let Some(tape) = x.tape().or(gate.tape()) else { return Ok(y.into()) };
    let (x, gate, slots) = (x.tensor.clone(), gate.tensor.clone(), [x.slot(), gate.slot()]);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::GluGradient { dx, dgate } = ops::glu_backward(&x, &gate, by, dy)?;
        gradients.add(slots[0], dx)?;
        gradients.add(slots[1], dgate)
    }))
}

/// [`ops::rms_norm()`].
pub(crate) fn rms_norm(x: &Var, Norm { weight, eps }: Norm<'_>) -> Result<Var> {
    let Some(tape) = x.tape() else { return Ok(ops::rms_norm(&x.tensor, &weight.value, eps)?.into()) };
    let (weight, name) = tape.tensor(weight);
    let y = ops::rms_norm(&x.tensor, &weight, eps)?;
    let (x, slot) = (x.tensor.clone(), x.slot());
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::RmsNormGradient { dx, dweight } = ops::rms_norm_backward(&x, &weight, eps, dy)?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(slot, dx)
    }))
}

/// [`ops::rope()`].
pub(crate) fn rope(x: &Var, positions: &Tensor, rope: &Arc<Rope>) -> Result<Var> {
    let y = ops::rope(&x.tensor, positions, rope)?;
    let Some(tape) = x.tape() else { return Ok(y.into()) };
    let (slot, positions, rope) = (x.slot(), positions.clone(), rope.clone());
    Ok(tape
        .record_one(y, move |dy, gradients| gradients.add(slot, ops::rope_backward(dy, &positions, &rope)?)))
}

/// [`ops::gated_rms_norm()`].
fn gated_rms_norm(x: &Var, gate: &Var, Norm { weight, eps }: Norm<'_>) -> Result<Var> {
    let Some(tape) = x.tape().or(gate.tape()) else {
        return Ok(ops::gated_rms_norm(&x.tensor, &gate.tensor, &weight.value, eps)?.into());
    };
    let (weight, name) = tape.tensor(weight);
    let y = ops::gated_rms_norm(&x.tensor, &gate.tensor, &weight, eps)?;
    let (x, gate, slots) = (x.tensor.clone(), gate.tensor.clone(), [x.slot(), gate.slot()]);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::GatedRmsNormGradient { dx, dgate, dweight } =
            ops::gated_rms_norm_backward(&x, &gate, &weight, eps, dy)?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(slots[0], dx)?;
        gradients.add(slots[1], dgate)
    }))
}

/// Checks that a state of which a gradient is taken has no slots.
fn no_slots(op: &'static str, slots: Option<&Tensor>) -> Result<()> {
    slots.map_or(Ok(()), |slots| {
        let (operand, got) = ("slots", slots.shape().to_vec());
        Err(KernelError::Shape { op, operand, got, want: "gradients take a state per sequence".into() })
    })
}

/// [`ops::causal_conv1d()`] without a bias. A state that is read is a constant.
pub(crate) fn causal_conv1d<'a>(
    x: &Var,
    weight: &Named<Tensor>,
    state: impl Into<SlotState<'a>>,
    cu_seqlens: &Tensor,
    activation: Option<Activation>,
) -> Result<Var> {
    let state = state.into();
    let Some(tape) = x.tape() else {
        let y = ops::causal_conv1d(&x.tensor, &weight.value, None, state, cu_seqlens, activation)?;
        return Ok(y.into());
    };
    no_slots("causal_conv1d", state.slots)?;
    let ((weight, name), before) = (tape.tensor(weight), state.state.clone());
    let y = ops::causal_conv1d(&x.tensor, &weight, None, state, cu_seqlens, activation)?;
    let (x, slot, cu_seqlens) = (x.tensor.clone(), x.slot(), cu_seqlens.clone());
    Ok(tape.record_one(y, move |dy, gradients| {
        let (state, cu_seqlens) = (&before, &cu_seqlens);
        let inputs = CausalConv1dInputs { x: &x, weight: &weight, state, cu_seqlens, activation };
        let ops::CausalConv1dGradient { dx, dweight } = ops::causal_conv1d_backward(&inputs, dy)?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(slot, dx)
    }))
}

/// [`causal_conv1d`], whose result comes as parts of the channels next to each other.
pub(crate) fn causal_conv1d_parts<'a>(
    x: &Var,
    (weight, bias): (&Named<Tensor>, Option<&Named<Tensor>>),
    state: impl Into<SlotState<'a>>,
    cu_seqlens: &Tensor,
    activation: Option<Activation>,
    widths: [usize; 3],
) -> Result<[Var; 3]> {
    if x.tape().is_some() {
        if bias.is_some() {
            let (op, operand) = ("causal_conv1d", "bias");
            let (got, want) = ("there".into(), "gradients are those without one".into());
            return Err(KernelError::Value { op, operand, got, want });
        }
        let y = causal_conv1d(x, weight, state, cu_seqlens, activation)?;
        return super::shapes::split_columns(&y, widths);
    }
    let taps = (&weight.value, bias.map(|bias| &bias.value));
    let parts = ops::causal_conv1d_parts(&x.tensor, taps, state, cu_seqlens, activation, widths)?;
    Ok(parts.map(Var::from))
}

/// The operands of [`gated_delta_rule`]: as [`GatedDeltaInputs`] with [`DeltaGates::Raw`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(crate) struct DeltaRuleInputs<'a> {
    pub qkv: [&'a Var; 3],
    pub a: &'a Var,
    pub b: &'a Var,
    pub a_log: &'a Named<Tensor>,
    pub dt_bias: &'a Named<Tensor>,
    pub cu_seqlens: &'a Tensor,
    pub slots: Option<&'a Tensor>,
}

/// [`ops::gated_delta_rule()`]. A state that is read is a constant.
pub(crate) fn gated_delta_rule(
    inputs: &DeltaRuleInputs<'_>,
    state: &mut Tensor,
    rule: &GatedDeltaRule,
) -> Result<Var> {
    let DeltaRuleInputs { qkv, a, b, a_log, dt_bias, cu_seqlens, slots } = *inputs;
    let vars = [qkv[0], qkv[1], qkv[2], a, b];
    let run = |state: &mut Tensor, a_log: &Tensor, dt_bias: &Tensor| {
        let gates = DeltaGates::Raw { a: &a.tensor, b: &b.tensor, a_log, dt_bias };
        let [q, k, v] = qkv.map(|x| &x.tensor);
        ops::gated_delta_rule(&GatedDeltaInputs { q, k, v, gates, cu_seqlens, slots }, state, rule)
    };
    let Some(tape) = vars.iter().find_map(|x| x.tape()) else {
        return Ok(run(state, &a_log.value, &dt_bias.value)?.into());
    };
    no_slots("gated_delta_rule", slots)?;
    let ((a_log, a_log_name), (dt_bias, dt_bias_name)) = (tape.tensor(a_log), tape.tensor(dt_bias));
    let before = state.clone();
    let y = run(state, &a_log, &dt_bias)?;
    let (slots, cu_seqlens, rule) = (vars.map(Var::slot), cu_seqlens.clone(), *rule);
    let [q, k, v, a, b] = vars.map(|x| x.tensor.clone());
    Ok(tape.record_one(y, move |dy, gradients| {
        let gates = DeltaGates::Raw { a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
        let inputs = GatedDeltaInputs { q: &q, k: &k, v: &v, gates, cu_seqlens: &cu_seqlens, slots: None };
        let gradient = ops::gated_delta_rule_backward(&inputs, &before, &rule, dy)?;
        let GatesGradient::Raw(dgates) = gradient.dgates else { unreachable!("the gates were raw") };
        gradients.add_tensor(a_log_name.as_ref(), dgates.da_log)?;
        gradients.add_tensor(dt_bias_name.as_ref(), dgates.ddt_bias)?;
        let results = [gradient.dq, gradient.dk, gradient.dv, dgates.da, dgates.db];
        slots.into_iter().zip(results).try_for_each(|(slot, dx)| gradients.add(slot, dx))
    }))
}

/// The operands of [`additive_rule`]: as [`GatedDeltaInputs`] with [`DeltaGates::Steps`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(crate) struct StepRuleInputs<'a> {
    pub qkv: [&'a Var; 3],
    pub dt: &'a Var,
    pub a_log: &'a Named<Tensor>,
    pub dt_bias: &'a Named<Tensor>,
    pub limits: StepLimits,
    pub cu_seqlens: &'a Tensor,
    pub slots: Option<&'a Tensor>,
}

/// [`ops::gated_delta_rule()`] without its correction, which has no gradient: a tape refuses it.
pub(crate) fn additive_rule(
    inputs: &StepRuleInputs<'_>,
    state: &mut Tensor,
    rule: &GatedDeltaRule,
) -> Result<Var> {
    let StepRuleInputs { qkv, dt, a_log, dt_bias, limits, cu_seqlens, slots } = *inputs;
    if qkv.iter().chain([&dt]).any(|x| x.tape().is_some()) {
        let (op, operand) = ("gated_delta_rule", "rule");
        let (got, want) = (format!("{:?}", rule.rule), "gradients are those of Delta".into());
        return Err(KernelError::Value { op, operand, got, want });
    }
    let [q, k, v] = qkv.map(|x| &x.tensor);
    let (a_log, dt_bias) = (&a_log.value, &dt_bias.value);
    let gates = DeltaGates::Steps { dt: &dt.tensor, a_log, dt_bias, limits };
    Ok(ops::gated_delta_rule(&GatedDeltaInputs { q, k, v, gates, cu_seqlens, slots }, state, rule)?.into())
}

/// The operands of [`channel_rule`]: as [`GatedDeltaInputs`] with [`DeltaGates::Channels`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(crate) struct ChannelRuleInputs<'a> {
    pub qkv: [&'a Var; 3],
    pub a: &'a Var,
    pub b: &'a Var,
    pub a_log: &'a Named<Tensor>,
    pub dt_bias: &'a Named<Tensor>,
    pub decay: ChannelDecay,
    pub cu_seqlens: &'a Tensor,
    pub slots: Option<&'a Tensor>,
}

/// [`ops::gated_delta_rule()`] with a decay per channel, which has no gradient: a tape refuses it.
pub(crate) fn channel_rule(
    inputs: &ChannelRuleInputs<'_>,
    state: &mut Tensor,
    rule: &GatedDeltaRule,
) -> Result<Var> {
    let ChannelRuleInputs { qkv, a, b, a_log, dt_bias, decay, cu_seqlens, slots } = *inputs;
    if qkv.iter().chain([&a, &b]).any(|x| x.tape().is_some()) {
        let (op, operand) = ("gated_delta_rule", "log_decay");
        let (got, want) = ("per channel".into(), "gradients are those of a decay per head".into());
        return Err(KernelError::Value { op, operand, got, want });
    }
    let [q, k, v] = qkv.map(|x| &x.tensor);
    let (a_log, dt_bias) = (&a_log.value, &dt_bias.value);
    let gates = DeltaGates::Channels { a: &a.tensor, b: &b.tensor, a_log, dt_bias, decay };
    Ok(ops::gated_delta_rule(&GatedDeltaInputs { q, k, v, gates, cu_seqlens, slots }, state, rule)?.into())
}

/// [`ops::router_top_k()`]: the ids, and the weights. The choice of experts, and `bias`, are
/// constants.
pub(crate) fn router_top_k(
    logits: &Var,
    bias: Option<&Tensor>,
    shared: Option<&Var>,
    params: RouterParams,
) -> Result<(Tensor, Var)> {
    let (ids, weights) = ops::router_top_k(&logits.tensor, bias, shared.map(Var::tensor), params)?;
    let Some(tape) = logits.tape() else { return Ok((ids, weights.into())) };
    let (slot, shared_slot) = (logits.slot(), shared.and_then(Var::slot));
    let (logits, shared, kept) = (logits.tensor.clone(), shared.map(|x| x.tensor.clone()), ids.clone());
    let weights = tape.record_one(weights, move |dweights, gradients| {
        let ops::RouterTopKGradient { dlogits, dshared } =
            ops::router_top_k_backward(&logits, shared.as_ref(), params, &kept, dweights)?;
        dshared.map_or(Ok(()), |dshared| gradients.add(shared_slot, dshared))?;
        gradients.add(slot, dlogits)
    });
    Ok((ids, weights))
}

/// [`ops::combine_experts()`].
pub(crate) fn combine_experts(x: &Var, weights: &Var) -> Result<Var> {
    let y = ops::combine_experts(&x.tensor, &weights.tensor)?;
    let Some(tape) = x.tape().or(weights.tape()) else { return Ok(y.into()) };
    let (x, weights, slots) = (x.tensor.clone(), weights.tensor.clone(), [x.slot(), weights.slot()]);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::CombineExpertsGradient { dx, dweights } = ops::combine_experts_backward(&x, &weights, dy)?;
        gradients.add(slots[0], dx)?;
        gradients.add(slots[1], dweights)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit_formats::DType;
    use lowbit_kernels::Device;

    #[test]
    fn recorded_states_have_no_slots() {
        let device = Device::cpu(Some(1)).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
        let named = |shape: &[usize]| Named { name: "x".into(), value: zeros(shape) };
        let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &device).unwrap();
        let (cu_seqlens, slots) = (ids(&[0, 2]), ids(&[1]));
        let slots = Some(&slots);
        let tape = Tape::new(Default::default());
        let refused = |op: &str, result: Result<Var>| {
            let want = format!("{op}: slots is [1], but gradients take a state per sequence");
            assert_eq!(result.unwrap_err().to_string(), want);
        };

        let conv = |x: &Var| {
            let state = SlotState { state: &mut zeros(&[2, 3, 1]), slots };
            causal_conv1d(x, &named(&[3, 2]), state, &cu_seqlens, None)
        };
        assert!(conv(&zeros(&[2, 3]).into()).is_ok());
        refused("causal_conv1d", conv(&tape.leaf(zeros(&[2, 3]))));

        let rule = |k: &Var| {
            let (heads, gates) = (Var::from(zeros(&[2, 1, 2])), Var::from(zeros(&[2, 1])));
            let (a, b, a_log, dt_bias) = (&gates, &gates, &named(&[1]), &named(&[1]));
            let inputs = DeltaRuleInputs {
                qkv: [&heads, k, &heads],
                a,
                b,
                a_log,
                dt_bias,
                cu_seqlens: &cu_seqlens,
                slots,
            };
            gated_delta_rule(&inputs, &mut zeros(&[2, 1, 2, 2]), &GatedDeltaRule::new(2))
        };
        assert!(rule(&zeros(&[2, 1, 2]).into()).is_ok());
        refused("gated_delta_rule", rule(&tape.leaf(zeros(&[2, 1, 2]))));
    }
}
