//! The product on a GPU: the kernel that [`plan`](super::plan) chose, and what it needs done first.

pub(super) mod cmma_tile;
pub(super) mod cube_rows;
pub(super) mod mat_vec;
mod pad;
pub(super) mod sorted;
pub(super) mod tile;

#[cfg(test)]
use super::cuda::tiles;
use super::cuda::{mma_rows, mma_tile, mma_vec, stream, vendor_blas, wgmma};
use super::input::{Input, Operand, PLAN};
use super::plan::{Kernel, Plan, plan_asking};
use super::problem::{Operands, Problem, Routing, XOperands};
use crate::gpu::Gpu;
#[cfg(test)]
use crate::gpu::compile::Target;
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
    let (problem, plan) = plan_of(gpu, &x, weight, experts, shape, y_type);
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
    let operands = Operands { x, weight, ids: experts.map(|experts| experts.ids), y: &y, sum: sum.as_ref() };
    launch(gpu, plan.kernel, &problem, &operands)?;
    Ok((y.cast(y_type.dtype())?, sum))
}

/// The product as the plan sees it, and the plan. It is not empty.
pub(crate) fn plan_of(
    gpu: &Gpu,
    x: &XOperands<'_>,
    weight: &QuantizedTensor,
    experts: Option<Experts<'_>>,
    shape: &[usize],
    y_type: FloatType,
) -> (Problem, Plan) {
    let rows = shape.iter().product::<usize>() / weight.n();
    let problem = Problem::new(x, weight, rows, experts.map(|experts| experts.routing), y_type);
    let plan = plan_asking(gpu.target().caps(), &problem, || gpu.library().is_some());
    (problem, plan)
}

fn launch(gpu: &Gpu, kernel: Kernel, problem: &Problem, operands: &Operands<'_>) -> Result<(), KernelError> {
    match kernel {
        Kernel::Stream(launch) => stream::launch(gpu, launch, problem, operands),
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
