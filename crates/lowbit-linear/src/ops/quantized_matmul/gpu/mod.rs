//! The product on a GPU: the kernel that [`plan`](super::plan) chose, and what it needs done first.

pub(super) mod cmma_tile;
pub(super) mod cube_rows;
pub(super) mod mat_vec;
mod pad;
pub(super) mod sorted;
pub(super) mod tile;

use super::cuda::parts::PARTS;
#[cfg(test)]
use super::cuda::tiles;
use super::cuda::{mma_rows, mma_tile, mma_vec, stream, stream_experts, stream_rows, vendor_blas, wgmma};
use super::input::{CHECK, Input, Operand, PLAN};
use super::plan::{Kernel, Plan, plan_asking};
use super::problem::{Operands, Problem, Routing, XOperands};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
use crate::ops::glu::Gate;
use crate::{Device, KernelError, QuantizedTensor, Tensor};
#[cfg(test)]
use cubecl_core::prelude::CubeKernel;
use lowbit_formats::{DType, FloatType};
use pad::padded;

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel of both ops for `target`.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let (formats, dtypes) = (super::tests::gpu_formats(), crate::ops::testing::FLOATS);
    let portable = [
        pad::kernels(target),
        mat_vec::kernels(target, &formats, &dtypes),
        tile::kernels(target),
        cmma_tile::kernels(target),
        sorted::kernels(target),
    ];
    let cuda = [
        mma_vec::kernels(target, &formats),
        mma_rows::kernels(target, &formats),
        stream::kernels(target, &formats),
        stream_rows::kernels(target, &formats),
        stream_experts::kernels(target, &formats),
        tiles::kernels(target),
        wgmma::kernels(target),
        mma_tile::kernels(target),
        vendor_blas::kernels(target),
    ];
    portable.into_iter().chain(cuda).flatten().collect()
}

/// Experts that pairs of a token and an expert choose: the ids, and how the problem sees them.
#[derive(Clone, Copy)]
pub(crate) struct Experts<'a> {
    pub ids: &'a Tensor,
    pub routing: Routing,
}

/// `x` times `weight`, of shape `shape`, and the sum where x is the norm of one. Everything was
/// checked.
pub(crate) fn multiply<T: Operand>(
    gpu: &Gpu,
    input: &Input<'_, T>,
    weight: &QuantizedTensor,
    experts: Option<Experts<'_>>,
    shape: &[usize],
    y_type: FloatType,
) -> Result<(Tensor, Option<Tensor>), KernelError> {
    let device = Device::Gpu(gpu.clone());
    let make = || input.make().map(|(x, sum)| (x.as_ref().clone(), sum.map(|sum| sum.as_ref().clone())));
    if shape.contains(&0) {
        return Ok((Tensor::allocate(shape, y_type.dtype(), &device)?, make()?.1));
    }
    let x = XOperands::new(input)?;
    let (problem, plan) = plan_of(gpu, &x, weight, experts.map(|experts| experts.routing), shape, y_type);
    log::trace!(target: PLAN, "{problem}: {}", plan.explain());
    let (made, sum) = if plan.make_x { make()? } else { (x.x.clone(), x.sum()?) };
    let problem = if plan.make_x { problem.of_tensor() } else { problem };
    let problem = if plan.widen { problem.widened() } else { problem };
    // A kernel that makes x takes its operands as they are; the others read whole runs of a tensor.
    let made = match problem.source {
        None if plan.widen => padded(gpu, &made)?.cast(DType::F32)?,
        None => padded(gpu, &made)?,
        Some(_) => made,
    };
    let x = if problem.source.is_none() { XOperands::new(&Input::Tensor(&made))? } else { x };
    let y = Tensor::allocate(shape, problem.y_type.dtype(), &device)?;
    let ids = experts.map(|experts| experts.ids);
    let operands = Operands { x, weight, ids, y: &y, sum: sum.as_ref(), widths: &[] };
    launch(gpu, plan.kernel, &problem, &operands)?;
    Ok((y.cast(y_type.dtype())?, sum))
}

/// `x` times `weight`, parts of its columns of these `widths` as tensors of their own. Everything
/// was checked. `None` where the product's kernel stores whole rows.
pub(crate) fn multiply_parts(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    widths: &[usize],
    shape: &[usize],
) -> Result<Option<Vec<Tensor>>, KernelError> {
    // Parts start at multiples of 32 bytes: kernels can load whole vectors of them.
    let aligned = widths.iter().rev().skip(1).all(|width| width.is_multiple_of(16));
    if shape.contains(&0) || widths.len() > PARTS || !aligned {
        return Ok(None);
    }
    let of_x = XOperands::new(&Input::from(x))?;
    let y_type = Input::from(x).dtype(CHECK)?;
    let (problem, plan) = plan_of(gpu, &of_x, weight, None, shape, y_type);
    if !matches!(plan.kernel, Kernel::StreamRows(_) | Kernel::Wgmma(_) | Kernel::MmaTile(_)) || plan.widen {
        return Ok(None);
    }
    log::trace!(target: PLAN, "{problem} in {} parts: {}", widths.len(), plan.explain());
    let y = Tensor::allocate(&[problem.m * problem.n], y_type.dtype(), x.device())?;
    let operands = Operands { x: of_x, weight, ids: None, y: &y, sum: None, widths };
    launch(gpu, plan.kernel, &problem, &operands)?;
    let mut start = 0;
    let parts = widths.iter().map(|width| {
        let end = start + problem.m * width;
        let part = y.rows(start, end)?;
        start = end;
        part.reshape(&[&shape[..shape.len() - 1], &[*width]].concat())
    });
    parts.collect::<Result<_, _>>().map(Some)
}

/// `glu(up, gate)` of the halves of `x` times `weight`, the gate first. Everything was checked.
/// `None` where the product's kernel does not make it.
pub(crate) fn multiply_glu(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    by: Gate,
    shape: &[usize],
) -> Result<Option<Tensor>, KernelError> {
    if shape.contains(&0) {
        return Ok(None);
    }
    let of_x = XOperands::new(&Input::from(x))?;
    let y_type = Input::from(x).dtype(CHECK)?;
    let (problem, plan) = plan_of(gpu, &of_x, weight, None, shape, y_type);
    let Kernel::StreamRows(launch) = plan.kernel else { return Ok(None) };
    log::trace!(target: PLAN, "{problem}, its halves by {by:?}: {}", plan.explain());
    let halved = [&shape[..shape.len() - 1], &[problem.n / 2]].concat();
    let y = Tensor::allocate(&halved, y_type.dtype(), x.device())?;
    let operands = Operands { x: of_x, weight, ids: None, y: &y, sum: None, widths: &[] };
    stream_rows::launch(gpu, launch.with_glu(by), &problem, &operands)?;
    Ok(Some(y))
}

/// `glu(up, gate)` of the products of `x` and both halves of `weight`, `[2, E, N, K]`, the gate's
/// first, of shape `shape`. Everything was checked. `None` where the products' kernel does not make
/// it.
pub(crate) fn multiply_experts_glu(
    gpu: &Gpu,
    x: &Tensor,
    weight: &QuantizedTensor,
    experts: Experts<'_>,
    by: Gate,
    shape: &[usize],
) -> Result<Option<Tensor>, KernelError> {
    if shape.contains(&0) {
        return Ok(None);
    }
    let of_x = XOperands::new(&Input::from(x))?;
    let y_type = Input::from(x).dtype(CHECK)?;
    let (problem, plan) = plan_of(gpu, &of_x, weight, Some(experts.routing), shape, y_type);
    let Kernel::StreamExperts(launch) = plan.kernel else { return Ok(None) };
    log::trace!(target: PLAN, "{problem}, its halves by {by:?}: {}", plan.explain());
    let y = Tensor::allocate(shape, y_type.dtype(), x.device())?;
    let operands = Operands { x: of_x, weight, ids: Some(experts.ids), y: &y, sum: None, widths: &[] };
    stream_experts::launch_glu(gpu, launch, by, &problem, &operands)?;
    Ok(Some(y))
}

/// The product as the plan sees it, and the plan. It is not empty.
pub(crate) fn plan_of(
    gpu: &Gpu,
    x: &XOperands<'_>,
    weight: &QuantizedTensor,
    routing: Option<Routing>,
    shape: &[usize],
    y_type: FloatType,
) -> (Problem, Plan) {
    let rows = shape.iter().product::<usize>() / weight.n();
    let problem = Problem::new(x, weight, rows, routing, y_type);
    let plan = plan_asking(gpu.target().caps(), &problem, || gpu.library().is_some());
    (problem, plan)
}

fn launch(gpu: &Gpu, kernel: Kernel, problem: &Problem, operands: &Operands<'_>) -> Result<(), KernelError> {
    match kernel {
        Kernel::Stream(launch) => stream::launch(gpu, launch, problem, operands),
        Kernel::StreamRows(launch) => stream_rows::launch(gpu, launch, problem, operands),
        Kernel::StreamExperts(launch) => stream_experts::launch(gpu, launch, problem, operands),
        Kernel::ExpertRows(config) => mma_rows::launch_experts(gpu, config, problem, operands),
        Kernel::ExpertTiles(config) => wgmma::launch_experts(gpu, config, problem, operands),
        Kernel::ExpertMmaTiles(config) => mma_tile::launch_experts(gpu, config, problem, operands),
        Kernel::ExpertCmmaTiles(config) => cmma_tile::launch_experts(gpu, config, problem, operands),
        Kernel::MmaRows(config) => mma_rows::launch(gpu, config, problem, operands),
        Kernel::MmaVec(config) => mma_vec::launch(gpu, config, problem, operands),
        Kernel::MatVec(config) => mat_vec::launch(gpu, config, problem, operands),
        Kernel::VendorBlas(weight) => vendor_blas::launch(gpu, weight, problem, operands),
        Kernel::Wgmma(config) => wgmma::launch(gpu, config, problem, operands),
        Kernel::MmaTile(config) => mma_tile::launch(gpu, config, problem, operands),
        Kernel::CmmaTile(config) => cmma_tile::launch(gpu, config, problem, operands),
        Kernel::Tile(config) => tile::launch(gpu, config, problem, operands),
    }
}
