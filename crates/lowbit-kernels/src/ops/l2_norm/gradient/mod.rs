//! The gradient of [`l2_norm()`](super::l2_norm()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use crate::ops::Check;
use crate::simd::{Kernel, Simd, slices};
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

/// With `L = sqrt(sum over e of x[.., e]^2 + eps)`, the gradient of `y = x / L`:
///
/// ```text
/// dx[.., d] = (dy[.., d] - x[.., d] / L^2 * sum over e of x[.., e] * dy[.., e]) / L
/// ```
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | dx | `[.., D]` | dy's |
///
/// All arithmetic is f32, rounded once to dy's dtype.
///
/// # Errors
/// As [`l2_norm()`](super::l2_norm()); [`KernelError::Shape`] for a dy of another shape than x.
pub fn l2_norm_backward(x: &Tensor, eps: f32, dy: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("l2_norm_backward");
    let Some(&width) = x.shape().last() else {
        return Err(check.shape_error("x", x, "[.., D] is wanted".into()));
    };
    check.eps(eps)?;
    check.float("x", x)?;
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let (x, dy) = (check.widened("x", x)?, check.widened("dy", dy)?);
    let dx = match x.device() {
        _ if x.is_empty() => Tensor::allocate(x.shape(), DType::F32, x.device())?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, [&x, &dy], eps)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => on_cpu(cpu, [&x, &dy], width, eps)?,
    };
    dx.cast(dtype)
}

/// dx in f32, of x and dy in f32.
fn on_cpu(cpu: &Cpu, [x, dy]: [&Tensor; 2], width: usize, eps: f32) -> Result<Tensor, KernelError> {
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let (x, dy) = (x.as_slice::<f32>()?, dy.as_slice::<f32>()?);
    cpu.for_each_rows(dx.as_mut_slice()?, width, 4 * width, |first, dx| {
        let range = first * width..first * width + dx.len();
        cpu.isa().dispatch(Rows { x: &x[range.clone()], dy: &dy[range], width, eps, dx });
    });
    Ok(dx)
}

/// Some whole rows.
struct Rows<'a> {
    x: &'a [f32],
    dy: &'a [f32],
    width: usize,
    eps: f32,
    dx: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.width).zip(self.dy.chunks_exact(self.width));
        for ((x, dy), dx) in rows.zip(self.dx.chunks_exact_mut(self.width)) {
            let scale = slices::reciprocal((slices::dot(simd, x, x) + self.eps).sqrt());
            let along = slices::dot(simd, x, dy) * scale * scale;
            dx.iter_mut().zip(x.iter().zip(dy)).for_each(|(dx, (x, dy))| *dx = (dy - x * along) * scale);
        }
    }
}
