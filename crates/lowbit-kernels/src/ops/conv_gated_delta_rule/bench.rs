use super::{ConvGatedDeltaInputs, conv_gated_delta_rule, reference};
use crate::bench::{Case, Cases, Expected, Prepared, Run};
use crate::inputs::{activations, rounding};
use crate::ops::gated_delta_rule::CHUNK;
use crate::ops::{Activation, DeltaGates, GatedDeltaRule, L2Norm, L2NormConvention};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// Key and value heads of Qwen3.5-9B and 35B-A3B, their size, and their convolution's channels and width.
const KEY_HEADS: usize = 16;
const VALUE_HEADS: usize = 32;
const DIM: usize = 128;
const CHANNELS: usize = (2 * KEY_HEADS + VALUE_HEADS) * DIM;
const WIDTH: usize = 4;

fn cases() -> Vec<Case> {
    let mut cases = vec![case(1, FloatType::F32)];
    if cfg!(feature = "gpu") {
        cases.extend([1, 4].map(|sequences| case(sequences, FloatType::BF16)));
    }
    cases
}

/// A token for each of `sequences` sequences, which finds the states cold.
fn case(sequences: usize, dtype: FloatType) -> Case {
    let states = sequences * (VALUE_HEADS * DIM * DIM + CHANNELS * (WIDTH - 1)) * size_of::<f32>();
    let weight = CHANNELS * WIDTH * size_of::<f32>();
    Case {
        op: "conv_gated_delta_rule",
        shape: format!("S=T={sequences} Hk={KEY_HEADS} Hv={VALUE_HEADS} D={DIM} W={WIDTH}"),
        format: "-".into(),
        dtype,
        bytes: 2 * states + weight + sequences * (CHANNELS + VALUE_HEADS * DIM) * dtype.size(),
        flops: sequences * (7 * VALUE_HEADS * DIM * DIM + 2 * CHANNELS * WIDTH),
        cold_bytes: states + weight,
        prepare: Box::new(move |device, copies| prepare(sequences, dtype, device, copies)),
    }
}

fn prepare(
    sequences: usize,
    dtype: FloatType,
    device: &Device,
    copies: usize,
) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let qkv = activations(&[sequences, CHANNELS], dtype, 1, &host)?;
    let [a, b] = [2, 3].map(|seed| activations(&[sequences, VALUE_HEADS], dtype, seed, &host));
    let [a_log, dt_bias] = [4, 5].map(|seed| activations(&[VALUE_HEADS], FloatType::F32, seed, &host));
    let weight = activations(&[CHANNELS, WIDTH], FloatType::F32, 6, &host)?;
    let past = activations(&[sequences, CHANNELS, WIDTH - 1], FloatType::F32, 7, &host)?;
    let state = activations(&[sequences, VALUE_HEADS, DIM, DIM], FloatType::F32, 8, &host)?;
    let offsets: Vec<u32> = (0..=sequences as u32).collect();
    let cu_seqlens = Tensor::new(&offsets, &[sequences + 1], &host)?;
    let norm = L2Norm { eps: 1e-6, convention: L2NormConvention::Sum };
    let params = GatedDeltaRule { qk_norm: Some(norm), ..GatedDeltaRule::new(DIM) };
    let others = [qkv, a?, b?, a_log?, dt_bias?, cu_seqlens];

    let wanted = |head: usize, j: usize| head % 9 == 4 && j % 50 == 7;
    let inputs = inputs(&others, &weight);
    let chunk = (dtype, CHUNK);
    let (y, _) = reference::conv_gated_delta_rule(&inputs, [&past, &state], &params, chunk, wanted)?;
    let checked = (0..y.values.len()).filter(|at| wanted(at / DIM % VALUE_HEADS, at % DIM));
    let expected = checked
        .map(|index| {
            let (value, bound) = (y.values[index], y.bounds[index]);
            Expected { index, value, bound: bound + rounding(dtype, value.abs() + bound) }
        })
        .collect();
    let run = |mut copies: [Tensor; 3]| -> Result<Run, KernelError> {
        // Weights and states of its own.
        copies.iter_mut().try_for_each(|x| x.as_mut_slice::<f32>().map(drop))?;
        let [weight, past, state] = copies.map(|x| x.to_device(device));
        let (weight, mut past, mut state) = (weight?, past?, state?);
        let others = others.each_ref().map(|x| x.to_device(device));
        let others = others.into_iter().collect::<Result<Vec<_>, _>>()?;
        let others: [Tensor; 6] = others.try_into().expect("as many as before");
        Ok(Box::new(move || {
            conv_gated_delta_rule(&self::inputs(&others, &weight), [&mut past, &mut state], &params)
        }))
    };
    let copy = |_| run([&weight, &past, &state].map(Tensor::clone));
    Ok(Prepared { runs: (0..copies).map(copy).collect::<Result<_, _>>()?, expected })
}

/// A call's operands, from `qkv`, `a`, `b`, `a_log`, `dt_bias` and `cu_seqlens`.
fn inputs<'a>(
    [qkv, a, b, a_log, dt_bias, cu_seqlens]: &'a [Tensor; 6],
    weight: &'a Tensor,
) -> ConvGatedDeltaInputs<'a> {
    let gates = DeltaGates::Raw { a, b, a_log, dt_bias };
    ConvGatedDeltaInputs { qkv, weight, activation: Some(Activation::Silu), gates, cu_seqlens }
}
