//! Benchmark cases of `narrow`, with the sizes of real models.

use super::narrow;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The queries of Qwen3.5-9B's joint projection of queries and gates, for a prompt.
fn cases() -> Vec<Case> {
    let (m, d, len, dtype) = (512 * 16, 512, 256, FloatType::F32);
    vec![Case {
        op: "narrow",
        shape: format!("M={m} D={d} len={len}"),
        format: "-".into(),
        dtype,
        bytes: 2 * m * len * dtype.size(),
        flops: 0,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let x = activations(&[m, d], dtype, 1, &host)?;
            let xs = x.cast(DType::F32)?;
            let rows = xs.as_slice::<f32>()?.chunks(d);
            let want: Vec<f64> = rows.flat_map(|x| &x[d - len..]).map(|&x| f64::from(x)).collect();
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || narrow(&x, d - len, len), Expected::all(&want, dtype, |_| 0.0)))
        }),
    }]
}
