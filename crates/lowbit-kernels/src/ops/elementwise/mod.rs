//! What the elementwise ops of two operands share: `add`, `silu_mul`, `sigmoid_mul`. A [`Gate`] needs nothing but its
//! formulas: dispatch, checks, benchmark and the list of GPU kernels stand here.

pub(super) mod bench;
#[cfg(feature = "gpu")]
pub(super) mod gpu;

use super::check::Check;
use crate::{
    Cpu, Device, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        slices::{self, Map},
    },
};
use lowbit_formats::DType;

/// Which element of y is combined with an element of x.
#[cfg(feature = "gpu")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Broadcast {
    /// That of the same index: y has x's shape.
    None,
    /// That of the same row, in the last columns: rows of y are longer.
    Last,
    /// That of the same column: y is one row.
    Row,
    /// That of the same row: y has one column.
    Column,
}

/// The op itself, of a gate and what it gates.
pub(super) type Run = fn(&Tensor, &Tensor) -> Result<Tensor, KernelError>;

/// What a GPU build has of an elementwise op: its kernel.
#[cfg(feature = "gpu")]
pub(super) trait OnGpu: gpu::Combine {}
#[cfg(feature = "gpu")]
impl<F: gpu::Combine> OnGpu for F {}
/// What a build without GPUs has of an elementwise op beside its function on the CPU: nothing.
#[cfg(not(feature = "gpu"))]
pub(super) trait OnGpu {}
#[cfg(not(feature = "gpu"))]
impl<F> OnGpu for F {}

/// An op `y = f(gate, up)` of two tensors of one shape, as feed-forward layers have it.
pub(super) trait Gate: Map<2> + OnGpu + Default + Sync + 'static {
    /// The op's name, and the op.
    const OP: &'static str;
    const RUN: Run;
    /// Roundings to a result: `|error| <= gamma_ROUNDINGS |y|`.
    const ROUNDINGS: usize;

    /// `f` in f64.
    fn reference(gate: f64, up: f64) -> f64;

    /// Checks that the op takes these operands.
    fn check(gate: &Tensor, up: &Tensor) -> Result<Check, KernelError> {
        let check = Check(Self::OP);
        check.float("gate", gate)?;
        check.shape("up", up, gate.shape(), || "gate".into())?;
        check.float("up", up)?;
        check.same_device("up", up.device(), gate.device())?;
        Ok(check)
    }

    /// The op, its operands checked.
    fn run(check: Check, gate: &Tensor, up: &Tensor) -> Result<Tensor, KernelError> {
        match gate.device() {
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu::map::<Self>(check, gpu, gate, up, Broadcast::None),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
            Device::Cpu(cpu) => {
                let operands = [&check.widened("gate", gate)?, &check.widened("up", up)?];
                map(cpu, Self::default(), operands)?.cast(gate.dtype())
            }
        }
    }

    /// [`Self::reference`] of all elements.
    fn references(gate: &[f32], up: &[f32]) -> Vec<f64> {
        gate.iter().zip(up).map(|(&gate, &up)| Self::reference(gate.into(), up.into())).collect()
    }
}

/// Registers a [`Gate`]'s benchmark and its GPU kernels.
macro_rules! register {
    ($gate:ty) => {
        inventory::submit!(crate::bench::Cases($crate::ops::elementwise::bench::cases::<$gate>));
        #[cfg(all(test, feature = "gpu"))]
        inventory::submit!(crate::gpu::tests::Kernels($crate::ops::elementwise::gpu::gate_kernels::<$gate>));
    };
}
pub(super) use register;

struct Elementwise<'a, const N: usize, F> {
    f: &'a F,
    x: [&'a [f32]; N],
    y: &'a mut [f32],
}

impl<const N: usize, F: Map<N>> Kernel for Elementwise<'_, N, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        slices::map(simd, self.f, self.x, self.y);
    }
}

/// `y = f(x[0], .., x[N - 1])` on all threads. All are f32 tensors of one shape.
pub(super) fn map<const N: usize, F: Map<N> + Sync>(
    cpu: &Cpu,
    f: F,
    x: [&Tensor; N],
) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x[0].shape(), DType::F32, x[0].device());
    let mut slices: [&[f32]; N] = [&[]; N];
    for (slice, x) in slices.iter_mut().zip(x) {
        *slice = x.as_slice()?;
    }
    cpu.for_each_rows(y.as_mut_slice()?, 1, N, |first, y| {
        let x = slices.map(|x| &x[first..first + y.len()]);
        cpu.isa().dispatch(Elementwise { f: &f, x, y });
    });
    Ok(y)
}
