//! Measures a device's limits: the bandwidth of its memory and the rates of its arithmetic.

use super::Case;
use crate::{
    Cpu, Device, KernelError,
    simd::{
        Isa,
        peak::{self, Read},
    },
};
use std::time::Instant;

/// The arithmetic of a case. On a GPU all cases are compared with one rate, that of the vendor BLAS
/// in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// f32, in fused multiply-adds.
    #[default]
    F32,
    /// Pairs of bf16, summed in f32.
    Bf16,
    /// Four int8 at a time, summed in int32.
    Int8,
    /// Tiles of bf16 where the processor has a unit for them, else int8.
    Tiles,
}

/// The device's measured limits. A rate is in additions and multiplications per second, of all
/// threads together.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bandwidth of reading memory that is in no cache; on a GPU, of reading and writing in a copy.
    pub bytes_per_second: f64,
    /// The rate of f32 multiply-adds in registers; on a GPU that of the vendor BLAS in bf16, or
    /// infinite without one.
    pub f32_per_second: f64,
    /// The rate of bf16 products, on a CPU that of its unit for tiles; `None` where the device has
    /// none, or where it is not measured.
    pub bf16_per_second: Option<f64>,
    /// The rate of int8 dot products; `None` where the device has none, or where it is not
    /// measured.
    pub int8_per_second: Option<f64>,
}

impl Limits {
    /// Measures `device` with all of its threads.
    ///
    /// # Errors
    /// Those of the device.
    pub fn measure(device: &Device) -> Result<Self, KernelError> {
        match device {
            Device::Cpu(cpu) => Ok(Self {
                bytes_per_second: read_bandwidth(cpu),
                f32_per_second: on_all_threads(cpu, peak::f32_operations_per_second),
                bf16_per_second: cpu.isa().has_tiles().then(|| {
                    on_all_threads(cpu, |isa| peak::bf16_operations_per_second(isa).unwrap_or_default())
                }),
                int8_per_second: Some(on_all_threads(cpu, peak::int8_operations_per_second)),
            }),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let (bytes_per_second, rate) = (gpu.copy_bandwidth()?, vendor_product(device)?);
                Ok(Self {
                    bytes_per_second,
                    f32_per_second: rate,
                    bf16_per_second: Some(rate),
                    int8_per_second: Some(rate),
                })
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        }
    }

    /// The rate of that arithmetic; infinite where it is unknown.
    pub fn operations_per_second(&self, arithmetic: Arithmetic) -> f64 {
        match arithmetic {
            Arithmetic::F32 => self.f32_per_second,
            Arithmetic::Bf16 => self.bf16_per_second.unwrap_or(f64::INFINITY),
            Arithmetic::Int8 => self.int8_per_second.unwrap_or(f64::INFINITY),
            Arithmetic::Tiles => self.bf16_per_second.or(self.int8_per_second).unwrap_or(f64::INFINITY),
        }
    }

    /// The least time that `case` takes: for moving its bytes or for its arithmetic, whichever is
    /// longer.
    pub fn seconds(&self, case: &Case) -> f64 {
        let moving = case.bytes as f64 / self.bytes_per_second;
        moving.max(case.flops as f64 / self.operations_per_second(case.arithmetic))
    }
}

/// A function that measures the operations per second of the best dense product on a GPU: infinite
/// where there is nothing to compare with. The op of dense products registers it.
#[cfg(feature = "gpu")]
pub struct DenseProduct(pub fn(&Device) -> Result<f64, KernelError>);
#[cfg(feature = "gpu")]
inventory::collect!(DenseProduct);

#[cfg(feature = "gpu")]
fn vendor_product(device: &Device) -> Result<f64, KernelError> {
    let product = inventory::iter::<DenseProduct>.into_iter().next();
    product.map_or(Ok(f64::INFINITY), |product| (product.0)(device))
}

/// Bytes that no cache of `device` holds.
pub(super) fn cold(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => past_caches(),
        // Several times the largest that GPUs have; as many copies on all of them, so that their
        // figures can be compared.
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

/// Bytes of which the last-level cache holds little when they are read over and over: a cache that
/// does not replace the oldest line first still holds a third of twice its size.
fn past_caches() -> usize {
    let cache = last_level_cache();
    (4 * cache).min((1 << 30).max(2 * cache))
}

/// Bytes of a size such as `480K`.
pub(super) fn kibibytes(text: &str) -> Option<usize> {
    text.strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
}

/// Each limit is the best of so many runs: what another process takes is no limit of the device.
const RUNS: usize = 5;

/// The sum of what all threads reach at the same time.
fn on_all_threads(cpu: &Cpu, rate: fn(Isa) -> f64) -> f64 {
    let run = |_| {
        let mut rates = vec![0.0; cpu.threads()];
        cpu.for_each(rates.iter_mut().collect(), |one| *one = rate(cpu.isa()));
        rates.iter().sum::<f64>()
    };
    (0..RUNS).map(run).fold(0.0, f64::max)
}

/// Bytes per second of all threads reading at the same time, by the best number of streams per
/// thread.
fn read_bandwidth(cpu: &Cpu) -> f64 {
    let part = (2 * past_caches() / size_of::<f32>()).div_ceil(cpu.threads()).next_multiple_of(1 << 12);
    let memory = vec![1.0f32; part * cpu.threads()];
    let seconds = |read: fn(Isa, &[f32]) -> f32| {
        let run = |_| {
            let start = Instant::now();
            cpu.for_each(memory.chunks_exact(part).collect(), |part| {
                std::hint::black_box(read(cpu.isa(), part));
            });
            start.elapsed().as_secs_f64()
        };
        (0..RUNS).map(run).fold(f64::INFINITY, f64::min)
    };
    let times = [
        seconds(|isa, part| isa.dispatch(Read::<2, 0>(part))),
        seconds(|isa, part| isa.dispatch(Read::<2, 4096>(part))),
        seconds(|isa, part| isa.dispatch(Read::<4, 1024>(part))),
        seconds(|isa, part| isa.dispatch(Read::<8, 1024>(part))),
        seconds(|isa, part| isa.dispatch(Read::<16, 1024>(part))),
    ];
    (memory.len() * size_of::<f32>()) as f64 / times.into_iter().fold(f64::INFINITY, f64::min)
}
