use super::{reference, silu_mul};
use crate::gamma::gamma;
use crate::{
    bench::{Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The feed-forward layer of Qwen3.5-9B, a token and a prompt.
fn cases() -> Vec<Case> {
    [1, 512].into_iter().map(|m| case(m, 12288, FloatType::F32)).collect()
}

fn case(m: usize, d: usize, dtype: FloatType) -> Case {
    Case {
        op: "silu_mul",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 3 * m * d * dtype.size(),
        flops: 20 * m * d,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (gate, up) = (activations(&[m, d], dtype, 1, &host)?, activations(&[m, d], dtype, 2, &host)?);
            let (gates, ups) = (gate.cast(DType::F32)?, up.cast(DType::F32)?);
            let want = reference::silu_mul(gates.as_slice()?, ups.as_slice()?);
            let expected = Expected::all(&want, dtype, |i| gamma(reference::ROUNDINGS) * want[i].abs());
            let (gate, up) = (gate.to_device(device)?, up.to_device(device)?);
            Ok(Prepared::warm(move || silu_mul(&gate, &up), expected))
        }),
    }
}
