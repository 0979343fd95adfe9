//! The gradients by a GPU maker's library of dense products. It takes operands that lie by rows or
//! by columns, so that nothing is transposed first.

use super::super::cuda::vendor_blas::decoded;
use super::super::problem::ALIGNMENT;
use super::matrices;
use crate::gpu::layout::{Codes, Layout, RUN};
use crate::gpu::{Dense, Form, Gpu, Memory};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;
use std::ops::Range;

/// True if there is a library, and it takes operands of this type with rows of these lengths.
pub(in crate::ops) fn takes(gpu: &Gpu, operands: &[&Tensor], dtype: FloatType, widths: &[usize]) -> bool {
    gpu.caps().vendor_blas
        && operands.iter().all(|x| x.is_aligned(ALIGNMENT))
        && widths.iter().all(|width| *width > 0 && (width * dtype.size()).is_multiple_of(ALIGNMENT))
}

/// True if the library takes `dy weight` of each of a weight's matrices, in dy's type.
pub(in crate::ops) fn multiplies(gpu: &Gpu, dy: &Tensor, weight: &QuantizedTensor, dtype: FloatType) -> bool {
    let dense = Layout::of(weight.format()).codes == Codes::Float(dtype);
    let aligned = !dense || weight.components()[0].is_aligned(ALIGNMENT);
    weight.k().is_multiple_of(RUN)
        && (dense && aligned || !dense && dtype != FloatType::F32)
        && takes(gpu, &[dy], dtype, &[weight.n(), weight.k()])
}

/// The matrices of a weight in a type that the library [`multiplies`].
pub(in crate::ops) struct Matrices<'a> {
    weight: &'a QuantizedTensor,
    dtype: FloatType,
    /// Their values, unless the weight has them in this type.
    decoded: Option<Memory>,
}

impl<'a> Matrices<'a> {
    pub fn new(gpu: &Gpu, weight: &'a QuantizedTensor, dtype: FloatType) -> Result<Self, KernelError> {
        let dense = Layout::of(weight.format()).codes == Codes::Float(dtype);
        let decoded = (!dense).then(|| decoded(gpu, weight, dtype)).transpose()?;
        Ok(Self { weight, dtype, decoded })
    }

    /// `dx = dy weight` for some of the matrices, with `each` rows of dy and of dx, the first of
    /// which are rows `first`.
    pub fn backward_x(
        &self,
        gpu: &Gpu,
        [dy, dx]: [&Tensor; 2],
        (first, each): (usize, usize),
        matrices: Range<usize>,
    ) -> Result<(), KernelError> {
        let (n, k) = (self.weight.n(), self.weight.k());
        let element = matrices.start * n * k;
        gpu.multiply(Dense {
            form: Form::Columns,
            count: matrices.len(),
            x: place(dy, first * n)?,
            weight: match &self.decoded {
                Some(values) => (values, element * self.dtype.size()),
                None => place(&self.weight.components()[0], element)?,
            },
            y: place(dx, first * k)?,
            sizes: [each, k, n],
            dtypes: [self.dtype; 2],
        })
    }
}

/// `dx = dy weight`, of `shape`, if the library takes it: the weight is decoded to dy's type,
/// unless it is of that type.
pub(super) fn backward_x(
    gpu: &Gpu,
    dy: &Tensor,
    weight: &QuantizedTensor,
    (shape, dtype): (&[usize], FloatType),
) -> Result<Option<Tensor>, KernelError> {
    if matrices(weight.shape()) != 1 || !multiplies(gpu, dy, weight, dtype) {
        return Ok(None);
    }
    let dx = Tensor::allocate(shape, dtype.dtype(), dy.device())?;
    let rows = dy.len() / weight.n();
    Matrices::new(gpu, weight, dtype)?.backward_x(gpu, [dy, &dx], (0, rows), 0..1)?;
    Ok(Some(dx))
}

/// Rows of x and of dy, of one type, that belong to one matrix of a weight, or as many rows to each
/// of several that follow each other.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Rows<'a> {
    pub x: &'a Tensor,
    pub dy: &'a Tensor,
    pub dtype: FloatType,
    /// The first row of x and of dy.
    pub first: usize,
    /// The number of rows that belong to a matrix.
    pub each: usize,
    pub matrices: usize,
}

/// Makes of `dweight`, from element `at` on,
/// `dweight[n, k] = sum over a matrix's rows of dy[row, n] * x[row, k]` for the columns `n` of dy,
/// which are all where there are several matrices. [`takes`] was asked with the lengths of all
/// rows.
pub(in crate::ops) fn backward_matrices(
    gpu: &Gpu,
    rows: Rows<'_>,
    n: Range<usize>,
    (dweight, at): (&Tensor, usize),
) -> Result<(), KernelError> {
    let Rows { x, dy, dtype, first, each, matrices } = rows;
    let (k, pitch) = (x.dim(-1), dy.dim(-1));
    gpu.multiply(Dense {
        form: Form::Outer(pitch),
        count: matrices,
        x: place(dy, first * pitch + n.start)?,
        weight: place(x, first * k)?,
        y: place(dweight, at)?,
        sizes: [n.len(), k, each],
        dtypes: [dtype, FloatType::F32],
    })
}

/// The memory and the offset in bytes of an element of a tensor.
fn place(tensor: &Tensor, element: usize) -> Result<(&Memory, usize), KernelError> {
    let (memory, start) = tensor.memory()?;
    Ok((memory, start + element * tensor.dtype().size()))
}
