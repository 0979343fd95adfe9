use super::{LogitMask, logit_mask, reference};
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Half of Qwen3.5's vocabulary.
fn cases() -> Vec<Case> {
    let (count, dtype) = (248_320, FloatType::F32);
    vec![Case {
        op: "logit_mask",
        shape: format!("V={count}"),
        format: "-".into(),
        dtype,
        bytes: 2 * count * dtype.size() + count / 8,
        flops: count,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let logits = activations(&[count], dtype, 1, &device.host()?)?;
            let bits = vec![0xaaaa_aaaa; count.div_ceil(32)];
            let want = reference::masked(logits.cast(DType::F32)?.as_slice()?, &bits);
            let mut expected = Expected::all(&want, dtype, |_| 0.0);
            // No difference of infinities is within a bound.
            expected.retain(|expected| expected.value.is_finite());
            let mut mask = LogitMask::new(count, device)?;
            mask.set(&bits)?;
            let logits = logits.to_device(device)?;
            Ok(Prepared::warm(move || logit_mask(&logits, &mask), expected))
        }),
    }]
}
