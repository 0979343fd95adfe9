//! The gradients of [`sigmoid_mul()`](super::sigmoid_mul()).

use crate::ops::check::Check;
use crate::simd::{Kernel, Simd, math, slices};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// Rows per task.
const ROWS: usize = 64;

/// The gradients of [`sigmoid_mul()`](super::sigmoid_mul()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct SigmoidMulGradient {
    pub dx: Tensor,
    pub dgate: Tensor,
}

/// With `s = 1 / (1 + e^-gate)`, the gradients of `y = x * s`:
///
/// ```text
/// dx    = dy * s
/// dgate = dy * x * s * (1 - s), summed over the row where a row has one gate
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | x, dy | `[.., D]` | f32, f16, bf16 |
/// | gate | `[.., G]`: the last D columns where `G >= D`, or `[.., 1]` | f32, f16, bf16 |
/// | dx, dgate | x's and gate's; columns of the gate that are not read have gradient 0 | dy's |
///
/// All arithmetic is f32, rounded once.
///
/// # Errors
/// As [`sigmoid_mul()`](super::sigmoid_mul()), of dy too; [`KernelError::Unsupported`] on a GPU.
pub fn sigmoid_mul_backward(
    x: &Tensor,
    gate: &Tensor,
    dy: &Tensor,
) -> Result<SigmoidMulGradient, KernelError> {
    super::check(x, gate)?;
    let check = Check("sigmoid_mul_backward");
    check.shape("dy", dy, x.shape(), || "x".into())?;
    let dtype = check.float("dy", dy)?.dtype();
    check.same_device("dy", dy.device(), x.device())?;
    let cpu = x.device().as_cpu(check.0)?;
    let (width, columns) = (*x.shape().last().unwrap_or(&1), *gate.shape().last().unwrap_or(&1));
    let (x, wide_gate, dy) = (check.widened("x", x)?, check.widened("gate", gate)?, check.widened("dy", dy)?);
    let mut dx = Tensor::allocate(x.shape(), DType::F32, x.device())?;
    // Of a gate whose row of x is empty, nothing is read.
    let mut dgate = Tensor::allocate_zeros(gate.shape(), DType::F32, x.device())?;
    if !x.is_empty() {
        let (x, gate, dy) = (x.as_slice::<f32>()?, wide_gate.as_slice::<f32>()?, dy.as_slice::<f32>()?);
        let dxs = dx.as_mut_slice::<f32>()?.chunks_mut(ROWS * width);
        let dgates = dgate.as_mut_slice::<f32>()?.chunks_mut(ROWS * columns);
        cpu.for_each(dxs.zip(dgates).enumerate().collect(), |(task, (dx, dgate))| {
            let range = task * ROWS * width..task * ROWS * width + dx.len();
            let gate = &gate[task * ROWS * columns..][..dgate.len()];
            let (x, dy) = (&x[range.clone()], &dy[range]);
            cpu.isa().dispatch(Rows { operands: [x, gate, dy], dx, dgate, width, columns });
        });
    }
    Ok(SigmoidMulGradient { dx: dx.cast(dtype)?, dgate: dgate.cast(dtype)? })
}

/// Some whole rows of x, gate and dy.
struct Rows<'a> {
    operands: [&'a [f32]; 3],
    dx: &'a mut [f32],
    dgate: &'a mut [f32],
    width: usize,
    columns: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { operands: [x, gate, dy], dx, dgate, width, columns } = self;
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        let gates = gate.chunks_exact(columns).zip(dgate.chunks_exact_mut(columns));
        for (((x, dy), dx), (gate, dgate)) in rows.zip(gates) {
            if columns < width {
                // 1 - s is sigmoid(-gate), which keeps its digits.
                let (s, rest) = (math::sigmoid(gate[0]), math::sigmoid(-gate[0]));
                dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy * s);
                dgate[0] = slices::dot(simd, x, dy) * s * rest;
                continue;
            }
            let read = columns - width;
            let pairs = gate[read..].iter().zip(&mut dgate[read..]);
            for (((x, dy), dx), (gate, dgate)) in x.iter().zip(dy).zip(dx).zip(pairs) {
                let (s, rest) = (math::sigmoid(*gate), math::sigmoid(-gate));
                (*dx, *dgate) = (dy * s, dy * x * s * rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::sigmoid_mul::reference;
    use crate::ops::testing::{
        FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, dot, normal, values,
    };
    use numcheck::{Random, gamma};

    fn sigmoid(x: f32) -> f64 {
        1.0 / (1.0 + (-f64::from(x)).exp())
    }

    /// dx; dgate of gates as long as x or one per row, and the magnitude of its terms.
    fn reference(x: &[f32], gate: &[f32], dy: &[f32]) -> (Vec<f64>, [Vec<f64>; 2]) {
        let width = x.len() / gate.len();
        let mut dgate = [vec![0.0; gate.len()], vec![0.0; gate.len()]];
        let mut dx = vec![];
        for (i, (&x, &dy)) in x.iter().zip(dy).enumerate() {
            let s = sigmoid(gate[i / width]);
            dx.push(f64::from(dy) * s);
            let term = f64::from(dy) * f64::from(x) * s * sigmoid(-gate[i / width]);
            dgate[0][i / width] += term;
            dgate[1][i / width] += term.abs();
        }
        (dx, dgate)
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        let [x, all, dy] = [(); 3].map(|()| coarse(&mut random, 2 * 3));
        for gate in [&all[..], &all[..2]] {
            let (dx, [dgate, _]) = reference(&x, gate, &dy);
            assert_derivatives("dx", &x, &dx, |x| dot(&reference::sigmoid_mul(x, gate), &dy));
            assert_derivatives("dgate", gate, &dgate, |gate| dot(&reference::sigmoid_mul(&x, gate), &dy));
        }
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for width in WIDTHS {
                // More rows than a task has.
                let (shape, dtype) = ([67, width], FLOATS[width % 3]);
                let (x, xs) = normal(&mut random, &shape, FLOATS[(width + 1) % 3], &device);
                let (dy, dys) = normal(&mut random, &shape, dtype, &device);
                for columns in [1, width, width + 3] {
                    let (gate, gates) = normal(&mut random, &[67, columns], FLOATS[0], &device);
                    let unread = columns.saturating_sub(width);
                    let read: Vec<f32> =
                        gates.chunks(columns).flat_map(|row| &row[unread..]).copied().collect();
                    let (want_dx, of_read) = reference(&xs, &read, &dys);
                    let [want, magnitude] = of_read.map(|of_read| {
                        let rows = of_read.chunks(columns - unread);
                        rows.flat_map(|row| [&vec![0.0; unread], row].concat()).collect::<Vec<_>>()
                    });
                    let SigmoidMulGradient { dx, dgate } = sigmoid_mul_backward(&x, &gate, &dy).unwrap();
                    let of_dx = |i: usize| gamma(reference::ROUNDINGS) * want_dx[i].abs();
                    assert_close(&dx, &shape, dtype, &want_dx, of_dx);
                    // Two sigmoids of 5 units each, 3 products, and the sum.
                    let of_dgate = |i: usize| gamma(width + 13) * magnitude[i];
                    assert_close(&dgate, &[67, columns], dtype, &want, of_dgate);
                }
            }
        }
    }

    #[test]
    fn empty_and_refused() {
        let device = device();
        let x = Tensor::new(&[1f32; 6], &[2, 3], &device).unwrap();
        let gate = Tensor::new(&[1f32; 2], &[2, 1], &device).unwrap();
        let error = sigmoid_mul_backward(&x, &gate, &gate).unwrap_err();
        assert_eq!(error.to_string(), "sigmoid_mul_backward: dy is [2, 1], but x wants [2, 3]");
        let none = Tensor::new::<f32>(&[], &[2, 0], &device).unwrap();
        let got = sigmoid_mul_backward(&none, &gate, &none).unwrap();
        assert_eq!((got.dx.shape(), values(&got.dgate)), (&[2, 0][..], vec![0.0; 2]));
    }
}
