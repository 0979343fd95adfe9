use super::argmax;
use crate::{
    Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Greedy sampling from Qwen3.5's vocabulary.
fn cases() -> Vec<Case> {
    let (count, dtype) = (248_320, FloatType::F32);
    vec![Case {
        op: "argmax",
        shape: format!("V={count}"),
        format: "-".into(),
        dtype,
        bytes: count * dtype.size(),
        flops: count,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let x = activations(&[count], dtype, 1, device)?;
            let xs = x.cast(DType::F32)?;
            let greatest = xs.as_slice::<f32>()?.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let value = greatest.map_or(f64::NAN, |(i, _)| i as f64);
            let run = move || {
                let ids = argmax(&x)?;
                Tensor::new(&[ids.as_slice::<u32>()?[0] as f32], &[1], ids.device())
            };
            Ok(Prepared::warm(run, vec![Expected { index: 0, value, bound: 0.0 }]))
        }),
    }]
}
