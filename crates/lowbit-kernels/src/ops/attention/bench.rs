use super::{AttentionParams, attention, reference::Operands};
use crate::{
    Device, KernelError, Tensor,
    bench::{Case, Cases, Expected, Prepared, Run},
    inputs::{activations, copy},
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// Query heads, key heads and the size of a head of Llama-3-8B and Qwen3.5-9B.
const LAYERS: [(usize, usize, usize); 2] = [(32, 8, 128), (16, 4, 256)];

fn cases() -> Vec<Case> {
    let shapes = [
        (1, 4096, FloatType::F32),
        (1, 4096, FloatType::BF16),
        (1, 32768, FloatType::BF16),
        (512, 512, FloatType::F32),
        (512, 4096, FloatType::F32),
    ];
    let layer = |layer| shapes.map(|(tokens, context, cache)| case(layer, tokens, context, cache));
    LAYERS.into_iter().flat_map(layer).collect()
}

/// The last `tokens` of `context`.
fn case(
    (query_heads, heads, d): (usize, usize, usize),
    tokens: usize,
    context: usize,
    cache: FloatType,
) -> Case {
    let dtype = FloatType::F32;
    let cold_bytes = 2 * heads * context * d * cache.size();
    let keys: usize = (context - tokens + 1..=context).sum();
    Case {
        op: "attention",
        shape: format!("T={tokens} keys={context} Hq={query_heads} Hkv={heads} D={d}"),
        format: format!("kv-{}", cache.dtype()),
        dtype,
        bytes: cold_bytes + 2 * tokens * query_heads * d * dtype.size(),
        flops: 4 * keys * query_heads * d,
        cold_bytes,
        prepare: Box::new(move |device, copies| {
            let sizes = [query_heads, heads, context, d, d];
            prepare(sizes, tokens, cache, device, copies)
        }),
    }
}

fn prepare(
    sizes: [usize; 5],
    tokens: usize,
    cache: FloatType,
    device: &Device,
    copies: usize,
) -> Result<Prepared, KernelError> {
    let [query_heads, heads, context, d, _] = sizes;
    let params = AttentionParams { scale: (d as f32).powf(-0.5), sliding_window: None };
    let q = activations(&[tokens, query_heads, d], FloatType::F32, 1, device)?;
    let [k, v] = [2, 3].map(|seed| activations(&[heads, context, d], cache, seed, device));
    let (k, v) = (k?, v?);
    let positions: Vec<u32> = ((context - tokens) as u32..).take(tokens).collect();
    // The reference takes long: the first token and the last.
    let (ks, vs, row) = (k.cast(DType::F32)?, v.cast(DType::F32)?, query_heads * d);
    let mut expected = vec![];
    for t in if tokens == 1 { vec![0] } else { vec![0, tokens - 1] } {
        let q = &q.as_slice()?[t * row..(t + 1) * row];
        let operands =
            Operands { q, k: ks.as_slice()?, v: vs.as_slice()?, positions: &positions[t..t + 1], sizes };
        let answer = operands.attention(&params);
        let element =
            |(i, &value): (usize, &f64)| Expected { index: t * row + i, value, bound: answer.bound(i) };
        expected.extend(answer.y.iter().enumerate().map(element));
    }
    let at = Tensor::new(&positions, &[tokens], device)?;
    let run = |_| -> Result<Run, KernelError> {
        let (q, k, v, at) = (q.clone(), copy(&k)?, copy(&v)?, at.clone());
        Ok(Box::new(move || attention(&q, &k, &v, &at, &params)))
    };
    Ok(Prepared { runs: (0..copies).map(run).collect::<Result<_, _>>()?, expected })
}
