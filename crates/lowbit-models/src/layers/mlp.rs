use super::Linear;
use crate::{ModelError, Weights};
use lowbit_kernels::{KernelError, Tensor, ops};

/// SwiGLU: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// The three projections below `json` (`mlp.`), in GGUF `ffn_{gate,up,down}` with `suffix`.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(
        weights: &Weights<'_>,
        json: &str,
        suffix: &str,
        hidden_size: usize,
        intermediate_size: usize,
    ) -> Result<Self, ModelError> {
        let linear = |part: &str, n, k| {
            weights.linear(&format!("{json}{part}_proj"), &format!("ffn_{part}{suffix}"), n, k)
        };
        Ok(Self {
            gate: linear("gate", intermediate_size, hidden_size)?,
            up: linear("up", intermediate_size, hidden_size)?,
            down: linear("down", hidden_size, intermediate_size)?,
        })
    }

    /// `[T, hidden_size]` to the same.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, KernelError> {
        let hidden = ops::silu_mul(&self.gate.forward(x)?, &self.up.forward(x)?)?;
        self.down.forward(&hidden)
    }
}
