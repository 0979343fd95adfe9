//! The computation of a checkpoint, and the check that the one made of it computes the same.

use crate::QuantizeError;
use lowbit_files::{Checkpoint, Unwritten, UnwrittenTensor};
use lowbit_kernels::Device;
use lowbit_kernels::ops::{ChannelDecay, Rope, RopeLayout, RopeParams, RopeScaling, Yarn};
use lowbit_models::arch::{self, Architecture, ModelType, WindowKeys};
use lowbit_models::keys::{self, Absent, Role};
use lowbit_models::layers::{
    AttentionConfig, DecoderConfig, FeedforwardSpec, KimiDeltaConfig, LatentAttentionConfig, LayerSpec,
    Mamba2Config, MixerSpec, MlpConfig, MoeConfig, QueryScale, RopeKind, rope_params, rope_params_of,
};
use lowbit_models::{Config, Outline, Target, Weights};
use std::path::Path;

/// The keys of a head's size, where layers with a window have another one than others.
const LOCAL_HEAD_DIM: (&str, &str) = ("head_dim", "attention.key_length_swa");
const FULL_HEAD_DIM: (&str, &str) = ("global_head_dim", "attention.key_length");

/// A checkpoint that lowbit computes.
pub struct Computed<'a> {
    pub checkpoint: &'a Checkpoint,
    pub config: Config<'a>,
    pub architecture: &'static Architecture,
    pub outline: Outline,
}

impl<'a> Computed<'a> {
    /// Looks at all of the configuration and at all tensors' names, types and shapes.
    ///
    /// # Errors
    /// As [`Outline::new`].
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, QuantizeError> {
        let config = Config::new(checkpoint)?;
        let architecture = arch::find(&config)?;
        Ok(Self { checkpoint, config, architecture, outline: Outline::new(checkpoint)? })
    }

    /// The `model_type` that describes its text model in `config.json`.
    pub fn text_type(&self) -> &'static ModelType {
        self.architecture.text_type(self.config.text_type())
    }

    /// True if such a model computes with `key` of `config.json`.
    pub fn computes(&self, key: &str) -> bool {
        matches!(keys::role(self.text_type().tables, key), Some(Role::Computed(_)))
    }

    /// True if such a model has a default for `key` of `config.json`.
    pub fn has_default(&self, key: &str) -> bool {
        matches!(
            keys::role(self.text_type().tables, key),
            Some(Role::Computed(Absent::Is(_) | Absent::Disputed(_)))
        )
    }

    /// The key of `config.json` for the number of experts.
    pub fn experts_key(&self) -> &'static str {
        let other = ["num_local_experts", "n_routed_experts"].into_iter().find(|key| self.computes(key));
        other.unwrap_or("num_experts")
    }

    /// Its sizes.
    pub fn decoder(&self) -> &DecoderConfig {
        self.outline.config()
    }

    /// The experts of the first layer that has some.
    pub fn experts(&self) -> Option<&MoeConfig> {
        self.outline.spec().layers.iter().find_map(|layer| match &layer.feedforward {
            FeedforwardSpec::Sparse(moe) | FeedforwardSpec::Parallel(_, moe) => Some(moe),
            FeedforwardSpec::Dense(_) | FeedforwardSpec::None => None,
        })
    }

    /// The MLP of the first layer that has one.
    pub fn mlp(&self) -> Option<MlpConfig> {
        self.outline.spec().layers.iter().find_map(|layer| match layer.feedforward {
            FeedforwardSpec::Dense(mlp) | FeedforwardSpec::Parallel(mlp, _) => Some(mlp),
            FeedforwardSpec::Sparse(_) | FeedforwardSpec::None => None,
        })
    }

    /// The rows of each layer's MLP.
    pub fn mlp_rows(&self) -> Vec<usize> {
        let rows = |layer: &LayerSpec| match layer.feedforward {
            FeedforwardSpec::Dense(mlp) | FeedforwardSpec::Parallel(mlp, _) => Some(mlp.intermediate_size),
            FeedforwardSpec::Sparse(_) | FeedforwardSpec::None => None,
        };
        self.outline.spec().layers.iter().filter_map(rows).collect()
    }

    /// Layers that read the keys of earlier ones.
    pub fn shared_layers(&self) -> usize {
        self.attention().filter(|attention| attention.kv_of.is_some()).count()
    }

    /// True if a layer is a short convolution.
    pub fn has_short_convolutions(&self) -> bool {
        self.outline.spec().layers.iter().any(|layer| matches!(layer.mixer, MixerSpec::ShortConv(_)))
    }

    /// The Mamba-2 layers, if there are some.
    pub fn mamba(&self) -> Option<&Mamba2Config> {
        self.outline.spec().layers.iter().find_map(|layer| match &layer.mixer {
            MixerSpec::Mamba2(mamba) => Some(mamba),
            _ => None,
        })
    }

    /// The layers of Kimi Delta Attention, if there are some.
    pub fn kimi_delta(&self) -> Option<&KimiDeltaConfig> {
        self.outline.spec().layers.iter().find_map(|layer| match &layer.mixer {
            MixerSpec::KimiDelta(kimi) => Some(kimi),
            _ => None,
        })
    }

    /// True if the decay of Kimi Delta Attention has a bound.
    pub fn has_bounded_decay(&self) -> bool {
        self.kimi_delta().is_some_and(|kimi| matches!(kimi.decay, ChannelDecay::Bounded(_)))
    }

    /// For each layer whether it is one of latent attention.
    pub fn latent_layers(&self) -> impl Iterator<Item = bool> {
        self.outline.spec().layers.iter().map(|layer| matches!(layer.mixer, MixerSpec::LatentAttention(_)))
    }

    /// Elements of an attention head: of latent attention, those that are rotated; of layers with a
    /// window, where kinds of layers differ.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn head_dim(&self) -> Result<usize, QuantizeError> {
        if let Some(latents) = self.latents() {
            return Ok(latents.qk_rope_head_dim);
        }
        if self.has_two_sizes() {
            return self.size_of(true, |attention| attention.head_dim, LOCAL_HEAD_DIM);
        }
        Ok(match self.config.optional_size("head_dim", "attention.key_length")? {
            Some(dim) => dim,
            None => self.decoder().hidden_size / self.heads()?,
        })
    }

    /// The factor of queries by position, if there is one.
    pub fn query_scale(&self) -> Option<QueryScale> {
        self.attention().find_map(|attention| attention.query_scale)
    }

    /// Query heads.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn heads(&self) -> Result<usize, QuantizeError> {
        Ok(self.config.size("num_attention_heads", "attention.head_count")?)
    }

    /// Elements of an attention head of layers without a window.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn full_head_dim(&self) -> Result<usize, QuantizeError> {
        match self.has_two_sizes() {
            true => self.size_of(false, |attention| attention.head_dim, FULL_HEAD_DIM),
            false => self.head_dim(),
        }
    }

    /// The size of the first layer with a window, or without: that of the configuration's key where
    /// there is no such layer.
    fn size_of(
        &self,
        sliding: bool,
        size: impl Fn(&AttentionConfig) -> usize,
        (json, gguf): (&str, &str),
    ) -> Result<usize, QuantizeError> {
        let found = self.attention().find(|attention| attention.sliding_window.is_some() == sliding);
        found.map_or_else(|| Ok(self.config.size(json, gguf)?), |attention| Ok(size(attention)))
    }

    /// True if layers with a window have heads of another size than others.
    pub fn has_two_sizes(&self) -> bool {
        let windows = self.architecture.conversion.windows;
        windows.is_some_and(|windows| windows.keys == WindowKeys::Sizes)
    }

    /// Key heads; of layers with a window where kinds of layers differ.
    ///
    /// # Errors
    /// As [`Config::size`].
    pub fn key_heads(&self) -> Result<usize, QuantizeError> {
        if self.latents().is_some() {
            return self.heads();
        }
        let first =
            |sliding: bool| self.attention().find(|attention| attention.sliding_window.is_some() == sliding);
        if let Some(attention) = first(true).or(first(false)).filter(|_| self.has_two_sizes()) {
            return Ok(attention.num_key_value_heads);
        }
        self.config.key_heads()?.map_or_else(|| self.heads(), Ok)
    }

    /// The rotary embedding.
    ///
    /// # Errors
    /// As [`rope_params`].
    pub fn rope(&self) -> Result<RopeParams, QuantizeError> {
        let target = Target::new(&Device::cpu(Some(1))?, None)?.with_exact(true);
        let weights = Weights::new(self.checkpoint, &target);
        if self.has_two_ropes() {
            return Ok(rope_params_of(&self.config, &weights, self.full_head_dim()?, RopeKind::Full)?);
        }
        // The layout decides which elements make a pair.
        Ok(rope_params(&self.config, &weights, self.head_dim()?, RopeLayout::HalfSplit)?)
    }

    /// The rotary embedding that llama.cpp computes from a GGUF file of this model, where it is
    /// known to differ: [`Conversion::rounds_yarn`](arch::Conversion::rounds_yarn).
    ///
    /// # Errors
    /// As [`rope_params`].
    pub fn rounded_yarn(&self) -> Result<Option<Rope>, QuantizeError> {
        let rope = self.rope()?;
        let scaling = match &rope.scaling {
            RopeScaling::Yarn(yarn) if self.architecture.conversion.rounds_yarn && !yarn.truncate => {
                RopeScaling::Yarn(Yarn { truncate: true, ..*yarn })
            }
            _ => return Ok(None),
        };
        Ok(Some(Rope::new(&RopeParams { scaling, ..rope })?))
    }

    /// The base of the rotary embedding of layers with a window, where that is one of their own.
    ///
    /// # Errors
    /// As [`rope_params_of`].
    pub fn local_theta(&self) -> Result<f64, QuantizeError> {
        let target = Target::new(&Device::cpu(Some(1))?, None)?.with_exact(true);
        let weights = Weights::new(self.checkpoint, &target);
        Ok(rope_params_of(&self.config, &weights, self.head_dim()?, RopeKind::Sliding)?.theta)
    }

    /// True if layers with a window have a rotary embedding of their own.
    pub fn has_two_ropes(&self) -> bool {
        self.architecture.conversion.windows.is_some_and(|windows| windows.ropes)
    }

    /// The layers' attention.
    pub fn attention(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.outline.spec().layers.iter().filter_map(|layer| match &layer.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// The keys that such a model has for soft caps, those of `config.json` and of GGUF, and the
    /// caps.
    pub fn softcaps(&self) -> impl Iterator<Item = (&'static str, Option<f32>)> {
        let of_scores = self.attention().next().and_then(|attention| attention.softcap);
        let of_logits = self.outline.spec().multipliers.softcap;
        let all = [("attn_logit_softcapping", of_scores), ("final_logit_softcapping", of_logits)];
        all.into_iter().filter(|(key, _)| self.computes(key))
    }

    /// The layers' latent attention, which is the same in all layers.
    pub fn latents(&self) -> Option<&LatentAttentionConfig> {
        self.outline.spec().layers.iter().find_map(|layer| match &layer.mixer {
            MixerSpec::LatentAttention(latents) => Some(latents),
            _ => None,
        })
    }

    /// The window of layers that have one, and which have it.
    pub fn windows(&self) -> (Option<usize>, Vec<bool>) {
        // A window on both sides is written as their sum, of which half is on each.
        let whole = |attention: &AttentionConfig| match (attention.sliding_window?, attention.look_ahead) {
            (window, 0) => Some(window),
            (window, _) => Some((2 * (window - 1)).max(1)),
        };
        let window = self.attention().find_map(whole);
        (window, self.attention().map(|attention| attention.sliding_window.is_some()).collect())
    }

    /// Refuses a checkpoint that readers would refuse, or compute otherwise than this one. `kind`
    /// is what it is.
    ///
    /// # Errors
    /// [`QuantizeError::Unreadable`], [`QuantizeError::Otherwise`].
    pub fn check_new(
        &self,
        output: &Path,
        kind: &'static str,
        description: Unwritten,
        tensors: Vec<UnwrittenTensor>,
    ) -> Result<(), QuantizeError> {
        let made_of_gguf = matches!(description, Unwritten::Gguf(_));
        let made = Checkpoint::unwritten(output, description, tensors)?;
        let made =
            Outline::new(&made).map_err(|error| QuantizeError::Unreadable { kind, error: error.into() })?;
        let rounded = match made_of_gguf {
            true => self.rounded_yarn()?.map(|rope| self.outline.with_frequencies(rope.inv_freq())),
            false => None,
        };
        match rounded.as_ref().unwrap_or(&self.outline).difference(&made) {
            None => Ok(()),
            Some(difference) => {
                let checkpoint = self.checkpoint.path().to_path_buf();
                Err(QuantizeError::Otherwise { checkpoint, kind, difference })
            }
        }
    }
}
