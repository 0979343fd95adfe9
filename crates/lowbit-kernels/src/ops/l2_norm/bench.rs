//! Benchmark cases of `l2_norm`, with the sizes of real models.

use super::{l2_norm, reference};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

const EPS: f32 = 1e-6;

/// The keys of Qwen3.5-9B's gated delta net, for one token and for a prompt.
fn cases() -> Vec<Case> {
    [16, 512 * 16].into_iter().map(|m| case(m, 128)).collect()
}

fn case(m: usize, d: usize) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "l2_norm",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 2 * m * d * dtype.size(),
        flops: 3 * m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let x = activations(&[m, d], dtype, 1, &host)?;
            let want = reference::l2_norm(x.cast(DType::F32)?.as_slice()?, d, EPS);
            let expected = Expected::all(&want, dtype, |i| gamma(reference::roundings(d)) * want[i].abs());
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || l2_norm(&x, EPS), expected))
        }),
    }
}
