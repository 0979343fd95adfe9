use super::{AttentionParams, attention, reference::Operands};
use crate::{
    Device, KernelError, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run, ScalingCases},
    inputs::{activations, copy},
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));
inventory::submit!(ScalingCases(scaling_cases));

/// Query heads, key heads and the size of a head of Llama-3-8B and Qwen3.5-9B.
const LAYERS: [(usize, usize, usize); 2] = [(32, 8, 128), (16, 4, 256)];

/// The same of layers whose key heads have 8 query heads each: Qwen3-30B-A3B and
/// Qwen3-Next-80B-A3B.
const WIDE_GROUPS: [(usize, usize, usize); 2] = [(32, 4, 128), (16, 2, 256)];

fn cases() -> Vec<Case> {
    let [f32, f16, bf16] = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let shapes = [
        (1, 4096, [f32, f32]),
        (1, 4096, [f32, f16]),
        (1, 16384, [f32, f16]),
        (1, 32768, [f32, f16]),
        (1, 4096, [f32, bf16]),
        (1, 32768, [f32, bf16]),
        (512, 512, [f32, f32]),
        (512, 512, [f32, f16]),
        (512, 4096, [f32, f32]),
        (512, 4096, [f32, f16]),
    ];
    let grouped = WIDE_GROUPS.map(|layer| case(layer, 1, 16384, [f32, f16]));
    of_layers(&shapes).into_iter().chain(grouped).collect()
}

fn gpu_cases() -> Vec<Case> {
    let half = [FloatType::BF16; 2];
    // The types for which Vulkan and Metal have matrices in any case.
    let f16 = [FloatType::F16; 2];
    let mut cases =
        of_layers(&[(1, 512, half), (1, 8192, half), (8, 8192, half), (512, 512, half), (4096, 4096, half)]);
    cases.extend(of_layers(&[
        (4096, 4096, f16),
        (512, 32768, f16),
        (4096, 32768, f16),
        (4096, 131_072, f16),
    ]));
    cases.extend(of_layers(&[(1, 2048, f16), (1, 32768, f16), (1, 107_000, f16), (1, 131_072, f16)]));
    cases
}

/// A token behind longer and longer texts.
fn scaling_cases() -> Vec<Case> {
    let contexts = (7..=15).map(|power| 1 << power);
    contexts.map(|context| case(LAYERS[0], 1, context, [FloatType::F32, FloatType::F16])).collect()
}

/// Of tokens, context and types, for each layer.
fn of_layers(shapes: &[(usize, usize, [FloatType; 2])]) -> Vec<Case> {
    let all = LAYERS.iter().flat_map(|layer| shapes.iter().map(move |shape| (*layer, *shape)));
    all.map(|(layer, (tokens, context, dtypes))| case(layer, tokens, context, dtypes)).collect()
}

/// The last `tokens` of `context`; the types of q and of the cache.
fn case(
    (query_heads, heads, d): (usize, usize, usize),
    tokens: usize,
    context: usize,
    [dtype, cache]: [FloatType; 2],
) -> Case {
    let cold_bytes = 2 * heads * context * d * cache.size();
    let keys: usize = (context - tokens + 1..=context).sum();
    Case {
        op: "attention",
        shape: format!("T={tokens} keys={context} Hq={query_heads} Hkv={heads} D={d}"),
        format: format!("kv-{}", cache.dtype()),
        dtype,
        bytes: cold_bytes + 2 * tokens * query_heads * d * dtype.size(),
        flops: 4 * keys * query_heads * d,
        arithmetic: Arithmetic::F32,
        cold_bytes,
        prepare: Box::new(move |device, copies| {
            let sizes = [query_heads, heads, context, d, d];
            prepare(sizes, tokens, [dtype, cache], device, copies)
        }),
    }
}

fn prepare(
    sizes: [usize; 5],
    tokens: usize,
    [dtype, cache]: [FloatType; 2],
    device: &Device,
    copies: usize,
) -> Result<Prepared, KernelError> {
    let [query_heads, heads, context, d, _] = sizes;
    let host = &device.host()?;
    let params = AttentionParams::causal((d as f32).powf(-0.5));
    let q = activations(&[tokens, query_heads, d], dtype, 1, host)?;
    let [k, v] = [2, 3].map(|seed| activations(&[heads, context, d], cache, seed, host));
    let (k, v) = (k?, v?);
    let positions: Vec<u32> = ((context - tokens) as u32..).take(tokens).collect();
    // The reference takes long: the first token and the last.
    let [qs, ks, vs] = [&q, &k, &v].map(|x| x.cast(DType::F32));
    let (qs, ks, vs, row) = (qs?, ks?, vs?, query_heads * d);
    let mut expected = vec![];
    for t in if tokens == 1 { vec![0] } else { vec![0, tokens - 1] } {
        let q = &qs.as_slice()?[t * row..(t + 1) * row];
        let operands = Operands {
            q,
            k: ks.as_slice()?,
            v: vs.as_slice()?,
            positions: &positions[t..t + 1],
            sinks: &[],
            sizes,
        };
        let answer = operands.attention(&params);
        let bound = |i| match device {
            Device::Cpu(cpu) => {
                let rounded = super::cpu::rounded(cpu, cache.into(), tokens * query_heads / heads, &params);
                answer.cpu_bound(i, rounded)
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let rounded = super::gpu::rounded(gpu, [dtype, cache], sizes, tokens, &params);
                answer.gpu_bound(i, rounded)
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        let all = Expected::all(&answer.y, dtype, bound).into_iter();
        expected.extend(all.map(|element| Expected { index: t * row + element.index, ..element }));
    }
    let at = Tensor::new(&positions, &[tokens], device)?;
    let q = q.to_device(device)?;
    let run = |_| -> Result<Run, KernelError> {
        let [k, v] = [&k, &v].map(|x| copy(x).and_then(|x| x.to_device(device)));
        let (q, k, v, at) = (q.clone(), k?, v?, at.clone());
        Ok(Box::new(move || attention(&q, &k, &v, &at, None, &params)))
    };
    Ok(Prepared { runs: (0..copies).map(run).collect::<Result<_, _>>()?, expected })
}
