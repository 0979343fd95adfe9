use super::step::{Step, wrong_cache};
use super::{
    Attention, DecoderSpec, FeedforwardSpec, GatedDeltaNet, KimiDelta, LatentAttention, LayerInput,
    LayerNorms, LayerSpec, Mamba2, MixerSpec, Mlp, ParallelMoe, PartInput, RmsNorm, ShortConv, SparseMoe,
    StateRows,
};
use crate::cache::{DeltaCache, LayerCache};
use crate::names::MLP;
use crate::tape::ops::{AddRmsNorm, mul};
use crate::tape::{Inventory, Var, shapes};
use crate::{ModelError, Outline, Weights};
use lowbit_kernels::ops::CacheType;
use lowbit_kernels::{Device, KernelError, Tensor, ops};

/// One layer of a decoder, as a [`LayerSpec`] describes it.
#[derive(Clone, Debug)]
pub struct Block {
    norms: BlockNorms,
    mixer: Mixer,
    feedforward: Feedforward,
    /// The factor of what the two add, `[hidden_size]`, if there is one.
    scale: Option<Tensor>,
    /// The use of embeddings of its own, if it has some.
    input: Option<LayerInput>,
    /// The factor of the layer's result, `[hidden_size]`, if there is one.
    scalar: Option<Tensor>,
}

/// As [`LayerNorms`](super::LayerNorms).
#[derive(Clone, Debug)]
struct BlockNorms {
    mixer: Option<RmsNorm>,
    after_mixer: Option<RmsNorm>,
    feedforward: Option<RmsNorm>,
    after_feedforward: Option<RmsNorm>,
}

/// The part of a block that mixes tokens.
#[derive(Clone, Debug)]
enum Mixer {
    Attention(Box<Attention>),
    LatentAttention(Box<LatentAttention>),
    DeltaNet(Box<GatedDeltaNet>),
    ShortConv(Box<ShortConv>),
    Mamba2(Box<Mamba2>),
    KimiDelta(Box<KimiDelta>),
    None,
}

/// The part of a block that works on each token alone.
#[derive(Clone, Debug)]
enum Feedforward {
    Dense(Box<Mlp>),
    Sparse(Box<SparseMoe>),
    Parallel(Box<ParallelMoe>),
    None,
}

/// The error for a layer that runs without what others give it.
pub(super) fn alone() -> KernelError {
    let got = "run alone".to_string();
    let want = "it reads the cache of an earlier layer, or embeddings of its own".into();
    KernelError::Value { op: "block", operand: "layer", got, want }
}

impl Block {
    /// The layer of `decoder` that `spec` describes, whose tensors are `weights`.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, decoder: &DecoderSpec, spec: &LayerSpec) -> Result<Self, ModelError> {
        let DecoderSpec { config, multipliers, .. } = decoder;
        let mixer = match &spec.mixer {
            MixerSpec::Attention(attention) => Mixer::Attention(Attention::load(weights, attention)?.into()),
            MixerSpec::LatentAttention(latent) => {
                Mixer::LatentAttention(LatentAttention::load(weights, latent)?.into())
            }
            MixerSpec::DeltaNet(net) => Mixer::DeltaNet(GatedDeltaNet::load(weights, net)?.into()),
            MixerSpec::ShortConv(conv) => Mixer::ShortConv(ShortConv::load(weights, conv)?.into()),
            MixerSpec::Mamba2(mamba) => Mixer::Mamba2(Mamba2::load(weights, mamba)?.into()),
            MixerSpec::KimiDelta(kimi) => Mixer::KimiDelta(KimiDelta::load(weights, kimi)?.into()),
            MixerSpec::None => Mixer::None,
        };
        let hidden = config.hidden_size;
        let feedforward = match &spec.feedforward {
            FeedforwardSpec::Dense(mlp) => Feedforward::Dense(Mlp::load(weights, MLP, hidden, *mlp)?.into()),
            FeedforwardSpec::Sparse(moe) => {
                Feedforward::Sparse(SparseMoe::load(weights, moe, hidden)?.into())
            }
            FeedforwardSpec::Parallel(mlp, moe) => {
                Feedforward::Parallel(ParallelMoe::load(weights, (*mlp, moe), config)?.into())
            }
            FeedforwardSpec::None => Feedforward::None,
        };
        let norm = |name| RmsNorm::load(weights, name, hidden, config.rms_norm_eps);
        let LayerNorms { mixer: before, after_mixer, feedforward: between, after_feedforward } = spec.norms;
        let norms = BlockNorms {
            mixer: before.map(norm).transpose()?,
            after_mixer: after_mixer.map(norm).transpose()?,
            feedforward: between.map(norm).transpose()?,
            after_feedforward: after_feedforward.map(norm).transpose()?,
        };
        let row = |factor| constant_row(factor, hidden, weights.device());
        let scalar = match multipliers.layer {
            // As in llama.cpp, a layer without one has 1.
            Some(name) if weights.has(name.0, name.1) => row(weights.values(name, 1)?[0])?,
            _ => None,
        };
        let input = decoder.layer_embedding.map(|width| LayerInput::load(weights, config, width));
        let (scale, input) = (row(multipliers.residual)?, input.transpose()?);
        Ok(Self { norms, mixer, feedforward, scale, input, scalar })
    }

    /// The earlier layer whose cache is this one's, too, if it has none of its own.
    pub(crate) fn cache_of(&self) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.kv_of(),
            _ => None,
        }
    }

    /// The keys that a query sees, if this is a layer of attention to a window.
    pub(crate) fn window(&self) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.window(),
            _ => None,
        }
    }

    /// An empty cache for this layer, keys and values of type `cache`.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, cache: CacheType, device: &Device) -> Result<LayerCache, KernelError> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.cache(cache, device).map(LayerCache::Attention),
            Mixer::LatentAttention(latent) => latent.cache(cache.dtype(), device).map(LayerCache::Attention),
            Mixer::DeltaNet(net) => net.cache(device).map(LayerCache::DeltaNet),
            Mixer::ShortConv(conv) => conv.cache(device).map(LayerCache::DeltaNet),
            Mixer::Mamba2(mamba) => mamba.cache(device).map(LayerCache::DeltaNet),
            Mixer::KimiDelta(kimi) => kimi.cache(device).map(LayerCache::DeltaNet),
            // A state without values.
            Mixer::None => DeltaCache::of_convolution([1, 0, 0], device).map(LayerCache::DeltaNet),
        }
    }

    /// True if the mixer is a recurrence.
    pub(crate) fn recurs(&self) -> bool {
        use Mixer::{DeltaNet, KimiDelta, Mamba2, ShortConv};
        matches!(self.mixer, DeltaNet(_) | KimiDelta(_) | Mamba2(_) | ShortConv(_))
    }

    /// Moves a recurrence's states on by these inputs, which an earlier pass has computed: see
    /// [`DraftRows`].
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache or the inputs of another kind of layer.
    pub(crate) fn catch_up(
        &self,
        inputs: &[Tensor],
        rows: StateRows<'_>,
        cache: &mut LayerCache,
    ) -> Result<(), KernelError> {
        let LayerCache::DeltaNet(states) = cache else { return Err(wrong_cache()) };
        match &self.mixer {
            Mixer::DeltaNet(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::ShortConv(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::Mamba2(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::KimiDelta(mixer) => mixer.catch_up(inputs, rows, states),
            Mixer::Attention(_) | Mixer::LatentAttention(_) | Mixer::None => Err(wrong_cache()),
        }
    }

    /// Appends the layer's weights to `all`.
    pub(crate) fn list(&self, all: &mut Inventory) {
        let BlockNorms { mixer, after_mixer, feedforward, after_feedforward } = &self.norms;
        mixer.iter().for_each(|norm| norm.list(all));
        match &self.mixer {
            Mixer::Attention(mixer) => mixer.list(all),
            Mixer::LatentAttention(mixer) => mixer.list(all),
            Mixer::DeltaNet(mixer) => mixer.list(all),
            Mixer::ShortConv(mixer) => mixer.list(all),
            Mixer::Mamba2(mixer) => mixer.list(all),
            Mixer::KimiDelta(mixer) => mixer.list(all),
            Mixer::None => {}
        }
        after_mixer.iter().for_each(|norm| norm.list(all));
        feedforward.iter().for_each(|norm| norm.list(all));
        match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.list(all),
            Feedforward::Sparse(moe) => moe.list(all),
            Feedforward::Parallel(both) => both.list(all),
            Feedforward::None => {}
        }
        after_feedforward.iter().for_each(|norm| norm.list(all));
        self.input.iter().for_each(|input| input.list(all));
    }

    /// Notes the layer's settings.
    pub(crate) fn outline(&self, outline: &mut Outline) {
        match &self.mixer {
            Mixer::Attention(mixer) => mixer.outline(outline),
            Mixer::LatentAttention(mixer) => mixer.outline(outline),
            Mixer::DeltaNet(mixer) => mixer.outline(outline),
            Mixer::ShortConv(mixer) => mixer.outline(outline),
            Mixer::Mamba2(mixer) => mixer.outline(outline),
            Mixer::KimiDelta(mixer) => mixer.outline(outline),
            Mixer::None => outline.word("mixer", "none"),
        }
        match &self.feedforward {
            Feedforward::Dense(mlp) => {
                outline.word("feedforward", "dense");
                outline.word("gate", format!("{:?}", mlp.gate()));
                outline.word("the MLP is gated", mlp.is_gated());
            }
            Feedforward::Sparse(moe) => moe.outline(outline),
            Feedforward::Parallel(both) => both.outline(outline),
            Feedforward::None => outline.word("feedforward", "none"),
        }
        outline.word("norm after the mixer", self.norms.after_mixer.is_some());
        outline.word("norm after the feed-forward part", self.norms.after_feedforward.is_some());
    }

    /// T tokens through the layer, with each sequence's cache, which [`Self::cache`] made, and the
    /// embeddings that are the layer's own, if it has some.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache of another kind of layer.
    pub fn forward(
        &self,
        x: Residual,
        own: Option<&Var>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<Residual, KernelError> {
        let x = self.mixed(x, step, caches)?;
        let norm = self.norms.feedforward.as_ref();
        let (stream, update) = match &self.feedforward {
            Feedforward::Dense(mlp) => mlp.forward_sum(x.input(norm))?,
            Feedforward::Sparse(moe) => {
                let (stream, input) = x.input(norm).make()?;
                (stream, moe.forward(&input)?)
            }
            Feedforward::Parallel(both) => both.forward(&x, norm)?,
            Feedforward::None => return Ok(x),
        };
        let x = Residual { stream, update: self.added(update, self.norms.after_feedforward.as_ref())? };
        let x = match (&self.input, own) {
            (None, None) => x,
            (Some(input), Some(own)) => input.forward(&x, own)?,
            (Some(_), None) | (None, Some(_)) => return Err(alone()),
        };
        let scalar = self.scalar.as_ref();
        Ok(Residual { stream: scaled(x.stream, scalar)?, update: scaled(x.update, scalar)? })
    }

    /// T tokens through the mixer, if there is one.
    fn mixed(
        &self,
        x: Residual,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<Residual, KernelError> {
        let input = x.input(self.norms.mixer.as_ref());
        let (stream, update) = match &self.mixer {
            Mixer::None => return Ok(x),
            Mixer::Attention(mixer) => mixer.forward(input, step, caches)?,
            Mixer::LatentAttention(mixer) => mixer.forward(input, step, caches)?,
            Mixer::DeltaNet(mixer) => mixer.forward(input, step, caches)?,
            Mixer::ShortConv(mixer) => mixer.forward(input, step, caches)?,
            Mixer::Mamba2(mixer) => mixer.forward(input, step, caches)?,
            Mixer::KimiDelta(mixer) => mixer.forward(input, step, caches)?,
        };
        Ok(Residual { stream, update: self.added(update, self.norms.after_mixer.as_ref())? })
    }

    /// The term that is added to the residual stream: the norm of `update`, if there is one, times
    /// the factor.
    fn added(&self, update: Var, norm: Option<&RmsNorm>) -> Result<Var, KernelError> {
        let normed = norm.map_or(Ok(update.clone()), |norm| norm.forward(&update))?;
        scaled(normed, self.scale.as_ref())
    }
}

/// `factor` in each of `width` columns, if it is not 1.
pub(super) fn constant_row(
    factor: f32,
    width: usize,
    device: &Device,
) -> Result<Option<Tensor>, KernelError> {
    (factor != 1.0).then(|| Tensor::new(&vec![factor; width], &[width], device)).transpose()
}

/// `x` times a row of factors, if there is one.
pub(super) fn scaled(x: Var, factors: Option<&Tensor>) -> Result<Var, KernelError> {
    factors.map_or(Ok(x.clone()), |factors| mul(&x, &factors.clone().into()))
}

/// The residual stream and what the last layer adds to it: the sum is taken together with the norm
/// that follows, by the product that reads that norm where there is only one.
#[derive(Debug)]
pub struct Residual {
    /// f32 `[T, hidden_size]`.
    pub stream: Var,
    /// The same shape, in the activations' type.
    pub update: Var,
}

impl Residual {
    /// The sum's norm in the activations' type.
    pub fn normed<'a>(&'a self, norm: &'a RmsNorm) -> AddRmsNorm<'a> {
        norm.of_sum(&self.stream, &self.update)
    }

    /// The input of a part of a layer: the sum's norm, if there is one, or the sum.
    pub fn input<'a>(&'a self, norm: Option<&'a RmsNorm>) -> PartInput<'a> {
        let Self { stream: h, update: x } = self;
        norm.map_or(PartInput::Plain { h, x }, |norm| PartInput::Normed(self.normed(norm)))
    }

    /// The last token of each sequence.
    pub(crate) fn last(&self, step: &Step) -> Result<Self, KernelError> {
        let xs = [&self.stream, &self.update].map(Var::tensor);
        let rows: Vec<u32> = step.ends().map(|end| (end - 1) as u32).collect();
        let last = if rows.len() == xs[0].dim(0) {
            xs.map(|x| Ok(x.clone()))
        } else if let [row] = rows[..] {
            xs.map(|x| x.rows(row as usize, row as usize + 1))
        } else {
            let ids = Tensor::new(&rows, &[rows.len()], xs[0].device())?;
            // A row of the pass is a place of a cache with one head.
            xs.map(|x| {
                let rows = ops::kv_gather(&x.reshape(&[1, x.dim(0), x.dim(1)])?, &ids)?;
                rows.reshape(&[ids.len(), x.dim(1)])
            })
        };
        let [stream, update] = shapes::each(last)?.map(Var::from);
        Ok(Self { stream, update })
    }
}
