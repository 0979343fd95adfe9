//! One op, a 4-bit product, for an engine that has its own tensors: what it owns goes in without a
//! copy, the result comes out as a slice.
//!
//!     cargo run --release -p lowbit-kernels --example foreign_memory
//!
//! Built with the feature `cuda`, it does the same on a CUDA device with memory and a stream of its
//! own, which stand for an engine's (that part is compiled in every check, but runs where there is
//! a device only).

use lowbit_formats::{FloatType, Format};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor, ops};
use std::sync::Arc;

/// Tokens, inputs, outputs.
const M: usize = 2;
const K: usize = 256;
const N: usize = 64;

/// Memory as an engine might have it: activations that it shares, a weight's components in one file
/// or arena.
struct Activations(Arc<Vec<f32>>);

impl AsRef<[f32]> for Activations {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let x: Arc<Vec<f32>> = Arc::new((0..M * K).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect());
    let values: Vec<f32> = (0..N * K).map(|i| ((i * 61 % 127) as f32 - 63.0) / 512.0).collect();
    let y = on_cpu(&x, &values)?;
    println!("cpu: y[0, ..4] = {:?}", &y[..4]);
    #[cfg(feature = "cuda")]
    println!("cuda: y[0, ..4] = {:?}", &cuda::on_cuda(&x, &values)?[..4]);
    Ok(())
}

/// The weight of `values`, `[N, K]`, in MLX's affine 4-bit format: codes `[N, K / 8]`, scales and
/// biases `[N, K / 64]`.
fn weight(values: &[f32], device: &Device) -> Result<QuantizedTensor, KernelError> {
    let format = Format::affine(4, 64, FloatType::F16)?;
    let mut components = vec![];
    for (component, bytes) in format.components(K)?.iter().zip(format.encode(values, K)?) {
        // `bytes::Bytes` is the way for what is bytes already: here a `Vec`, as well a range of a
        // memory map.
        let shape = [N, component.columns];
        components.push(Tensor::mapped(bytes.into(), &shape, component.dtype, device)?);
    }
    QuantizedTensor::new(format, &[N, K], components)
}

/// `y[M, N] = x[M, K] weight[N, K]^T` on the CPU.
fn on_cpu(x: &Arc<Vec<f32>>, values: &[f32]) -> Result<Vec<f32>, KernelError> {
    let device = Device::cpu(None)?;
    let operand = Tensor::from_owner(Activations(x.clone()), &[M, K], &device)?;
    assert_eq!(operand.as_slice::<f32>()?.as_ptr(), x.as_ptr(), "nothing was copied");
    let y = ops::quantized_matmul(&operand, &weight(values, &device)?)?;
    Ok(y.as_slice::<f32>()?.to_vec())
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use cudarc::driver::{CudaContext, DevicePtr};
    use lowbit_formats::DType;
    use lowbit_kernels::gpu::CudaOptions;

    /// The same on CUDA device 0, with the stream and the memory of `cudarc`, as of any engine.
    #[allow(unsafe_code)]
    pub fn on_cuda(x: &[f32], values: &[f32]) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
        let context = CudaContext::new(0)?;
        let stream = context.new_stream()?;
        let home = std::env::var_os("CUDA_HOME").unwrap_or_else(|| "/usr/local/cuda".into());
        let options = CudaOptions::new([home]);
        // SAFETY: the stream outlives the device, which is dropped at the end of this function,
        // before it.
        let device = unsafe { Device::cuda_on_stream(0, stream.cu_stream().cast(), &options) }?;

        let memory = stream.clone_htod(x)?;
        let (address, _used) = memory.device_ptr(&stream);
        // SAFETY: the memory holds [M, K] values and outlives the tensor; all work on it is on
        // `stream`.
        let operand = unsafe { Tensor::from_cuda_ptr(address, &[M, K], DType::F32, &device, ()) }?;
        let weight = weight(values, &Device::cpu(Some(1))?)?.to_device(&device)?;
        let y = ops::quantized_matmul(&operand, &weight)?;
        // An engine goes on with `y.cuda_ptr()` on its stream; here the result is fetched.
        let y = y.to_device(&Device::cpu(Some(1))?)?;
        Ok(y.as_slice::<f32>()?.to_vec())
    }
}
