//! A case's measurements, as a line of a record.

use super::{Case, Limits, Times};

/// A case's measurements.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Row {
    pub op: String,
    pub shape: String,
    pub format: String,
    pub dtype: String,
    pub median_us: f64,
    /// The median of the runs' distances from the median time.
    pub deviation_us: f64,
    pub bytes: usize,
    pub flops: usize,
    /// [`Limits::seconds`] divided by the median time.
    pub share_of_limit: f64,
    /// The largest ratio of an error to its bound.
    pub error_over_bound: f64,
}

impl Row {
    /// The names of [`Row::csv`]'s columns.
    pub const HEADER: &'static str =
        "op,shape,format,dtype,median_us,bytes,flops,share_of_limit,error_over_bound,deviation_us";

    pub(super) fn new(case: &Case, times: Times, limits: &Limits, error_over_bound: f64) -> Self {
        let seconds = times.median;
        Self {
            op: case.op.into(),
            shape: case.shape.clone(),
            format: case.format.clone(),
            dtype: case.dtype.dtype().to_string(),
            median_us: seconds * 1e6,
            deviation_us: times.deviation * 1e6,
            bytes: case.bytes,
            flops: case.flops,
            share_of_limit: limits.seconds(case) / seconds,
            error_over_bound,
        }
    }

    /// One line of a record. No field contains a comma.
    pub fn csv(&self) -> String {
        let Self { op, shape, format, dtype, median_us, deviation_us, bytes, flops, .. } = self;
        let Self { share_of_limit, error_over_bound, .. } = self;
        format!(
            "{op},{shape},{format},{dtype},{median_us:.2},{bytes},{flops},{share_of_limit:.4},{error_over_bound:.4},{deviation_us:.2}"
        )
    }

    /// Bytes moved per second, in units of 10^9.
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.median_us / 1e3
    }

    /// Operations per second, in units of 10^9.
    pub fn gigaflops(&self) -> f64 {
        self.flops as f64 / self.median_us / 1e3
    }
}
