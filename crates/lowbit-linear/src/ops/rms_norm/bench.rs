//! Benchmark cases of `rms_norm`, with the sizes of real models.

use super::{gated_rms_norm, reference, rms_norm};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Qwen3.5-9B: the layers' norm, the queries' and the gated delta net's, for one token and for a
/// prompt.
fn cases() -> Vec<Case> {
    let norms = [(1, 4096), (512, 4096), (512 * 16, 256)].into_iter().map(|(m, d)| case(m, d, false));
    norms.chain([(32, 128), (512 * 32, 128)].into_iter().map(|(m, d)| case(m, d, true))).collect()
}

fn case(m: usize, d: usize, gated: bool) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: if gated { "gated_rms_norm" } else { "rms_norm" },
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: ((2 + usize::from(gated)) * m * d + d) * dtype.size(),
        flops: (4 + 20 * usize::from(gated)) * m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (x, weight) = (activations(&[m, d], dtype, 1, &host)?, activations(&[d], dtype, 2, &host)?);
            let gate = activations(&[m, d], dtype, 3, &host)?;
            let [xs, gates, weights] = [&x, &gate, &weight].map(|x| x.cast(DType::F32));
            let (xs, gates, weights) = (xs?, gates?, weights?);
            let gates = if gated { Some(gates.as_slice()?) } else { None };
            let want = reference::rms_norm(xs.as_slice()?, gates, weights.as_slice()?, 1e-6);
            let expected =
                Expected::all(&want, dtype, |i| gamma(reference::roundings(d, gated)) * want[i].abs());
            let (x, gate, weight) =
                (x.to_device(device)?, gate.to_device(device)?, weight.to_device(device)?);
            Ok(match gated {
                true => Prepared::warm(move || gated_rms_norm(&x, &gate, &weight, 1e-6), expected),
                false => Prepared::warm(move || rms_norm(&x, &weight, 1e-6), expected),
            })
        }),
    }
}
