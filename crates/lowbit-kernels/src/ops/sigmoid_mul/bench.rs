//! Benchmark cases of `sigmoid_mul`, with the sizes of real models.

use super::{reference, sigmoid_mul};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The output gate of Qwen3.5-9B's attention, alone and after each head's query, and that of the shared expert of
/// Qwen3.5-35B-A3B.
fn cases() -> Vec<Case> {
    [(1, 4096, 4096), (16, 256, 512), (512, 4096, 4096), (512, 2048, 1)].into_iter().map(case).collect()
}

fn case((m, d, gates): (usize, usize, usize)) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "sigmoid_mul",
        shape: format!("M={m} D={d} gates={gates}"),
        format: "-".into(),
        dtype,
        bytes: m * (2 * d + gates.min(d)) * dtype.size(),
        flops: m * (d + 20 * gates.min(d)),
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (x, gate) =
                (activations(&[m, d], dtype, 1, &host)?, activations(&[m, gates], dtype, 2, &host)?);
            let (xs, gs) = (x.cast(DType::F32)?, gate.cast(DType::F32)?);
            let gs: Vec<f32> = gs
                .as_slice::<f32>()?
                .chunks(gates)
                .flat_map(|row| &row[gates - gates.min(d)..])
                .copied()
                .collect();
            let want = reference::sigmoid_mul(xs.as_slice()?, &gs);
            let expected = Expected::all(&want, dtype, |i| gamma(reference::ROUNDINGS) * want[i].abs());
            let (x, gate) = (x.to_device(device)?, gate.to_device(device)?);
            Ok(Prepared::warm(move || sigmoid_mul(&x, &gate), expected))
        }),
    }
}
