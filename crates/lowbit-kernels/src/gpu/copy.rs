//! Copies within a device, of one element type or to another.

use super::compile::{Target, buffer};
use super::float::{read, with_storage, write};
use super::{Dispatch, Gpu, Memory};
use crate::KernelError;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Units of a cube of kernels that work on each element alone.
pub(crate) const UNITS: u32 = 256;

/// Cubes of [`UNITS`] that go through `len` elements together, each unit stepping over what all take at once. Vulkan
/// promises no more than 65535.
pub(crate) fn cubes(len: usize) -> [u32; 3] {
    [len.div_ceil(UNITS as usize).clamp(1, 65535) as u32, 1, 1]
}

#[cube(launch_unchecked)]
fn convert<X: Int, Y: Int>(
    x: &[X],
    y: &mut [Y],
    len: u32,
    #[comptime] from: FloatType,
    #[comptime] to: FloatType,
) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        if comptime!(from == to) {
            y[i] = Y::cast_from(x[i]);
        } else {
            write(y, i, read(x, i, from), to);
        }
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

#[cube(launch_unchecked)]
fn fill(y: &mut [u32], word: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        y[i] = word;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

fn fill_kernel(target: &Target) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    Box::new(fill::Fill::new(settings, properties, registers, buffer(), (), ()))
}

fn kernel(target: &Target, from: FloatType, to: FloatType) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(UNITS);
    with_storage!(from, X => with_storage!(to, Y => Box::new(convert::Convert::<X, Y>::new(
        settings, properties, registers, buffer(), buffer(), (), from, to,
    ))))
}

/// Every kernel here.
#[cfg(test)]
pub(crate) fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let pairs = floats.into_iter().flat_map(|from| floats.map(|to| (from, to)));
    pairs.map(|(from, to)| kernel(target, from, to)).chain([fill_kernel(target)]).collect()
}

impl Gpu {
    /// Memory that is `byte` throughout.
    pub(crate) fn filled(&self, bytes: usize, byte: u8) -> Result<Memory, KernelError> {
        let memory = self.allocate(bytes)?;
        let words = bytes.div_ceil(4);
        let len = index(words)?;
        if len > 0 {
            self.launch(Dispatch {
                kernel: fill_kernel(self.target()),
                cubes: cubes(words),
                buffers: vec![(&memory, 0)],
                scalars: vec![u32::from_ne_bytes([byte; 4]), len],
            })?;
        }
        Ok(memory)
    }

    /// `len` elements of `from`, from byte `start` of `memory` on, to as many of `to` in other memory.
    pub(crate) fn convert(
        &self,
        (memory, start): (&Memory, usize),
        len: usize,
        (from, to): (FloatType, FloatType),
    ) -> Result<Memory, KernelError> {
        let copy = self.allocate(len * to.size())?;
        let count = index(len)?;
        if count > 0 {
            self.launch(Dispatch {
                kernel: kernel(self.target(), from, to),
                cubes: cubes(len),
                buffers: vec![(memory, start), (&copy, 0)],
                scalars: vec![count],
            })?;
        }
        Ok(copy)
    }
}

fn index(len: usize) -> Result<u32, KernelError> {
    u32::try_from(len).map_err(|_| KernelError::Value {
        op: "copy",
        operand: "size",
        got: len.to_string(),
        want: "kernels count up to 4294967295".into(),
    })
}
