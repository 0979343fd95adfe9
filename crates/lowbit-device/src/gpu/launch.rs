//! Typed launches. `#[kernel]` makes a struct of a kernel's signature, with one named field per
//! argument; launching binds its fields in the signature's order.

use super::copy::Columns;
use super::encoder::Dispatch;
use super::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core::prelude::{BufferCompilationArg, CubeKernel};
use std::marker::PhantomData;

pub use lowbit_device_macros::{LaunchArgs, kernel, sources};

/// A buffer among a launch's arguments: device memory from byte `start` on.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// All of the memory.
    pub memory: &'a Memory,
    /// The byte in it at which the buffer starts.
    pub start: usize,
    /// A tensor's bytes. Other memory, which starts where every device binds it, has 0.
    len: usize,
}

impl<'a> Buffer<'a> {
    /// Memory from byte `start` on, a multiple of what every device wants: of 256.
    pub fn at(memory: &'a Memory, start: usize) -> Self {
        debug_assert!(start.is_multiple_of(256), "a buffer starts at byte {start}");
        Self { memory, start, len: 0 }
    }

    /// The buffer from `bytes` before on.
    pub fn back(self, bytes: usize) -> Self {
        Self { start: self.start - bytes, len: self.len + bytes, ..self }
    }
}

impl<'a> From<&'a Memory> for Buffer<'a> {
    fn from(memory: &'a Memory) -> Self {
        Self::at(memory, 0)
    }
}

impl Tensor {
    /// The tensor's memory as an argument of a launch.
    pub fn buffer(&self) -> Result<Buffer<'_>, KernelError> {
        let (memory, start) = self.memory()?;
        Ok(Buffer { memory, start, len: self.size_bytes() })
    }
}

/// A kernel with its compile-time values, which is launched with an `Entry`.
pub struct Kernel<Entry> {
    code: Box<dyn CubeKernel>,
    entry: PhantomData<Entry>,
}

impl<Entry> Kernel<Entry> {
    /// For the code that `#[kernel]` makes.
    pub fn new(code: impl CubeKernel) -> Self {
        Self { code: Box::new(code), entry: PhantomData }
    }

    /// The kernel alone, to compile it.
    pub fn code(self) -> Box<dyn CubeKernel> {
        self.code
    }
}

/// The arguments of a launch.
pub trait Arguments<'a> {
    /// Says which kernel.
    type Entry;

    /// Appends all arguments in the kernel's order.
    fn bind(self, to: &mut Bound<'a>);
}

/// One argument of a launch, or a group of them.
pub trait Bind<'a> {
    /// Appends it to those before.
    fn bind(self, to: &mut Bound<'a>);
}

impl<'a> Bind<'a> for Buffer<'a> {
    fn bind(self, to: &mut Bound<'a>) {
        to.buffers.push((self, false));
    }
}

impl<'a> Bind<'a> for u32 {
    fn bind(self, to: &mut Bound<'a>) {
        to.scalars.push(self);
    }
}

/// Arguments in a kernel's order.
#[derive(Default)]
pub struct Bound<'a> {
    /// Each with true if the kernel writes it.
    buffers: Vec<(Buffer<'a>, bool)>,
    scalars: Vec<u32>,
    early: usize,
}

impl<'a> Bound<'a> {
    /// Binds an argument that the kernel writes.
    pub fn written(&mut self, argument: impl Bind<'a>) {
        let before = self.buffers.len();
        argument.bind(self);
        self.buffers[before..].iter_mut().for_each(|(_, written)| *written = true);
    }

    /// The buffers until here may be read before the launch before has ended.
    pub fn early(&mut self) {
        self.early = self.buffers.len();
    }
}

/// The compile-time form of a kernel's argument for CubeCL, which knows nothing of a launch.
pub trait Unbound {
    /// Such a form.
    fn unbound() -> Self;
}

impl Unbound for () {
    fn unbound() {}
}

impl Unbound for BufferCompilationArg {
    /// A buffer that aliases no other.
    fn unbound() -> Self {
        Self { inplace: None }
    }
}

impl Gpu {
    /// Records a launch of `kernel` in cubes (CUDA's blocks, Vulkan's workgroups) along x, y and z.
    /// A tensor that starts where the device binds no buffer
    /// ([`Target::binding`](super::compile::Target::binding)) is copied, and copied back if the
    /// kernel writes it.
    ///
    /// # Safety
    /// Kernels do not check what they index: with these cubes, sizes and compile-time values the
    /// kernel must stay within its buffers. Tensors may hold anything (ids, positions, offsets):
    /// kernels check that themselves.
    #[allow(unsafe_code)]
    pub unsafe fn launch<'a, A: Arguments<'a>>(
        &self,
        kernel: Kernel<A::Entry>,
        cubes: [u32; 3],
        arguments: A,
    ) -> Result<(), KernelError> {
        let mut bound = Bound::default();
        arguments.bind(&mut bound);
        let Bound { buffers, scalars, early } = bound;
        // None on most devices, and then no memory of the host's either.
        let mut copies: Vec<(usize, Memory)> = vec![];
        for (i, (buffer, _)) in buffers.iter().enumerate() {
            if !buffer.start.is_multiple_of(self.target().binding()) {
                copies.push((i, self.copied(buffer)?));
            }
        }
        let bound = buffers.iter().enumerate().map(|(i, (buffer, _))| {
            let copy = copies.iter().find(|(of, _)| *of == i);
            copy.map_or((buffer.memory, buffer.start), |(_, copy)| (copy, 0))
        });
        let written = buffers.iter().rev().fold(0, |bits, (_, written)| bits << 1 | u64::from(*written));
        let dispatch =
            Dispatch { kernel: kernel.code, cubes, buffers: bound.collect(), written, scalars, early };
        // SAFETY: the arguments are the kernel's, in its order; the caller answers for the rest.
        unsafe { self.dispatch(dispatch)? };
        for (i, copy) in &copies {
            let (buffer, written) = buffers[*i];
            if written {
                let [tensor, copy] = [buffer, copy.into()].map(|place| Columns::row(place, buffer.len));
                self.copy_columns(copy, tensor, 1)?;
            }
        }
        Ok(())
    }

    /// A copy of a tensor, in memory of its own.
    fn copied(&self, buffer: &Buffer<'_>) -> Result<Memory, KernelError> {
        let memory = self.allocate(buffer.len)?;
        let [tensor, copy] = [*buffer, (&memory).into()].map(|place| Columns::row(place, buffer.len));
        self.copy_columns(tensor, copy, 1)?;
        Ok(memory)
    }
}
