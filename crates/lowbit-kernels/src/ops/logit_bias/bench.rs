use super::{LogitBias, logit_bias, reference};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Ten tokens of Qwen3.5's vocabulary.
fn cases() -> Vec<Case> {
    let (count, dtype) = (248_320, FloatType::F32);
    vec![Case {
        op: "logit_bias",
        shape: format!("V={count} n=10"),
        format: "-".into(),
        dtype,
        bytes: 2 * count * dtype.size(),
        flops: 10,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let logits = activations(&[count], dtype, 1, &device.host()?)?;
            let biases: Vec<(u32, f32)> = (0..10).map(|i| (i * 20_000, i as f32 - 5.0)).collect();
            let want = reference::sums(logits.cast(DType::F32)?.as_slice()?, &biases);
            let expected = Expected::all(&want, dtype, |i| gamma(1) * want[i].abs());
            let bias = LogitBias::new(&biases, count, device)?.expect("there are biases");
            let logits = logits.to_device(device)?;
            Ok(Prepared::warm(move || logit_bias(&logits, &bias), expected))
        }),
    }]
}
