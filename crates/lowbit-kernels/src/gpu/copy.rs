//! Copies within a device, of one element type or to another.

use super::compile::{Target, buffer};
use super::float::{read, with_storage, write};
use super::{CUBES, Dispatch, Gpu, Memory};
use crate::KernelError;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Units of a cube of kernels that work on each element alone.
pub(crate) const UNITS: u32 = 256;

/// Cubes of [`UNITS`] that go through `len` elements together, each unit stepping over what all take at once.
pub(crate) fn cubes(len: usize) -> [u32; 3] {
    [len.div_ceil(UNITS as usize).clamp(1, CUBES) as u32, 1, 1]
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

/// Rows of `len` words to rows `to_pitch` apart, from rows `from_pitch` apart that have `have` of them; zeros for the
/// rest.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube(launch_unchecked)]
fn columns<W: Int, V: Size>(
    x: &[Vector<W, V>],
    y: &mut [Vector<W, V>],
    all: u32,
    len: u32,
    have: u32,
    from_pitch: u32,
    from_start: u32,
    to_pitch: u32,
    to_start: u32,
) {
    let mut i = ABSOLUTE_POS;
    while i < all as usize {
        let (row, column) = (i / len as usize, i % len as usize);
        let mut word = Vector::<W, V>::new(W::from_int(0));
        if column < have as usize {
            word = x[row * from_pitch as usize + from_start as usize + column];
        }
        y[row * to_pitch as usize + to_start as usize + column] = word;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The kernel for words of `size` bytes.
fn columns_kernel(target: &Target, size: usize) -> Box<dyn CubeKernel> {
    macro_rules! of {
        ($word:ty, $vector:expr) => {{
            let (settings, properties, registers) = target.start(UNITS);
            Box::new(columns::Columns::<$word>::new(
                settings,
                properties,
                registers,
                buffer(),
                buffer(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                $vector,
            ))
        }};
    }
    match size {
        16 => of!(u32, 4),
        4 => of!(u32, 1),
        2 => of!(u16, 1),
        _ => of!(u8, 1),
    }
}

/// Some columns of rows in a GPU's memory, all in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    pub memory: (&'a Memory, usize),
    /// From one row to the next.
    pub pitch: usize,
    pub start: usize,
    pub len: usize,
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
    pairs
        .map(|(from, to)| kernel(target, from, to))
        .chain([fill_kernel(target)])
        .chain([1, 2, 4, 16].map(|size| columns_kernel(target, size)))
        .collect()
}

impl Gpu {
    /// Memory that is `byte` throughout.
    pub(crate) fn filled(&self, bytes: usize, byte: u8) -> Result<Memory, KernelError> {
        let memory = self.allocate(bytes)?;
        self.fill(&memory, bytes, byte)?;
        Ok(memory)
    }

    /// Makes the first `bytes` bytes of `memory`, rounded up to whole words, `byte` throughout.
    pub(crate) fn fill(&self, memory: &Memory, bytes: usize, byte: u8) -> Result<(), KernelError> {
        let words = bytes.div_ceil(4);
        let len = index(words)?;
        if len == 0 {
            return Ok(());
        }
        self.launch(Dispatch {
            kernel: fill_kernel(self.target()),
            cubes: cubes(words),
            buffers: vec![(memory, 0)],
            scalars: vec![u32::from_ne_bytes([byte; 4]), len],
        })
    }

    /// Copies `rows` rows of `from` to `to`, which has no fewer columns; more are zero.
    pub(crate) fn copy_columns(&self, from: Columns, to: Columns, rows: usize) -> Result<(), KernelError> {
        let all = [from.pitch, from.start, from.len, from.memory.1, to.pitch, to.start, to.len, to.memory.1];
        let size =
            *[16, 4, 2, 1].iter().find(|&size| all.iter().all(|n| n.is_multiple_of(*size))).unwrap_or(&1);
        let words = |bytes: usize| index(bytes / size);
        words(rows * from.pitch)?;
        words(rows * to.pitch)?;
        if rows * to.len == 0 {
            return Ok(());
        }
        self.launch(Dispatch {
            kernel: columns_kernel(self.target(), size),
            cubes: cubes(rows * to.len / size),
            buffers: vec![from.memory, to.memory],
            scalars: vec![
                words(rows * to.len)?,
                words(to.len)?,
                words(from.len)?,
                words(from.pitch)?,
                words(from.start)?,
                words(to.pitch)?,
                words(to.start)?,
            ],
        })
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
