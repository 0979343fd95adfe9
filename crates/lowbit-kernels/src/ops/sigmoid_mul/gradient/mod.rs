//! The gradients of [`sigmoid_mul()`](super::sigmoid_mul()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use crate::ops::check::Check;
use crate::simd::{Kernel, Simd, math, slices};
use crate::{Cpu, Device, KernelError, Tensor};
use lowbit_formats::DType;

/// Rows per task.
const ROWS: usize = 64;

/// The gradients of [`sigmoid_mul()`](super::sigmoid_mul()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct SigmoidMulGradient {
    pub dx: Tensor,
    pub dgate: Tensor,
}

/// With `s = 1 / (1 + e^-gate)`, the gradients of `y = x * s`:
///
/// ```text
/// dx    = dy * s
/// dgate = dy * x * s * (1 - s), summed over the row where a row has one gate
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | gate | `[.., G]`: the last D columns where `G >= D`, or `[.., 1]` | f32, f16, bf16 |
/// | dx, dgate | x's and gate's; columns of the gate that are not read have gradient 0 | dy's |
///
/// All arithmetic is f32, rounded once.
///
/// # Errors
/// As [`sigmoid_mul()`](super::sigmoid_mul()), of dy too.
pub fn sigmoid_mul_backward(
    x: &Tensor,
    gate: &Tensor,
    dy: &Tensor,
) -> Result<SigmoidMulGradient, KernelError> {
    super::check(x, gate)?;
    let check = Check("sigmoid_mul_backward");
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let (x, gate, dy) = (check.widened("x", x)?, check.widened("gate", gate)?, check.widened("dy", dy)?);
    let [dx, dgate] = match x.device() {
        // Of a gate whose row of x is empty, nothing is read.
        _ if x.is_empty() => {
            let zeros = |x: &Tensor| Tensor::allocate_zeros(x.shape(), DType::F32, x.device());
            [zeros(&x)?, zeros(&gate)?]
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, [&x, &gate, &dy])?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => on_cpu(cpu, [&x, &gate, &dy])?,
    };
    Ok(SigmoidMulGradient { dx: dx.cast(dtype)?, dgate: dgate.cast(dtype)? })
}

/// `[dx, dgate]` of `[x, gate, dy]`, which are f32 and not empty.
fn on_cpu(cpu: &Cpu, [x, gate, dy]: [&Tensor; 3]) -> Result<[Tensor; 2], KernelError> {
    let [width, columns] = widths(x, gate);
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let mut dgate = Tensor::allocate_zeros(gate.shape(), DType::F32, x.device())?;
    let (x, gate, dy) = (x.as_slice::<f32>()?, gate.as_slice::<f32>()?, dy.as_slice::<f32>()?);
    let dxs = dx.as_mut_slice::<f32>()?.chunks_mut(ROWS * width);
    let dgates = dgate.as_mut_slice::<f32>()?.chunks_mut(ROWS * columns);
    cpu.for_each(dxs.zip(dgates).enumerate().collect(), |(task, (dx, dgate))| {
        let range = task * ROWS * width..task * ROWS * width + dx.len();
        let gate = &gate[task * ROWS * columns..][..dgate.len()];
        let (x, dy) = (&x[range.clone()], &dy[range]);
        cpu.isa().dispatch(Rows { operands: [x, gate, dy], dx, dgate, width, columns });
    });
    Ok([dx, dgate])
}

/// Columns of x and of the gate.
fn widths(x: &Tensor, gate: &Tensor) -> [usize; 2] {
    [x, gate].map(|x| *x.shape().last().unwrap_or(&1))
}

/// Some whole rows of x, gate and dy.
struct Rows<'a> {
    operands: [&'a [f32]; 3],
    dx: &'a mut [f32],
    dgate: &'a mut [f32],
    width: usize,
    columns: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { operands: [x, gate, dy], dx, dgate, width, columns } = self;
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        let gates = gate.chunks_exact(columns).zip(dgate.chunks_exact_mut(columns));
        for (((x, dy), dx), (gate, dgate)) in rows.zip(gates) {
            if columns < width {
                // 1 - s is sigmoid(-gate), which keeps its digits.
                let (s, rest) = (math::sigmoid(gate[0]), math::sigmoid(-gate[0]));
                dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy * s);
                dgate[0] = slices::dot(simd, x, dy) * s * rest;
                continue;
            }
            let read = columns - width;
            let pairs = gate[read..].iter().zip(&mut dgate[read..]);
            for (((x, dy), dx), (gate, dgate)) in x.iter().zip(dy).zip(dx).zip(pairs) {
                let (s, rest) = (math::sigmoid(*gate), math::sigmoid(-gate));
                (*dx, *dgate) = (dy * s, dy * x * s * rest);
            }
        }
    }
}
