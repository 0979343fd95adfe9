//! The keys of models with Mamba-2 layers.

use super::TextConfig;
use crate::QuantizeError;
use lowbit_models::arch::Mamba2Keys;
use lowbit_models::layers::{FeedforwardSpec, LayerSpec, MixerSpec};
use serde_json::Value as Json;

impl TextConfig<'_> {
    /// Mamba-2's sizes and the layers that have it.
    pub(super) fn mamba(&mut self, keys: &Mamba2Keys) -> Result<(), QuantizeError> {
        let source = self.source;
        for (key, gguf) in [
            (keys.num_heads, "ssm.time_step_rank"),
            (keys.n_groups, "ssm.group_count"),
            (keys.state_size, "ssm.state_size"),
            (keys.conv_kernel, "ssm.conv_kernel"),
        ] {
            self.put(key, source.config.size(key, gguf)?);
        }
        if let Some(mamba) = source.mamba() {
            self.put(keys.head_dim, mamba.head_dim);
            let [least, most] = [mamba.limits.least, mamba.limits.most.min(f32::MAX)];
            let limits = [least, most].map(|limit| self.number(keys.limits, limit.into()));
            let limits = limits.into_iter().collect::<Result<Vec<_>, _>>()?;
            self.json.insert(keys.limits.into(), limits.into());
        }
        match source.computes("hybrid_override_pattern") {
            true => self.parts(),
            false => self.layers_of_granite(),
        }
        Ok(())
    }

    /// The kinds of layers that are one part each, as letters, and the sizes of MLPs and experts.
    fn parts(&mut self) {
        let source = self.source;
        let layers = source.outline.spec().layers.iter();
        let letter = |layer: &LayerSpec| match (&layer.mixer, &layer.feedforward) {
            (MixerSpec::Mamba2(_), _) => 'M',
            (MixerSpec::None, FeedforwardSpec::Sparse(_)) => 'E',
            (MixerSpec::None, _) => '-',
            _ => '*',
        };
        self.put("hybrid_override_pattern", layers.map(letter).collect::<String>());
        for other in ["layers_block_type", "layer_types", "hidden_act"] {
            self.json.remove(other);
        }
        self.put("mlp_hidden_act", "relu2");
        // mlx-lm wants these.
        self.put("attention_bias", false);
        // transformers has another flag for it.
        let biased = self.json.get("use_bias").is_some_and(|flag| *flag == Json::Bool(true));
        self.put("mamba_proj_bias", biased);
        if let Some(mlp) = source.mlp() {
            self.put("intermediate_size", mlp.intermediate_size);
        }
        if let Some(moe) = source.experts() {
            self.put("moe_shared_expert_intermediate_size", moe.shared_expert_intermediate_size);
            self.put("moe_latent_size", moe.latent_size.map_or(Json::Null, Json::from));
        }
    }

    /// Granite's layers, and the size of MLPs. mlx-lm has words of its own for kinds of layers, and
    /// for whether attention rotates.
    fn layers_of_granite(&mut self) {
        let source = self.source;
        let hidden = source.decoder().hidden_size;
        let inner = source.mamba().map(|mamba| mamba.inner_size());
        if let Some(inner) = inner.filter(|inner| inner.is_multiple_of(hidden)) {
            self.put("mamba_expand", inner / hidden);
        }
        let layers = source.outline.spec().layers.iter();
        let kind = |layer: &LayerSpec| match layer.mixer {
            MixerSpec::Attention(_) => "attention",
            _ => "mamba",
        };
        self.put("layer_types", layers.map(kind).collect::<Vec<_>>());
        self.json.remove("layers_block_type");
        if let Some(attention) = source.attention().next() {
            let word = if attention.rotates() { "rope" } else { "nope" };
            self.put("position_embedding_type", word);
        }
        let shared = source.experts().map(|moe| moe.shared_expert_intermediate_size);
        let alone = source.mlp().map(|mlp| mlp.intermediate_size);
        if let Some(size) = shared.or(alone) {
            self.put("shared_intermediate_size", size);
        }
        if let Some(size) = alone {
            self.put("intermediate_size", size);
            self.put("num_local_experts", 0);
            self.put("num_experts_per_tok", 0);
        }
    }
}
