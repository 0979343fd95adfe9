//! Elementwise ops of two operands on a GPU.

use super::Broadcast;
use crate::gpu::compile::{Target, buffer};
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::{Dispatch, Gpu, rows};
use crate::ops::check::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// What an op makes of an element of each operand.
#[cube]
pub(crate) trait Combine: 'static + Send + Sync {
    fn combine(x: f32, y: f32) -> f32;
}

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Of x and the result.
    pub x: FloatType,
    pub y: FloatType,
    pub broadcast: Broadcast,
    /// Elements that a unit takes at once.
    pub vector: usize,
}

/// `z = f(x, y)`; `width` is a row's vectors, `pitch` those of a row of y that is longer, `len` those of all rows.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn each<F: Combine, X: Int, Y: Int, V: Size, W: Size>(
    x: &[Vector<X, V>],
    y: &[Vector<Y, W>],
    z: &mut [Vector<X, V>],
    len: u32,
    width: u32,
    pitch: u32,
    #[comptime] shape: Shape,
) {
    let vector = comptime!(shape.vector);
    let (width, pitch) = (width as usize, pitch as usize);
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        let mut xs = Array::<f32>::new(vector);
        let mut ys = Array::<f32>::new(vector);
        unpack::<X, V>(x[i], &mut xs, 0usize, vector, shape.x);
        match comptime!(shape.broadcast) {
            Broadcast::None => unpack::<Y, W>(y[i], &mut ys, 0usize, vector, shape.y),
            Broadcast::Last => {
                let at = i / width * pitch + (pitch - width) + i % width;
                unpack::<Y, W>(y[at], &mut ys, 0usize, vector, shape.y)
            }
            Broadcast::Row => unpack::<Y, W>(y[i % width], &mut ys, 0usize, vector, shape.y),
            Broadcast::Column => unpack::<Y, W>(y[i / width], &mut ys, 0usize, 1usize, shape.y),
        }
        #[unroll]
        for j in 0..vector {
            let other = if comptime!(shape.broadcast == Broadcast::Column) { ys[0usize] } else { ys[j] };
            xs[j] = F::combine(xs[j], other);
        }
        z[i] = pack::<X, V>(&xs, 0usize, vector, shape.x);
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn kernel<F: Combine>(target: &Target, shape: Shape) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    let other = if shape.broadcast == Broadcast::Column { 1 } else { shape.vector };
    with_storage!(shape.x, X => with_storage!(shape.y, Y => Box::new(each::Each::<F, X, Y>::new(
        settings, properties, registers, buffer(), buffer(), buffer(), (), (), (), shape.vector, other, shape,
    ))))
}

/// A kernel of `F` for each way to load and each type of either operand.
#[cfg(test)]
pub(crate) fn kernels<F: Combine>(target: &Target, broadcasts: &[Broadcast]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut kernels = Vec::new();
    let vectors = [1, rows::VECTOR, rows::LONGEST].into_iter().filter(|&vector| vector <= target.vector());
    for (&broadcast, vector) in broadcasts.iter().flat_map(|b| vectors.clone().map(move |v| (b, v))) {
        for (x, y) in [(F32, BF16), (F16, F32), (BF16, F16)] {
            kernels.push(kernel::<F>(target, Shape { x, y, broadcast, vector }));
        }
    }
    kernels
}

/// So many elements keep all units busy with longer vectors.
const MANY: usize = 1 << 20;

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
    let most = if x.len() < MANY { rows::VECTOR } else { rows::LONGEST };
    let pitch = if broadcast == Broadcast::Last { y.dim(-1) } else { width };
    let vector = match broadcast {
        Broadcast::Column => rows::vector(gpu.target(), most, width, &[x]),
        // Both sizes are multiples of the vector.
        _ => [width, pitch]
            .map(|size| rows::vector(gpu.target(), most, size, &[x, y]))
            .into_iter()
            .fold(most, usize::min),
    };
    let shape = Shape { x: check.float("x", x)?, y: check.float("y", y)?, broadcast, vector };
    gpu.launch(Dispatch {
        kernel: kernel::<F>(gpu.target(), shape),
        cubes: cubes(x.len() / vector),
        buffers: vec![x.memory()?, y.memory()?, z.memory()?],
        scalars: vec![
            check.index(x.len() / vector)?,
            check.index(width / vector)?,
            check.index(pitch / vector)?,
        ],
    })?;
    Ok(z)
}
