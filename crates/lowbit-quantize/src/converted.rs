use crate::tensor::Tensor;
use serde_json::Value as Json;

/// A checkpoint in MLX's layout, without the tokenizer.
pub struct Converted {
    /// `config.json`.
    pub config: Json,
    pub tensors: Vec<Tensor>,
    /// Things that are not carried over or that mlx-lm does not share, a sentence each.
    pub warnings: Vec<String>,
}
