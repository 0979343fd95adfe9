//! The numbers in gates' formulas, which a CPU, a GPU and the reference share.

/// `sqrt(2 / pi)` times 2, and times 0.044715: [`Gate::GeluTanh`](super::Gate::GeluTanh) is
/// `g * sigmoid(GELU[0] g + GELU[1] g^3)`, since `1 + tanh(u)` is `2 sigmoid(2 u)`.
pub(in crate::ops) const GELU: [f32; 2] = [1.595_769_2, 0.071_354_814];
/// Beyond this, [`Gate::GeluTanh`](super::Gate::GeluTanh) has a slope of 0 or 1, and the
/// derivative's powers of g could overflow.
pub(in crate::ops) const GELU_LINEAR: f32 = 16.0;
/// The factor of the gate in the sigmoid of [`Gate::SwigluOai`](super::Gate::SwigluOai), and the
/// limit at which it cuts both operands off.
pub(in crate::ops) const OAI_ALPHA: f32 = 1.702;
pub(in crate::ops) const OAI_LIMIT: f32 = 7.0;
