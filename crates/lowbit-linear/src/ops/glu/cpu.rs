//! Gates on a CPU: one per element, or one per row.

use super::constants::{GELU, GELU_LINEAR, OAI_ALPHA, OAI_LIMIT};
use crate::{
    Cpu, KernelError, Tensor,
    simd::{
        Kernel, Simd,
        math::Math,
        slices::{self, Map},
    },
};
use lowbit_formats::DType;
use std::marker::PhantomData;

/// A gate on vectors: `y = value(x) * factor(gate)`, and its derivatives.
pub(in crate::ops) trait Formula: Sync + 'static {
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V;

    /// `v` times the derivative of the factor.
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V;

    /// True if the value is x itself.
    const VALUE_IS_X: bool = true;

    #[inline(always)]
    fn value<S: Simd>(_: S, x: S::V) -> S::V {
        x
    }

    /// `v` times the derivative of the value.
    #[inline(always)]
    fn value_slope<S: Simd>(_: S, v: S::V, _: S::V) -> S::V {
        v
    }
}

pub(in crate::ops) struct Silu;

impl Formula for Silu {
    #[inline(always)]
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V {
        simd.silu(gate)
    }

    #[inline(always)]
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V {
        simd.mul(v, silu_slope(simd, gate))
    }
}

pub(in crate::ops) struct GeluTanh;

impl GeluTanh {
    /// The argument of the sigmoid.
    #[inline(always)]
    fn argument<S: Simd>(simd: S, gate: S::V) -> S::V {
        let [c, d] = GELU.map(|c| simd.splat(c));
        simd.mul(gate, simd.mul_add(simd.mul(gate, gate), d, c))
    }
}

impl Formula for GeluTanh {
    #[inline(always)]
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V {
        simd.mul(gate, simd.sigmoid(Self::argument(simd, gate)))
    }

    #[inline(always)]
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V {
        let gate = clamp(simd, gate, GELU_LINEAR);
        let (argument, [c, d]) = (Self::argument(simd, gate), GELU);
        let steep = simd.mul_add(simd.mul(gate, gate), simd.splat(3.0 * d), simd.splat(c));
        let along = simd.mul_add(simd.mul(gate, rest(simd, argument)), steep, simd.splat(1.0));
        simd.mul(v, simd.mul(simd.sigmoid(argument), along))
    }
}

pub(in crate::ops) struct Sigmoid;

impl Formula for Sigmoid {
    #[inline(always)]
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V {
        simd.sigmoid(gate)
    }

    #[inline(always)]
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V {
        simd.mul(simd.mul(v, simd.sigmoid(gate)), rest(simd, gate))
    }
}

pub(in crate::ops) struct Relu;

impl Formula for Relu {
    #[inline(always)]
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V {
        // The second is the result for NaN.
        simd.max(simd.splat(0.0), gate)
    }

    #[inline(always)]
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V {
        let zero = simd.splat(0.0);
        // NaN for NaN, and 0 for all other gates that are not above 0.
        let below = simd.mul(simd.min(zero, Self::factor(simd, gate)), v);
        simd.select_lt(zero, gate, v, below)
    }
}

pub(in crate::ops) struct SwigluOai;

impl Formula for SwigluOai {
    #[inline(always)]
    fn factor<S: Simd>(simd: S, gate: S::V) -> S::V {
        let gate = simd.min(simd.splat(OAI_LIMIT), gate);
        simd.mul(gate, simd.sigmoid(simd.mul(gate, simd.splat(OAI_ALPHA))))
    }

    #[inline(always)]
    fn factor_slope<S: Simd>(simd: S, v: S::V, gate: S::V) -> S::V {
        let slope = silu_slope(simd, simd.mul(gate, simd.splat(OAI_ALPHA)));
        let zero = simd.splat(0.0);
        simd.select_lt(simd.splat(OAI_LIMIT), gate, zero, simd.mul(v, slope))
    }

    const VALUE_IS_X: bool = false;

    #[inline(always)]
    fn value<S: Simd>(simd: S, x: S::V) -> S::V {
        simd.add(clamp(simd, x, OAI_LIMIT), simd.splat(1.0))
    }

    #[inline(always)]
    fn value_slope<S: Simd>(simd: S, v: S::V, x: S::V) -> S::V {
        let zero = simd.splat(0.0);
        let magnitude = simd.max(x, simd.sub(zero, x));
        simd.select_lt(simd.splat(OAI_LIMIT), magnitude, zero, v)
    }
}

/// The derivative of silu: `s * (1 + x * (1 - s))` with `s = 1 / (1 + e^-x)`.
#[inline(always)]
fn silu_slope<S: Simd>(simd: S, x: S::V) -> S::V {
    simd.mul(simd.sigmoid(x), simd.mul_add(x, rest(simd, x), simd.splat(1.0)))
}

/// `1 - sigmoid(x)`, which keeps its digits.
#[inline(always)]
fn rest<S: Simd>(simd: S, x: S::V) -> S::V {
    simd.sigmoid(simd.sub(simd.splat(0.0), x))
}

/// From `-limit` to `limit`; NaN for NaN.
#[inline(always)]
fn clamp<S: Simd>(simd: S, x: S::V, limit: f32) -> S::V {
    simd.min(simd.splat(limit), simd.max(simd.splat(-limit), x))
}

/// The op on vectors of x and gate.
pub(in crate::ops) struct Glu<G>(pub PhantomData<G>);

impl<G: Formula> Map<2> for Glu<G> {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, gate]: [S::V; 2]) -> S::V {
        simd.mul(G::value(simd, x), G::factor(simd, gate))
    }
}

/// The op on a row of x, which has one factor.
struct Row<G>(f32, PhantomData<G>);

impl<G: Formula> Map<1> for Row<G> {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x]: [S::V; 1]) -> S::V {
        simd.mul(G::value(simd, x), simd.splat(self.0))
    }
}

/// One gate per row of `width` elements.
struct Rows<'a, G> {
    x: &'a [f32],
    gate: &'a [f32],
    y: &'a mut [f32],
    width: usize,
    by: PhantomData<G>,
}

impl<G: Formula> Kernel for Rows<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width));
        for ((x, y), &gate) in rows.zip(self.gate) {
            let mut factor = [0.0];
            simd.store_partial(G::factor(simd, simd.splat(gate)), &mut factor);
            slices::map(simd, &Row::<G>(factor[0], PhantomData), [x], y);
        }
    }
}

/// `x` `[.., D]` by `gate` `[.., 1]`, both f32.
pub(super) fn rows<G: Formula>(cpu: &Cpu, x: &Tensor, gate: &Tensor) -> Result<Tensor, KernelError> {
    let mut y = Tensor::empty(x.shape(), DType::F32, x.device());
    let (width, x, gate) = (x.dim(-1), x.as_slice::<f32>()?, gate.as_slice::<f32>()?);
    cpu.for_each_rows(y.as_mut_slice()?, width, width, |first, y| {
        let x = &x[first * width..first * width + y.len()];
        cpu.isa().dispatch(Rows::<G> { x, gate: &gate[first..], y, width, by: PhantomData });
    });
    Ok(y)
}
