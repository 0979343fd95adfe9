//! A weight's component tensors as kernels take them.

use super::launch::LaunchArgs;
use crate::{KernelError, QuantizedTensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The component tensors of a weight that was repacked for GPUs, see [`layout`](super::layout). A
/// layout without scales or biases does not read them.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub struct Components<S: Int, B: Int, V: Size> {
    pub codes: Box<[Vector<u32, V>]>,
    pub scales: Box<[S]>,
    pub biases: Box<[B]>,
}

impl QuantizedTensor {
    /// The component tensors as an argument of a launch. The codes' buffer stands for those that
    /// the layout has not.
    pub fn buffers(&self) -> Result<ComponentsArgs<'_>, KernelError> {
        let components = self.components();
        let codes = components[0].buffer()?;
        let other = |i: usize| components.get(i).map_or(Ok(codes), |component| component.buffer());
        Ok(ComponentsArgs { codes, scales: other(1)?, biases: other(2)? })
    }
}
