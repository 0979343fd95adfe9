//! Benchmark cases of gates, with the sizes of real models.

use super::Gate;
use crate::bench::{Arithmetic, Case, Expected, Prepared};
use crate::gamma::gamma;
use crate::inputs::activations;
use lowbit_formats::{DType, FloatType};

/// The feed-forward layer of Qwen3.5-9B, for one token and for a prompt.
pub(in crate::ops) fn cases<G: Gate>() -> Vec<Case> {
    [1, 512].map(|m| case::<G>(m, 12288, FloatType::F32)).into()
}

fn case<G: Gate>(m: usize, d: usize, dtype: FloatType) -> Case {
    Case {
        op: G::OP,
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 3 * m * d * dtype.size(),
        flops: 20 * m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (gate, up) = (activations(&[m, d], dtype, 1, &host)?, activations(&[m, d], dtype, 2, &host)?);
            let (gates, ups) = (gate.cast(DType::F32)?, up.cast(DType::F32)?);
            let want = G::references(gates.as_slice()?, ups.as_slice()?);
            let expected = Expected::all(&want, dtype, |i| gamma(G::ROUNDINGS) * want[i].abs());
            let (gate, up) = (gate.to_device(device)?, up.to_device(device)?);
            Ok(Prepared::warm(move || (G::RUN)(&gate, &up), expected))
        }),
    }
}
