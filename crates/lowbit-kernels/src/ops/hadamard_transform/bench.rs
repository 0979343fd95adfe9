//! Benchmark cases of `hadamard_transform`, with the sizes of real models.

use super::{hadamard_transform, reference};
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The queries of Llama-3-8B, for one token and for a prompt.
fn cases() -> Vec<Case> {
    [32, 512 * 32].into_iter().map(|m| case(m, 128)).collect()
}

fn case(m: usize, d: usize) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "hadamard_transform",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 2 * m * d * dtype.size(),
        flops: m * d * d.ilog2() as usize,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let x = activations(&[m, d], dtype, 1, &device.host()?)?;
            let wide: Vec<f64> = x.cast(DType::F32)?.as_slice::<f32>()?.iter().map(|&x| x.into()).collect();
            let (want, sums): (Vec<f64>, Vec<f64>) =
                reference::hadamard_transform(&wide, d).into_iter().unzip();
            let expected = Expected::all(&want, dtype, |i| gamma(reference::roundings(d)) * sums[i]);
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || hadamard_transform(&x), expected))
        }),
    }
}
