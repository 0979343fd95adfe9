use crate::layers::DeltaNetConfig;
use lowbit_formats::DType;
use lowbit_kernels::{Device, KernelError, Tensor, ops};

/// What one sequence leaves behind in each layer. A clone is a fork: it shares memory until one of them writes.
#[derive(Clone, Debug)]
pub struct Cache {
    layers: Vec<LayerCache>,
    position: usize,
}

/// One layer's part.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum LayerCache {
    Attention(KvCache),
    DeltaNet(DeltaCache),
}

/// Keys and values of all tokens so far, f32 `[Hkv, capacity, head_dim]` each.
#[derive(Clone, Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
}

/// A gated delta net's state: the convolution's last inputs, f32 `[1, C, W - 1]`, and the recurrence's matrix, f32
/// `[1, Hv, Dk, Dv]`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaCache {
    pub conv: Tensor,
    pub state: Tensor,
}

/// The first capacity of a [`KvCache`]; it doubles from there.
const FIRST_CAPACITY: usize = 256;

impl Cache {
    pub(crate) fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, position: 0 }
    }

    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes in use.
    pub fn size_bytes(&self) -> usize {
        let layer = |layer: &LayerCache| match layer {
            LayerCache::Attention(cache) => cache.keys.bytes().len() + cache.values.bytes().len(),
            LayerCache::DeltaNet(cache) => cache.conv.bytes().len() + cache.state.bytes().len(),
        };
        self.layers.iter().map(layer).sum()
    }

    pub(crate) fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    pub(crate) fn reserve(&mut self, tokens: usize) -> Result<(), KernelError> {
        let wanted = self.position + tokens;
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.reserve(wanted)?;
            }
        }
        Ok(())
    }

    pub(crate) fn advance(&mut self, tokens: usize) {
        self.position += tokens;
    }
}

impl KvCache {
    pub(crate) fn new(kv_heads: usize, head_dim: usize, device: &Device) -> Self {
        let empty = Tensor::zeros(&[kv_heads, 0, head_dim], DType::F32, device);
        Self { keys: empty.clone(), values: empty }
    }

    /// Adds `k` and `v` `[T, Hkv, head_dim]` at `positions` and gives the whole cache back.
    pub(crate) fn append(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        positions: &Tensor,
    ) -> Result<(&Tensor, &Tensor), KernelError> {
        ops::kv_append(&mut self.keys, k, positions)?;
        ops::kv_append(&mut self.values, v, positions)?;
        Ok((&self.keys, &self.values))
    }

    fn reserve(&mut self, tokens: usize) -> Result<(), KernelError> {
        let capacity = self.keys.dim(1);
        if tokens > capacity {
            let capacity = tokens.max(2 * capacity).next_multiple_of(FIRST_CAPACITY);
            self.keys = ops::grow(&self.keys, capacity)?;
            self.values = ops::grow(&self.values, capacity)?;
        }
        Ok(())
    }
}

impl DeltaCache {
    pub(crate) fn new(config: &DeltaNetConfig, device: &Device) -> Self {
        let conv = [1, config.conv_dim(), config.linear_conv_kernel_dim - 1];
        let state =
            [1, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim];
        Self {
            conv: Tensor::zeros(&conv, DType::F32, device),
            state: Tensor::zeros(&state, DType::F32, device),
        }
    }
}
