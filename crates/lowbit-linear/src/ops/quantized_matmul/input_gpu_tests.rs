//! Products of what other ops make on a GPU, against both in f64.

use super::input_tests::Operands;
use super::tests::assert_expected;
use super::{
    AddRmsNorm, Input, Norm, quantized_matmul, quantized_matmul_and_sum, quantized_matmul_to, reference,
};
use crate::bench::Expected;
use crate::inputs::{self, rounding};
use crate::ops::glu::Gate;
use crate::ops::testing::{assert_close, gpu, values};
use crate::ops::{add_rms_norm, rms_norm};
use crate::{Device, Tensor};
use lowbit_formats::{FloatType, Format};
use numcheck::gamma;

/// The largest error of a sigmoid for 16 bits, relative to its value.
const SIGMOID: f64 = 1.0 / 131_072.0;

/// The op's result in f64, and the largest error of f32.
pub(crate) fn made(x: &Input<'_>) -> Vec<(f64, f64)> {
    let within = |relative: f64| move |y: f64| (y, relative * y.abs());
    match *x {
        Input::Tensor(x) => values(x).into_iter().map(|x| (x.into(), 0.0)).collect(),
        Input::Glu { x, gate, by } => {
            let (columns, gates) = (gate.dim(-1), values(gate));
            let width = x.len() / (gates.len() / columns);
            let gates: Vec<f32> =
                gates.chunks(columns).flat_map(|head| &head[columns - width..]).copied().collect();
            let [y, magnitude] = by.references(&values(x), &gates);
            let bound = gamma(by.roundings()) + SIGMOID;
            y.into_iter().zip(magnitude).map(|(y, magnitude)| (y, bound * magnitude)).collect()
        }
        Input::GatedRmsNorm { x, gate, norm: Norm { weight, eps } } => {
            let y = rms_norm::reference::rms_norm(&values(x), Some(&values(gate)), &values(weight), eps);
            let roundings = rms_norm::reference::roundings(weight.len(), true);
            y.into_iter().map(within(gamma(roundings) + SIGMOID)).collect()
        }
        Input::AddRmsNorm(AddRmsNorm { h, x, norm: Norm { weight, eps } }) => {
            let [_, y] = add_rms_norm::reference::add_rms_norm(&values(h), &values(x), &values(weight), eps);
            y
        }
    }
}

/// Rows of `x`, each value rounded to `dtype`, times those of `weight`, rounded to `result`.
pub(crate) fn product(
    x: &[(f64, f64)],
    weight: &[f32],
    k: usize,
    [dtype, result]: [FloatType; 2],
) -> Vec<Expected> {
    let mut y: Vec<Expected> = Vec::new();
    for x in x.chunks_exact(k) {
        for weight in weight.chunks_exact(k) {
            let (mut value, mut magnitude, mut error) = (0.0, 0.0, 0.0);
            for (&(x, bound), &w) in x.iter().zip(weight) {
                let w = f64::from(w);
                let bound = bound + rounding(dtype, x.abs() + bound);
                value += x * w;
                magnitude += (x.abs() + bound) * w.abs();
                error += bound * w.abs();
            }
            let bound = gamma(k) * magnitude + error;
            y.push(Expected { index: y.len(), value, bound: bound + rounding(result, value.abs() + bound) });
        }
    }
    y
}

/// All inputs of `heads` heads of `width`, times a weight of `n` rows.
fn check(format: Format, n: usize, sizes: [usize; 3], [dtype, h]: [FloatType; 2]) {
    let (gpu, k) = (gpu(), sizes[1] * sizes[2]);
    let host = gpu.host().unwrap();
    let weight = inputs::weight(format, &[n, k], 7, &host).unwrap();
    let decoded = reference::decoded(&weight, n).unwrap();
    let weight = weight.to_device(&gpu).unwrap();
    let of = Operands::new(sizes, [dtype, h], &gpu);
    let what = format!("{format} N={n} {sizes:?} {dtype:?} {h:?}");
    let normed = Input::AddRmsNorm(of.add_rms_norm());
    let gates = Gate::ALL.map(|by| (format!("{by:?}"), of.glu(by)));
    let heads = [Gate::Sigmoid, Gate::SwigluOai].map(|by| (format!("{by:?} of heads"), of.heads_glu(by)));
    let normed_heads = ("gated_rms_norm".into(), of.gated_rms_norm());
    for (name, x) in gates.into_iter().chain(heads).chain([normed_heads]) {
        let y = quantized_matmul(x, &weight).unwrap();
        assert_eq!((y.shape(), y.dtype()), (&[sizes[0], n][..], dtype.dtype()));
        assert_expected(&format!("{name} {what}"), &y, &product(&made(&x), &decoded, k, [dtype; 2]));
    }
    let y = quantized_matmul_to(normed, &weight, FloatType::F32).unwrap();
    let want = made(&normed);
    assert_expected(&format!("to f32 {what}"), &y, &product(&want, &decoded, k, [dtype, FloatType::F32]));
    let (sum, y) = quantized_matmul_and_sum(of.add_rms_norm(), &weight).unwrap();
    assert_expected(&format!("add_rms_norm {what}"), &y, &product(&want, &decoded, k, [dtype; 2]));
    let AddRmsNorm { h: stream, x, .. } = of.add_rms_norm();
    let sums: Vec<f64> =
        values(stream).into_iter().zip(values(x)).map(|(h, x)| f64::from(h) + f64::from(x)).collect();
    assert_close(&sum, stream.shape(), h, &sums, |i| gamma(1) * sums[i].abs());
}

#[test]
fn small_weights_and_several_rows() {
    use FloatType::{BF16, F16, F32};
    for (rows, dtype, h) in [(1, F16, F32), (1, F32, F32), (2, BF16, F32), (5, F16, F16)] {
        check(Format::Q4_0, 29, [rows, 4, 64], [dtype, h]);
        check(Format::Q8_0, 19, [rows, 3, 96], [dtype, h]);
    }
}

/// Inputs that a product makes itself, where one does: units that make one vector of x and several,
/// and one row too many.
#[test]
fn large_weights() {
    use FloatType::{BF16, F16, F32};
    let affine = Format::affine(4, 64, BF16).unwrap();
    for (n, heads, width, types) in [
        (26000, 2, 128, [F16, F32]),
        (6400, 10, 128, [BF16, F32]),
        (1589, 32, 128, [F16, F32]),
        (1589, 16, 256, [BF16, F16]),
        (1600, 512, 8, [F16, F16]),
        (2113, 40, 128, [F16, BF16]),
        (2113, 56, 256, [F16, F32]),
        // Heads that are no power of two.
        (1700, 64, 96, [F16, F32]),
    ] {
        check(affine, n, [1, heads, width], types);
    }
    check(affine, 6400, [2, 4, 64], [F16, F32]);
    check(Format::Q4_K, 1700, [1, 32, 128], [BF16, F32]);
}

/// A product reads what the launch before it wrote, as often as it is replayed.
#[test]
fn a_chain_of_products() {
    let gpu = gpu();
    let of = Operands::new([1, 32, 128], [FloatType::F16, FloatType::F32], &gpu);
    let weight = inputs::weight(Format::Q4_0, &[4096, 4096], 7, &gpu.host().unwrap()).unwrap();
    let weight = weight.to_device(&gpu).unwrap();
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let run = || {
        let AddRmsNorm { norm, .. } = of.add_rms_norm();
        let (mut sum, mut y) = quantized_matmul_and_sum(of.add_rms_norm(), &weight)?;
        for _ in 0..5 {
            (sum, y) = quantized_matmul_and_sum(AddRmsNorm { h: &sum, x: &y, norm }, &weight)?;
        }
        Ok((sum, y))
    };
    let of_both = |(sum, y): (Tensor, Tensor)| (values(&sum), values(&y));
    let want = of_both(run().unwrap());
    assert!(want.0.iter().chain(&want.1).all(|value| value.is_finite()));
    let mut captured = None;
    let pass = queue.capture(|| run().map(|both| captured = Some(both))).unwrap();
    for _ in 0..3 {
        pass.replay().unwrap();
        assert_eq!(of_both(captured.clone().unwrap()), want);
    }
}
