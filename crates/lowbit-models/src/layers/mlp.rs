use super::{Linear, MergedLinear, MlpConfig, PartInput};
use crate::names::Name;
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Var};
use crate::{ModelError, Weights};
use lowbit_kernels::ops::Gate;
use lowbit_kernels::{KernelError, QuantizedTensor};

/// `down(glu(up(x), gate(x)))`: SwiGLU where the gate is silu. Without a gate, up is its own.
#[derive(Clone, Debug)]
pub struct Mlp {
    inner: Inner,
    down: Linear,
    gate: Gate,
}

/// The projections of the input.
#[derive(Clone, Debug)]
enum Inner {
    Gated(Box<MergedLinear<2>>),
    Up(Linear),
}

impl Mlp {
    /// The projections `names`: gate, where there is one, up and down, the first two perhaps in one
    /// matrix.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(
        weights: &Weights<'_>,
        names: [Name<'_>; 3],
        hidden_size: usize,
        config: MlpConfig,
    ) -> Result<Self, ModelError> {
        let MlpConfig { intermediate_size, fused, gate: function, gated } = config;
        let [gate, up, down] = names;
        let both = [(gate, intermediate_size), (up, intermediate_size)];
        let inner = match fused {
            _ if !gated => Inner::Up(weights.linear(up, intermediate_size, hidden_size)?),
            Some(whole) => Inner::Gated(weights.fused(whole, [intermediate_size; 2], hidden_size)?.into()),
            None => Inner::Gated(weights.merged(both, hidden_size)?.into()),
        };
        let down = weights.linear(down, hidden_size, intermediate_size)?;
        Ok(Self { inner, down, gate: function })
    }

    /// The gate's function.
    pub fn gate(&self) -> Gate {
        self.gate
    }

    /// True if a projection of its own is the gate.
    pub(super) fn is_gated(&self) -> bool {
        matches!(self.inner, Inner::Gated(_))
    }

    /// The weights of gate, up and down, if there is a gate, and no biases.
    pub(super) fn weights(&self) -> Option<[&Named<QuantizedTensor>; 3]> {
        let Inner::Gated(gate_up) = &self.inner else { return None };
        let [gate, up] = gate_up.parts();
        Some([gate.weight()?, up.weight()?, self.down.weight()?])
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        match &self.inner {
            Inner::Gated(gate_up) => gate_up.list(all),
            Inner::Up(up) => up.list(all),
        }
        self.down.list(all);
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        match self.weights() {
            Some(weights) if !joins(x) && x.tape().is_none() => ops::gated_mlp(x, weights, self.gate),
            _ => match &self.inner {
                Inner::Gated(gate_up) => self.down(&gate_up.forward(x)?),
                Inner::Up(up) => self.squared(&up.forward(x)?),
            },
        }
    }

    /// As [`Self::forward`], of the norm of a sum or of the sum, which comes first.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward_sum(&self, x: PartInput<'_>) -> Result<(Var, Var), KernelError> {
        if !joins(x.update()) {
            let (sum, x) = x.make()?;
            return Ok((sum, self.forward(&x)?));
        }
        let gate_up = match &self.inner {
            Inner::Gated(gate_up) => gate_up,
            Inner::Up(up) => {
                let (sum, x) = x.make()?;
                return Ok((sum, self.squared(&up.forward(&x)?)?));
            }
        };
        match gate_up.whole() {
            // One row's norm and glu are made by the products that read them.
            Some(whole) if x.update().dim(0) > 1 && !x.is_recorded() => {
                let (sum, x) = x.make()?;
                let y = ops::quantized_matmul_glu(&x, whole, self.gate)?;
                Ok((sum, self.down.forward(&y)?))
            }
            _ => {
                let (sum, gate_up) = gate_up.forward_sum(x)?;
                Ok((sum, self.down(&gate_up)?))
            }
        }
    }

    /// By up as its own gate: of relu, its square.
    fn squared(&self, up: &Var) -> Result<Var, KernelError> {
        self.down.forward(Input::Glu { x: up, gate: up, by: self.gate })
    }

    fn down(&self, [gate, up]: &[Var; 2]) -> Result<Var, KernelError> {
        self.down.forward(Input::Glu { x: up, gate, by: self.gate })
    }
}

/// True if gate and up are one weight where x is.
fn joins(x: &Var) -> bool {
    x.tensor().device().plan().joins_weights
}
