use super::median;
use crate::{
    Cpu, Device, KernelError, inputs,
    ops::matmul,
    simd::{Kernel, Simd},
};
use lowbit_formats::FloatType;
use std::time::Instant;

/// What the device can do at the most, measured.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Reading memory that no cache holds; on a GPU reading and writing in a copy.
    pub bytes_per_second: f64,
    /// The best dense f32 product; on a GPU its maker's library's in bf16, or infinite where there is none.
    pub flops_per_second: f64,
}

impl Limits {
    /// Measures `device` with all of its threads.
    ///
    /// # Errors
    /// What the product gives.
    pub fn measure(device: &Device) -> Result<Self, KernelError> {
        match device {
            Device::Cpu(cpu) => {
                Ok(Self { bytes_per_second: read_bandwidth(cpu), flops_per_second: dense_product(device)? })
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Ok(Self {
                bytes_per_second: gpu.copy_bandwidth()?,
                flops_per_second: library_product(gpu, device)?,
            }),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        }
    }
}

/// Bytes that no cache of `device` holds.
pub(super) fn cold(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => last_level_cache(),
        // Several times the largest that GPUs have.
        Device::Gpu(_) => 400 << 20,
    }
}

/// Bytes of the largest cache, as Linux tells it; 32 MiB where it does not.
pub fn last_level_cache() -> usize {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").into_iter().flatten().flatten();
    let sizes = caches.filter_map(|cache| {
        let text = std::fs::read_to_string(cache.path().join("size")).ok()?;
        kibibytes(text.trim())
    });
    sizes.max().unwrap_or(32 << 20)
}

/// `480K` and the like, in bytes.
pub(super) fn kibibytes(text: &str) -> Option<usize> {
    text.strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
}

/// Places that a thread reads from at once: one stream alone does not keep memory busy.
const STREAMS: usize = 8;

fn read_bandwidth(cpu: &Cpu) -> f64 {
    let part = (last_level_cache() / size_of::<f32>()).div_ceil(cpu.threads()).next_multiple_of(STREAMS * 16);
    let memory = vec![1.0f32; part * cpu.threads()];
    let mut times = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        let parts: Vec<_> = memory.chunks_exact(part).collect();
        cpu.for_each(parts, |part| {
            std::hint::black_box(cpu.isa().dispatch(Read(part)));
        });
        times.push(start.elapsed().as_secs_f64());
    }
    (memory.len() * size_of::<f32>()) as f64 / median(times)
}

/// Adds everything up, from [`STREAMS`] places at once.
struct Read<'a>(&'a [f32]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let stream = self.0.len() / STREAMS;
        let streams: [&[f32]; STREAMS] = std::array::from_fn(|i| &self.0[i * stream..][..stream]);
        let mut sums = [simd.splat(0.0); STREAMS];
        let mut at = 0;
        while at + S::LANES <= stream {
            for (sum, stream) in sums.iter_mut().zip(&streams) {
                *sum = simd.add(*sum, simd.load(&stream[at..]));
            }
            at += S::LANES;
        }
        sums.into_iter().map(|sum| simd.sum(sum)).sum()
    }
}

/// The best of some bf16 products by the maker's library.
#[cfg(feature = "gpu")]
fn library_product(gpu: &crate::gpu::Gpu, device: &Device) -> Result<f64, KernelError> {
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

fn dense_product(device: &Device) -> Result<f64, KernelError> {
    let mut best = 0.0f64;
    for (m, n, k) in [(512, 1024, 1024), (1024, 2048, 2048)] {
        let x = inputs::activations(&[m, k], FloatType::F32, 1, device)?;
        let weight = inputs::activations(&[n, k], FloatType::F32, 2, device)?;
        for _ in 0..5 {
            let start = Instant::now();
            matmul(&x, &weight)?;
            best = best.max((2 * m * n * k) as f64 / start.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}
