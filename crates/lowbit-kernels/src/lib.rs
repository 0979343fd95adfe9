//! The ops of low-bit language models: each folder of [`ops`] holds one op's contract, its f64 reference, its
//! implementations, its tests and its benchmark cases. What they stand on ([`Device`], [`Tensor`],
//! [`QuantizedTensor`], [`simd`]) names no op.

pub mod bench;
mod buffer;
mod cast;
mod device;
mod error;
mod gemm;
pub mod gpu;
mod inputs;
pub mod ops;
mod quantized;
mod scan;
pub mod simd;
mod tensor;

pub use device::{Cpu, Device};
pub use error::KernelError;
pub use quantized::QuantizedTensor;
pub use tensor::{Element, Tensor};
