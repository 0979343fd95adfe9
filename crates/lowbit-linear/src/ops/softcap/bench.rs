//! Benchmark cases of `softcap`, with the sizes of real models.

use super::softcap;
use crate::Tensor;
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Gemma's logits, of one token and of a few.
fn cases() -> Vec<Case> {
    [1, 16].map(|m| case(m, 262_144, FloatType::F32)).into()
}

/// Roundings to a result: those of x / y, e^-2x and what joins them, where a division may be off by
/// 2.5 units of the last place.
pub(super) const ROUNDINGS: usize = 20;

/// The op in f64.
pub(super) fn reference(x: f32, cap: f32) -> f64 {
    let cap = f64::from(cap);
    cap * (f64::from(x) / cap).tanh()
}

fn case(m: usize, d: usize, dtype: FloatType) -> Case {
    Case {
        op: "softcap",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 2 * m * d * dtype.size(),
        flops: m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let x = activations(&[m, d], dtype, 1, &host)?;
            let caps = Tensor::new(&vec![30f32; d], &[d], device)?;
            let xs = x.cast(DType::F32)?;
            let want: Vec<f64> = xs.as_slice::<f32>()?.iter().map(|&x| reference(x, 30.0)).collect();
            let expected = Expected::all(&want, dtype, |i| gamma(ROUNDINGS) * want[i].abs());
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || softcap(&x, &caps), expected))
        }),
    }
}
