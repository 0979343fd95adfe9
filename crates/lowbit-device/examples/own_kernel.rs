//! A GPU kernel of one's own, written once and run on a lowbit device, with its benchmark.
//!
//!     cargo run --release -p lowbit-device --features vulkan --example own_kernel
//!
//! With the feature `cuda` it runs on a CUDA device.

#![allow(unsafe_code)] // A launch.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_device::bench::{self, Arithmetic, Case, Expected, GpuCases, Limits, Prepared};
use lowbit_device::gpu::compile::Sources;
use lowbit_device::gpu::launch::{kernel, sources};
use lowbit_device::{Check, Device, KernelError, Tensor, inputs};
use lowbit_formats::{DType, FloatType};

const UNITS: usize = 256;

/// `y[t, d] = x[t, d] * scale[t]`.
#[kernel]
fn scale_rows(x: &[f32], scale: &[f32], y: &mut [f32], len: u32, width: u32) {
    if ABSOLUTE_POS < len as usize {
        y[ABSOLUTE_POS] = x[ABSOLUTE_POS] * scale[ABSOLUTE_POS / width as usize];
    }
}

// This program's kernels are kept on the disk under a name of their own.
inventory::submit!(Sources(sources!()));
// `bench::cases` lists it.
inventory::submit!(GpuCases(|| vec![case(4096, 4096)]));

/// Rows `[T, D]` of f32 times their factors `[T]`, on a GPU.
fn scale(x: &Tensor, scale: &Tensor) -> Result<Tensor, KernelError> {
    const CHECK: Check = Check("scale_rows");
    let (Device::Gpu(gpu), &[rows, width]) = (x.device(), x.shape()) else {
        return Err(CHECK.shape_error("x", x, "[T, D] on a GPU is wanted".into()));
    };
    CHECK.dtype("x", x, DType::F32)?;
    CHECK.dtype("scale", scale, DType::F32)?;
    CHECK.shape("scale", scale, &[rows], || format!("x has {rows} rows"))?;
    CHECK.same_device("scale", scale.device(), x.device())?;
    let y = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let (len, width) = (CHECK.index(x.len())?, CHECK.index(width)?);
    let arguments = ScaleRows { x: x.buffer()?, scale: scale.buffer()?, y: y.buffer()?, len, width };
    let cubes = [len.div_ceil(UNITS as u32).max(1), 1, 1];
    // SAFETY: each unit has one element of x and y, and a row that scale has.
    unsafe { gpu.launch(ScaleRows::kernel(gpu.target(), UNITS), cubes, arguments)? };
    Ok(y)
}

fn case(rows: usize, width: usize) -> Case {
    Case {
        op: "scale_rows",
        shape: format!("T={rows} D={width}"),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: 4 * rows * (2 * width + 1),
        flops: rows * width,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let (x, xs) = inputs::operand(&[rows, width], FloatType::F32, 1, device)?;
            let (factors, of_rows) = inputs::operand(&[rows], FloatType::F32, 2, device)?;
            let product = |(i, &x): (usize, &f32)| f64::from(x * of_rows[i / width]);
            let want: Vec<f64> = xs.iter().enumerate().map(product).collect();
            let expected = Expected::all(&want, FloatType::F32, |_| 0.0);
            Ok(Prepared::warm(move || scale(&x, &factors), expected))
        }),
    }
}

fn device() -> Result<Device, KernelError> {
    #[cfg(feature = "cuda")]
    return Device::cuda(0, &lowbit_device::gpu::CudaOptions::new(["/usr/local/cuda"]));
    #[cfg(all(feature = "vulkan", not(feature = "cuda")))]
    return Device::vulkan(&Default::default());
    #[cfg(not(any(feature = "cuda", feature = "vulkan")))]
    return Device::metal();
}

fn main() -> Result<(), KernelError> {
    let device = device()?;
    let limits = Limits::measure(&device)?;
    for case in bench::cases("scale_rows", &device) {
        let row = bench::run(&case, &device, &limits)?;
        println!("{case}: {:.1} us, {:.0} GB/s", row.median_us, row.gigabytes_per_second());
    }
    Ok(())
}
