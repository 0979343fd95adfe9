//! Both gradients on a CPU, in one pass over their operands.

use super::super::cpu::Formula;
use super::widths;
use crate::simd::{
    Kernel, Simd,
    slices::{self, Map},
};
use crate::{Cpu, KernelError, Tensor};
use lowbit_formats::DType;
use std::marker::PhantomData;

/// Values of x per task, at least.
const TASK: usize = 1 << 14;

/// `[dx, dgate]` of `[x, gate, dy]`, which are f32 and not empty.
pub(super) fn run<G: Formula>(cpu: &Cpu, [x, gate, dy]: [&Tensor; 3]) -> Result<[Tensor; 2], KernelError> {
    // Rows do not matter where each element has its gate.
    let [width, columns] = if x.shape() == gate.shape() { [1, 1] } else { widths(x, gate) };
    let rows = TASK.div_ceil(width);
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    let mut dgate = Tensor::allocate_zeros(gate.shape(), DType::F32, x.device())?;
    let (x, gate, dy) = (x.as_slice::<f32>()?, gate.as_slice::<f32>()?, dy.as_slice::<f32>()?);
    let dxs = dx.as_mut_slice::<f32>()?.chunks_mut(rows * width);
    let dgates = dgate.as_mut_slice::<f32>()?.chunks_mut(rows * columns);
    cpu.for_each(dxs.zip(dgates).enumerate().collect(), |(task, (dx, dgate))| {
        let range = task * rows * width..task * rows * width + dx.len();
        let gate = &gate[task * rows * columns..][..dgate.len()];
        let (x, dy) = (&x[range.clone()], &dy[range]);
        let widths = if [width, columns] == [1, 1] { [dx.len(); 2] } else { [width, columns] };
        cpu.isa().dispatch(Rows::<G> { operands: [x, gate, dy], dx, dgate, widths, by: PhantomData });
    });
    Ok([dx, dgate])
}

/// Some whole rows of x, gate and dy.
struct Rows<'a, G> {
    operands: [&'a [f32]; 3],
    dx: &'a mut [f32],
    dgate: &'a mut [f32],
    /// Columns of x and of the gate.
    widths: [usize; 2],
    by: PhantomData<G>,
}

impl<G: Formula> Kernel for Rows<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { operands: [x, gate, dy], dx, dgate, widths: [width, columns], .. } = self;
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        let gates = gate.chunks_exact(columns).zip(dgate.chunks_exact_mut(columns));
        for (((x, dy), dx), (gate, dgate)) in rows.zip(gates) {
            if columns < width {
                one_gate::<S, G>(simd, [x, dy], gate[0], dx, &mut dgate[0]);
            } else {
                let read = columns - width;
                elements::<S, G>(simd, [x, &gate[read..], dy], dx, &mut dgate[read..]);
            }
        }
    }
}

/// A gate per element.
#[inline(always)]
fn elements<S: Simd, G: Formula>(simd: S, [x, gate, dy]: [&[f32]; 3], dx: &mut [f32], dgate: &mut [f32]) {
    let vectors = x.chunks(S::LANES).zip(gate.chunks(S::LANES)).zip(dy.chunks(S::LANES));
    let results = dx.chunks_mut(S::LANES).zip(dgate.chunks_mut(S::LANES));
    for (((x, gate), dy), (dx, dgate)) in vectors.zip(results) {
        let [x, gate, dy] = [x, gate, dy].map(|x| match x.len() == S::LANES {
            true => simd.load(x),
            false => simd.load_partial(x, 0.0),
        });
        let of_x = G::value_slope(simd, simd.mul(dy, G::factor(simd, gate)), x);
        let of_gate = G::factor_slope(simd, simd.mul(dy, G::value(simd, x)), gate);
        if dx.len() == S::LANES {
            simd.store(of_x, dx);
            simd.store(of_gate, dgate);
        } else {
            simd.store_partial(of_x, dx);
            simd.store_partial(of_gate, dgate);
        }
    }
}

/// A gate per row.
#[inline(always)]
fn one_gate<S: Simd, G: Formula>(simd: S, [x, dy]: [&[f32]; 2], gate: f32, dx: &mut [f32], dgate: &mut f32) {
    let along = if G::VALUE_IS_X {
        slices::dot(simd, x, dy)
    } else {
        // dx holds the values until their sum is there.
        slices::map(simd, &Value::<G>(PhantomData), [x], dx);
        slices::dot(simd, dx, dy)
    };
    let (along, gate) = (simd.splat(along), simd.splat(gate));
    simd.store_partial(G::factor_slope(simd, along, gate), std::slice::from_mut(dgate));
    let mut factor = [0.0];
    simd.store_partial(G::factor(simd, gate), &mut factor);
    slices::map(simd, &Dx::<G>(factor[0], PhantomData), [x, dy], dx);
}

struct Value<G>(PhantomData<G>);

impl<G: Formula> Map<1> for Value<G> {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x]: [S::V; 1]) -> S::V {
        G::value(simd, x)
    }
}

/// The gradient of x by one factor.
struct Dx<G>(f32, PhantomData<G>);

impl<G: Formula> Map<2> for Dx<G> {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, dy]: [S::V; 2]) -> S::V {
        G::value_slope(simd, simd.mul(dy, simd.splat(self.0)), x)
    }
}
