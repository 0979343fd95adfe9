//! The gradients of [`gather_qmm()`](super::gather_qmm()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(feature = "gpu")]
mod padding;
#[cfg(test)]
mod tests;

use super::cpu::gathered;
use super::product_shape;
use crate::ops::quantized_matmul::Group;
use crate::ops::quantized_matmul::gradient::cpu::{self, Rows};
#[cfg(feature = "gpu")]
use crate::ops::quantized_matmul::gradient::gpu::group_sums;
use crate::ops::{Check, ScalesGradient};
use crate::{Cpu, Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, FormatError};

/// `dx[t, slot, k] = sum over p, n of dy[p, t, slot, n] * weight[p, ids[t, slot], n, k]`, summed
/// over the slots where these share x.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `dy` | `[T, top_k, N]`, or `[P, T, top_k, N]` | f32, f16, bf16 |
/// | `weight` | `[E, N, K]`, or `[P, E, N, K]` | any format, not repacked |
/// | `ids` | `[T, top_k]` | u32 |
/// | `slots` | 1 where all slots share x, or top_k | |
/// | result | `[T, slots, K]` | as `dy` |
///
/// As in [`quantized_matmul_backward_x`](crate::ops::quantized_matmul_backward_x), which says the
/// rest.
///
/// # Errors
/// As [`gather_qmm()`](super::gather_qmm()); [`KernelError::Shape`] for a dy that does not fit;
/// [`KernelError::Unsupported`] for a repacked weight. On a GPU an id that is not below `E` is no
/// error: its rows of dx are NaN, and no weight's gradient has it.
pub fn gather_qmm_backward_x(
    dy: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    slots: usize,
) -> Result<Tensor, KernelError> {
    let check = Check("gather_qmm_backward_x");
    let x = [ids.shape().first().copied().unwrap_or(0), slots, weight.k()];
    let shapes = Shapes::new(check, x, weight, ids)?;
    let dtype = shapes.check_dy(dy)?;
    match dy.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_x(gpu, dy, weight, ids, slots),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let wide = check.widened("dy", dy)?;
            let mut dx = Tensor::allocate_zeros(&x, DType::F32, dy.device())?;
            let experts = Experts::new(shapes)?;
            experts.backward_x(cpu, wide.as_slice()?, weight, dx.as_mut_slice()?);
            dx.cast(dtype)
        }
    }
}

/// The gradients of all experts' scales and biases, with their codes as constants; 0 for experts
/// that nobody chose. Shapes of `x`, `weight` and `ids` are
/// [`gather_qmm()`](super::gather_qmm())'s, `dy` is as its result, and the result is
/// `[E, N, K / group]`, or `[P, E, N, K / group]`. As in
/// [`quantized_matmul_backward_scales`](crate::ops::quantized_matmul_backward_scales), which says
/// the rest.
///
/// # Errors
/// As [`gather_qmm_backward_x`]; [`KernelError::Format`] for weights of plain floats, which have no
/// scales.
pub fn gather_qmm_backward_scales(
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<ScalesGradient, KernelError> {
    let check = Check("gather_qmm_backward_scales");
    let scheme = weight.format().scheme();
    let Some(group) = scheme.group_size() else { return Err(FormatError::Codes(weight.format()).into()) };
    let operands = Operands::new(check, x, weight, ids, dy)?;
    match dy.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let dweight = gpu::backward_weight(gpu, [&operands.x, &operands.dy], weight, ids)?;
            group_sums(gpu, weight, &dweight)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let shape = [&weight.shape()[..weight.shape().len() - 1], &[weight.k() / group]].concat();
            let mut dscales = check.result(&shape, dy.device())?;
            let mut dbiases = scheme.biased().then(|| check.result(&shape, dy.device())).transpose()?;
            let biases = dbiases.as_mut().map(|dbiases| dbiases.as_mut_slice::<f32>()).transpose()?;
            let rows = operands.by_expert()?;
            cpu::backward_scales(cpu, weight, &rows.pairs(), (dscales.as_mut_slice()?, biases))?;
            Ok(ScalesGradient { dscales, dbiases })
        }
    }
}

/// The gradient of all values of all experts, of weight's shape; 0 for experts that nobody chose.
/// Operands are [`gather_qmm_backward_scales`]'s, with any weight that is not repacked; its values
/// are not read. As in
/// [`quantized_matmul_backward_weight`](crate::ops::quantized_matmul_backward_weight), which says
/// the rest.
///
/// # Errors
/// As [`gather_qmm_backward_x`].
pub fn gather_qmm_backward_weight(
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<Tensor, KernelError> {
    let check = Check("gather_qmm_backward_weight");
    let operands = Operands::new(check, x, weight, ids, dy)?;
    match dy.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_weight(gpu, [&operands.x, &operands.dy], weight, ids),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let mut dweight = check.result(weight.shape(), dy.device())?;
            cpu::backward_weight(cpu, &operands.by_expert()?.pairs(), dweight.as_mut_slice()?);
            Ok(dweight)
        }
    }
}

/// x and dy in f32, or in their one type on a GPU, checked against the weight and the ids.
struct Operands<'a> {
    shapes: Shapes<'a>,
    x: Tensor,
    dy: Tensor,
}

impl<'a> Operands<'a> {
    fn new(
        check: Check,
        x: &Tensor,
        weight: &QuantizedTensor,
        ids: &'a Tensor,
        dy: &Tensor,
    ) -> Result<Self, KernelError> {
        let shape = check.dims("x", x, "[T, 1, K] or [T, top_k, K]")?;
        let shapes = Shapes::new(check, shape, weight, ids)?;
        check.same_device("x", x.device(), dy.device())?;
        shapes.check_dy(dy)?;
        let [x, dy] = check.of_one_type(x, dy)?;
        Ok(Self { shapes, x, dy })
    }

    /// The rows brought together, on the host.
    fn by_expert(&self) -> Result<ByExpert<'a>, KernelError> {
        let experts = Experts::new(self.shapes.clone())?;
        let (k, n, share) = (self.x.dim(-1), self.dy.dim(-1), self.shapes.share);
        let x = self.x.as_slice::<f32>()?;
        let rows = experts.order.iter().map(|pair| &x[pair / share * k..][..k]);
        let (xs, dys) = (gathered(rows, k), experts.gathered_dy(self.dy.as_slice()?));
        Ok(ByExpert { experts, xs, dys, k, n })
    }
}

/// The rows of x and of dy, by product and expert.
struct ByExpert<'a> {
    experts: Experts<'a>,
    xs: Vec<f32>,
    dys: Vec<f32>,
    k: usize,
    n: usize,
}

impl ByExpert<'_> {
    /// Of each matrix of the weight.
    fn pairs(&self) -> Vec<[Rows<'_>; 2]> {
        let Self { experts, xs, dys, k, n } = self;
        let Shapes { products, count, .. } = experts.shapes;
        // Experts that nobody chose have no rows.
        let none = || [Rows { values: &[], width: *k }, Rows { values: &[], width: *n }];
        let mut pairs: Vec<_> = (0..products * count).map(|_| none()).collect();
        let mut done = 0;
        for product in 0..products {
            let mut first = 0;
            for same in experts.of_each() {
                let (values, dy) = (&xs[first * k..][..same.len() * k], &dys[done * n..][..same.len() * n]);
                pairs[experts.matrix(product, same[0])] =
                    [Rows { values, width: *k }, Rows { values: dy, width: *n }];
                (first, done) = (first + same.len(), done + same.len());
            }
        }
        pairs
    }
}

/// Checks that ids, weight and x fit together, and dy with them.
#[derive(Clone)]
struct Shapes<'a> {
    check: Check,
    ids: &'a Tensor,
    /// Experts per product, and products.
    count: usize,
    products: usize,
    /// The number of pairs that read one row of x.
    share: usize,
    dy: Vec<usize>,
}

impl<'a> Shapes<'a> {
    /// Checks all but dy; `x` is x's shape.
    fn new(
        check: Check,
        x: [usize; 3],
        weight: &QuantizedTensor,
        ids: &'a Tensor,
    ) -> Result<Self, KernelError> {
        weight.by_rows(check.0)?;
        let dy = product_shape(check, &x, weight, ids)?;
        let count = weight.shape()[weight.shape().len() - 3];
        check.ids("ids", ids, count)?;
        check.same_device("weight", weight.device(), ids.device())?;
        let products = if let [products, _, _, _] = *weight.shape() { products } else { 1 };
        let share = if x[1] == 1 { ids.dim(1).max(1) } else { 1 };
        Ok(Self { check, ids, count, products, share, dy })
    }

    fn check_dy(&self, dy: &Tensor) -> Result<DType, KernelError> {
        self.check.shape("dy", dy, &self.dy, || format!("ids {:?} with these operands", self.ids.shape()))?;
        self.check.same_device("ids", self.ids.device(), dy.device())?;
        Ok(self.check.float("dy", dy)?.dtype())
    }
}

/// The pairs of a token and a slot by the expert that they chose, in the host's memory.
struct Experts<'a> {
    shapes: Shapes<'a>,
    chosen: &'a [u32],
    /// The pairs, by expert.
    order: Vec<usize>,
}

impl<'a> Experts<'a> {
    fn new(shapes: Shapes<'a>) -> Result<Self, KernelError> {
        let chosen = shapes.ids.as_slice::<u32>()?;
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_unstable_by_key(|&pair| (chosen[pair], pair));
        Ok(Self { shapes, chosen, order })
    }

    /// Adds the product of dy with each pair's expert to the pair's row of dx.
    fn backward_x(&self, cpu: &Cpu, dy: &[f32], weight: &QuantizedTensor, dx: &mut [f32]) {
        let (n, k, pairs) = (weight.n(), weight.k(), self.order.len());
        let Shapes { products, share, .. } = self.shapes;
        let (gathered, mut rows) = (self.gathered_dy(dy), vec![0.0; products * pairs * k]);
        let (mut dys, mut dxs, mut groups) = (&gathered[..], &mut rows[..], vec![]);
        for product in 0..products {
            for same in self.of_each() {
                let (x, rest) = dys.split_at(same.len() * n);
                let y = dxs.split_off_mut(..same.len() * k).unwrap_or_default();
                groups.push(Group { weight_row: self.matrix(product, same[0]) * n, x, y });
                dys = rest;
            }
        }
        cpu::backward_x_groups(cpu, weight, groups);
        for (row, &pair) in rows.chunks_exact(k.max(1)).zip(self.order.iter().cycle()) {
            let sums = &mut dx[pair / share * k..][..k];
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }

    /// The pairs of each expert that somebody chose.
    fn of_each(&self) -> impl Iterator<Item = &[usize]> {
        self.order.chunk_by(|&a, &b| self.chosen[a] == self.chosen[b])
    }

    /// The matrix that a pair meets, counted over all products.
    fn matrix(&self, product: usize, pair: usize) -> usize {
        product * self.shapes.count + self.chosen[pair] as usize
    }

    /// The rows of dy by product and expert.
    fn gathered_dy(&self, dy: &[f32]) -> Vec<f32> {
        let (pairs, n) = (self.order.len(), self.shapes.dy[self.shapes.dy.len() - 1]);
        let rows = (0..self.shapes.products * pairs).map(|i| (i / pairs) * pairs + self.order[i % pairs]);
        gathered(rows.map(|row| &dy[row * n..(row + 1) * n]), n)
    }
}
