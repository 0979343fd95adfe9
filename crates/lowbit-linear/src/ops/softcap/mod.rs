//! Numbers bent towards a cap: the logits of Gemma.

mod bench;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod tests;

use super::Check;
use super::elementwise;
use crate::simd::{Simd, math::Math, slices::Map};
use crate::{Device, KernelError, Tensor};
pub use gradient::softcap_backward;
use lowbit_formats::DType;

/// `z = y * tanh(x / y)`, element by element, with one `y`, above 0, for each column: z is close to
/// x where x is far below y, and never beyond y.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[.., D]` | f32, f16, bf16 |
/// | y | `[D]` | f32, f16, bf16 |
/// | z | x's | x's |
///
/// All arithmetic is f32, rounded once to x's dtype. NaN in x stays NaN.
///
/// Source: transformers 5.24 `Gemma4ForCausalLM`; mlx-lm 0.32 `logit_softcap`; llama.cpp's
/// `f_final_logit_softcapping`.
///
/// # Errors
/// [`KernelError::Shape`] for another number of caps, [`KernelError::Value`] for other dtypes.
pub fn softcap(x: &Tensor, y: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("softcap");
    let dtype = operands(check, x, y)?;
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::softcap(check, gpu, x, y),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (x, y) = (check.widened("x", x)?, check.widened("y", y)?);
            elementwise::map_rows(cpu, Capped, &x, &y)?.cast(dtype)
        }
    }
}

/// x's dtype; refuses what the ops do not take.
fn operands(check: Check, x: &Tensor, y: &Tensor) -> Result<DType, KernelError> {
    let dtype = check.float("x", x)?.dtype();
    let columns = x.shape().last().copied().unwrap_or(1);
    check.shape("y", y, &[columns], || format!("x {:?}", x.shape()))?;
    check.float("y", y)?;
    check.same_device("y", y.device(), x.device())?;
    Ok(dtype)
}

struct Capped;

impl Map<2> for Capped {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, cap]: [S::V; 2]) -> S::V {
        simd.mul(cap, simd.tanh(simd.div(x, cap)))
    }
}

/// `1 - tanh(x / cap)^2`, which is `4 e / (1 + e)^2` for `e = e^(-2 |x / cap|)`.
struct Slope;

impl Map<2> for Slope {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, cap]: [S::V; 2]) -> S::V {
        let (x, one) = (simd.div(x, cap), simd.splat(1.0));
        let magnitude = simd.max(simd.sub(simd.splat(0.0), x), x);
        let e = simd.exp(simd.mul(magnitude, simd.splat(-2.0)));
        let root = simd.add(one, e);
        simd.div(simd.mul(simd.splat(4.0), e), simd.mul(root, root))
    }
}
