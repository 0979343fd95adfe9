//! Typed launches. `#[kernel]` makes a struct of a kernel's signature, with one named field per argument; launching binds
//! its fields in the signature's order.

use super::encoder::Dispatch;
use super::{Gpu, Memory};
use crate::{KernelError, Tensor};
use cubecl_core::prelude::{BufferCompilationArg, CubeKernel};
use std::marker::PhantomData;

pub(crate) use lowbit_kernels_macros::{LaunchArgs, kernel};

/// A buffer among a launch's arguments: device memory from byte `start` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer<'a> {
    pub memory: &'a Memory,
    pub start: usize,
}

impl<'a> From<&'a Memory> for Buffer<'a> {
    fn from(memory: &'a Memory) -> Self {
        Self { memory, start: 0 }
    }
}

impl Tensor {
    /// The tensor's memory as an argument of a launch.
    pub(crate) fn buffer(&self) -> Result<Buffer<'_>, KernelError> {
        let (memory, start) = self.memory()?;
        Ok(Buffer { memory, start })
    }
}

/// A kernel with its compile-time values, which is launched with an `Entry`.
pub(crate) struct Kernel<Entry> {
    code: Box<dyn CubeKernel>,
    entry: PhantomData<Entry>,
}

impl<Entry> Kernel<Entry> {
    /// For the code that `#[kernel]` makes.
    pub fn new(code: impl CubeKernel) -> Self {
        Self { code: Box::new(code), entry: PhantomData }
    }

    /// The kernel alone, to compile it.
    #[cfg(test)]
    pub fn code(self) -> Box<dyn CubeKernel> {
        self.code
    }
}

/// What a kernel is launched with.
pub(crate) trait Arguments<'a> {
    /// Says which kernel.
    type Entry;

    /// Appends all arguments in the kernel's order.
    fn bind(self, to: &mut Bound<'a>);
}

/// One argument of a launch, or a group of them.
pub(crate) trait Bind<'a> {
    /// Appends it to those before.
    fn bind(self, to: &mut Bound<'a>);
}

impl<'a> Bind<'a> for Buffer<'a> {
    fn bind(self, to: &mut Bound<'a>) {
        to.buffers.push((self.memory, self.start));
    }
}

impl<'a> Bind<'a> for u32 {
    fn bind(self, to: &mut Bound<'a>) {
        to.scalars.push(self);
    }
}

/// Arguments in a kernel's order.
#[derive(Default)]
pub(crate) struct Bound<'a> {
    buffers: Vec<(&'a Memory, usize)>,
    scalars: Vec<u32>,
    early: usize,
}

impl Bound<'_> {
    /// The buffers until here may be read before the launch before has ended.
    pub fn early(&mut self) {
        self.early = self.buffers.len();
    }
}

/// What CubeCL compiles a kernel's argument with: nothing that is known of a launch.
pub(crate) trait Unbound {
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
    ///
    /// # Safety
    /// Kernels do not check what they index: with these cubes, sizes and compile-time values the kernel must stay within
    /// its buffers. What tensors hold (ids, positions, offsets) may be anything: kernels check that themselves.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn launch<'a, A: Arguments<'a>>(
        &self,
        kernel: Kernel<A::Entry>,
        cubes: [u32; 3],
        arguments: A,
    ) -> Result<(), KernelError> {
        let mut bound = Bound::default();
        arguments.bind(&mut bound);
        let Bound { buffers, scalars, early } = bound;
        // SAFETY: the arguments are the kernel's, in its order; the caller answers for the rest.
        unsafe { self.dispatch(Dispatch { kernel: kernel.code, cubes, buffers, scalars, early }) }
    }
}
