//! Shared by the tests of this crate and of those with ops, each of which includes this file:
//! devices, tensors of random values, and the comparison with a derived bound.

#![allow(dead_code)] // No crate's tests use all of it.

#[cfg(feature = "gpu")]
pub(crate) mod kernels;

use lowbit_device::{Device, Tensor, simd::Isa};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

/// Every activation type.
pub(crate) const FLOATS: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::BF16];

/// CPU devices: each instruction set of this machine, with one thread and with two.
pub(crate) fn devices() -> Vec<Device> {
    let all = Isa::all().into_iter();
    all.flat_map(|isa| [1, 2].map(|threads| Device::cpu_with(Some(threads), isa).expect("a device")))
        .collect()
}

/// The GPU that tests run on: the one that `LOWBIT_GPU` names, by default Vulkan's, for which there
/// is a software driver.
#[cfg(feature = "gpu")]
pub(crate) fn gpu() -> Device {
    let name = std::env::var("LOWBIT_GPU").unwrap_or_else(|_| "vulkan".into());
    match name.as_str() {
        #[cfg(feature = "cuda")]
        "cuda" => {
            // One per thread, so that kernels are compiled once and tests do not capture each
            // other's launches.
            thread_local!(static CUDA: Device = Device::cuda(0, &kernels::cuda_options()).expect("a CUDA device"));
            CUDA.with(Device::clone)
        }
        #[cfg(feature = "vulkan")]
        "vulkan" => {
            // One for all threads, with the kernels that other tests' processes compiled.
            static VULKAN: std::sync::LazyLock<Device> = std::sync::LazyLock::new(|| {
                let cache = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/kernels");
                let options = lowbit_device::gpu::VulkanOptions::default().with_cache(cache);
                Device::vulkan(&options).expect("a Vulkan driver, such as Mesa's lavapipe")
            });
            VULKAN.clone()
        }
        #[cfg(feature = "metal")]
        "metal" => Device::metal().expect("a Metal device"),
        // Metal's kernels on the processor.
        #[cfg(feature = "msl")]
        "msl" => {
            thread_local!(static MSL: Device = Device::msl());
            MSL.with(Device::clone)
        }
        _ => panic!("LOWBIT_GPU is {name}, which this build does not have"),
    }
}

/// `values` rounded to `dtype`.
pub(crate) fn rounded(values: &[f32], shape: &[usize], dtype: FloatType, device: &Device) -> Tensor {
    tensor(values, shape, dtype, device).0
}

/// A device where the host can read a tensor of `device`: `device` itself, if it is a CPU.
pub(crate) fn host(device: &Device) -> Device {
    match device {
        Device::Cpu(_) => device.clone(),
        Device::Gpu(_) => self::device(),
    }
}

/// The tensor in the host's memory.
pub(crate) fn fetched(x: &Tensor) -> Tensor {
    x.to_device(&host(x.device())).expect("it can be read")
}

/// Tensors of `count` elements of 4, 2 and 1 bytes, in which neighbours differ.
#[cfg(feature = "gpu")]
pub(crate) fn patterns(count: usize) -> Vec<Tensor> {
    let words: Vec<u32> = (0..count as u32).map(|i| i.wrapping_mul(0x9e37_79b1)).collect();
    let halves: Vec<half::f16> = words.iter().map(|&word| half::f16::from_bits(word as u16)).collect();
    let bytes: Vec<u8> = words.iter().map(|&word| word as u8).collect();
    let (shape, device) = ([count], device());
    [
        Tensor::new(&words, &shape, &device),
        Tensor::new(&halves, &shape, &device),
        Tensor::new(&bytes, &shape, &device),
    ]
    .map(|tensor| tensor.expect("it fits"))
    .into()
}

/// The same values on another device.
pub(crate) fn moved(x: &Tensor, device: &Device) -> Tensor {
    Tensor::mapped(bytes::Bytes::copy_from_slice(x.bytes()), x.shape(), x.dtype(), device).expect("a tensor")
}

/// All values in f32.
pub(crate) fn values(x: &Tensor) -> Vec<f32> {
    fetched(x).cast(DType::F32).expect("floats").as_slice::<f32>().expect("f32").to_vec()
}

/// The largest error of rounding a value of at most this `magnitude` to `dtype`.
pub(crate) fn rounding(dtype: FloatType, magnitude: f64) -> f64 {
    match dtype {
        FloatType::F32 => 0.0,
        FloatType::F16 => (magnitude * 2f64.powi(-11)).max(2f64.powi(-25)),
        FloatType::BF16 => (magnitude * 2f64.powi(-8)).max(2f64.powi(-134)),
    }
}

/// Row lengths below, at and above one vector and four vectors of 8 and of 16 lanes.
pub(crate) const WIDTHS: [usize; 16] = [1, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 203];

/// A CPU with one thread.
pub(crate) fn device() -> Device {
    Device::cpu(Some(1)).unwrap()
}

/// A tensor of `values` rounded to `dtype`, and the rounded values.
pub(crate) fn tensor(
    values: &[f32],
    shape: &[usize],
    dtype: FloatType,
    device: &Device,
) -> (Tensor, Vec<f32>) {
    let tensor = Tensor::new(values, shape, &host(device)).unwrap().cast(dtype.dtype()).unwrap();
    let rounded = tensor.cast(DType::F32).unwrap().as_slice().unwrap().to_vec();
    (tensor.to_device(device).unwrap(), rounded)
}

/// A tensor of normal numbers, and its values.
pub(crate) fn normal(
    random: &mut Random,
    shape: &[usize],
    dtype: FloatType,
    device: &Device,
) -> (Tensor, Vec<f32>) {
    tensor(&random.normal(shape.iter().product(), 1.5), shape, dtype, device)
}

/// Asserts that `y` has this type and shape, and that its values are within `bound` of `want`, with
/// the error of rounding to its type on top.
#[track_caller]
pub(crate) fn assert_close(
    y: &Tensor,
    shape: &[usize],
    dtype: FloatType,
    want: &[f64],
    bound: impl Fn(usize) -> f64,
) {
    assert_eq!((y.shape(), y.dtype()), (shape, dtype.dtype()));
    let y = fetched(y).cast(DType::F32).unwrap();
    // Half a unit in the last place of 11 or 8 digits, or of the smallest subnormal.
    let (relative, least) = match dtype {
        FloatType::F32 => (0.0, 2f64.powi(-150)),
        FloatType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        FloatType::BF16 => (2f64.powi(-8), 2f64.powi(-134)),
    };
    let rounding = |i: usize| relative * (want[i].abs() + bound(i)) + least;
    numcheck::assert_within(y.as_slice().unwrap(), want, |i| bound(i) + rounding(i));
}

/// `n` roughly normal numbers that are multiples of 2^-8, for [`assert_derivatives`].
pub(crate) fn coarse(random: &mut Random, n: usize) -> Vec<f32> {
    random.normal(n, 1.0).iter().map(|x| (x * 256.0).round() / 256.0).collect()
}

/// Asserts that `want` are the derivatives of `f` by the elements of `x`, multiples of 2^-8:
/// central differences of three steps that are exact in f32, extrapolated to step 0 (Romberg). The
/// last extrapolation's change bounds the error, and f64's rounding of `f` comes on top.
#[track_caller]
pub(crate) fn assert_derivatives(what: &str, x: &[f32], want: &[f64], f: impl Fn(&[f32]) -> f64) {
    assert_eq!(x.len(), want.len(), "{what}: length");
    let steps = [10, 9, 8].map(|power| 2f64.powi(-power));
    let rounding = 64.0 * f64::EPSILON * (1.0 + f(x).abs()) / steps[0];
    for (i, &want) in want.iter().enumerate() {
        let moved = |step: f64| {
            let mut x = x.to_vec();
            x[i] += step as f32;
            f(&x)
        };
        let [a, b, c] = steps.map(|step| (moved(step) - moved(-step)) / (2.0 * step));
        let [ab, bc] = [(a, b), (b, c)].map(|(fine, rough)| fine + (fine - rough) / 3.0);
        let slope = ab + (ab - bc) / 15.0;
        let bound = (slope - ab).abs() + rounding;
        assert!(bound < 1e-6 * (1.0 + want.abs()), "{what} [{i}]: the differences say too little: {bound:e}");
        assert!((slope - want).abs() <= bound, "{what} [{i}]: slope {slope}, but {want}: over {bound:e}");
    }
}

/// `sum a[i] b[i]`.
pub(crate) fn dot(a: &[f64], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, &b)| a * f64::from(b)).sum()
}
