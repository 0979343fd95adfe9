//! Drawing on a GPU. The logits are cut into slices in their order, a plane a slice; then one plane finds the slice that
//! the random number falls into, and the id in it. Filters become one threshold before, which is found without sorting:
//! pass by pass, 32 units hold 32 thresholds against all logits.

mod draw;
mod search;
mod slices;

use super::{DecodeState, SampleParams, cpu};
use crate::gpu::compile::Target;
use crate::gpu::{Dispatch, Gpu, Memory};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// The logits' type.
    pub dtype: FloatType,
    /// Units of a cube: a plane, or one where planes differ.
    pub lanes: usize,
    /// Whether top-p is on.
    pub mass: bool,
    /// Whether top-k is on.
    pub count: bool,
}

/// Units that run in step on every device of this kind.
fn lanes(target: &Target) -> usize {
    target.smallest_plane().min(32)
}

impl Shape {
    fn of(target: &Target, dtype: FloatType, params: &SampleParams, len: usize) -> Self {
        let lanes = lanes(target);
        Self { dtype, lanes, mass: params.top_p < 1.0, count: (1..len).contains(&params.top_k) }
    }

    fn filtered(self) -> bool {
        self.mass || self.count
    }
}

/// Logits at most: sums of as many weights have 64 bits.
const MOST: usize = 1 << 24;

/// Slices at most: one plane goes through them in the end.
const SLICES: usize = 512;

/// Takes up the token `id`: it gets the place of the oldest in the ring of `window` tokens.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn take_up(
    id: u32,
    token: &mut [u32],
    position: &mut [u32],
    step: &mut [u32],
    history: &mut [u32],
    window: u32,
) {
    let at = position[0usize] + 1u32;
    token[0usize] = id;
    position[0usize] = at;
    step[0usize] += 1u32;
    if window > 0u32 {
        history[(at % window) as usize] = id;
    }
}

/// Every kernel of the op.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let lanes = lanes(target);
    let filters = [(false, false), (false, true), (true, false), (true, true)];
    let mut kernels = Vec::new();
    for dtype in crate::ops::testing::FLOATS {
        let shape = |(mass, count)| Shape { dtype, lanes, mass, count };
        kernels.extend(slices::kernels(target, shape((true, true))));
        kernels.push(draw::take_kernel(target, shape((false, false))));
    }
    for (mass, count) in filters {
        let shape = Shape { dtype: FloatType::F32, lanes, mass, count };
        kernels.extend([slices::sums_kernel(target, shape), draw::kernel(target, shape)]);
        if shape.filtered() {
            kernels.push(search::kernel(target, shape));
        }
    }
    kernels
}

/// The logits of one draw and what the kernels share.
struct Draw<'a> {
    gpu: &'a Gpu,
    logits: &'a Tensor,
    shape: Shape,
    len: u32,
    /// Logits a slice.
    slice: u32,
    slices: u32,
    params: &'a SampleParams,
    /// Each slice's greatest key, then its id.
    greatest: Memory,
}

/// See [`super::sample_next`]; everything was checked.
pub(super) fn sample_next(
    check: Check,
    gpu: &Gpu,
    logits: &Tensor,
    state: &DecodeState,
    params: &SampleParams,
) -> Result<(), KernelError> {
    if logits.len() > MOST {
        return Err(check.value("logits", logits.len(), format!("{MOST} at most are wanted on a GPU")));
    }
    let [_, _, _, history] = state.tensors();
    let penalised = slices::penalised(check, gpu, logits, history, params.repetition_penalty)?;
    let logits = penalised.as_ref().unwrap_or(logits);
    let shape = Shape::of(gpu.target(), check.float("logits", logits)?, params, logits.len());
    let slice = logits.len().div_ceil(SLICES).next_multiple_of(shape.lanes);
    let slices = logits.len().div_ceil(slice);
    let greatest = gpu.allocate(8 * slices)?;
    let [len, slice, slices] = [logits.len(), slice, slices].map(|n| check.index(n));
    let draw = Draw { gpu, logits, shape, len: len?, slice: slice?, slices: slices?, params, greatest };
    draw.find_greatest()?;
    if params.temperature == 0.0 {
        return draw.take_greatest(state);
    }
    let counts = draw.search()?;
    let sums = draw.add_up(&counts)?;
    draw.pick(&counts, &sums, state)
}

impl Draw<'_> {
    fn rate(&self) -> u32 {
        cpu::rate(self.params.temperature).to_bits()
    }

    fn top_k(&self) -> u32 {
        self.params.top_k.min(u32::MAX as usize) as u32
    }

    /// How far below the greatest logit min-p lets others be.
    fn floor(&self) -> u32 {
        self.params.min_p.ln().to_bits()
    }

    fn launch(
        &self,
        kernel: Box<dyn CubeKernel>,
        cubes: u32,
        buffers: Vec<(&Memory, usize)>,
        scalars: Vec<u32>,
    ) -> Result<(), KernelError> {
        self.gpu.launch(Dispatch { kernel, cubes: [cubes, 1, 1], buffers, scalars })
    }
}
