//! The feed-forward layer of most models, whose products a CPU need not write to memory.

use super::cpu::{self, Weight};
use super::input::Input;
use super::{on_cpu, policy, product_shape, quantized_matmul, quantized_matmul_each};
use crate::ops::Check;
use crate::ops::glu::{Gate, glu};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;

const CHECK: Check = Check("gated_mlp");

/// `y = glu(x up^T, x gate^T) down^T`: SwiGLU with [`Gate::Silu`].
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `x` | `[.., K]` | f32, f16, bf16 |
/// | `gate`, `up` | `[I, K]` | any format |
/// | `down` | `[N, I]` | any format |
/// | `y` | `[.., N]` | as `x` |
///
/// Products and their rounding are [`quantized_matmul()`](super::quantized_matmul())'s, and the
/// weights may have its batches. A CPU rounds neither the two products nor what down multiplies to
/// x's dtype, and where gate and up are in panels and of one format, it does not write the products
/// to memory.
///
/// # Errors
/// As [`quantized_matmul()`](super::quantized_matmul()); [`KernelError::Shape`] for a gate and an
/// up of different shapes.
///
/// Source: the `mlp` of most of transformers' models; mlx-lm 0.32 `swiglu`; ggml's
/// `ggml_glu_split`.
pub fn gated_mlp(
    x: &Tensor,
    [gate, up, down]: [&QuantizedTensor; 3],
    by: Gate,
) -> Result<Tensor, KernelError> {
    if gate.shape() != up.shape() {
        let want = format!("gate is {:?}", gate.shape());
        return Err(KernelError::Shape { op: CHECK.0, operand: "up", got: up.shape().to_vec(), want });
    }
    let dtype = CHECK.float("x", x)?;
    let hidden = product_shape(CHECK, x.shape(), gate.shape())?;
    let shape = product_shape(CHECK, &hidden, down.shape())?;
    for (name, weight) in [("gate", gate), ("up", up), ("down", down)] {
        CHECK.same_device(name, weight.device(), x.device())?;
    }
    let Device::Cpu(cpu) = x.device() else {
        let products = quantized_matmul_each(x, &[gate, up])?;
        return quantized_matmul(Input::Glu { x: &products[1], gate: &products[0], by }, down);
    };
    let wide = CHECK.widened("x", x)?;
    let m = x.shape()[..x.shape().len() - 1].iter().product();
    let in_panels = gate.panels_in_turn(up).is_some() && down.is_repacked();
    let one_batch = gate.shape().len() == 2 && down.shape().len() == 2;
    let y = if policy::in_tiles(cpu.isa(), m) && in_panels && one_batch && !down.shape().contains(&0) {
        let mut y = CHECK.result(&shape, x.device())?;
        cpu::gated_mlp(cpu, (wide.as_slice()?, m), ([gate, up, down], by), y.as_mut_slice()?);
        y
    } else {
        quantized_matmul(&combined(&wide, [gate, up], by)?, down)?
    };
    y.cast(dtype.dtype())
}

/// `glu(x up^T, x gate^T)` on a CPU, operands checked.
fn combined(x: &Tensor, [gate, up]: [&QuantizedTensor; 2], by: Gate) -> Result<Tensor, KernelError> {
    if gate.panels_in_turn(up).is_some() {
        let mut y = on_cpu(x.device().as_cpu(CHECK.0)?, x, &[Weight::Glu { gate, up, by }], FloatType::F32)?;
        return Ok(y.pop().expect("a result per weight"));
    }
    let products = quantized_matmul_each(x, &[gate, up])?;
    glu(&products[1], &products[0], by)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs;
    use crate::ops::quantized_matmul::tests::formats;
    use crate::ops::testing::{FLOATS, devices, values};
    use lowbit_formats::{DType, Format};
    use numcheck::assert_bits;

    fn weight(format: Format, shape: &[usize], seed: u64, device: &Device) -> QuantizedTensor {
        inputs::weight(format, shape, seed, device).unwrap()
    }

    /// The input of down, and the result of the three ops that it stands for.
    fn both(x: &Tensor, weights: [&QuantizedTensor; 2], by: Gate) -> [Tensor; 2] {
        let products = quantized_matmul_each(x, &weights).unwrap();
        [combined(x, weights, by).unwrap(), glu(&products[1], &products[0], by).unwrap()]
    }

    #[test]
    fn products_are_combined_as_by_three_ops() {
        for device in devices() {
            for (i, format) in formats().into_iter().enumerate() {
                let by = Gate::ALL[i % 4];
                for (m, n, k) in [(1, 35, 256), (7, 32, 256), (67, 19, 256)] {
                    let x = inputs::activations(&[m, k], FloatType::F32, 3, &device).unwrap();
                    let plain = [1, 2].map(|seed| weight(format, &[n, k], seed, &device));
                    let panels = plain.each_ref().map(|weight| weight.to_panels().unwrap());
                    for [gate, up] in [&plain, &panels, &[plain[0].clone(), panels[1].clone()]] {
                        let [y, want] = both(&x, [gate, up], by);
                        assert_eq!((y.shape(), y.dtype()), (want.shape(), want.dtype()));
                        assert_bits(
                            &format!("{by:?} {format} M={m} N={n} on {device:?}"),
                            &values(&y),
                            &values(&want),
                        );
                    }
                }
            }
        }
    }

    /// The op, and what it is made of, all in f32.
    fn all(x: &Tensor, weights: [&QuantizedTensor; 3], by: Gate) -> [Tensor; 2] {
        let [gate, up, down] = weights;
        let wide = x.cast(DType::F32).unwrap();
        let hidden = both(&wide, [gate, up], by)[1].clone();
        let y = quantized_matmul(&hidden, down).unwrap().cast(x.dtype()).unwrap();
        [gated_mlp(x, weights, by).unwrap(), y]
    }

    #[test]
    fn it_is_four_ops_in_one() {
        let formats = [Format::Q4_K, Format::Q4_K, Format::Q6_K, Format::Mxfp8];
        for device in devices() {
            for (i, dtype) in FLOATS.into_iter().enumerate() {
                for (m, by) in [(1, Gate::Silu), (5, Gate::Silu), (70, Gate::Silu), (5, Gate::ALL[i + 1])] {
                    let weight = |format, shape: &[usize], panels| {
                        let weight = weight(format, shape, i as u64, &device);
                        if panels { weight.to_panels().unwrap() } else { weight }
                    };
                    let x = inputs::activations(&[m, 512], dtype, 3, &device).unwrap();
                    // Two weights of one layout or not, rows or panels.
                    let gate = weight(formats[i], &[768, 512], true);
                    for up in [weight(formats[0], &[768, 512], true), weight(formats[i], &[768, 512], false)]
                    {
                        let down = weight(formats[3 - i], &[37, 768], true);
                        let [y, want] = all(&x, [&gate, &up, &down], by);
                        assert_eq!((y.shape(), y.dtype()), (&[m, 37][..], dtype.dtype()));
                        assert_bits(
                            &format!("{} M={m} on {device:?}", gate.format()),
                            &values(&y),
                            &values(&want),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn each_batch_has_its_weights() {
        for device in devices() {
            for m in [1, 60] {
                let [gate, up, down] = [1, 2, 3]
                    .map(|seed| weight(Format::Q4_K, &[2, 256, 256], seed, &device).to_panels().unwrap());
                let x = inputs::activations(&[4, m, 256], FloatType::F32, 3, &device).unwrap();
                let [y, want] = all(&x, [&gate, &up, &down], Gate::Silu);
                assert_eq!(y.shape(), [4, m, 256]);
                assert_bits(&format!("M={m} on {device:?}"), &values(&y), &values(&want));
            }
        }
    }

    #[cfg(feature = "gpu")]
    mod gpu {
        use super::*;
        use crate::ops::testing::gpu;

        #[test]
        fn it_is_its_products() {
            let device = gpu();
            let host = device.host().unwrap();
            let weight = |format, shape: &[usize], seed| {
                weight(format, shape, seed, &host).to_device(&device).unwrap()
            };
            for m in [1, 40] {
                let [gate, up] = [1, 2].map(|seed| weight(Format::Q4_0, &[64, 96], seed));
                let down = weight(Format::Q8_0, &[35, 64], 3);
                let x = inputs::activations(&[m, 96], FloatType::F32, 4, &host).unwrap();
                let x = x.to_device(&device).unwrap();
                let products = [&gate, &up].map(|weight| quantized_matmul(&x, weight).unwrap());
                for by in Gate::ALL {
                    let hidden = glu(&products[1], &products[0], by).unwrap();
                    let got = gated_mlp(&x, [&gate, &up, &down], by).unwrap();
                    let want = quantized_matmul(&hidden, &down).unwrap();
                    assert_eq!(got.shape(), [m, 35]);
                    // A product that makes its x has another sigmoid.
                    for (got, want) in values(&got).into_iter().zip(values(&want)) {
                        assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "{by:?}: {got}, {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn empty_sizes() {
        for device in devices() {
            for [m, k, inner, n] in [[0, 64, 64, 4], [60, 0, 64, 4], [60, 64, 0, 4], [60, 64, 64, 0]] {
                let weight = |n, k| weight(Format::Q8_0, &[n, k], 1, &device).to_panels().unwrap();
                let x = inputs::activations(&[m, k], FloatType::F32, 3, &device).unwrap();
                let weights = [&weight(inner, k), &weight(inner, k), &weight(n, inner)];
                let y = gated_mlp(&x, weights, Gate::Silu).unwrap();
                assert_eq!(y.shape(), [m, n]);
                assert!(values(&y).iter().all(|&y| y == 0.0) || k * inner > 0);
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = Device::cpu(Some(1)).unwrap();
        let weight = |n, k| weight(Format::Q8_0, &[n, k], 1, &device).to_panels().unwrap();
        let (gate, up, down) = (weight(64, 64), weight(96, 64), weight(5, 96));
        let message = |k, up, down| {
            let x = inputs::activations(&[2, k], FloatType::F32, 3, &device).unwrap();
            gated_mlp(&x, [&gate, up, down], Gate::Silu).unwrap_err().to_string()
        };
        assert_eq!(message(64, &up, &down), "gated_mlp: up is [96, 64], but gate is [64, 64]");
        assert_eq!(message(32, &gate, &down), "gated_mlp: x is [2, 32], but weight is [64, 64]");
        assert_eq!(message(64, &gate, &down), "gated_mlp: x is [2, 64], but weight is [5, 96]");
    }
}
