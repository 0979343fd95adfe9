//! Benchmark cases of `rope`, with the sizes of real models.

use super::{Rope, RopeLayout, RopeParams, RopeScaling, reference, rope};
use crate::gamma::gamma;
use crate::{
    Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// The queries of Qwen3.5-9B and of Llama-3-8B, for one token and for a prompt.
fn cases() -> Vec<Case> {
    [(1, 16, 256, 64), (512, 16, 256, 64), (512, 32, 128, 128)].into_iter().map(case).collect()
}

fn case((tokens, heads, d, rotary_dim): (usize, usize, usize, usize)) -> Case {
    let dtype = FloatType::F32;
    Case {
        op: "rope",
        shape: format!("T={tokens} H={heads} D={d} rotary_dim={rotary_dim}"),
        format: "-".into(),
        dtype,
        bytes: 2 * tokens * heads * d * dtype.size(),
        flops: tokens * (3 * heads * rotary_dim + 60 * rotary_dim / 2),
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let (theta, layout) = (1e7, RopeLayout::HalfSplit);
            let params =
                RopeParams { theta, rotary_dim, layout, scaling: RopeScaling::None, freq_factors: None };
            let rotation = Rope::new(&params)?;
            let positions: Vec<u32> = (1000..).take(tokens).collect();
            let x = activations(&[tokens, heads, d], dtype, 1, &host)?;
            let xs = x.cast(DType::F32)?;
            let want = reference::rope(xs.as_slice::<f32>()?, d, &positions, &rotation);
            let greatest = xs.as_slice::<f32>()?.iter().fold(0f32, |a, b| a.max(b.abs()));
            // A sum of two products, each at most as large as the largest element.
            let bound = gamma(reference::ROUNDINGS) * 2.0 * f64::from(greatest);
            let at = Tensor::new(&positions, &[tokens], device)?;
            let x = x.to_device(device)?;
            Ok(Prepared::warm(move || rope(&x, &at, &rotation), Expected::all(&want, dtype, |_| bound)))
        }),
    }
}
