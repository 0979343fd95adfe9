//! The weighted sum of a token's experts.
//! ```text
//! y[t, n] = sum_i weights[t, i] * x[t, i, n]      in ascending i, in f32, rounded once at the end
//! ```
//! | operand | shape | dtype |
//! |---|---|---|
//! | `x` | `[T, top_k, N]` | f32, f16 or bf16 |
//! | `weights` | `[T, top_k]` | f32 (see `router_top_k`) |
//! | `y` | `[T, N]` | as `x` |
//!
//! Source: mlx-lm 0.32 `Qwen3NextSparseMoeBlock`; transformers 5 `Qwen3NextExperts` (which rounds
//! each product to the activations' dtype).

mod bench;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{CombineExpertsGradient, combine_experts_backward};

use super::Check;
use crate::simd::{Kernel, Simd};
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

/// Sums the experts' outputs `x`, weighted by `weights`.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that do
/// not fit the [module](self)'s table. NaN and infinity pass through.
pub fn combine_experts(x: &Tensor, weights: &Tensor) -> Result<Tensor, KernelError> {
    let op = Check("combine_experts");
    let [tokens, top_k, n] = check(op, x, weights)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(op, gpu, x, weights),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let wide = op.widened("x", x)?;
            let (wide, weights) = (wide.as_slice::<f32>()?, weights.as_slice::<f32>()?);
            let mut y = Tensor::allocate(&[tokens, n], DType::F32, x.device())?;
            cpu.for_each_rows(y.as_mut_slice::<f32>()?, n, top_k * n, |first, y| {
                let (x, weights) = (&wide[first * top_k * n..], &weights[first * top_k..]);
                cpu.isa().dispatch(Rows { x, weights, top_k, n, y });
            });
            y.cast(x.dtype())
        }
    }
}

/// Checks the operands against the [module](self)'s table; returns T, top_k and N.
fn check(op: Check, x: &Tensor, weights: &Tensor) -> Result<[usize; 3], KernelError> {
    let [tokens, top_k, n] = op.dims("x", x, "[T, top_k, N]")?;
    op.shape("weights", weights, &[tokens, top_k], || format!("x {:?}", x.shape()))?;
    op.dtype("weights", weights, DType::F32)?;
    op.float("x", x)?;
    op.same_device("weights", weights.device(), x.device())?;
    Ok([tokens, top_k, n])
}

/// Some whole rows of y.
struct Rows<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    top_k: usize,
    n: usize,
    y: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (t, y) in self.y.chunks_exact_mut(self.n).enumerate() {
            y.fill(0.0);
            for slot in t * self.top_k..(t + 1) * self.top_k {
                let weight = self.weights[slot];
                for (y, &x) in y.iter_mut().zip(&self.x[slot * self.n..(slot + 1) * self.n]) {
                    *y += weight * x;
                }
            }
        }
    }
}
