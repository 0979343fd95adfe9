use super::reference::{self, Bounded};
use super::rounded::{self, Rounding};
use super::{DeltaGates, Dims, Form, GatedDeltaInputs, GatedDeltaRule, Rule};
use super::{cpu, cpu::CHUNK, gated_delta_rule};
use crate::bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run, ScalingCases};
use crate::inputs::rounding;
use crate::random::Random;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));
inventory::submit!(ScalingCases(scaling_cases));

/// Key and value heads of Qwen3.5-9B and 35B-A3B, and their size.
const QWEN: Dims = Dims { key_heads: 16, key_dim: 128, value_heads: 32, value_dim: 128 };
/// Those of Granite 4 H Tiny's Mamba-2, which has no correction.
const GRANITE: Dims = Dims { key_heads: 1, key_dim: 128, value_heads: 48, value_dim: 64 };

/// Those of Kimi-Linear 48B-A3B, whose channels each have their own decay.
const KIMI: Dims = Dims { key_heads: 32, key_dim: 128, value_heads: 32, value_dim: 128 };

/// The sizes and the choices of a case.
#[derive(Clone, Copy)]
struct Shape {
    sequences: usize,
    /// Tokens of a sequence.
    length: usize,
    dtype: FloatType,
    form: Form,
    rule: Rule,
    /// True if each channel of the keys has its own decay.
    channels: bool,
    /// True if the states are rows of a pool.
    pooled: bool,
}

impl Shape {
    fn new(sequences: usize, length: usize, dtype: FloatType) -> Self {
        Self { sequences, length, dtype, form: Form::Auto, rule: Rule::Delta, channels: false, pooled: false }
    }

    /// The same of Mamba-2.
    fn additive(self) -> Self {
        Self { rule: Rule::Additive, ..self }
    }

    /// The same with a decay per channel.
    fn with_channels(self) -> Self {
        Self { channels: true, ..self }
    }

    fn dims(self) -> Dims {
        match self.rule {
            Rule::Delta if self.channels => KIMI,
            Rule::Delta => QWEN,
            Rule::Additive => GRANITE,
        }
    }

    fn params(self) -> GatedDeltaRule {
        let params = match self.rule {
            Rule::Delta => GatedDeltaRule::new(QWEN.key_dim),
            Rule::Additive => GatedDeltaRule::additive(),
        };
        GatedDeltaRule { form: self.form, ..params }
    }
}

fn cases() -> Vec<Case> {
    let shape = |sequences, length| Shape::new(sequences, length, FloatType::F32);
    let auto = [(1, 1), (8, 1), (1, 8), (1, 64), (1, 512), (1, 2048)].map(|(s, t)| shape(s, t));
    let forms = [Form::Recurrent, Form::Chunked].map(|form| Shape { form, ..shape(1, 8) });
    let other = [Shape::new(1, 512, FloatType::BF16), Shape { form: Form::Recurrent, ..shape(1, 512) }];
    let mamba = [(1, 1), (1, 512)].map(|(s, t)| shape(s, t).additive());
    let recurrent = |shape| Shape { form: Form::Recurrent, ..shape };
    let kimi = [shape(1, 1), shape(1, 8), recurrent(shape(1, 8)), shape(1, 512), recurrent(shape(1, 512))];
    let kimi = kimi.map(Shape::with_channels);
    auto.into_iter().chain(forms).chain(other).chain(mamba).chain(kimi).map(case).collect()
}

fn gpu_cases() -> Vec<Case> {
    let shape = |(sequences, length)| Shape::new(sequences, length, FloatType::BF16);
    let sizes = [(1, 1), (64, 1), (1, 2048), (1, 8192), (1, 32768)].map(shape);
    let steps = [1, 4, 16, 64, 256].map(|sequences| Shape { pooled: true, ..shape((sequences, 1)) });
    let mamba = [(1, 1), (1, 8192)].map(shape);
    let pooled = Shape { pooled: true, ..shape((64, 1)) };
    let mamba = mamba.into_iter().chain([pooled]).map(Shape::additive);
    let kimi = [(1, 1), (64, 1), (1, 2048)].map(|sizes| shape(sizes).with_channels());
    sizes.into_iter().chain(steps).chain(mamba).chain(kimi).map(case).collect()
}

/// Longer and longer texts.
fn scaling_cases() -> Vec<Case> {
    (0..=12).map(|power| case(Shape::new(1, 1 << power, FloatType::F32))).collect()
}

/// Decoding finds the states cold.
fn case(shape: Shape) -> Case {
    let Shape { sequences, length, dtype, form, pooled, rule, channels } = shape;
    let Dims { key_heads, key_dim, value_heads, value_dim } = shape.dims();
    let tokens = sequences * length;
    let state = sequences * value_heads * key_dim * value_dim;
    let activations = tokens * 2 * (key_heads * key_dim + value_heads * value_dim) * dtype.size();
    let dim = if key_dim == value_dim { format!("{key_dim}") } else { format!("{key_dim}x{value_dim}") };
    let chosen = if form == Form::Auto { String::new() } else { format!(" {form:?}").to_lowercase() };
    let place = if pooled { " pool" } else { "" };
    let kind = if channels { " channels" } else { "" };
    let decays = tokens * value_heads * if channels { key_dim } else { 1 };
    Case {
        op: "gated_delta_rule",
        shape: format!(
            "S={sequences} T={length} Hk={key_heads} Hv={value_heads} D={dim}{chosen}{kind}{place}"
        ),
        format: "-".into(),
        dtype,
        bytes: 2 * state * size_of::<f32>()
            + activations
            + (decays + tokens * value_heads) * size_of::<f32>(),
        // Decay, two reads (one without a correction) and an update of the state.
        flops: if rule == Rule::Delta { 7 } else { 5 } * tokens * value_heads * key_dim * value_dim,
        arithmetic: Arithmetic::F32,
        cold_bytes: if length <= 8 { state * size_of::<f32>() } else { 0 },
        prepare: Box::new(move |device, copies| prepare(shape, device, copies)),
    }
}

fn prepare(shape: Shape, device: &Device, copies: usize) -> Result<Prepared, KernelError> {
    let Shape { sequences, length, dtype, pooled, channels, .. } = shape;
    let (dims, params) = (shape.dims(), shape.params());
    let Dims { key_heads, key_dim, value_heads, value_dim } = dims;
    let host = device.host()?;
    let tokens = sequences * length;
    let mut random = Random::new(1);
    let mut normal = |shape: &[usize], scale: f32| {
        Tensor::new(&random.normal(shape.iter().product(), scale), shape, &host)?.cast(dtype.dtype())
    };
    // Keys of about unit length, so that states stay as small as they are in models.
    let unit = (key_dim as f32).sqrt().recip();
    let keys = [tokens, key_heads, key_dim];
    let (q, k) = (normal(&keys, unit)?, normal(&keys, unit)?);
    let v = normal(&[tokens, value_heads, value_dim], 1.0)?;
    let mut gate = |shape: &[usize], least: f32, most: f32| {
        let uniform = |_| least + (most - least) * (random.uniform() + 1.0) / 2.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(uniform).collect();
        Tensor::new(&values, shape, &host)
    };
    let heads = [tokens, value_heads, key_dim];
    let log_decay = gate(if channels { &heads } else { &heads[..2] }, -0.2, 0.0)?;
    let beta = gate(&heads[..2], 0.0, 1.0)?;
    let offsets: Vec<u32> = (0..=sequences).map(|s| (s * length) as u32).collect();
    let cu_seqlens = Tensor::new(&offsets, &[sequences + 1], &host)?;
    // The pool has a row for each sequence, in their order: the reference knows no slots.
    let slots: Vec<u32> = (0..sequences as u32).collect();
    let slots = pooled.then(|| Tensor::new(&slots, &[sequences], device)).transpose()?;
    let shape = [sequences, value_heads, key_dim, value_dim];
    let state = Tensor::new(&random.normal(shape.iter().product(), 0.1), &shape, &host)?;

    let gates = DeltaGates::Computed { log_decay: &log_decay, beta: &beta };
    let inputs = GatedDeltaInputs { q: &q, k: &k, v: &v, gates, cu_seqlens: &cu_seqlens, slots: None };
    let wanted = |head: usize, j: usize| head % 9 == 4 && j % 50 == 7;
    let y = expected(device, &inputs, &state, &params, wanted)?;
    let checked = (0..y.values.len()).filter(|at| wanted(at / value_dim % value_heads, at % value_dim));
    let expected = checked
        .map(|index| {
            let (value, bound) = (y.values[index], y.bounds[index]);
            Expected { index, value, bound: bound + rounding(dtype, value.abs() + bound) }
        })
        .collect();
    let on = |x: &Tensor| x.to_device(device);
    let (q, k, v, log_decay, beta) = (on(&q)?, on(&k)?, on(&v)?, on(&log_decay)?, on(&beta)?);
    let cu_seqlens = on(&cu_seqlens)?;
    let run = |mut state: Tensor| -> Result<Run, KernelError> {
        // A state of its own.
        state.as_mut_slice::<f32>()?;
        let (mut state, slots) = (state.to_device(device)?, slots.clone());
        let [q, k, v, log_decay, beta, cu_seqlens] =
            [&q, &k, &v, &log_decay, &beta, &cu_seqlens].map(Tensor::clone);
        Ok(Box::new(move || {
            let gates = DeltaGates::Computed { log_decay: &log_decay, beta: &beta };
            let inputs = GatedDeltaInputs {
                q: &q,
                k: &k,
                v: &v,
                gates,
                cu_seqlens: &cu_seqlens,
                slots: slots.as_ref(),
            };
            gated_delta_rule(&inputs, &mut state, &params)
        }))
    };
    Ok(Prepared { runs: (0..copies).map(|_| run(state.clone())).collect::<Result<_, _>>()?, expected })
}

/// `y` of the reference, with the bounds of the way that `device` computes it.
fn expected(
    device: &Device,
    inputs: &GatedDeltaInputs,
    state: &Tensor,
    params: &GatedDeltaRule,
    wanted: impl Fn(usize, usize) -> bool,
) -> Result<Bounded, KernelError> {
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = device {
        let dims = super::check(inputs, state, params)?;
        if let Some(tokens) = super::gpu::chunk_tokens(gpu, inputs, dims, params)? {
            let rounding = (Rounding::of(super::CHECK.float("q", inputs.q)?), tokens);
            return Ok(rounded::gated_delta_rule(inputs, state, params, rounding, wanted)?.0);
        }
    }
    if let Device::Cpu(cpu) = device
        && !inputs.gates.per_channel()
        && cpu::rounds(cpu, params, inputs.q.dim(0) / state.dim(0))
    {
        let rounding = (Rounding::on_cpu(), CHUNK);
        return Ok(rounded::gated_delta_rule(inputs, state, params, rounding, wanted)?.0);
    }
    Ok(reference::gated_delta_rule(inputs, state, params, CHUNK, wanted)?.0)
}
