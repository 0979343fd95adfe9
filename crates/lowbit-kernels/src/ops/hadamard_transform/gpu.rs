//! Rows times a Hadamard matrix on a GPU: some units of a plane share a row in registers, and add
//! it up in pairs, then in pairs of pairs. Kernels that append keys to a cache transform theirs by
//! [`transform`], too.

#![allow(unsafe_code)] // Launches.

use super::block;
use crate::gpu::Gpu;
use crate::gpu::compile::Target;
use crate::gpu::float::{pack, unpack, with_storage};
use crate::gpu::launch::{Kernel, kernel};
use crate::gpu::rows::{self, Reduce};
use crate::ops::Check;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Units of a cube.
const UNITS: usize = 128;

/// Rows in registers: unit `l` of the lanes of a row has elements
/// `(n lanes + l) quad .. + quad` of it, for each n below [`Self::each`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowLanes {
    /// Elements of a row.
    pub width: usize,
    /// Units that share a row, neighbours in a plane: a power of two. One where planes differ from
    /// launch to launch.
    pub lanes: usize,
    /// Elements of a vector in memory, which divide a quad.
    pub vector: usize,
}

impl RowLanes {
    /// For rows of `width` elements in vectors of `vector`.
    pub fn new(target: &Target, width: usize, vector: usize) -> Self {
        let quads = width / Self { width, lanes: 1, vector }.quad();
        let lanes = target.plane().map_or(1, |plane| plane.min(quads.next_power_of_two()));
        Self { width, lanes, vector }
    }

    /// Neighbouring elements that a unit has: 4, or the greatest power of two that divides a row.
    pub fn quad(self) -> usize {
        block(self.width).min(4)
    }

    /// Quads of a row.
    pub fn quads(self) -> usize {
        self.width / self.quad()
    }

    /// Quads of a unit; the last ones of some units may be beyond the row, and are zeros.
    pub fn each(self) -> usize {
        self.quads().div_ceil(self.lanes)
    }

    /// Elements of a unit.
    pub fn values(self) -> usize {
        self.each() * self.quad()
    }

    /// Rows of a cube.
    pub fn rows(self) -> usize {
        UNITS / self.lanes
    }

    pub fn units(self) -> usize {
        UNITS
    }

    /// Cubes for `count` rows.
    pub fn cubes(self, count: usize) -> usize {
        count.div_ceil(self.rows())
    }

    fn factor(self) -> f32 {
        (block(self.width) as f32).sqrt().recip()
    }
}

/// This unit's row among those of cubes from `first` on.
#[cube]
pub(crate) fn row_of_unit(first: usize, #[comptime] of: RowLanes) -> usize {
    (CUBE_POS - first) * comptime!(of.rows()) + UNIT_POS_X as usize / comptime!(of.lanes)
}

/// The number of this unit's quad `n`.
#[cube]
pub(crate) fn quad_of_unit(#[comptime] n: usize, #[comptime] of: RowLanes) -> usize {
    UNIT_POS_X as usize % comptime!(of.lanes) + comptime!(n * of.lanes)
}

/// A unit's elements of row `row` of `x`.
#[cube]
pub(crate) fn load_row<X: Int, V: Size>(
    x: &[Vector<X, V>],
    row: usize,
    #[comptime] float: FloatType,
    #[comptime] of: RowLanes,
) -> Array<f32> {
    let (quad, vector, quads) = comptime!((of.quad(), of.vector, of.quads()));
    let mut values = Array::<f32>::new(comptime!(of.values()));
    #[unroll]
    for n in 0..comptime!(of.each()) {
        let index = quad_of_unit(n, of);
        let from = (row * quads + min(index, comptime!(quads - 1))) * comptime!(quad / vector);
        #[unroll]
        for v in 0..comptime!(quad / vector) {
            let at = comptime!(n * quad + v * vector);
            unpack::<X, V>(x[from + v], &mut values, at, vector, float);
        }
        if comptime!(!quads.is_multiple_of(of.lanes)) {
            #[unroll]
            for j in 0..quad {
                let at = comptime!(n * quad + j);
                values[at] = select(index < quads, values[at], 0.0f32.runtime());
            }
        }
    }
    values
}

/// Stores a unit's elements as those of row `row` of `y`.
#[cube]
pub(crate) fn store_row<Y: Int, V: Size>(
    values: &Array<f32>,
    y: &mut [Vector<Y, V>],
    row: usize,
    #[comptime] float: FloatType,
    #[comptime] of: RowLanes,
) {
    let (quad, vector, quads) = comptime!((of.quad(), of.vector, of.quads()));
    #[unroll]
    for n in 0..comptime!(of.each()) {
        let index = quad_of_unit(n, of);
        if index < quads {
            let to = (row * quads + index) * comptime!(quad / vector);
            #[unroll]
            for v in 0..comptime!(quad / vector) {
                let at = comptime!(n * quad + v * vector);
                y[to + v] = pack::<Y, V>(values, at, vector, float);
            }
        }
    }
}

/// Transforms a row in place. Every unit of the plane must call this.
#[cube]
pub(crate) fn transform(values: &mut Array<f32>, #[comptime] of: RowLanes) {
    let (quad, each, lanes) = comptime!((of.quad(), of.each(), of.lanes));
    #[unroll]
    for i in 0..comptime!(of.values()) {
        values[i] *= comptime!(of.factor());
    }
    #[unroll]
    for bit in 0..comptime!(quad.ilog2() as usize) {
        #[unroll]
        for i in 0..comptime!(of.values()) {
            if comptime!(i >> bit & 1 == 0) {
                let right = comptime!(i + (1 << bit));
                let (a, b) = (values[i], values[right]);
                values[i] = a + b;
                values[right] = a - b;
            }
        }
    }
    #[unroll]
    for bit in 0..comptime!((block(of.width) / quad).ilog2() as usize) {
        if comptime!(1 << bit < lanes) {
            let mask = comptime!(1u32 << bit);
            let is_right = UNIT_POS_X & mask != 0u32;
            #[unroll]
            for i in 0..comptime!(of.values()) {
                let own = values[i];
                let other = plane_shuffle_xor(own, mask.runtime());
                values[i] = other + select(is_right, -own, own);
            }
        } else {
            let step = comptime!((1 << bit) / lanes);
            #[unroll]
            for n in 0..each {
                if comptime!(n & step == 0) {
                    #[unroll]
                    for j in 0..quad {
                        let (left, right) = comptime!((n * quad + j, (n + step) * quad + j));
                        let (a, b) = (values[left], values[right]);
                        values[left] = a + b;
                        values[right] = a - b;
                    }
                }
            }
        }
    }
}

/// Reduces a number of each quad over aligned groups of `count` quads, for all of them. Every unit
/// of the plane must call this.
#[cube]
pub(crate) fn reduce_quads<T: Numeric, R: Reduce<T>>(
    numbers: &mut Array<T>,
    #[comptime] count: usize,
    #[comptime] of: RowLanes,
) {
    #[unroll]
    for bit in 0..comptime!(count.ilog2() as usize) {
        #[unroll]
        for n in 0..comptime!(of.each()) {
            if comptime!(1 << bit < of.lanes) {
                let other = plane_shuffle_xor(numbers[n], comptime!(1u32 << bit).runtime());
                numbers[n] = R::combine(numbers[n], other);
            } else {
                let step = comptime!((1 << bit) / of.lanes);
                if comptime!(n & step == 0 && n + step < of.each()) {
                    let both = R::combine(numbers[n], numbers[comptime!(n + step)]);
                    numbers[n] = both;
                    numbers[comptime!(n + step)] = both;
                }
            }
        }
    }
}

#[kernel]
fn hadamard_transform<X: Int, V: Size>(
    x: &[Vector<X, V>],
    y: &mut [Vector<X, V>],
    count: u32,
    #[comptime] dtype: FloatType,
    #[comptime] of: RowLanes,
) {
    let row = row_of_unit(0usize.runtime(), of);
    let live = row < count as usize;
    // Units past the last row compute the first, but do not store it.
    let row = select(live, row, 0usize);
    let mut values = load_row::<X, V>(x, row, dtype, of);
    transform(&mut values, of);
    if live {
        store_row::<X, V>(&values, y, row, dtype, of);
    }
}

fn compiled(target: &Target, dtype: FloatType, of: RowLanes) -> Kernel<HadamardTransform<'static>> {
    with_storage!(dtype, X => HadamardTransform::kernel::<X>(target, of.units(), of.vector, dtype, of))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Kernels for heads and other rows, of each type.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = crate::ops::testing::FLOATS.into_iter().zip([(128, 4), (256, 1), (70, 1)]);
    let all = all
        .map(|(dtype, (width, vector))| compiled(target, dtype, RowLanes::new(target, width, vector)).code());
    all.collect()
}

/// See [`super::hadamard_transform`]; everything was checked.
pub(super) fn launch(check: Check, gpu: &Gpu, x: &Tensor, dtype: FloatType) -> Result<Tensor, KernelError> {
    let y = Tensor::allocate(x.shape(), x.dtype(), x.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    check.index(x.len())?;
    let width = x.dim(-1);
    let count = x.len() / width;
    let vector = rows::vector(gpu.target(), rows::VECTOR, width, &[x, &y]);
    let of = RowLanes::new(gpu.target(), width, vector);
    let arguments = HadamardTransform { x: x.buffer()?, y: y.buffer()?, count: check.index(count)? };
    let cubes = rows::cubes(of.cubes(count));
    // SAFETY: x and y have `count` rows of `width` elements, whole vectors.
    unsafe { gpu.launch(compiled(gpu.target(), dtype, of), cubes, arguments)? };
    Ok(y)
}
