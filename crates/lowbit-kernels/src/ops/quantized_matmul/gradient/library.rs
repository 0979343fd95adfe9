//! The gradients by a GPU maker's library of dense products. It takes operands that lie by rows or by columns, so that nothing is
//! transposed first.

use super::super::cuda::vendor_blas::decoded;
use super::super::problem::ALIGNMENT;
use super::matrices;
use crate::gpu::layout::{Codes, Layout, RUN};
use crate::gpu::{Dense, Form, Gpu, Memory};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;

/// Whether there is a library, and it takes operands of this type with rows of these lengths.
pub(in crate::ops) fn takes(gpu: &Gpu, operands: &[&Tensor], dtype: FloatType, widths: &[usize]) -> bool {
    gpu.caps().vendor_blas
        && operands.iter().all(|x| x.is_aligned(ALIGNMENT))
        && widths.iter().all(|width| *width > 0 && (width * dtype.size()).is_multiple_of(ALIGNMENT))
}

/// `dx = dy weight`, of `shape`, if the library takes it: the weight is decoded to dy's type, unless it is of that type.
pub(super) fn backward_x(
    gpu: &Gpu,
    dy: &Tensor,
    weight: &QuantizedTensor,
    (shape, dtype): (&[usize], FloatType),
) -> Result<Option<Tensor>, KernelError> {
    let (n, k) = (weight.n(), weight.k());
    let first = &weight.components()[0];
    let dense = Layout::of(weight.format()).codes == Codes::Float(dtype) && first.is_aligned(ALIGNMENT);
    let fits = matrices(weight.shape()) == 1
        && k.is_multiple_of(RUN)
        && (dense || dtype != FloatType::F32)
        && takes(gpu, &[dy], dtype, &[n, k]);
    if !fits {
        return Ok(None);
    }
    let values = if dense { None } else { Some(decoded(gpu, weight, dtype)?) };
    let dx = Tensor::allocate(shape, dtype.dtype(), dy.device())?;
    gpu.multiply(Dense {
        form: Form::Columns,
        x: dy.memory()?,
        weight: match &values {
            Some(values) => (values, 0),
            None => first.memory()?,
        },
        y: dx.memory()?,
        sizes: [dy.len() / n, k, n],
        dtypes: [dtype; 2],
    })?;
    Ok(Some(dx))
}

/// Rows of x and of dy that belong to one matrix of a weight, of one type.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Rows<'a> {
    pub x: &'a Tensor,
    pub dy: &'a Tensor,
    pub dtype: FloatType,
    /// The first row of x and of dy, and how many there are.
    pub first: [usize; 2],
    pub count: usize,
}

/// Makes of `dweight`, from element `at.1` on, `dweight[n, k] = sum over rows of dy[row, n] * x[row, k]` for the columns `n` of dy.
/// [`takes`] was asked with the lengths of all rows.
pub(in crate::ops) fn backward_matrix(
    gpu: &Gpu,
    rows: Rows<'_>,
    n: std::ops::Range<usize>,
    (dweight, at): (&Tensor, usize),
) -> Result<(), KernelError> {
    let Rows { x, dy, dtype, first, count } = rows;
    let (k, pitch) = (x.dim(-1), dy.dim(-1));
    gpu.multiply(Dense {
        form: Form::Outer(pitch),
        x: place(dy, first[1] * pitch + n.start)?,
        weight: place(x, first[0] * k)?,
        y: place(dweight, at)?,
        sizes: [n.len(), k, count],
        dtypes: [dtype, FloatType::F32],
    })
}

/// Where an element of a tensor lies.
fn place(tensor: &Tensor, element: usize) -> Result<(&Memory, usize), KernelError> {
    let (memory, start) = tensor.memory()?;
    Ok((memory, start + element * tensor.dtype().size()))
}
