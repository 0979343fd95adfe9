//! The keys that Gemma's configurations alone have.

use super::TextConfig;
use crate::QuantizeError;
use lowbit_kernels::ops::RopeParams;
use serde_json::{Map, Value as Json, json};

impl TextConfig<'_> {
    /// The layers that have windows, and their rotary embedding.
    pub(super) fn windows_of_gemma(&mut self) -> Result<(), QuantizeError> {
        let (_, sliding) = self.source.windows();
        self.windows();
        // mlx-lm reads the interval alone.
        let fits = |interval: &usize| {
            (0..sliding.len()).all(|layer| sliding[layer] != (layer + 1).is_multiple_of(*interval))
        };
        let interval = (1..=sliding.len() + 1).rev().find(fits).ok_or_else(|| {
            let full: Vec<_> = (0..sliding.len()).filter(|&layer| !sliding[layer]).collect();
            self.refuse(
                "layer_types",
                &format!("full attention at {full:?}"),
                "MLX's layout has one interval between them",
            )
        })?;
        self.put("sliding_window_pattern", interval);
        let theta = self.number("rope_local_base_freq", self.source.local_theta()?)?;
        self.put("rope_local_base_freq", theta);
        if self.source.architecture.conversion.sees_later {
            self.put("use_bidirectional_attention", true);
        }
        Ok(())
    }

    /// The factor of scores, and the caps of scores and logits, of models that have keys for them.
    pub(super) fn scale_and_caps(&mut self) -> Result<(), QuantizeError> {
        let source = self.source;
        let first = source.attention().next();
        if let Some(attention) = first.filter(|_| source.computes("query_pre_attn_scalar")) {
            let scale = f64::from(attention.scale);
            self.put("query_pre_attn_scalar", (1.0 / (scale * scale)).round() as usize);
        }
        for (key, cap) in source.softcaps() {
            let cap = cap.map(|cap| self.number(key, cap.into())).transpose()?;
            self.json.insert(key.into(), cap.unwrap_or(Json::Null));
        }
        Ok(())
    }

    /// The keys of Gemma 4: heads of layers without a window, and what its models have or have not.
    pub(super) fn sizes_by_kind(&mut self) -> Result<(), QuantizeError> {
        let source = self.source;
        let full = || source.attention().filter(|attention| attention.sliding_window.is_none());
        let keys_are_values = full().any(|attention| attention.keys_are_values);
        let local = source.key_heads()?;
        let key_heads = full().next().map_or(local, |attention| attention.num_key_value_heads);
        if key_heads != local && !keys_are_values {
            let want = format!("layers with a window have {local}, and values of their own");
            return Err(self.refuse("num_global_key_value_heads", &key_heads.to_string(), &want));
        }
        self.json.remove("per_layer_config");
        self.put("global_head_dim", source.full_head_dim()?);
        self.put("num_global_key_value_heads", key_heads);
        self.put("attention_k_eq_v", keys_are_values);
        let moe = source.experts();
        self.put("enable_moe_block", moe.is_some());
        if let Some(moe) = moe {
            self.put("top_k_experts", moe.router.top_k);
        }
        // mlx-lm's defaults are those of the smaller models.
        self.put("num_kv_shared_layers", source.shared_layers());
        self.put("hidden_size_per_layer_input", source.outline.spec().layer_embedding.unwrap_or(0));
        self.put("vocab_size_per_layer_input", source.decoder().vocab_size);
        self.put("use_double_wide_mlp", source.mlp_rows().windows(2).any(|rows| rows[0] != rows[1]));
        Ok(())
    }

    /// Gemma 4's two rotary embeddings, `rope` being that of layers without a window.
    pub(super) fn ropes_by_kind(&mut self, rope: &RopeParams, theta: Json) -> Result<(), QuantizeError> {
        let mut full = Map::new();
        match rope.freq_factors.as_deref() {
            None => drop(full.insert("rope_type".into(), "default".into())),
            Some(divisors) => {
                let rotated = divisors.iter().take_while(|divisor| divisor.is_finite()).count();
                let (first, rest) = (divisors.first().copied().unwrap_or(1.0), &divisors[rotated..]);
                let alike = divisors[..rotated].iter().all(|&divisor| divisor == first);
                let whole = 2 * divisors.len() == self.source.full_head_dim()?;
                if rotated == 0 || !alike || !whole || rest.iter().any(|divisor| divisor.is_finite()) {
                    let got = format!("{} divisors of frequencies", divisors.len());
                    let want = "MLX's layout of this model rotates the first pairs of a head, and no others";
                    return Err(self.refuse("rope_freqs.weight", &got, want));
                }
                full.insert("rope_type".into(), "proportional".into());
                let fraction = rotated as f64 / divisors.len() as f64;
                full.insert("partial_rotary_factor".into(), fraction.into());
                if first != 1.0 {
                    full.insert("factor".into(), self.number("factor", first.into())?);
                }
            }
        }
        full.insert("rope_theta".into(), theta);
        let local = self.number("rope_theta", self.source.local_theta()?)?;
        let sliding = json!({ "rope_type": "default", "rope_theta": local });
        for key in ["rope_theta", "rope_scaling", "partial_rotary_factor"] {
            self.json.remove(key);
        }
        self.put("rope_parameters", json!({ "full_attention": full, "sliding_attention": sliding }));
        Ok(())
    }
}
