//! A case's measurements, as a line of a record.

use super::{Case, Limits};

/// A case's measurements.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Row {
    pub op: String,
    pub shape: String,
    pub format: String,
    pub dtype: String,
    pub median_us: f64,
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
        "op,shape,format,dtype,median_us,bytes,flops,share_of_limit,error_over_bound";

    pub(super) fn new(case: &Case, seconds: f64, limits: &Limits, error_over_bound: f64) -> Self {
        Self {
            op: case.op.into(),
            shape: case.shape.clone(),
            format: case.format.clone(),
            dtype: case.dtype.dtype().to_string(),
            median_us: seconds * 1e6,
            bytes: case.bytes,
            flops: case.flops,
            share_of_limit: limits.seconds(case) / seconds,
            error_over_bound,
        }
    }

    /// One line of a record. No field contains a comma.
    pub fn csv(&self) -> String {
        let Self { op, shape, format, dtype, median_us, bytes, flops, share_of_limit, error_over_bound } =
            self;
        format!(
            "{op},{shape},{format},{dtype},{median_us:.2},{bytes},{flops},{share_of_limit:.4},{error_over_bound:.4}"
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
