//! Products of what other ops make.

use super::{AddRmsNorm, Input, Norm, quantized_matmul, quantized_matmul_and_sum, quantized_matmul_to};
use crate::inputs::{activations, weight};
use crate::ops::testing::{FLOATS, device, devices, values};
use crate::ops::{Gate, add_rms_norm, gated_rms_norm, glu};
use crate::{Device, Tensor};
use lowbit_formats::{DType, FloatType, Format};

const EPS: f32 = 1e-5;

/// The operands of inputs: rows of `heads` heads.
pub(super) struct Operands {
    h: Tensor,
    x: Tensor,
    gate: Tensor,
    norm: Tensor,
    heads: [Tensor; 2],
    /// Half of its columns are gates.
    query_gate: Tensor,
    head_norm: Tensor,
}

impl Operands {
    /// All of `dtype` but h, which is of type `h`, and the norms' weights, which are f32.
    pub fn new([rows, heads, width]: [usize; 3], [dtype, h]: [FloatType; 2], device: &Device) -> Self {
        let host = device.host().unwrap();
        let tensor = |shape: &[usize], dtype, seed| {
            activations(shape, dtype, seed, &host).unwrap().to_device(device).unwrap()
        };
        let (x, gate) = (tensor(&[rows, heads * width], dtype, 1), tensor(&[rows, heads * width], dtype, 2));
        Self {
            heads: [&x, &gate].map(|x| x.reshape(&[rows, heads, width]).unwrap()),
            h: tensor(&[rows, heads * width], h, 3),
            query_gate: tensor(&[rows, heads, 2 * width], dtype, 6),
            norm: tensor(&[heads * width], FloatType::F32, 4),
            head_norm: tensor(&[width], FloatType::F32, 5),
            x,
            gate,
        }
    }

    pub fn glu(&self, by: Gate) -> Input<'_> {
        Input::Glu { x: &self.x, gate: &self.gate, by }
    }

    pub fn gated_rms_norm(&self) -> Input<'_> {
        let norm = Norm { weight: &self.head_norm, eps: EPS };
        Input::GatedRmsNorm { x: &self.x, gate: &self.gate, norm }
    }

    pub fn heads_glu(&self, by: Gate) -> Input<'_> {
        Input::Glu { x: &self.x, gate: &self.query_gate, by }
    }

    pub fn add_rms_norm(&self) -> AddRmsNorm<'_> {
        AddRmsNorm { h: &self.h, x: &self.x, norm: Norm { weight: &self.norm, eps: EPS } }
    }
}

#[test]
fn a_product_of_an_input_is_both_ops() {
    for device in devices() {
        for (format, sizes, types) in [
            (Format::Q4_0, [1, 3, 64], [FloatType::F32; 2]),
            (Format::Q8_0, [5, 2, 32], [FloatType::F16, FloatType::F32]),
            (Format::Float(FloatType::F32), [2, 3, 7], [FloatType::BF16, FloatType::F16]),
        ] {
            let of = Operands::new(sizes, types, &device);
            let (n, k) = (13, sizes[1] * sizes[2]);
            let weight = weight(format, &[n, k], 7, &device).unwrap();
            let same = |got: Tensor, x: &Tensor| {
                let want = quantized_matmul(x, &weight).unwrap();
                assert_eq!((got.shape(), got.dtype()), (&[sizes[0], n][..], types[0].dtype()));
                assert_eq!(values(&got), values(&want), "{format} {sizes:?} {types:?}");
            };
            let product = |x: Input| quantized_matmul(x, &weight).unwrap();
            for by in Gate::ALL {
                same(product(of.glu(by)), &glu(&of.x, &of.gate, by).unwrap());
                let heads = glu(&of.heads[0], &of.query_gate, by).unwrap();
                same(product(of.heads_glu(by)), &heads.reshape(&[sizes[0], k]).unwrap());
            }
            let [x, gate] = &of.heads;
            let normed = gated_rms_norm(x, gate, &of.head_norm, EPS).unwrap();
            same(product(of.gated_rms_norm()), &normed.reshape(&[sizes[0], k]).unwrap());
            let (want, normed) = add_rms_norm(&of.h, &of.x, &of.norm, EPS).unwrap();
            let (sum, y) = quantized_matmul_and_sum(of.add_rms_norm(), &weight).unwrap();
            same(y, &normed);
            same(product(Input::AddRmsNorm(of.add_rms_norm())), &normed);
            assert_eq!((sum.dtype(), values(&sum)), (types[1].dtype(), values(&want)));
            let wide = quantized_matmul_to(of.glu(Gate::Silu), &weight, FloatType::F32).unwrap();
            assert_eq!(wide.dtype(), DType::F32);
        }
    }
}

#[test]
fn refusals_are_those_of_the_op_that_makes_x() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, FLOATS[0].dtype(), &device);
    let weight = weight(Format::Q4_0, &[5, 64], 7, &device).unwrap();
    let refused = |x: Input| quantized_matmul(x, &weight).unwrap_err().to_string();
    let (x, narrow, heads, ones) = (zeros(&[1, 64]), zeros(&[1, 32]), zeros(&[1, 2, 16]), zeros(&[64]));
    let glu = |x, gate| Input::Glu { x, gate, by: Gate::Silu };
    let gated = |x, gate, weight| Input::GatedRmsNorm { x, gate, norm: Norm { weight, eps: 0.0 } };
    let sum = |h, x, weight, eps| Input::AddRmsNorm(AddRmsNorm { h, x, norm: Norm { weight, eps } });
    for (x, want) in [
        (
            glu(&x, &narrow),
            "glu: gate is [1, 32], but x [1, 64] wants the same shape, or a last size that is larger or 1",
        ),
        (
            glu(&x, &heads),
            "glu: gate is [1, 2, 16], but x [1, 64] wants the same shape, or a last size that is larger or 1",
        ),
        (glu(&narrow, &narrow), "quantized_matmul: x is [1, 32], but weight is [5, 64]"),
        (gated(&narrow, &narrow, &zeros(&[16])), "quantized_matmul: x is [1, 32], but weight is [5, 64]"),
        (gated(&x, &narrow, &ones), "gated_rms_norm: gate is [1, 32], but x wants [1, 64]"),
        (
            gated(&x, &x, &zeros(&[24])),
            "gated_rms_norm: weight is [24], but x [1, 64] wants one whose length divides its last size",
        ),
        (
            gated(&x, &x, &zeros(&[0])),
            "gated_rms_norm: weight is [0], but x [1, 64] wants one whose length divides its last size",
        ),
        (sum(&x, &narrow, &ones, 0.0), "add_rms_norm: x is [1, 32], but h wants [1, 64]"),
        (sum(&x, &x, &ones, -1.0), "add_rms_norm: eps is -1, but a finite number from 0 is wanted"),
    ] {
        assert_eq!(refused(x), want);
    }
    let ids = Tensor::zeros(&[1, 64], DType::U32, &device);
    assert_eq!(refused(glu(&x, &ids)), "glu: gate is u32, but f32, f16 or bf16 is wanted");
}
