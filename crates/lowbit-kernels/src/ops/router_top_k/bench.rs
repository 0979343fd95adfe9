use super::{RouterParams, reference, router_top_k};
use crate::bench::{Arithmetic, Case, Cases, Expected, Prepared};
use crate::inputs::activations;
use crate::{Device, KernelError};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// Experts and top k of Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B.
const ROUTERS: [(usize, usize); 2] = [(256, 8), (512, 10)];

fn cases() -> Vec<Case> {
    ROUTERS.iter().flat_map(|&(experts, top_k)| [1, 512].map(|tokens| case(tokens, experts, top_k))).collect()
}

fn case(tokens: usize, experts: usize, top_k: usize) -> Case {
    Case {
        op: "router_top_k",
        shape: format!("T={tokens} E={experts} k={top_k}"),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: tokens * (experts + 2 * top_k) * size_of::<f32>(),
        flops: tokens * experts,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| prepare(tokens, experts, top_k, device)),
    }
}

fn prepare(tokens: usize, experts: usize, top_k: usize, device: &Device) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let logits = activations(&[tokens, experts], FloatType::F32, 1, &host)?;
    let params = RouterParams::softmax(top_k, true);
    let rows = logits.as_slice::<f32>()?.chunks_exact(experts);
    let choices = rows.flat_map(|row| reference::router_top_k(row, &[], params)).enumerate();
    let expected = choices.map(|(index, c)| Expected { index, value: c.weight, bound: c.bound }).collect();
    let logits = logits.to_device(device)?;
    Ok(Prepared { runs: vec![Box::new(move || Ok(router_top_k(&logits, None, None, params)?.1))], expected })
}
