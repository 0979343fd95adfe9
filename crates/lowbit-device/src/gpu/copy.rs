//! Copies within a device, of one element type or to another.

#![allow(unsafe_code)] // Launches.

use super::compile::Target;
use super::float::{read, with_storage, write};
use super::launch::{Buffer, Kernel, LaunchArgs, kernel};
use super::{CUBES, Gpu, Memory};
use crate::KernelError;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Units of a cube of kernels that work on each element alone.
pub const UNITS: usize = 256;

/// Cubes of [`UNITS`] that go through `len` elements together, each unit stepping over what all
/// take at once.
pub fn cubes(len: usize) -> [u32; 3] {
    [len.div_ceil(UNITS).clamp(1, CUBES) as u32, 1, 1]
}

#[kernel]
fn copy_convert<X: Int, Y: Int>(
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

#[kernel]
fn copy_fill(y: &mut [u32], word: u32, len: u32) {
    let mut i = ABSOLUTE_POS;
    while i < len as usize {
        y[i] = word;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// In words: how many there are in all rows of y, and in a row of y and of x.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Words {
    all: u32,
    len: u32,
    have: u32,
}

/// In words: from one row to the next, and to the first column.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Pitch {
    pitch: u32,
    start: u32,
}

/// Rows of `len` words of y from rows of x that have `have` of them; zeros for the rest.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[kernel]
fn copy_columns<W: Int, V: Size>(
    x: &[Vector<W, V>],
    y: &mut [Vector<W, V>],
    words: Words,
    from: Pitch,
    to: Pitch,
) {
    let mut i = ABSOLUTE_POS;
    while i < words.all as usize {
        let (row, column) = (i / words.len as usize, i % words.len as usize);
        let mut word = Vector::<W, V>::new(W::from_int(0));
        if column < words.have as usize {
            word = x[row * from.pitch as usize + from.start as usize + column];
        }
        y[row * to.pitch as usize + to.start as usize + column] = word;
        i += (CUBE_COUNT_X * CUBE_DIM_X) as usize;
    }
}

/// The kernel for words of `size` bytes.
fn columns_kernel(target: &Target, size: usize) -> Kernel<CopyColumns<'static>> {
    match size {
        16 => CopyColumns::kernel::<u32>(target, UNITS, 4),
        4 => CopyColumns::kernel::<u32>(target, UNITS, 1),
        2 => CopyColumns::kernel::<u16>(target, UNITS, 1),
        _ => CopyColumns::kernel::<u8>(target, UNITS, 1),
    }
}

/// Some columns of rows in a GPU's memory, all in bytes.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    /// The rows, one after the other.
    pub buffer: Buffer<'a>,
    /// From one row to the next.
    pub pitch: usize,
    /// Before the first column of a row.
    pub start: usize,
    /// Of a row.
    pub len: usize,
}

impl<'a> Columns<'a> {
    /// The first `len` bytes of a buffer.
    pub fn row(buffer: Buffer<'a>, len: usize) -> Self {
        Self { buffer, pitch: len, start: 0, len }
    }

    /// The same columns of a buffer that starts at a multiple of `bytes`.
    fn bound_at(self, bytes: usize) -> Self {
        let before = self.buffer.start % bytes;
        Self { buffer: self.buffer.back(before), start: self.start + before, ..self }
    }
}

fn convert_kernel(target: &Target, from: FloatType, to: FloatType) -> Kernel<CopyConvert<'static>> {
    with_storage!(from, X => with_storage!(to, Y => CopyConvert::kernel::<X, Y>(target, UNITS, from, to)))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Every kernel here.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let pairs = floats.into_iter().flat_map(|from| floats.map(|to| (from, to)));
    pairs
        .map(|(from, to)| convert_kernel(target, from, to).code())
        .chain([CopyFill::kernel(target, UNITS).code()])
        .chain([1, 2, 4, 16].map(|size| columns_kernel(target, size).code()))
        .collect()
}

impl Gpu {
    /// Memory that is `byte` throughout.
    #[doc(hidden)] // It trusts its caller.
    pub fn filled(&self, bytes: usize, byte: u8) -> Result<Memory, KernelError> {
        let memory = self.allocate(bytes)?;
        self.fill(&memory, bytes, byte)?;
        Ok(memory)
    }

    /// Makes the first `bytes` bytes of `memory`, rounded up to whole words, `byte` throughout.
    #[doc(hidden)] // It trusts its caller.
    pub fn fill(&self, memory: &Memory, bytes: usize, byte: u8) -> Result<(), KernelError> {
        let words = bytes.div_ceil(4);
        let len = index(words)?;
        if len == 0 {
            return Ok(());
        }
        let arguments = CopyFill { y: memory.into(), word: u32::from_ne_bytes([byte; 4]), len };
        // SAFETY: memory is whole words.
        unsafe { self.launch(CopyFill::kernel(self.target(), UNITS), cubes(words), arguments) }
    }

    /// The bandwidth of copies by a kernel, in bytes read and written a second: several at a time,
    /// since the host's clock may be all that there is.
    pub(super) fn kernel_copy_bandwidth(&self) -> Result<f64, KernelError> {
        const AT_A_TIME: usize = 16;
        // More than caches hold. A program for the processor takes long for as much.
        let size = if self.is_software() { 32 << 20 } else { 256 << 20 };
        let (from, to) = (self.filled(size, 1)?, self.filled(size, 0)?);
        let columns = |memory| Columns { buffer: Buffer::from(memory), pitch: size, start: 0, len: size };
        let mut best = 0.0f64;
        for _ in 0..5 {
            let time = self.time(|| {
                (0..AT_A_TIME).try_for_each(|_| self.copy_columns(columns(&from), columns(&to), 1))
            })?;
            best = best.max((2 * AT_A_TIME * size) as f64 / time.as_secs_f64());
        }
        Ok(best)
    }

    /// Copies `rows` rows of `from` to `to`, which has no fewer columns; more are zero.
    #[doc(hidden)] // It trusts its caller.
    pub fn copy_columns(&self, from: Columns, to: Columns, rows: usize) -> Result<(), KernelError> {
        let [from, to] = [from, to].map(|of| of.bound_at(self.target().binding()));
        let all = [from, to].map(|of| [of.pitch, of.start, of.len, of.buffer.start]);
        let all = all.as_flattened();
        let size =
            *[16, 4, 2, 1].iter().find(|&size| all.iter().all(|n| n.is_multiple_of(*size))).unwrap_or(&1);
        let words = |bytes: usize| index(bytes / size);
        words(rows * from.pitch)?;
        words(rows * to.pitch)?;
        if rows * to.len == 0 {
            return Ok(());
        }
        let pitch =
            |of: Columns| Ok::<_, KernelError>(Pitch { pitch: words(of.pitch)?, start: words(of.start)? });
        let arguments = CopyColumns {
            x: from.buffer,
            y: to.buffer,
            words: Words { all: words(rows * to.len)?, len: words(to.len)?, have: words(from.len)? },
            from: pitch(from)?,
            to: pitch(to)?,
        };
        let kernel = columns_kernel(self.target(), size);
        // SAFETY: the callers' columns lie within their rows, and those within their memory.
        unsafe { self.launch(kernel, cubes(rows * to.len / size), arguments) }
    }

    /// The `len` elements of `from` that `x` begins with, as as many of `to` in other memory.
    #[doc(hidden)] // It trusts its caller.
    pub fn convert(
        &self,
        x: Buffer<'_>,
        len: usize,
        (from, to): (FloatType, FloatType),
    ) -> Result<Memory, KernelError> {
        let copy = self.allocate(len * to.size())?;
        let count = index(len)?;
        if count > 0 {
            let arguments = CopyConvert { x, y: (&copy).into(), len: count };
            // SAFETY: both buffers have as many elements.
            unsafe { self.launch(convert_kernel(self.target(), from, to), cubes(len), arguments)? };
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

#[cfg(test)]
mod tests {
    use crate::Device;
    use crate::testing::gpu;

    #[test]
    fn bandwidth_is_measured_on_every_device() {
        let Device::Gpu(gpu) = gpu() else { unreachable!("a GPU") };
        let rate = gpu.copy_bandwidth().unwrap();
        // From a slow processor to ten times the fastest memory.
        assert!((1e7..1e14).contains(&rate), "{rate}");
    }
}
