//! The projections from the latents of multi-head latent attention, which Hugging Face has in one
//! matrix, and GGUF and most of MLX's checkpoints per head, those of keys transposed.
//!
//! Source: mlx-lm 0.32 `models/deepseek_v3.py` (`sanitize`); llama.cpp `conversion/deepseek.py`.

use crate::QuantizeError;
use crate::computed::Computed;
use crate::tensor::{Joined, Tensor, Turned};
use lowbit_files::Layout;
use lowbit_models::layers::LatentAttentionConfig;
use lowbit_models::names::{EMBED_Q, KV_B_PROJ, UNEMBED_OUT};

/// The sizes of such a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Latents {
    heads: usize,
    keys: usize,
    values: usize,
    rank: usize,
}

impl Latents {
    /// Those of `computed`, if a checkpoint of this layout has the projections per head.
    pub fn per_head(computed: &Computed<'_>, target: Layout) -> Option<Self> {
        let latents = computed.architecture.conversion.latents?;
        let is_per_head = match target {
            Layout::Gguf => true,
            Layout::Mlx => latents.mlx_per_head,
            Layout::HuggingFace => false,
        };
        is_per_head.then(|| Self::of(computed)).flatten()
    }

    /// Those of `computed`, if it has latent attention.
    pub fn of(computed: &Computed<'_>) -> Option<Self> {
        let LatentAttentionConfig { num_attention_heads, qk_nope_head_dim, v_head_dim, kv_lora_rank, .. } =
            *computed.latents()?;
        let (heads, keys, values) = (num_attention_heads, qk_nope_head_dim, v_head_dim);
        Some(Self { heads, keys, values, rank: kv_lora_rank })
    }

    /// The two of the one matrix `whole`; `None` if it is another tensor.
    ///
    /// # Errors
    /// [`QuantizeError::Shape`] for a matrix that is not of these sizes.
    pub fn split(self, whole: &Tensor) -> Result<Option<[Tensor; 2]>, QuantizeError> {
        let Self { heads, keys, values, rank } = self;
        let stem = whole.name.strip_suffix(".weight").and_then(|name| name.strip_suffix(KV_B_PROJ.0));
        let Some(stem) = stem else { return Ok(None) };
        let stride = keys + values;
        if whole.shape != [heads * stride, rank] {
            let (name, shape) = (whole.name.clone(), whole.shape.clone());
            let want = "a row for each key and value of the configuration's heads is wanted";
            return Err(QuantizeError::Shape { name, shape, want });
        }
        let [mut embed, mut unembed] = [EMBED_Q, UNEMBED_OUT]
            .map(|name| Tensor { name: format!("{stem}{}.weight", name.0), ..whole.clone() });
        embed.shape = vec![heads, rank, keys];
        embed.change.turned = Some(Turned { rows: keys, stride });
        unembed.shape = vec![heads, values, rank];
        let rows = (0..heads).flat_map(|head| head * stride + keys..(head + 1) * stride);
        unembed.change.rows = Some(rows.collect());
        Ok(Some([embed, unembed]))
    }

    /// The one matrix of `unembed`, whose name it gets for its own, and of the projection to keys
    /// beside it.
    ///
    /// # Errors
    /// [`QuantizeError::Shape`] for projections that are not of these sizes.
    pub fn join(self, mut unembed: Tensor, embed: &Tensor) -> Result<Tensor, QuantizeError> {
        let Self { heads, keys, values, rank } = self;
        for (tensor, shape) in [(embed, [heads, rank, keys]), (&unembed, [heads, values, rank])] {
            if tensor.shape != shape {
                let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
                let want = "a matrix for each of the configuration's heads is wanted";
                return Err(QuantizeError::Shape { name, shape, want });
            }
        }
        unembed.name = unembed.name.replace(UNEMBED_OUT.0, KV_B_PROJ.0);
        unembed.shape = vec![heads * (keys + values), rank];
        unembed.change.joined = Some(Joined { rows: values, turned: embed.source.clone() });
        Ok(unembed)
    }
}

/// A sentence for a conversion after which some norms have another eps; `target` is the new layout.
pub fn other_eps(computed: &Computed<'_>, target: Layout) -> Option<String> {
    let eps = computed.decoder().rms_norm_eps;
    let new = computed.architecture.conversion.latents?.norm_eps(target, eps);
    let old = computed.latents()?.norm_eps;
    let readers = if target == Layout::Gguf { "llama.cpp adds" } else { "mlx-lm adds" };
    (new != old).then(|| {
        format!(
            "{}: {readers} {new} in the norms of compressed queries and of latents, where {old} was added: the new checkpoint \
             is read so, and computes a little otherwise",
            computed.config.path().display()
        )
    })
}
