//! Elementwise ops of two operands on a GPU.

#![allow(unsafe_code)] // Launches.

use super::Broadcast;
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// An op's function of an element of each operand.
#[cube]
pub(crate) trait Combine: 'static + Send + Sync {
    fn combine(x: f32, y: f32) -> f32;
}

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ElementwiseConfig {
    /// Of x and the result.
    pub x: FloatType,
    pub y: FloatType,
    pub broadcast: Broadcast,
    /// Elements that a unit takes at once.
    pub vector: usize,
}

/// In vectors: all rows, a row, and a row of y that is longer.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    len: u32,
    width: u32,
    pitch: u32,
}

/// `z = f(x, y)`.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn elementwise<F: Combine, X: Int, Y: Int, V: Size, W: Size>(
    x: &[Vector<X, V>],
    y: &[Vector<Y, W>],
    z: &mut [Vector<X, V>],
    sizes: Sizes,
    #[comptime] config: ElementwiseConfig,
) {
    let vector = comptime!(config.vector);
    let (width, pitch) = (sizes.width as usize, sizes.pitch as usize);
    let mut i = ABSOLUTE_POS;
    while i < sizes.len as usize {
        let mut xs = Array::<f32>::new(vector);
        let mut ys = Array::<f32>::new(vector);
        unpack::<X, V>(x[i], &mut xs, 0usize, vector, config.x);
        match comptime!(config.broadcast) {
            Broadcast::None => unpack::<Y, W>(y[i], &mut ys, 0usize, vector, config.y),
            Broadcast::Last => {
                let at = i / width * pitch + (pitch - width) + i % width;
                unpack::<Y, W>(y[at], &mut ys, 0usize, vector, config.y)
            }
            Broadcast::Row => unpack::<Y, W>(y[i % width], &mut ys, 0usize, vector, config.y),
            Broadcast::Column => unpack::<Y, W>(y[i / width], &mut ys, 0usize, 1usize, config.y),
        }
        #[unroll]
        for j in 0..vector {
            let other = if comptime!(config.broadcast == Broadcast::Column) { ys[0usize] } else { ys[j] };
            xs[j] = F::combine(xs[j], other);
        }
        z[i] = pack::<X, V>(&xs, 0usize, vector, config.x);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn compiled<F: Combine>(target: &Target, config: ElementwiseConfig) -> Kernel<Elementwise<'static>> {
    let other = if config.broadcast == Broadcast::Column { 1 } else { config.vector };
    with_storage!(config.x, X => with_storage!(config.y, Y => {
        Elementwise::kernel::<F, X, Y>(target, UNITS, config.vector, other, config)
    }))
}

/// A kernel of `F` for each way to load and each type of either operand.
#[cfg(test)]
pub(crate) fn kernels<F: Combine>(target: &Target, broadcasts: &[Broadcast]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let vectors = [1, rows::VECTOR, rows::LONGEST].into_iter().filter(|&vector| vector <= target.vector());
    for (&broadcast, vector) in broadcasts.iter().flat_map(|b| vectors.clone().map(move |v| (b, v))) {
        for (x, y) in [(F32, BF16), (F16, F32), (BF16, F16)] {
            kernels.push(compiled::<F>(target, ElementwiseConfig { x, y, broadcast, vector }).code());
        }
    }
    kernels
}

/// So many elements keep all units busy with longer vectors.
const MANY_ELEMENTS: usize = 1 << 20;

/// `f(x, y)` of `x`'s shape and type; `y`'s shape fits `broadcast`.
pub(crate) fn map<F: Combine>(
    check: Check,
    gpu: &Gpu,
    x: &Tensor,
    y: &Tensor,
    broadcast: Broadcast,
) -> Result<Tensor, KernelError> {
    let z = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if z.is_empty() {
        return Ok(z);
    }
    let width = if broadcast == Broadcast::None { x.len() } else { x.dim(-1) };
    let most = if x.len() < MANY_ELEMENTS { rows::VECTOR } else { rows::LONGEST };
    let pitch = if broadcast == Broadcast::Last { y.dim(-1) } else { width };
    let vector = match broadcast {
        Broadcast::Column => rows::vector(gpu.target(), most, width, &[x]),
        // Both sizes are multiples of the vector.
        _ => [width, pitch]
            .map(|size| rows::vector(gpu.target(), most, size, &[x, y]))
            .into_iter()
            .fold(most, usize::min),
    };
    let config = ElementwiseConfig { x: check.float("x", x)?, y: check.float("y", y)?, broadcast, vector };
    let sizes = Sizes {
        len: check.index(x.len() / vector)?,
        width: check.index(width / vector)?,
        pitch: check.index(pitch / vector)?,
    };
    let arguments = Elementwise { x: x.buffer()?, y: y.buffer()?, z: z.buffer()?, sizes };
    // SAFETY: z is as long as x, and y's shape fits the broadcast.
    unsafe { gpu.launch(compiled::<F>(gpu.target(), config), cubes(x.len() / vector), arguments)? };
    Ok(z)
}
