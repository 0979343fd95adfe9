//! Benchmark cases of `add_rms_norm`, with the sizes of real models.

use super::{add_rms_norm, reference};
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::operand,
};
use lowbit_formats::FloatType;

inventory::submit!(Cases(cases));

/// Between the layers of Qwen3.5-9B, for one token and for a prompt.
fn cases() -> Vec<Case> {
    [1, 512].map(|m| case(m, 4096)).into()
}

fn case(m: usize, d: usize) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "add_rms_norm",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: (4 * m * d + d) * dtype.size(),
        flops: 5 * m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let (h, hs) = operand(&[m, d], dtype, 1, device)?;
            let (x, xs) = operand(&[m, d], dtype, 2, device)?;
            let (weight, weights) = operand(&[d], dtype, 3, device)?;
            let [_, want] = reference::add_rms_norm(&hs, &xs, &weights, 1e-6);
            let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
            let expected = Expected::all(&want, dtype, |i| bounds[i]);
            Ok(Prepared::warm(move || Ok(add_rms_norm(&h, &x, &weight, 1e-6)?.1), expected))
        }),
    }
}
