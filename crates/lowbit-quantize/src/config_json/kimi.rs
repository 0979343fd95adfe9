//! The keys of models with Kimi Delta Attention.

use super::TextConfig;
use crate::QuantizeError;
use lowbit_kernels::ops::ChannelDecay;
use serde_json::{Value as Json, json};

impl TextConfig<'_> {
    /// The sizes of Kimi Delta Attention and the layers that have it, counted from 1, where mlx-lm
    /// looks for them.
    pub(super) fn kimi_delta(&mut self) -> Result<(), QuantizeError> {
        let source = self.source;
        let layers: Vec<bool> = source.latent_layers().collect();
        if source.computes("layer_group_size") {
            return self.ling(&layers);
        }
        let listed = |attends: bool| -> Vec<usize> {
            (0..layers.len()).filter(|&layer| layers[layer] == attends).map(|layer| layer + 1).collect()
        };
        let [heads, dim, taps] = match source.kimi_delta() {
            Some(kimi) => [kimi.num_heads, kimi.head_dim, kimi.conv_kernel],
            // Of no layer, but readers want them.
            None => [source.heads()?, 1, 4],
        };
        let section = json!({
            "num_heads": heads,
            "head_dim": dim,
            "short_conv_kernel_size": taps,
            "kda_layers": listed(false),
            "full_attn_layers": listed(true),
        });
        for key in ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "layer_types"] {
            self.json.remove(key);
        }
        self.put("linear_attn_config", section);
        self.put("mla_use_nope", true);
        // mlx-lm wants one, and takes it for no size that stands here, too.
        let head_dim = self.json.get("qk_rope_head_dim").cloned().unwrap_or(Json::Null);
        self.put("head_dim", head_dim);
        Ok(())
    }

    /// The same of Ling 3, where mlx-lm knows layers by the size of groups alone.
    fn ling(&mut self, attends: &[bool]) -> Result<(), QuantizeError> {
        let source = self.source;
        let count = attends.len();
        let fits = |size: &usize| {
            let attends_by = |layer: usize| (layer + 1).is_multiple_of(*size) || layer >= count / size * size;
            (0..count).all(|layer| attends[layer] == attends_by(layer))
        };
        let stored = match source.config.is_gguf() {
            true => None,
            false => source.config.optional_size("layer_group_size", "")?,
        };
        let size =
            stored.filter(|&size| size > 0).into_iter().chain(1..=count).find(fits).ok_or_else(|| {
                let layers: Vec<usize> = (0..count).filter(|&layer| attends[layer]).collect();
                let got = format!("layers of latent attention at {layers:?}");
                self.refuse("layer_types", &got, "MLX's layout has one interval between them")
            })?;
        self.put("layer_group_size", size);
        if let Some(kimi) = source.kimi_delta() {
            self.put("short_conv_kernel_size", kimi.conv_kernel);
            if let ChannelDecay::Bounded(bound) = kimi.decay {
                let bound = self.number("kda_lower_bound", bound.into())?;
                self.put("kda_lower_bound", bound);
            }
            self.put("kda_safe_gate", source.has_bounded_decay());
        }
        let dim = source.kimi_delta().map_or(1, |kimi| kimi.head_dim);
        self.put("head_dim", dim);
        if let Some(moe) = source.experts() {
            self.put("moe_shared_expert_intermediate_size", moe.moe_intermediate_size);
        }
        for key in ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "layer_types"] {
            self.json.remove(key);
        }
        self.put("no_kda_lora", true);
        self.put("rope_interleave", true);
        // By it mlx-lm tells it from Ling 2.5.
        self.put("architectures", json!(["BailingMoeV3ForCausalLM"]));
        Ok(())
    }
}
