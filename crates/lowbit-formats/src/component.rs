use crate::DType;

/// One of the tensors that make up a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Component {
    /// `weight`, `scales` or `biases`, as MLX names them; a format of one tensor has `weight`
    /// alone.
    pub name: &'static str,
    /// Its element type.
    pub dtype: DType,
    /// Elements per row of the weight.
    pub columns: usize,
}

impl Component {
    /// Bytes per row of the weight.
    pub const fn row_bytes(&self) -> usize {
        self.columns * self.dtype.size()
    }
}
