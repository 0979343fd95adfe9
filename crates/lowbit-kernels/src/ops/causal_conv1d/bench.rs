use super::{Activation, causal_conv1d, reference};
use crate::bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run};
use crate::inputs::{activations, rounding};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));

/// q, k and v of Qwen3.5-9B's gated delta net.
const CHANNELS: usize = 8192;
const WIDTH: usize = 4;

fn cases() -> Vec<Case> {
    let sizes = [(1, FloatType::F32), (64, FloatType::F32), (512, FloatType::F32), (512, FloatType::BF16)];
    sizes.map(|(tokens, dtype)| case(tokens, dtype)).into()
}

fn gpu_cases() -> Vec<Case> {
    [1, 4096].map(|tokens| case(tokens, FloatType::BF16)).into()
}

fn case(tokens: usize, dtype: FloatType) -> Case {
    let cold = CHANNELS * (WIDTH + WIDTH - 1) * size_of::<f32>();
    Case {
        op: "causal_conv1d",
        shape: format!("T={tokens} C={CHANNELS} W={WIDTH}"),
        format: "-".into(),
        dtype,
        bytes: 2 * tokens * CHANNELS * dtype.size() + cold + CHANNELS * (WIDTH - 1) * size_of::<f32>(),
        flops: 2 * tokens * CHANNELS * WIDTH,
        arithmetic: Arithmetic::F32,
        cold_bytes: if tokens == 1 { cold } else { 0 },
        prepare: Box::new(move |device, copies| prepare(tokens, dtype, device, copies)),
    }
}

fn prepare(tokens: usize, dtype: FloatType, device: &Device, copies: usize) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let x = activations(&[tokens, CHANNELS], dtype, 1, &host)?;
    let weight = activations(&[CHANNELS, WIDTH], FloatType::F32, 2, &host)?;
    let state = activations(&[1, CHANNELS, WIDTH - 1], FloatType::F32, 3, &host)?;
    let cu_seqlens = Tensor::new(&[0, tokens as u32], &[2], device)?;
    let activation = Some(Activation::Silu);
    let wide = x.cast(lowbit_formats::DType::F32)?;
    let (values, sizes) = reference::causal_conv1d(
        wide.as_slice()?,
        weight.as_slice()?,
        None,
        state.as_slice()?,
        CHANNELS,
        activation,
    );
    let expect = |(index, (value, size)): (usize, (f64, f64))| {
        let bound = reference::bound(value, size, WIDTH, activation);
        Expected { index, value, bound: bound + rounding(dtype, value.abs() + bound) }
    };
    let expected = values.into_iter().zip(sizes).enumerate().map(expect).collect();
    let x = x.to_device(device)?;
    let run = |(mut weight, mut state): (Tensor, Tensor)| -> Result<Run, KernelError> {
        // Copies of its own.
        weight.as_mut_slice::<f32>()?;
        state.as_mut_slice::<f32>()?;
        let (weight, mut state) = (weight.to_device(device)?, state.to_device(device)?);
        let (x, cu_seqlens) = (x.clone(), cu_seqlens.clone());
        Ok(Box::new(move || causal_conv1d(&x, &weight, None, &mut state, &cu_seqlens, activation)))
    };
    let runs = (0..copies).map(|_| run((weight.clone(), state.clone()))).collect::<Result<_, _>>()?;
    Ok(Prepared { runs, expected })
}
