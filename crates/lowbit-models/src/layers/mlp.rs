use super::{Linear, MergedLinear, MlpConfig, PartInput};
use crate::names::Name;
use crate::tape::ops::{self, Input};
use crate::tape::{Inventory, Named, Var};
use crate::{ModelError, Weights};
use lowbit_kernels::ops::Gate;
use lowbit_kernels::{Device, KernelError, QuantizedTensor};

/// `down(glu(up(x), gate(x)))`: SwiGLU where the gate is silu.
#[derive(Clone, Debug)]
pub struct Mlp {
    gate_up: MergedLinear<2>,
    down: Linear,
    gate: Gate,
}

impl Mlp {
    /// The projections `names`: gate, up and down, the first two perhaps in one matrix.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(
        weights: &Weights<'_>,
        names: [Name<'_>; 3],
        hidden_size: usize,
        config: MlpConfig,
    ) -> Result<Self, ModelError> {
        let MlpConfig { intermediate_size, fused, gate: function } = config;
        let [gate, up, down] = names;
        let gate_up = match fused {
            Some(whole) => weights.fused(whole, [intermediate_size; 2], hidden_size)?,
            None => weights.merged([(gate, intermediate_size), (up, intermediate_size)], hidden_size)?,
        };
        let down = weights.linear(down, hidden_size, intermediate_size)?;
        Ok(Self { gate_up, down, gate: function })
    }

    /// The gate's function.
    pub fn gate(&self) -> Gate {
        self.gate
    }

    /// The weights of gate, up and down, if there are no biases.
    pub(super) fn weights(&self) -> Option<[&Named<QuantizedTensor>; 3]> {
        let [gate, up] = self.gate_up.parts();
        Some([gate.weight()?, up.weight()?, self.down.weight()?])
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.gate_up.list(all);
        self.down.list(all);
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Var) -> Result<Var, KernelError> {
        match (x.tensor().device(), self.weights()) {
            (Device::Cpu(_), Some(weights)) if x.tape().is_none() => ops::gated_mlp(x, weights, self.gate),
            _ => self.down(&self.gate_up.forward(x)?),
        }
    }

    /// As [`Self::forward`], of the norm of a sum or of the sum, which comes first.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward_sum(&self, x: PartInput<'_>) -> Result<(Var, Var), KernelError> {
        if let Device::Cpu(_) = x.update().tensor().device() {
            let (sum, x) = x.make()?;
            return Ok((sum, self.forward(&x)?));
        }
        match self.gate_up.whole_on_gpu(x.update()) {
            // One row's norm and glu are made by the products that read them.
            Some(whole) if x.update().dim(0) > 1 && !x.is_recorded() => {
                let (sum, x) = x.make()?;
                let y = ops::quantized_matmul_glu(&x, whole, self.gate)?;
                Ok((sum, self.down.forward(&y)?))
            }
            _ => {
                let (sum, gate_up) = self.gate_up.forward_sum(x)?;
                Ok((sum, self.down(&gate_up)?))
            }
        }
    }

    fn down(&self, [gate, up]: &[Var; 2]) -> Result<Var, KernelError> {
        self.down.forward(Input::Glu { x: up, gate, by: self.gate })
    }
}
