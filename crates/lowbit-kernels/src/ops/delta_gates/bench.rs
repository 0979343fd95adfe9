use super::{delta_gates, reference};
use crate::bench::{Arithmetic, Case, Cases, Expected, Prepared};
use crate::inputs::activations;
use crate::{Device, KernelError};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// Value heads of Qwen3.5-9B's gated delta net.
const HEADS: usize = 32;

fn cases() -> Vec<Case> {
    [1, 512].map(case).into()
}

fn case(tokens: usize) -> Case {
    Case {
        op: "delta_gates",
        shape: format!("T={tokens} Hv={HEADS}"),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: 4 * tokens * HEADS * size_of::<f32>() + 2 * HEADS * size_of::<f32>(),
        flops: 8 * tokens * HEADS,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| prepare(tokens, device)),
    }
}

fn prepare(tokens: usize, device: &Device) -> Result<Prepared, KernelError> {
    let host = device.host()?;
    let (a, b) = (
        activations(&[tokens, HEADS], FloatType::F32, 1, &host)?,
        activations(&[tokens, HEADS], FloatType::F32, 2, &host)?,
    );
    let (a_log, dt_bias) =
        (activations(&[HEADS], FloatType::F32, 3, &host)?, activations(&[HEADS], FloatType::F32, 4, &host)?);
    let [as_, bs, a_logs, biases] = [&a, &b, &a_log, &dt_bias].map(|x| x.as_slice::<f32>());
    let (as_, bs, a_logs, biases) = (as_?, bs?, a_logs?, biases?);
    let expect = |index: usize| {
        let head = index % HEADS;
        let [(value, bound), _] = reference::delta_gates(as_[index], bs[index], a_logs[head], biases[head]);
        Expected { index, value, bound }
    };
    let expected = (0..tokens * HEADS).map(expect).collect();
    let [a, b, a_log, dt_bias] = [&a, &b, &a_log, &dt_bias].map(|x| x.to_device(device));
    let (a, b, a_log, dt_bias) = (a?, b?, a_log?, dt_bias?);
    let run = Box::new(move || Ok(delta_gates(&a, &b, &a_log, &dt_bias)?.0));
    Ok(Prepared { runs: vec![run], expected })
}
