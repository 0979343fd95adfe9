//! Benchmark cases of `glu`, with the sizes of real models.

use super::{Gate, glu};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The feed-forward layer of Qwen3.5-9B by each of its kind of gates, for one token and for a
/// prompt; the output gate of its attention, alone and after each head's query, and that of the
/// shared expert of Qwen3.5-35B-A3B.
fn cases() -> Vec<Case> {
    let of_layers = [Gate::Silu, Gate::GeluTanh, Gate::SwigluOai].map(|by| [(by, 1), (by, 512)]);
    let of_layers = of_layers.into_iter().flatten().map(|(by, m)| case(by, [m, 12288, 12288]));
    let output = [[1, 4096, 4096], [16, 256, 512], [512, 4096, 4096], [512, 2048, 1]];
    of_layers.chain(output.map(|sizes| case(Gate::Sigmoid, sizes))).collect()
}

fn case(by: Gate, [m, d, gates]: [usize; 3]) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "glu",
        shape: format!("{by:?} M={m} D={d} gates={gates}"),
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
            let [want, magnitude] = by.references(xs.as_slice()?, &gs);
            let expected = Expected::all(&want, dtype, |i| gamma(by.roundings()) * magnitude[i]);
            let (x, gate) = (x.to_device(device)?, gate.to_device(device)?);
            Ok(Prepared::warm(move || glu(&x, &gate, by), expected))
        }),
    }
}
