//! The vendor's dense product on a GPU, which benchmarks compare with.

use super::matmul;
use crate::bench::DenseProduct;
use crate::{Device, KernelError, inputs};
use lowbit_formats::FloatType;

inventory::submit!(DenseProduct(dense_product));

fn dense_product(device: &Device) -> Result<f64, KernelError> {
    match device {
        Device::Cpu(_) => Ok(f64::INFINITY),
        Device::Gpu(gpu) => by_vendor(gpu, device),
    }
}

/// The best of some bf16 products by the vendor BLAS.
fn by_vendor(gpu: &crate::gpu::Gpu, device: &Device) -> Result<f64, KernelError> {
    let (m, n, k) = (4096, 8192, 4096);
    if gpu.library().is_none() {
        return Ok(f64::INFINITY);
    }
    let host = device.host()?;
    let operand =
        |rows, seed| inputs::activations(&[rows, k], FloatType::BF16, seed, &host)?.to_device(device);
    let (x, weight) = (operand(m, 1)?, operand(n, 2)?);
    let mut best = 0.0f64;
    for _ in 0..10 {
        let time = gpu.time(|| matmul(&x, &weight).map(drop))?;
        best = best.max((2 * m * n * k) as f64 / time.as_secs_f64());
    }
    Ok(best)
}
