use super::{LatentAttentionParams, latent_attention};
use crate::ops::attention::reference::Operands;
use crate::{
    Device, KernelError, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run},
    inputs::{activations, copy},
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));

/// `kv_lora_rank`, and that with `qk_rope_head_dim`, of all published models.
const RANK: usize = 512;
const WIDTH: usize = 576;
/// Heads of GLM-4.7-Flash and DeepSeek V3.
const HEADS: [usize; 2] = [20, 128];

fn cases() -> Vec<Case> {
    let shapes = [(1, 4096), (128, 512)];
    shapes.map(|(tokens, context)| case(HEADS[0], tokens, context, [FloatType::F32, FloatType::F16])).into()
}

fn gpu_cases() -> Vec<Case> {
    let shapes = [(1, 512), (1, 8192), (512, 512)];
    let all = HEADS.into_iter().flat_map(|heads| shapes.map(|shape| (heads, shape)));
    all.map(|(heads, (tokens, context))| case(heads, tokens, context, [FloatType::BF16; 2])).collect()
}

/// The last `tokens` of `context`; the types of q and of the latents.
fn case(heads: usize, tokens: usize, context: usize, [dtype, cache]: [FloatType; 2]) -> Case {
    let cold_bytes = context * WIDTH * cache.size();
    let keys: usize = (context - tokens + 1..=context).sum();
    Case {
        op: "latent_attention",
        shape: format!("T={tokens} keys={context} H={heads} D={WIDTH} rank={RANK}"),
        format: format!("kv-{}", cache.dtype()),
        dtype,
        bytes: cold_bytes + tokens * heads * (WIDTH + RANK) * dtype.size(),
        flops: 2 * keys * heads * (WIDTH + RANK),
        arithmetic: Arithmetic::F32,
        cold_bytes,
        prepare: Box::new(move |device, copies| {
            prepare([heads, tokens, context], [dtype, cache], device, copies)
        }),
    }
}

fn prepare(
    [heads, tokens, context]: [usize; 3],
    [dtype, cache]: [FloatType; 2],
    device: &Device,
    copies: usize,
) -> Result<Prepared, KernelError> {
    let host = &device.host()?;
    let params = LatentAttentionParams { rank: RANK, scale: 256f32.powf(-0.5), exact: true };
    let q = activations(&[tokens, heads, WIDTH], dtype, 1, host)?;
    let latents = activations(&[1, context, WIDTH], cache, 2, host)?;
    let positions: Vec<u32> = ((context - tokens) as u32..).take(tokens).collect();
    // The reference takes long: the first token alone.
    let (qs, ks) = (q.cast(DType::F32)?, latents.cast(DType::F32)?);
    let k = ks.as_slice::<f32>()?;
    let v: Vec<f32> = k.chunks(WIDTH).flat_map(|row| &row[..RANK]).copied().collect();
    let operands = Operands {
        q: &qs.as_slice()?[..heads * WIDTH],
        k,
        v: &v,
        positions: &positions[..1],
        sinks: &[],
        sizes: [heads, 1, context, WIDTH, RANK],
    };
    let answer = operands.attention(&params.attention());
    let bound = |i| match device {
        Device::Cpu(_) => answer.cpu_bound(i, None),
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => answer.gpu_bound(i, Some(cache).filter(|cache| *cache != FloatType::F32)),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
    };
    let expected = Expected::all(&answer.y, dtype, bound);
    let (at, q) = (Tensor::new(&positions, &[tokens], device)?, q.to_device(device)?);
    let run = |_| -> Result<Run, KernelError> {
        let (q, latents, at) = (q.clone(), copy(&latents)?.to_device(device)?, at.clone());
        Ok(Box::new(move || latent_attention(&q, &latents, &at, &params)))
    };
    Ok(Prepared { runs: (0..copies).map(run).collect::<Result<_, _>>()?, expected })
}
