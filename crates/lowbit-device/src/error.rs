use lowbit_formats::{DType, FormatError};

/// An error of an op, a tensor or a device.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum KernelError {
    #[error("{op}: {operand} is {got:?}, but {want}")]
    Shape { op: &'static str, operand: &'static str, got: Vec<usize>, want: String },
    #[error("{op}: {operand} is {got}, but {want} is wanted")]
    DType { op: &'static str, operand: &'static str, got: DType, want: DType },
    #[error("{op}: {operand} is {got}, but {want}")]
    Value { op: &'static str, operand: &'static str, got: String, want: String },
    #[error("{op}: {operand}[{index}] is {id}, but there are {count} rows to choose from")]
    Id { op: &'static str, operand: &'static str, index: usize, id: u32, count: usize },
    #[error("{op}: {shape:?} is more than memory can hold")]
    TooLarge { op: &'static str, shape: Vec<usize> },
    #[error("{op}: {operand} is on {got}, but x is on {want}")]
    Device { op: &'static str, operand: &'static str, got: String, want: String },
    #[error("{op} does not run on {device}")]
    Unsupported { op: &'static str, device: String },
    /// There is no such device on this machine.
    #[error("{device}: {problem}")]
    NoGpu { device: String, problem: String },
    #[error("{device}: {problem}")]
    Gpu { device: String, problem: String },
    #[error("kernel {name} does not compile: {problem}")]
    Kernel { name: String, problem: String },
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(
        "{threads} threads were asked for, but 1 to {limit} are wanted: this machine runs {cores} at once"
    )]
    Threads { threads: usize, cores: usize, limit: usize },
    #[error("the thread pool could not be started: {0}")]
    ThreadPool(#[source] std::io::Error),
}
