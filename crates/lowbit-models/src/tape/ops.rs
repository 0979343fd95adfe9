//! The ops of [`lowbit_kernels::ops`] on [`Var`]s, each with the rule that a tape records. Operands and errors are the op's.

use super::shapes::{each, or_zeros, reshape};
use super::{Named, Tape, Var};
use crate::layers::RmsNorm;
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{
    self, Activation, CausalConv1dInputs, DeltaGates, GatedDeltaInputs, GatedDeltaRule, GatesGradient,
    RouterParams, WeightGradient, WeightPart,
};
use lowbit_kernels::{KernelError, QuantizedTensor, Tensor};

type Result<T> = std::result::Result<T, KernelError>;

/// A product's x: as [`ops::Input`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Input<'a> {
    Var(&'a Var),
    SiluMul { gate: &'a Var, up: &'a Var },
    GatedRmsNorm { x: &'a Var, gate: &'a Var, norm: &'a RmsNorm },
    SigmoidMul { x: &'a Var, gate: &'a Var },
    AddRmsNorm(AddRmsNorm<'a>),
}

/// The norm of a sum: as [`ops::AddRmsNorm`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct AddRmsNorm<'a> {
    pub h: &'a Var,
    pub x: &'a Var,
    pub norm: &'a RmsNorm,
}

impl<'a> From<&'a Var> for Input<'a> {
    fn from(x: &'a Var) -> Self {
        Self::Var(x)
    }
}

impl<'a> From<AddRmsNorm<'a>> for Input<'a> {
    fn from(x: AddRmsNorm<'a>) -> Self {
        Self::AddRmsNorm(x)
    }
}

impl<'a> Input<'a> {
    fn tape(&self) -> Option<&'a Tape> {
        match *self {
            Self::Var(x) => x.tape(),
            Self::SiluMul { gate, up } => gate.tape().or(up.tape()),
            Self::GatedRmsNorm { x, gate, .. } | Self::SigmoidMul { x, gate } => x.tape().or(gate.tape()),
            Self::AddRmsNorm(AddRmsNorm { h, x, .. }) => h.tape().or(x.tape()),
        }
    }

    /// What a product of the op reads, for an input that nothing records.
    fn unrecorded(&self) -> ops::Input<'a> {
        match *self {
            Self::Var(x) => ops::Input::Tensor(&x.tensor),
            Self::SiluMul { gate, up } => ops::Input::SiluMul { gate: &gate.tensor, up: &up.tensor },
            Self::GatedRmsNorm { x, gate, norm } => {
                let (weight, eps) = norm.parts();
                ops::Input::GatedRmsNorm { x: &x.tensor, gate: &gate.tensor, weight, eps }
            }
            Self::SigmoidMul { x, gate } => ops::Input::SigmoidMul { x: &x.tensor, gate: &gate.tensor },
            Self::AddRmsNorm(x) => ops::Input::AddRmsNorm(x.unrecorded()),
        }
    }

    /// x itself, recorded.
    fn var(&self) -> Result<Var> {
        match *self {
            Self::Var(x) => Ok(x.clone()),
            Self::SiluMul { gate, up } => silu_mul(gate, up),
            Self::GatedRmsNorm { x, gate, norm } => join_heads(&gated_rms_norm(x, gate, norm)?),
            Self::SigmoidMul { x, gate } => join_heads(&sigmoid_mul(x, gate)?),
            Self::AddRmsNorm(x) => Ok(x.vars()?.1),
        }
    }
}

impl<'a> AddRmsNorm<'a> {
    fn unrecorded(&self) -> ops::AddRmsNorm<'a> {
        let (weight, eps) = self.norm.parts();
        ops::AddRmsNorm { h: &self.h.tensor, x: &self.x.tensor, weight, eps }
    }

    /// Whether a tape records the sum.
    pub(crate) fn is_recorded(&self) -> bool {
        self.h.tape().or(self.x.tape()).is_some()
    }

    /// The sum and its norm, for several readers.
    ///
    /// # Errors
    /// As [`ops::add_rms_norm()`].
    pub fn vars(&self) -> Result<(Var, Var)> {
        let Some(tape) = self.h.tape().or(self.x.tape()) else {
            let (sum, y) = self.unrecorded().tensors()?;
            return Ok((sum.into(), y.into()));
        };
        let (_, eps) = self.norm.parts();
        let (weight, name) = tape.tensor(self.norm.weight());
        let (sum, y) = ops::add_rms_norm(&self.h.tensor, &self.x.tensor, &weight, eps)?;
        let (h, x, kept) = (self.h.slot(), self.x.slot(), sum.clone());
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
}

/// `[.., H, D]` as `[.., H * D]`.
fn join_heads(x: &Var) -> Result<Var> {
    let (rows, heads) = x.tensor.shape().split_at(x.tensor.shape().len() - 2);
    reshape(x, &[rows, &[heads.iter().product()]].concat())
}

/// [`ops::quantized_matmul_to()`]; in x's type without `to`.
pub(crate) fn quantized_matmul(
    x: Input<'_>,
    weight: &Named<QuantizedTensor>,
    to: Option<FloatType>,
) -> Result<Var> {
    let product = |x: ops::Input<'_>, weight: &QuantizedTensor| match to {
        None => ops::quantized_matmul(x, weight),
        Some(dtype) => ops::quantized_matmul_to(x, weight, dtype),
    };
    let Some(tape) = x.tape() else { return Ok(product(x.unrecorded(), &weight.value)?.into()) };
    let (x, weight) = (x.var()?, tape.weight(weight));
    let y = product((&x.tensor).into(), &weight.value)?;
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
    let (sum, y) = ops::quantized_matmul_and_sum(x.unrecorded(), &weight.value)?;
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

/// [`ops::swiglu()`]; nothing records it.
pub(crate) fn swiglu(x: &Var, weights: [&Named<QuantizedTensor>; 3]) -> Result<Var> {
    Ok(ops::swiglu(&x.tensor, weights.map(|weight| &weight.value))?.into())
}

/// [`ops::gather_qmm()`]; ids are constants.
pub(crate) fn gather_qmm(x: Input<'_>, weight: &Named<QuantizedTensor>, ids: &Tensor) -> Result<Var> {
    let Some(tape) = x.tape() else {
        return Ok(ops::gather_qmm(x.unrecorded(), &weight.value, ids)?.into());
    };
    let (x, weight, ids) = (x.var()?, tape.weight(weight), ids.clone());
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

/// [`ops::silu_mul()`].
pub(crate) fn silu_mul(gate: &Var, up: &Var) -> Result<Var> {
    let y = ops::silu_mul(&gate.tensor, &up.tensor)?;
    let Some(tape) = gate.tape().or(up.tape()) else { return Ok(y.into()) };
    let (gate, up, slots) = (gate.tensor.clone(), up.tensor.clone(), [gate.slot(), up.slot()]);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::SiluMulGradient { dgate, dup } = ops::silu_mul_backward(&gate, &up, dy)?;
        gradients.add(slots[0], dgate)?;
        gradients.add(slots[1], dup)
    }))
}

/// [`ops::sigmoid_mul()`].
pub(crate) fn sigmoid_mul(x: &Var, gate: &Var) -> Result<Var> {
    let y = ops::sigmoid_mul(&x.tensor, &gate.tensor)?;
    let Some(tape) = x.tape().or(gate.tape()) else { return Ok(y.into()) };
    let (x, gate, slots) = (x.tensor.clone(), gate.tensor.clone(), [x.slot(), gate.slot()]);
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::SigmoidMulGradient { dx, dgate } = ops::sigmoid_mul_backward(&x, &gate, dy)?;
        gradients.add(slots[0], dx)?;
        gradients.add(slots[1], dgate)
    }))
}

/// [`ops::rms_norm()`].
pub(crate) fn rms_norm(x: &Var, norm: &RmsNorm) -> Result<Var> {
    let (weight, eps) = norm.parts();
    let Some(tape) = x.tape() else { return Ok(ops::rms_norm(&x.tensor, weight, eps)?.into()) };
    let (weight, name) = tape.tensor(norm.weight());
    let y = ops::rms_norm(&x.tensor, &weight, eps)?;
    let (x, slot) = (x.tensor.clone(), x.slot());
    Ok(tape.record_one(y, move |dy, gradients| {
        let ops::RmsNormGradient { dx, dweight } = ops::rms_norm_backward(&x, &weight, eps, dy)?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(slot, dx)
    }))
}

/// [`ops::gated_rms_norm()`].
fn gated_rms_norm(x: &Var, gate: &Var, norm: &RmsNorm) -> Result<Var> {
    let (weight, eps) = norm.parts();
    let Some(tape) = x.tape().or(gate.tape()) else {
        return Ok(ops::gated_rms_norm(&x.tensor, &gate.tensor, weight, eps)?.into());
    };
    let (weight, name) = tape.tensor(norm.weight());
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

/// [`ops::causal_conv1d()`] without a bias. A state that is read is a constant.
pub(crate) fn causal_conv1d(
    x: &Var,
    weight: &Named<Tensor>,
    state: &mut Tensor,
    cu_seqlens: &Tensor,
    activation: Option<Activation>,
) -> Result<Var> {
    let Some(tape) = x.tape() else {
        let y = ops::causal_conv1d(&x.tensor, &weight.value, None, state, cu_seqlens, activation)?;
        return Ok(y.into());
    };
    let ((weight, name), before) = (tape.tensor(weight), state.clone());
    let y = ops::causal_conv1d(&x.tensor, &weight, None, state, cu_seqlens, activation)?;
    let (x, slot, cu_seqlens) = (x.tensor.clone(), x.slot(), cu_seqlens.clone());
    Ok(tape.record_one(y, move |dy, gradients| {
        let inputs = CausalConv1dInputs {
            x: &x,
            weight: &weight,
            bias: None,
            state: &before,
            cu_seqlens: &cu_seqlens,
            activation,
        };
        let ops::CausalConv1dGradient { dx, dweight, .. } = ops::causal_conv1d_backward(&inputs, dy)?;
        gradients.add_tensor(name.as_ref(), dweight)?;
        gradients.add(slot, dx)
    }))
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
}

/// [`ops::gated_delta_rule()`]. A state that is read is a constant.
pub(crate) fn gated_delta_rule(
    inputs: &DeltaRuleInputs<'_>,
    state: &mut Tensor,
    rule: &GatedDeltaRule,
) -> Result<Var> {
    let DeltaRuleInputs { qkv, a, b, a_log, dt_bias, cu_seqlens } = *inputs;
    let vars = [qkv[0], qkv[1], qkv[2], a, b];
    let run = |state: &mut Tensor, a_log: &Tensor, dt_bias: &Tensor| {
        let gates = DeltaGates::Raw { a: &a.tensor, b: &b.tensor, a_log, dt_bias };
        let [q, k, v] = qkv.map(|x| &x.tensor);
        ops::gated_delta_rule(&GatedDeltaInputs { q, k, v, gates, cu_seqlens }, state, rule)
    };
    let Some(tape) = vars.iter().find_map(|x| x.tape()) else {
        return Ok(run(state, &a_log.value, &dt_bias.value)?.into());
    };
    let ((a_log, a_log_name), (dt_bias, dt_bias_name)) = (tape.tensor(a_log), tape.tensor(dt_bias));
    let before = state.clone();
    let y = run(state, &a_log, &dt_bias)?;
    let (slots, cu_seqlens, rule) = (vars.map(Var::slot), cu_seqlens.clone(), *rule);
    let [q, k, v, a, b] = vars.map(|x| x.tensor.clone());
    Ok(tape.record_one(y, move |dy, gradients| {
        let gates = DeltaGates::Raw { a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
        let inputs = GatedDeltaInputs { q: &q, k: &k, v: &v, gates, cu_seqlens: &cu_seqlens };
        let gradient = ops::gated_delta_rule_backward(&inputs, &before, &rule, dy)?;
        let GatesGradient::Raw(dgates) = gradient.dgates else { unreachable!("the gates were raw") };
        gradients.add_tensor(a_log_name.as_ref(), dgates.da_log)?;
        gradients.add_tensor(dt_bias_name.as_ref(), dgates.ddt_bias)?;
        let results = [gradient.dq, gradient.dk, gradient.dv, dgates.da, dgates.db];
        slots.into_iter().zip(results).try_for_each(|(slot, dx)| gradients.add(slot, dx))
    }))
}

/// [`ops::router_top_k()`]: the ids, and the weights. Which experts are chosen is a constant.
pub(crate) fn router_top_k(
    logits: &Var,
    shared: Option<&Var>,
    params: RouterParams,
) -> Result<(Tensor, Var)> {
    let (ids, weights) = ops::router_top_k(&logits.tensor, shared.map(Var::tensor), params)?;
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
