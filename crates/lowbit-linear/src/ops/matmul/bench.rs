//! Benchmark cases of `matmul`, with the sizes of real models.

use super::matmul;
use crate::{
    Device, KernelError, QuantizedTensor, Tensor,
    bench::{Case, Cases, GpuCases},
    ops::{quantized_matmul, quantized_matmul::bench::Product},
};
use lowbit_formats::{FloatType, Format};

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for weight in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        for m in [1, 8, 64, 512] {
            let (format, dtype) = (Format::Float(weight), FloatType::F32);
            let product = Product { op: "matmul", format, dtype, m, n: 4096, k: 4096 };
            cases.push(product.case(run));
        }
    }
    cases
}

fn gpu_cases() -> Vec<Case> {
    let (format, dtype) = (Format::Float(FloatType::BF16), FloatType::BF16);
    let product = |m| Product { op: "matmul", format, dtype, m, n: 14336, k: 4096 };
    [1, 8, 64, 512, 4096].map(|m| product(m).case(run)).into()
}

/// Weights are repacked when they are uploaded to a GPU, so the weight is not a tensor.
fn run(x: &Tensor, weight: &QuantizedTensor) -> Result<Tensor, KernelError> {
    match x.device() {
        Device::Cpu(_) => matmul(x, &weight.components()[0]),
        Device::Gpu(_) => quantized_matmul(x, weight),
    }
}
