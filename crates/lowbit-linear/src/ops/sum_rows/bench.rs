//! Benchmark cases of `sum_rows`, with the sizes of real models.

use super::{reference, sum_rows};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The bias of all queries, keys and values of Qwen2.5-7B, for one sequence and for four.
fn cases() -> Vec<Case> {
    [512, 2048].map(|m| case(m, 4608, FloatType::F32)).into()
}

fn case(m: usize, d: usize, dtype: FloatType) -> Case {
    Case {
        op: "sum_rows",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: (m + 1) * d * dtype.size(),
        flops: m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let x = activations(&[m, d], dtype, 1, &device.host()?)?;
            let (want, magnitude) = reference::sum_rows(x.cast(DType::F32)?.as_slice()?, d);
            let gamma = gamma(reference::roundings(m));
            let expected = Expected::all(&want, FloatType::F32, |i| gamma * magnitude[i]);
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || sum_rows(&x), expected))
        }),
    }
}
