//! Benchmark cases of `attention_paged`: a decode step of one sequence and of many.

use super::reference::Operands;
use super::{AttentionParams, attention_paged};
use crate::ops::pages::{PAGE_TOKENS, Pages};
use crate::{
    Device, KernelError, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));

/// Query heads, key heads and the size of a head of Qwen3.5-9B and Llama-3-8B.
const LAYERS: [[usize; 3]; 2] = [[16, 4, 256], [32, 8, 128]];

/// Pages that differ: making more takes longer than reading them.
const DISTINCT: usize = 61;

fn cases() -> Vec<Case> {
    [1, 16].map(|sequences| case(LAYERS[0], sequences, 512, [FloatType::F32, FloatType::F16])).into()
}

fn gpu_cases() -> Vec<Case> {
    let steps = [1, 16, 64].into_iter().flat_map(|sequences| [512, 8192].map(|keys| (sequences, keys)));
    let all = steps.flat_map(|step| LAYERS.map(|layer| (layer, step)));
    all.map(|(layer, (sequences, keys))| case(layer, sequences, keys, [FloatType::F16; 2])).collect()
}

/// A token of each of `sequences`, each behind `keys` keys; the types of q and of the pages.
fn case(layer: [usize; 3], sequences: usize, keys: usize, [dtype, cache]: [FloatType; 2]) -> Case {
    let [query_heads, heads, d] = layer;
    let cold_bytes = 2 * sequences * heads * keys * d * cache.size();
    Case {
        op: "attention_paged",
        shape: format!("S={sequences} keys={keys} Hq={query_heads} Hkv={heads} D={d}"),
        format: format!("kv-{}", cache.dtype()),
        dtype,
        bytes: cold_bytes + 2 * sequences * query_heads * d * dtype.size(),
        flops: 4 * sequences * keys * query_heads * d,
        arithmetic: Arithmetic::F32,
        cold_bytes,
        prepare: Box::new(move |device, copies| {
            prepare(layer, [sequences, keys], [dtype, cache], device, copies)
        }),
    }
}

fn prepare(
    [query_heads, heads, d]: [usize; 3],
    [sequences, keys]: [usize; 2],
    [dtype, cache]: [FloatType; 2],
    device: &Device,
    copies: usize,
) -> Result<Prepared, KernelError> {
    let host = &device.host()?;
    let params = AttentionParams::causal((d as f32).powf(-0.5));
    let q = activations(&[sequences, query_heads, d], dtype, 1, host)?;
    let columns = keys.div_ceil(PAGE_TOKENS);
    let count = sequences * columns;
    // Not in order: a prime that divides no count here.
    let table: Vec<u32> = (0..count).map(|i| (i * 7919 % count) as u32).collect();
    let page = [heads, PAGE_TOKENS, d];
    let [k, v] = [2, 3].map(|seed| activations(&[&[DISTINCT], &page[..]].concat(), cache, seed, host));
    let (k, v) = (k?, v?);
    let positions = vec![keys as u32 - 1; sequences];
    let sizes = [query_heads, heads, columns * PAGE_TOKENS, d, d];
    // The reference takes long: the first sequence and the last.
    let qs = q.cast(DType::F32)?;
    let mut expected = vec![];
    for s in if sequences == 1 { vec![0] } else { vec![0, sequences - 1] } {
        let table: Vec<u32> =
            table[s * columns..][..columns].iter().map(|page| page % DISTINCT as u32).collect();
        let table = Tensor::new(&table, &[columns], host)?;
        let [k, v] = [&k, &v].map(|x| crate::ops::gather_pages(x, &table)?.cast(DType::F32));
        let (k, v, row) = (k?, v?, query_heads * d);
        let q = &qs.as_slice()?[s * row..][..row];
        let (k, v, positions) = (k.as_slice()?, v.as_slice()?, &positions[..1]);
        let answer = Operands { q, k, v, positions, sinks: &[], sizes }.attention(&params);
        let bound = |i| match device {
            Device::Cpu(cpu) => {
                let rounded = super::cpu::rounded(cpu, cache.into(), query_heads / heads, &params);
                answer.cpu_bound(i, rounded)
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let sizes = [query_heads / heads, heads, sequences, d, d];
                answer.gpu_bound(i, super::gpu::rounded_paged(gpu, (dtype, cache.into()), sizes, &params))
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        let all = Expected::all(&answer.y, dtype, bound).into_iter();
        expected.extend(all.map(|element| Expected { index: s * row + element.index, ..element }));
    }
    let at = Tensor::new(&positions, &[sequences], device)?;
    let table = Tensor::new(&table, &[sequences, columns], device)?;
    let q = q.to_device(device)?;
    let run = |_| -> Result<Run, KernelError> {
        let pool = |x: &Tensor| {
            let len = count * x.size_bytes() / DISTINCT;
            let bytes: Vec<u8> = x.bytes().iter().copied().cycle().take(len).collect();
            Tensor::mapped(bytes.into(), &[&[count], &page[..]].concat(), x.dtype(), device)
        };
        let (keys, values) = (pool(&k)?, pool(&v)?);
        let (q, table, at) = (q.clone(), table.clone(), at.clone());
        Ok(Box::new(move || {
            let pages = Pages { keys: &keys, values: &values, table: &table };
            attention_paged(&q, pages, &at, None, &params)
        }))
    };
    Ok(Prepared { runs: (0..copies).map(run).collect::<Result<_, _>>()?, expected })
}
