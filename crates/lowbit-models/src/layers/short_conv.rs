use super::verify::{StateRows, vars};
use super::{Linear, MergedLinear, PartInput, Step};
use crate::cache::{DeltaCache, LayerCache};
use crate::names::{SHORT_CONV, SHORT_CONV_IN, SHORT_CONV_OUT};
use crate::tape::ops;
use crate::tape::{Inventory, Named, Var};
use crate::{ModelError, Outline, Weights};
use lowbit_kernels::ops::SlotState;
use lowbit_kernels::{Device, KernelError, Tensor};

/// An architecture's gated short convolutions.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, non_snake_case)]
pub struct ShortConvConfig {
    pub hidden_size: usize,
    /// Taps of the convolution.
    pub conv_L_cache: usize,
}

/// `out_proj(c * conv(b * x))`, with `[b | c | x]` the projection of the input and a causal
/// convolution of each channel.
#[derive(Clone, Debug)]
pub struct ShortConv {
    config: ShortConvConfig,
    in_proj: MergedLinear<3>,
    conv: Named<Tensor>,
    out_proj: Linear,
}

impl ShortConv {
    /// A layer's weights.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &ShortConvConfig) -> Result<Self, ModelError> {
        let ShortConvConfig { hidden_size: hidden, conv_L_cache: width } = *config;
        let taps = weights.product(["hidden_size", "conv_L_cache"], [hidden, width])?;
        let conv = weights.vector(SHORT_CONV, taps)?;
        Ok(Self {
            in_proj: weights.fused(SHORT_CONV_IN, [hidden; 3], hidden)?,
            conv: conv.with(conv.value.reshape(&[hidden, width])?),
            out_proj: weights.linear(SHORT_CONV_OUT, hidden, hidden)?,
            config: *config,
        })
    }

    /// An empty cache for this layer.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, device: &Device) -> Result<DeltaCache, KernelError> {
        self.states(1, device)
    }

    /// The states of so many sequences that have not begun.
    fn states(&self, sequences: usize, device: &Device) -> Result<DeltaCache, KernelError> {
        DeltaCache::of_convolution([sequences, self.config.hidden_size, self.config.conv_L_cache - 1], device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.in_proj.list(all);
        all.tensors.push(self.conv.clone());
        self.out_proj.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        outline.word("mixer", "short convolution");
        outline.word("conv_L_cache", self.config.conv_L_cache);
    }

    /// As [`Block::catch_up`](super::Block::catch_up).
    pub(super) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        states: &mut DeltaCache,
    ) -> Result<(), KernelError> {
        let [x] = vars(inputs)?;
        self.convolved(&x, rows, states).map(drop)
    }

    /// The convolution for sequences at these places.
    fn convolved(
        &self,
        x: &Var,
        StateRows { cu_seqlens, slots, .. }: StateRows<'_>,
        states: &mut DeltaCache,
    ) -> Result<Var, KernelError> {
        let states = SlotState { state: &mut states.conv, slots };
        ops::causal_conv1d(x, &self.conv, states, cu_seqlens, None)
    }

    /// T tokens, whose input is a sum or the norm of one, `[T, hidden_size]`. Returns that sum and
    /// the result, of the same shape; each sequence's cache advances by its tokens.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`](super::wrong_cache) for the cache of another kind of
    /// layer.
    pub fn forward(
        &self,
        x: PartInput<'_>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<(Var, Var), KernelError> {
        let (sum, [b, c, x]) = self.in_proj.forward_sum(x)?;
        let x = ops::mul(&b, &x)?;
        let device = x.tensor().device();
        let conv =
            |[x]: [&Var; 1], rows: StateRows<'_>, states: &mut DeltaCache| self.convolved(x, rows, states);
        let y = step.with_states([&x], caches, |sequences| self.states(sequences, device), conv)?;
        Ok((sum, self.out_proj.forward(&ops::mul(&c, &y)?)?))
    }
}
