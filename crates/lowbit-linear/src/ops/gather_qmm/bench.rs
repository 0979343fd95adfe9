use super::gather_qmm;
use crate::random::Random;
use crate::{
    Device, KernelError, QuantizedTensor, Tensor,
    bench::{Case, Cases, Expected, GpuCases, Prepared, Run},
    inputs,
    ops::quantized_matmul::{
        bench::{arithmetic, on_device, sampled},
        reference::{self, Rounded},
    },
};
use lowbit_formats::{DType, FloatType, Format};
use std::collections::HashSet;

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));

/// Qwen3.5-35B-A3B's experts: gate and up projections.
const LAYER: Experts = Experts { experts: 256, top_k: 8, slots: 1, n: 512, k: 2048 };
/// Both in one, and the down projection.
const STEPS: [Experts; 2] =
    [Experts { n: 1024, ..LAYER }, Experts { slots: LAYER.top_k, n: 2048, k: 512, ..LAYER }];

#[derive(Clone, Copy)]
struct Experts {
    experts: usize,
    top_k: usize,
    /// Rows of x per token.
    slots: usize,
    n: usize,
    k: usize,
}

fn cases() -> Vec<Case> {
    of_dtype(FloatType::F32)
}

fn gpu_cases() -> Vec<Case> {
    let format = inputs::formats(&["affine4g64"])[0];
    let of_layer =
        |layer: &Experts| [1, 4, 16, 64, 128].map(|tokens| layer.case(format, FloatType::BF16, tokens));
    of_dtype(FloatType::BF16).into_iter().chain(STEPS.iter().flat_map(of_layer)).collect()
}

fn of_dtype(dtype: FloatType) -> Vec<Case> {
    let formats = inputs::formats(&["affine4g64", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]);
    let of_format = |&format| [1, 8, 64, 512].map(|tokens| LAYER.case(format, dtype, tokens));
    formats.iter().flat_map(of_format).collect()
}

impl Experts {
    fn case(self, format: Format, dtype: FloatType, tokens: usize) -> Case {
        let Self { experts, top_k, slots, n, k } = self;
        let row: usize = format.components(k).map_or(0, |all| all.iter().map(|c| c.row_bytes()).sum());
        let used = self.ids(tokens, 0).into_iter().collect::<HashSet<_>>().len();
        let activations = (tokens * slots * k + tokens * top_k * n) * dtype.size();
        Case {
            op: "gather_qmm",
            shape: format!("T={tokens} K={k} N={n} E={experts} top_k={top_k}"),
            format: format.to_string(),
            dtype,
            bytes: used * n * row + activations,
            flops: 2 * tokens * top_k * n * k,
            arithmetic: arithmetic(format, tokens * top_k / experts),
            cold_bytes: used * n * row,
            prepare: Box::new(move |device, copies| {
                let host = device.host()?;
                let x = inputs::activations(&[tokens, slots, k], dtype, 1, &host)?;
                let weight = inputs::weight(format, &[experts, n, k], 2, &host)?;
                let rounded = Rounded::on(device, dtype, || Ok(Rounded::of_any_m(&weight.to_panels()?)))?;
                let expected = self.expected(&x, &weight, &self.ids(tokens, 0), rounded)?;
                let x = x.to_device(device)?;
                // Each run reads other experts.
                let stacks = inputs::copies(&weight, (copies * used).div_ceil(experts))?;
                let stacks =
                    stacks.iter().map(|weight| on_device(weight, device)).collect::<Result<Vec<_>, _>>()?;
                let runs = (0..copies).map(|i| self.run(&x, &stacks[i % stacks.len()], i, device));
                Ok(Prepared { runs: runs.collect::<Result<_, _>>()?, expected })
            }),
        }
    }

    /// Different experts for each token.
    fn ids(self, tokens: usize, seed: usize) -> Vec<u32> {
        let mut random = Random::new(seed as u64);
        let mut token = || {
            // An odd stride visits all of a power of two.
            let (start, stride) = (random.below(self.experts), random.below(self.experts) | 1);
            (0..self.top_k).map(move |slot| ((start + slot * stride) % self.experts) as u32)
        };
        (0..tokens).flat_map(|_| token()).collect()
    }

    fn run(
        self,
        x: &Tensor,
        weight: &QuantizedTensor,
        seed: usize,
        device: &Device,
    ) -> Result<Run, KernelError> {
        let tokens = x.dim(0);
        let ids = Tensor::new(&self.ids(tokens, seed), &[tokens, self.top_k], device)?;
        let (x, weight) = (x.clone(), weight.clone());
        Ok(Box::new(move || gather_qmm(&x, &weight, &ids)))
    }

    fn expected(
        self,
        x: &Tensor,
        weight: &QuantizedTensor,
        ids: &[u32],
        rounded: Rounded,
    ) -> Result<Vec<Expected>, KernelError> {
        let Self { top_k, slots, n, k, .. } = self;
        let dtype = FloatType::from_dtype(x.dtype()).unwrap_or(FloatType::F32);
        let x = x.cast(DType::F32)?;
        let distinct = reference::decoded(weight, inputs::DISTINCT)?;
        let mut all = Vec::new();
        for pair in sampled(ids.len()) {
            let x = &x.as_slice::<f32>()?[pair / (top_k / slots) * k..][..k];
            let of_pair = reference::matmul_bounded(x, &distinct, k, dtype, rounded);
            let first = ids[pair] as usize * n;
            let row = |i: usize| Expected { index: pair * n + i, ..of_pair[(first + i) % of_pair.len()] };
            all.extend((0..n).map(row));
        }
        Ok(all)
    }
}
