//! Benchmarks: each op's folder registers [`Case`]s; [`run`] checks a case's answer against its
//! reference and then times it on cold weights.
//!
//! ```ignore
//! inventory::submit!(bench::Cases(|| vec![Case { op: "rms_norm", .. }]));
//! ```

mod limits;
mod row;
#[cfg(test)]
mod tests;

#[cfg(feature = "gpu")]
pub use limits::DenseProduct;
pub use limits::{Arithmetic, Limits, last_level_cache};
pub use row::Row;

use crate::{Device, KernelError, Tensor, inputs};
use lowbit_formats::{DType, FloatType};
use std::time::{Duration, Instant};

/// One op at one shape.
pub struct Case {
    /// The op's name.
    pub op: &'static str,
    /// The sizes, named after a real layer's, as in `M=1 K=4096 N=14336`.
    pub shape: String,
    /// The weight's format, or `-` without a weight.
    pub format: String,
    /// The activations' type.
    pub dtype: FloatType,
    /// Bytes that must move at least: every operand is read once and the result written once.
    pub bytes: usize,
    /// Additions and multiplications.
    pub flops: usize,
    /// The arithmetic that does them on the CPU.
    pub arithmetic: Arithmetic,
    /// Bytes of the operands that a model reads once per step and so finds in no cache, such as
    /// weights; 0 if all operands come from the previous op.
    pub cold_bytes: usize,
    /// Makes the operands.
    pub prepare: Prepare,
}

/// Makes a case's operands on a device, with the given number of copies of the cold ones.
pub type Prepare = Box<dyn Fn(&Device, usize) -> Result<Prepared, KernelError>>;

/// A case's operands on a device.
pub struct Prepared {
    /// The same computation on different copies of the cold operands.
    pub runs: Vec<Run>,
    /// The expected result of the first run on the first copy: all or some of its elements.
    pub expected: Vec<Expected>,
}

/// One computation.
pub type Run = Box<dyn FnMut() -> Result<Tensor, KernelError> + Send>;

/// An element of the result that the f64 reference expects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Its index in the result.
    pub index: usize,
    /// The expected value.
    pub value: f64,
    /// The derived bound of the error.
    pub bound: f64,
}

impl Prepared {
    /// A computation whose operands come from the previous op, or stay in a cache.
    pub fn warm(
        run: impl FnMut() -> Result<Tensor, KernelError> + Send + 'static,
        expected: Vec<Expected>,
    ) -> Self {
        Self { runs: vec![Box::new(run)], expected }
    }
}

impl Expected {
    /// Expects all elements `want`, each within `bound`, with the error of rounding to `dtype` on
    /// top.
    pub fn all(want: &[f64], dtype: FloatType, bound: impl Fn(usize) -> f64) -> Vec<Self> {
        let expected = |(index, &value): (usize, &f64)| Self {
            index,
            value,
            bound: bound(index) + inputs::rounding(dtype, value.abs() + bound(index)),
        };
        want.iter().enumerate().map(expected).collect()
    }
}

/// A function that lists an op's cases.
pub struct Cases(pub fn() -> Vec<Case>);
inventory::collect!(Cases);

/// A function that lists an op's cases for GPUs only: their sizes and types would take too long on
/// a CPU.
pub struct GpuCases(pub fn() -> Vec<Case>);
inventory::collect!(GpuCases);

/// A function that lists cases whose sizes grow in small steps, in the order of their sizes.
pub struct ScalingCases(pub fn() -> Vec<Case>);
inventory::collect!(ScalingCases);

/// All cases whose sizes grow and whose description has every word of `filter`.
pub fn scaling_cases(filter: &str) -> Vec<Case> {
    let mut cases: Vec<_> = inventory::iter::<ScalingCases>.into_iter().flat_map(|cases| cases.0()).collect();
    cases.retain(|case| case.has_words(filter));
    cases.sort_by_key(|case| case.op);
    cases
}

/// All cases for a device like `device` whose description has every word of `filter`, sorted by op
/// and dtype.
pub fn cases(filter: &str, device: &Device) -> Vec<Case> {
    let mut cases: Vec<_> = inventory::iter::<Cases>.into_iter().flat_map(|cases| cases.0()).collect();
    if let Device::Gpu(_) = device {
        cases.extend(inventory::iter::<GpuCases>.into_iter().flat_map(|cases| cases.0()));
    }
    cases.retain(|case| case.has_words(filter));
    cases.sort_by(|a, b| (a.op, a.dtype).cmp(&(b.op, b.dtype)));
    cases
}

impl Case {
    fn has_words(&self, filter: &str) -> bool {
        filter.split_whitespace().all(|word| self.to_string().contains(word))
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} {}", self.op, self.shape, self.format, self.dtype.dtype())
    }
}

/// A case is timed for at least this long.
const TIME: Duration = Duration::from_millis(300);
/// A case is timed at least this many times.
const RUNS: usize = 15;

/// Checks `case` on `device`, then times it: the median of many runs, which cycle through the
/// copies of the cold operands. All copies together exceed the last-level cache.
///
/// # Errors
/// [`KernelError::Value`] when the answer is outside its bound; the errors of preparing and running
/// the case.
pub fn run(case: &Case, device: &Device, limits: &Limits) -> Result<Row, KernelError> {
    let copies = limits::cold(device).checked_div(case.cold_bytes).map_or(1, |copies| copies + 2);
    let Prepared { mut runs, expected } = (case.prepare)(device, copies)?;
    let error_over_bound = error_over_bound(case, &runs[0]()?, &expected)?;
    let times = match device {
        Device::Cpu(_) => each(&mut runs)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => replayed(gpu, &mut runs)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
    };
    Ok(Row::new(case, times, limits, error_over_bound))
}

/// The time of a run.
fn each(runs: &mut [Run]) -> Result<Times, KernelError> {
    let (mut times, copies, begin) = (Vec::new(), runs.len(), Instant::now());
    for i in 1.. {
        let start = Instant::now();
        runs[i % copies]()?;
        // The first run of each copy may fault its pages in.
        if i >= copies {
            times.push(start.elapsed().as_secs_f64());
        }
        if times.len() >= RUNS && begin.elapsed() >= TIME {
            break;
        }
    }
    Ok(Times::new(times))
}

/// The device's time per run: over replays of a pass that runs once on each copy.
#[cfg(feature = "gpu")]
fn replayed(gpu: &crate::gpu::Gpu, runs: &mut [Run]) -> Result<Times, KernelError> {
    let turns = runs.len().max(RUNS).next_multiple_of(runs.len());
    let copies = runs.len();
    let pass = gpu.capture(|| (0..turns).try_for_each(|turn| runs[turn % copies]().map(drop)))?;
    let (mut times, begin) = (Vec::new(), Instant::now());
    while times.len() < RUNS || begin.elapsed() < TIME {
        times.push(gpu.time(|| pass.replay())?.as_secs_f64() / turns as f64);
    }
    Ok(Times::new(times))
}

/// Times of runs of the same work, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// The median.
    pub median: f64,
    /// The median of the distances from it, which a run that was interrupted does not change.
    pub deviation: f64,
}

impl Times {
    /// Of at least one run.
    pub fn new(times: Vec<f64>) -> Self {
        let middle = median(times.clone());
        Self { median: middle, deviation: median(times.iter().map(|time| (time - middle).abs()).collect()) }
    }
}

/// The middle one, or the mean of the two in the middle.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// All elements of a result: floats, or ids that an f32 holds.
fn numbers(y: &Tensor) -> Result<Vec<f32>, KernelError> {
    let y = y.to_device(&y.device().host()?)?;
    match y.dtype() {
        DType::U32 => Ok(y.as_slice::<u32>()?.iter().map(|&id| id as f32).collect()),
        _ => Ok(y.cast(DType::F32)?.as_slice::<f32>()?.to_vec()),
    }
}

fn error_over_bound(case: &Case, y: &Tensor, expected: &[Expected]) -> Result<f64, KernelError> {
    let y = numbers(y)?;
    let mut worst = 0.0f64;
    for want in expected {
        let error = (f64::from(y[want.index]) - want.value).abs();
        // An exact zero has a bound of 0.
        let ratio = if error == 0.0 { 0.0 } else { error / want.bound };
        // Not `ratio > 1.0`: a NaN must fail.
        if ratio.is_nan() || ratio > 1.0 {
            return Err(KernelError::Value {
                op: case.op,
                operand: "result",
                got: format!("{} at {} of {case}", y[want.index], want.index),
                want: format!("{} within {:e} is wanted", want.value, want.bound),
            });
        }
        worst = worst.max(ratio);
    }
    Ok(worst)
}
