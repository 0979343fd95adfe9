//! Benchmark cases of `kv_append`, with the sizes of real models.

use super::kv_append;
use crate::{
    Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::{activations, copy},
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The keys of Qwen3.5-9B, for one token and for a prompt, into a full cache.
fn cases() -> Vec<Case> {
    [1, 512]
        .into_iter()
        .flat_map(|tokens| [FloatType::F32, FloatType::BF16].map(|dtype| case(tokens, dtype)))
        .collect()
}

fn case(tokens: usize, dtype: FloatType) -> Case {
    let (heads, capacity, d) = (4, 4096, 256);
    Case {
        op: "kv_append",
        shape: format!("T={tokens} Hkv={heads} D={d} capacity={capacity}"),
        format: "-".into(),
        dtype,
        bytes: 2 * tokens * heads * d * dtype.size(),
        flops: 0,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let x = activations(&[tokens, heads, d], dtype, 1, &device.host()?)?;
            let positions: Vec<u32> = ((capacity - tokens) as u32..).take(tokens).collect();
            let at = Tensor::new(&positions, &[tokens], device)?;
            let xs = x.cast(DType::F32)?;
            let place = |i: usize| (i / d % heads * capacity + positions[i / d / heads] as usize) * d + i % d;
            let expected = |(i, &x): (usize, &f32)| Expected { index: place(i), value: x.into(), bound: 0.0 };
            let expected = xs.as_slice::<f32>()?.iter().enumerate().map(expected).collect();
            let x = x.to_device(device)?;
            // Only the first run's result is checked; copying the cache in every run would be
            // timed.
            let mut cache = Tensor::zeros(&[heads, capacity, d], dtype.dtype(), device);
            let mut first = true;
            let run = move || {
                kv_append(&mut cache, &x, &at)?;
                if std::mem::take(&mut first) {
                    return copy(&cache.to_device(&cache.device().host()?)?);
                }
                Ok(at.clone())
            };
            Ok(Prepared::warm(run, expected))
        }),
    }
}
