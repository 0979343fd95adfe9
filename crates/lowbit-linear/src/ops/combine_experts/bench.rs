use super::{combine_experts, reference};
use crate::bench::{Arithmetic, Case, Cases, Expected, Prepared};
use crate::inputs::activations;
use crate::{Device, KernelError};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// Hidden size and top k of Qwen3.5-35B-A3B.
const HIDDEN: usize = 2048;
const TOP_K: usize = 8;

fn cases() -> Vec<Case> {
    [1, 512].map(case).into()
}

fn case(tokens: usize) -> Case {
    Case {
        op: "combine_experts",
        shape: format!("T={tokens} k={TOP_K} N={HIDDEN}"),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: tokens * (TOP_K * HIDDEN + TOP_K + HIDDEN) * size_of::<f32>(),
        flops: 2 * tokens * TOP_K * HIDDEN,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| prepare(tokens, device)),
    }
}

fn prepare(tokens: usize, device: &Device) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let x = activations(&[tokens, TOP_K, HIDDEN], FloatType::F32, 1, &host)?;
    let weights = activations(&[tokens, TOP_K], FloatType::F32, 2, &host)?;
    let (xs, ws) = (x.as_slice::<f32>()?, weights.as_slice::<f32>()?);
    let expect = |index: usize| {
        let slots = index / HIDDEN * TOP_K..(index / HIDDEN + 1) * TOP_K;
        let (value, bound) =
            reference::combine_experts(slots.map(|s| (ws[s], xs[s * HIDDEN + index % HIDDEN])));
        Expected { index, value, bound }
    };
    let expected = (0..tokens * HIDDEN).map(expect).collect();
    Ok(Prepared {
        runs: vec![Box::new({
            let (x, weights) = (x.to_device(device)?, weights.to_device(device)?);
            move || combine_experts(&x, &weights)
        })],
        expected,
    })
}
