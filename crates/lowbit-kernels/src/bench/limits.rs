//! What a device can do at most, measured: the bandwidth of its memory and the rate of dense products.

use super::median;
use crate::{
    Cpu, Device, KernelError,
    simd::{Kernel, Simd},
};
use std::time::Instant;

/// The device's measured limits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bandwidth of reading memory that is in no cache; on a GPU, of reading and writing in a copy.
    pub bytes_per_second: f64,
    /// The best rate of a dense f32 product; on a GPU that of the vendor BLAS in bf16, or infinite without one.
    pub flops_per_second: f64,
}

impl Limits {
    /// Measures `device` with all of its threads.
    ///
    /// # Errors
    /// Those of the product.
    pub fn measure(device: &Device) -> Result<Self, KernelError> {
        let bytes_per_second = match device {
            Device::Cpu(cpu) => read_bandwidth(cpu),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu.copy_bandwidth()?,
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        let mut flops_per_second = f64::INFINITY;
        for product in inventory::iter::<DenseProduct> {
            flops_per_second = (product.0)(device)?;
        }
        Ok(Self { bytes_per_second, flops_per_second })
    }
}

/// A function that measures the operations per second of the best dense product on a device: infinite where there is nothing
/// to compare with. The op of dense products registers it.
pub struct DenseProduct(pub fn(&Device) -> Result<f64, KernelError>);
inventory::collect!(DenseProduct);

/// Bytes that no cache of `device` holds.
pub(super) fn cold(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => last_level_cache(),
        // Several times the largest that GPUs have; as many copies on all of them, so that their figures can be compared.
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => (4 * gpu.caps().cache).max(400 << 20),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
    }
}

/// Bytes of the largest cache, as Linux reports it; 32 MiB if it does not.
pub fn last_level_cache() -> usize {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").into_iter().flatten().flatten();
    let sizes = caches.filter_map(|cache| {
        let text = std::fs::read_to_string(cache.path().join("size")).ok()?;
        kibibytes(text.trim())
    });
    sizes.max().unwrap_or(32 << 20)
}

/// Bytes of a size such as `480K`.
pub(super) fn kibibytes(text: &str) -> Option<usize> {
    text.strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
}

/// Streams that a thread reads at the same time: one does not saturate memory.
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

/// Sums all numbers, reading [`STREAMS`] streams at the same time.
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
