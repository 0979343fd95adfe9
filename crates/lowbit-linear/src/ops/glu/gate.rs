//! The gates, and their formulas in f64.

use super::constants::OAI_LIMIT;

/// The function of a gated linear unit ([`glu`](super::glu())).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// `x * silu(g)`, with `silu(g) = g / (1 + e^-g)`: SwiGLU. Source: mlx-lm 0.32 `swiglu`.
    Silu,
    /// `x * gelu(g)`, with `gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))`:
    /// GeGLU. Source: torch's `gelu(approximate="tanh")`, `gelu_pytorch_tanh` in `config.json`.
    GeluTanh,
    /// `x * sigmoid(g)`, with `sigmoid(g) = 1 / (1 + e^-g)`: GLU. Source: transformers 5.23
    /// `qwen3_next` (attention's output gate and `shared_expert_gate`).
    Sigmoid,
    /// `(clamp(x, -7, 7) + 1) * h * sigmoid(1.702 h)`, with `h = min(g, 7)`. Source: transformers
    /// 5.24 `gpt_oss`; ggml's `swiglu_oai`.
    SwigluOai,
    /// `x * max(g, 0)`: ReGLU; by x itself the square of `max(x, 0)`, `relu2` in `config.json`.
    /// Source: Shazeer, "GLU Variants Improve Transformer" (2020); transformers 5.24 `nemotron_h`.
    Relu,
}

/// `$body` with `$G`, the type that has the formulas of a gate on a CPU
/// ([`Formula`](super::cpu::Formula)) and on a GPU.
macro_rules! with_gate {
    ($gate:expr, $G:ident => $body:expr) => {
        match $gate {
            $crate::ops::glu::Gate::Silu => {
                type $G = $crate::ops::glu::cpu::Silu;
                $body
            }
            $crate::ops::glu::Gate::GeluTanh => {
                type $G = $crate::ops::glu::cpu::GeluTanh;
                $body
            }
            $crate::ops::glu::Gate::Sigmoid => {
                type $G = $crate::ops::glu::cpu::Sigmoid;
                $body
            }
            $crate::ops::glu::Gate::SwigluOai => {
                type $G = $crate::ops::glu::cpu::SwigluOai;
                $body
            }
            $crate::ops::glu::Gate::Relu => {
                type $G = $crate::ops::glu::cpu::Relu;
                $body
            }
        }
    };
}
pub(in crate::ops) use with_gate;

/// A gate's results in f64, and the magnitude of their terms, which f32's roundings are relative
/// to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reference {
    /// The factor of x.
    pub factor: (f64, f64),
    /// The derivative of that.
    pub slope: (f64, f64),
}

impl Gate {
    /// All gates.
    pub const ALL: [Self; 5] = [Self::Silu, Self::GeluTanh, Self::Sigmoid, Self::SwigluOai, Self::Relu];

    /// Roundings to a result on a CPU and a GPU in f32: `|error| <= gamma_ROUNDINGS * magnitude`. A
    /// sigmoid is within 2.5 ulp, 5 roundings; a factor of g, a sum with 1, and the product are one
    /// each. Those of a sigmoid's argument, 5 at most, stand in the magnitude.
    pub(crate) fn roundings(self) -> usize {
        match self {
            Self::Relu => 1,
            Self::Sigmoid => 6,
            _ => 8,
        }
    }

    /// The same to a gradient by the gate: two sigmoids, what joins their terms (8 roundings at
    /// most), and two products.
    #[cfg(test)]
    pub(crate) fn gradient_roundings(self) -> usize {
        match self {
            Self::Relu => 2,
            Self::Sigmoid => 13,
            Self::Silu => 16,
            Self::GeluTanh | Self::SwigluOai => 20,
        }
    }

    /// The factor that x has by `gate`.
    pub(crate) fn reference(self, gate: f64) -> Reference {
        // With a the sigmoid's argument, and b = g da/dg: a relative error of a is one of |a|
        // sigmoid(-a) in sigmoid(a).
        let linear = |g: f64, a: f64, b: f64| {
            let (s, rest) = (sigmoid(a), sigmoid(-a));
            let inner = if self == Self::Silu { 0.0 } else { a.abs() };
            let of_s = s * (1.0 + inner * rest);
            let along = if s * rest == 0.0 { 0.0 } else { b * s * rest };
            Reference {
                factor: (g * s, g.abs() * of_s),
                slope: (s + along, of_s + along.abs() * (1.0 + inner)),
            }
        };
        match self {
            Self::Silu => linear(gate, gate, gate),
            Self::GeluTanh => {
                let [c, d] = GELU_EXACT;
                let cube = gate * gate * gate;
                linear(gate, c * gate + d * cube, c * gate + 3.0 * d * cube)
            }
            Self::Sigmoid => {
                let s = sigmoid(gate);
                let slope = s * sigmoid(-gate);
                Reference { factor: (s, s), slope: (slope, slope) }
            }
            Self::Relu => {
                let slope = if gate > 0.0 { 1.0 } else { 0.0 };
                Reference { factor: (gate.max(0.0), gate.max(0.0)), slope: (slope, slope) }
            }
            Self::SwigluOai => {
                let g = gate.min(OAI_LIMIT.into());
                let a = OAI_ALPHA_EXACT * g;
                let Reference { factor, slope } = linear(g, a, a);
                let cut = gate > OAI_LIMIT.into();
                Reference { factor, slope: if cut { (0.0, 0.0) } else { slope } }
            }
        }
    }

    /// The value that the factor multiplies, and its derivative.
    pub(crate) fn value(self, x: f64) -> (f64, f64) {
        let limit = f64::from(OAI_LIMIT);
        match self {
            Self::SwigluOai => (x.clamp(-limit, limit) + 1.0, if x.abs() > limit { 0.0 } else { 1.0 }),
            _ => (x, 1.0),
        }
    }

    /// Values and their magnitudes; `gate` has one for each `x.len() / gate.len()` of x.
    pub(crate) fn references(self, x: &[f32], gate: &[f32]) -> [Vec<f64>; 2] {
        let width = (x.len() / gate.len().max(1)).max(1);
        let each = x.iter().enumerate().map(|(i, &x)| {
            let (value, _) = self.value(x.into());
            let (factor, magnitude) = self.reference(gate[i / width].into()).factor;
            (value * factor, value.abs() * magnitude)
        });
        let (values, magnitudes) = each.unzip();
        [values, magnitudes]
    }
}

/// As `GELU` and `OAI_ALPHA` of [`constants`](super::constants), before they are rounded.
const GELU_EXACT: [f64; 2] = [1.595_769_121_605_730_8, 0.071_354_816_272_600_25];
const OAI_ALPHA_EXACT: f64 = 1.702;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
