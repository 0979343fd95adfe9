//! Benchmark cases of `qdq`, with the sizes of real models.

use super::{qdq_backward_biases, qdq_backward_scales, qdq_forward, qdq_init, reference};
use crate::bench::{Arithmetic, Case, Cases, Expected, Prepared};
use crate::random::Random;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// A projection of Qwen3.5-9B, at 4 bits in groups of 64.
const ROWS: usize = 4096;
const K: usize = 4096;
const GROUP: usize = 64;
const LEVELS: usize = 16;

type Prepare = fn(&Device) -> Result<Prepared, KernelError>;

fn cases() -> Vec<Case> {
    let groups = ROWS * K / GROUP;
    // Weights and gradients are f32, codes are bytes.
    let all: [(&'static str, usize, Prepare); 4] = [
        ("qdq_init", ROWS * K * 5 + groups * 8, init),
        ("qdq_forward", ROWS * K * 5 + groups * 8, forward),
        ("qdq_backward_scales", ROWS * K * 5 + groups * 4, scales),
        ("qdq_backward_biases", ROWS * K * 4 + groups * 4, biases),
    ];
    let case = |(op, bytes, prepare): (&'static str, usize, Prepare)| Case {
        op,
        shape: format!("N={ROWS} K={K} G={GROUP}"),
        format: format!("{LEVELS} levels"),
        dtype: FloatType::F32,
        bytes,
        flops: 4 * ROWS * K,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| prepare(device)),
    };
    all.map(case).into()
}

fn values(seed: u64, device: &Device) -> Result<(Vec<f32>, Tensor), KernelError> {
    let values = Random::new(seed).normal(ROWS * K, 0.02);
    let tensor = Tensor::new(&values, &[ROWS, K], device)?;
    Ok((values, tensor))
}

/// Groups whose results are checked.
const CHECKED: usize = 64;

fn expected(values: impl Iterator<Item = (f64, f64)>) -> Vec<Expected> {
    values.enumerate().map(|(index, (value, bound))| Expected { index, value, bound }).collect()
}

fn init(device: &Device) -> Result<Prepared, KernelError> {
    let (values, w) = values(1, device)?;
    let grid = |w: &[f32]| {
        let (scale, _, bound) = reference::grid(w, LEVELS);
        (scale, bound)
    };
    let expected = expected(values.chunks_exact(GROUP).take(CHECKED).map(grid));
    Ok(Prepared::warm(move || Ok(qdq_init(&w, GROUP, LEVELS)?.scales), expected))
}

fn forward(device: &Device) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let qdq = qdq_init(&values(1, device)?.1, GROUP, LEVELS)?;
    let [codes, scales, biases] = [&qdq.codes, &qdq.scales, &qdq.biases].map(|part| part.to_device(&host));
    let (codes, scales, biases) = (codes?, scales?, biases?);
    let (codes, scales, biases) =
        (codes.as_slice::<u8>()?, scales.as_slice::<f32>()?, biases.as_slice::<f32>()?);
    let value = |i: usize| reference::forward(codes[i], scales[i / GROUP], biases[i / GROUP]);
    let expected = expected((0..CHECKED * GROUP).map(value));
    Ok(Prepared::warm(move || qdq_forward(&qdq, GROUP), expected))
}

fn scales(device: &Device) -> Result<Prepared, KernelError> {
    let (dy, dy_tensor) = values(2, device)?;
    let codes = qdq_init(&values(1, device)?.1, GROUP, LEVELS)?.codes;
    let on_host = codes.to_device(&device.host()?)?;
    let factors = on_host.as_slice::<u8>()?;
    let sum = |group: usize| {
        let at = group * GROUP..(group + 1) * GROUP;
        reference::sum(factors[at.clone()].iter().map(|&code| f64::from(code)).zip(dy[at].iter().copied()))
    };
    let expected = expected((0..CHECKED).map(sum));
    Ok(Prepared::warm(move || qdq_backward_scales(&codes, &dy_tensor, GROUP), expected))
}

fn biases(device: &Device) -> Result<Prepared, KernelError> {
    let (dy, dy_tensor) = values(2, device)?;
    let sum = |dy: &[f32]| reference::sum(dy.iter().map(|&dy| (1.0, dy)));
    let expected = expected(dy.chunks_exact(GROUP).take(CHECKED).map(sum));
    Ok(Prepared::warm(move || qdq_backward_biases(&dy_tensor, GROUP), expected))
}
