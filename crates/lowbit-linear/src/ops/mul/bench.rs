//! Benchmark cases of `mul`, with the sizes of real models.

use super::mul;
use crate::gamma::gamma;
use crate::{
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The short convolution's gate of LFM2-1.2B's kin, for one token and for a prompt.
fn cases() -> Vec<Case> {
    [1, 512].map(|m| case(m, 4096, FloatType::F32)).into()
}

fn case(m: usize, d: usize, dtype: FloatType) -> Case {
    Case {
        op: "mul",
        shape: format!("M={m} D={d}"),
        format: "-".into(),
        dtype,
        bytes: 3 * m * d * dtype.size(),
        flops: m * d,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (x, y) = (activations(&[m, d], dtype, 1, &host)?, activations(&[m, d], dtype, 2, &host)?);
            let (xs, ys) = (x.cast(DType::F32)?, y.cast(DType::F32)?);
            let product = |(&x, &y): (&f32, &f32)| f64::from(x) * f64::from(y);
            let want: Vec<f64> = xs.as_slice()?.iter().zip(ys.as_slice()?).map(product).collect();
            let expected = Expected::all(&want, dtype, |i| gamma(1) * want[i].abs());
            let (x, y) = (x.to_device(device)?, y.to_device(device)?);
            Ok(Prepared::warm(move || mul(&x, &y), expected))
        }),
    }
}
