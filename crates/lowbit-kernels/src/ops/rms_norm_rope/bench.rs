//! Benchmark cases of `rms_norm_rope`, with the sizes of real models.

use super::{RmsNormRope, reference, rms_norm_rope, rms_norm_rope_append};
use crate::{
    Device, KernelError, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::{activations, copy},
    ops::{Rope, RopeLayout, RopeParams, RopeScaling},
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

const DTYPE: FloatType = FloatType::F32;

/// The queries of Qwen3.5-9B, each followed by its gate, and of Qwen3-8B; the keys and values of
/// the former. For one token and for a prompt.
fn cases() -> Vec<Case> {
    let queries = [[16, 256, 512, 64], [32, 128, 128, 128]];
    let queries = queries.into_iter().flat_map(|sizes| [1, 512].map(|tokens| case(tokens, sizes)));
    queries.chain([1, 512].map(append_case)).collect()
}

fn flops(tokens: usize, [heads, head_dim, _, rotary_dim]: [usize; 4]) -> usize {
    tokens * (heads * (4 * head_dim + 3 * rotary_dim) + 60 * rotary_dim / 2)
}

fn case(tokens: usize, sizes: [usize; 4]) -> Case {
    let [heads, head_dim, columns, rotary_dim] = sizes;
    Case {
        op: "rms_norm_rope",
        shape: format!("T={tokens} H={heads} D={head_dim} S={columns} rotary_dim={rotary_dim}"),
        format: "-".into(),
        dtype: DTYPE,
        bytes: (2 * tokens * heads + 1) * head_dim * DTYPE.size(),
        flops: flops(tokens, sizes),
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let operands = Operands::new(device, tokens, sizes, 1000)?;
            let (want, bounds): (Vec<f64>, Vec<f64>) = operands.want.iter().copied().unzip();
            let run = move || rms_norm_rope(&operands.x, &operands.positions, &operands.params());
            Ok(Prepared::warm(run, Expected::all(&want, DTYPE, |i| bounds[i])))
        }),
    }
}

fn append_case(tokens: usize) -> Case {
    let (sizes, capacity) = ([4, 256, 256, 64], 4096);
    let [heads, d, ..] = sizes;
    Case {
        op: "rms_norm_rope_append",
        shape: format!("T={tokens} H={heads} Hkv={heads} D={d} capacity={capacity}"),
        format: "-".into(),
        dtype: DTYPE,
        bytes: (6 * tokens * heads + 1) * d * DTYPE.size(),
        flops: 2 * flops(tokens, sizes),
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let first = capacity - tokens;
            let operands = Operands::new(device, tokens, sizes, first)?;
            let (want, bounds): (Vec<f64>, Vec<f64>) = operands.want.iter().copied().unzip();
            let mut expected = Expected::all(&want, DTYPE, |i| bounds[i]);
            for (i, key) in expected.iter_mut().enumerate() {
                key.index = (i / d % heads * capacity + first + i / d / heads) * d + i % d;
            }
            let empty = || Tensor::allocate_zeros(&[heads, capacity, d], DTYPE.dtype(), device);
            let (mut keys, mut values) = (empty()?, empty()?);
            // Only the first run's result is checked; copying the cache in every run would be
            // timed.
            let mut first = true;
            let run = move || {
                let Operands { x, positions, .. } = &operands;
                let params = operands.params();
                rms_norm_rope_append([&mut keys, &mut values], [x, x, x], [positions; 2], [&params; 2])?;
                if std::mem::take(&mut first) {
                    return copy(&keys.to_device(&keys.device().host()?)?);
                }
                Ok(positions.clone())
            };
            Ok(Prepared::warm(run, expected))
        }),
    }
}

/// Heads at consecutive positions, and the parameters.
struct Operands {
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    rope: Rope,
    want: Vec<(f64, f64)>,
}

impl Operands {
    fn new(
        device: &Device,
        tokens: usize,
        [heads, head_dim, columns, rotary_dim]: [usize; 4],
        first: usize,
    ) -> Result<Self, KernelError> {
        let host = device.host()?;
        let (theta, layout) = (1e7, RopeLayout::HalfSplit);
        let rope = RopeParams { theta, rotary_dim, layout, scaling: RopeScaling::None, freq_factors: None };
        let positions: Vec<u32> = (first as u32..).take(tokens).collect();
        let mut operands = Self {
            x: activations(&[tokens, heads, columns], DTYPE, 1, &host)?,
            weight: activations(&[head_dim], DTYPE, 2, &host)?,
            positions: Tensor::new(&positions, &[tokens], device)?,
            rope: Rope::new(&rope)?,
            want: Vec::new(),
        };
        let (xs, weights) = (operands.x.cast(DType::F32)?, operands.weight.cast(DType::F32)?);
        let (xs, weights) = (xs.as_slice()?, weights.as_slice()?);
        operands.want = reference::rms_norm_rope(xs, columns, weights, &positions, &operands.params());
        operands.x = operands.x.to_device(device)?;
        operands.weight = operands.weight.to_device(device)?;
        Ok(operands)
    }

    fn params(&self) -> RmsNormRope<'_> {
        let norm = Some((&self.weight, 1e-6));
        RmsNormRope { head_dim: self.weight.len(), norm, rope: &self.rope }
    }
}
