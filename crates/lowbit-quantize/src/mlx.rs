//! The names and shapes that mlx-lm gives a Hugging Face checkpoint's tensors: what the `sanitize` methods of
//! mlx-lm 0.32 `models/{qwen3_5,qwen3_5_moe,qwen3_next,qwen3_moe}.py` do.

use crate::QuantizeError;
use lowbit_files::{Checkpoint, Layout, TensorView};
use lowbit_models::arch::is_extra;
use std::ops::Range;

/// A tensor of the new checkpoint and where its values come from.
pub struct Target {
    pub name: String,
    pub shape: Vec<usize>,
    /// Ranges of bytes that follow one another in the new tensor.
    pub pieces: Vec<(TensorView, Range<usize>)>,
    /// Norms of raw hybrids are stored as `w - 1`; MLX stores `w`.
    pub add_one: bool,
}

/// What of a configuration the renaming depends on.
struct Names<'a> {
    checkpoint: &'a Checkpoint,
    layers: usize,
    experts: usize,
    tied: bool,
    /// Qwen3.5 in MLX is a multimodal model's text part.
    nested: bool,
    /// The checkpoint is a hybrid as published: its norms are stored as `w - 1`.
    raw_hybrid: bool,
}

/// All tensors of `checkpoint` as MLX has them, sorted by name.
///
/// # Errors
/// [`QuantizeError`] for shapes that do not split, and experts that are missing or surplus.
pub fn targets(checkpoint: &Checkpoint) -> Result<Vec<Target>, QuantizeError> {
    let config = checkpoint.config()?;
    let text = config.get("text_config").unwrap_or(config);
    let size = |key: &str| text.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    let model_type = config.get("model_type").and_then(|name| name.as_str()).unwrap_or_default();
    let hybrid = ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"];
    let names = Names {
        checkpoint,
        layers: size("num_hidden_layers"),
        experts: size("num_experts"),
        tied: is_flag(text, "tie_word_embeddings") && has_no_other_head(checkpoint),
        nested: model_type.starts_with("qwen3_5"),
        raw_hybrid: hybrid.contains(&model_type) && checkpoint.layout() == Layout::HuggingFace,
    };
    let mut targets = vec![];
    for view in checkpoint.tensors().iter().filter(|view| !is_extra(&view.name, names.layers)) {
        names.rename(view, &mut targets)?;
    }
    targets.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(targets)
}

fn is_flag(config: &serde_json::Value, key: &str) -> bool {
    config.get(key).and_then(serde_json::Value::as_bool).unwrap_or(false)
}

/// Whether no output layer would be lost: one that differs from the embedding stays, and loading says that it contradicts
/// the configuration.
fn has_no_other_head(checkpoint: &Checkpoint) -> bool {
    let named = |end: &str| checkpoint.tensors().iter().find(|view| view.name.ends_with(end));
    match (named("lm_head.weight"), named("embed_tokens.weight")) {
        (Some(head), Some(embedding)) => {
            head.shape == embedding.shape
                && head.stored == embedding.stored
                && head.bytes[..] == embedding.bytes[..]
        }
        _ => true,
    }
}

impl Names<'_> {
    fn rename(&self, view: &TensorView, targets: &mut Vec<Target>) -> Result<(), QuantizeError> {
        let name = self.nest(&view.name);
        if self.tied && name.ends_with("lm_head.weight") {
            return Ok(());
        }
        if let Some(mlp) = name.strip_suffix("experts.gate_up_proj") {
            return split_gate_up(view, mlp, targets);
        }
        if let Some((mlp, expert, part)) = single_expert(&name) {
            return if expert == 0 { self.stack(view, mlp, part, targets) } else { self.known(view, expert) };
        }
        let whole = vec![(view.clone(), 0..view.bytes.len())];
        let (mut name, mut shape) = (name, view.shape.clone());
        if let Some(mlp) = name.strip_suffix("experts.down_proj") {
            name = format!("{mlp}switch_mlp.down_proj.weight");
        } else if name.ends_with("conv1d.weight") && shape.len() == 3 {
            shape.swap(1, 2);
        }
        let add_one = self.raw_hybrid && shape.len() == 1 && is_offset_norm(&name);
        targets.push(Target { name, shape, pieces: whole, add_one });
        Ok(())
    }

    /// The name below the text model's place in MLX.
    fn nest(&self, name: &str) -> String {
        match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("language_model.model.{rest}"),
            None if self.nested && !name.starts_with("language_model.") => format!("language_model.{name}"),
            None => name.to_string(),
        }
    }

    /// One tensor an expert becomes one for all.
    fn stack(
        &self,
        first: &TensorView,
        mlp: &str,
        part: &str,
        targets: &mut Vec<Target>,
    ) -> Result<(), QuantizeError> {
        let mut pieces = vec![];
        for expert in 0..self.experts {
            let name = first.name.replace(".experts.0.", &format!(".experts.{expert}."));
            let view = self.checkpoint.tensors().get(&name);
            // Of a name that spells 0 in another way, all experts would be the first.
            let view = view.filter(|view| expert == 0 || view.name != first.name);
            let view = view.ok_or(QuantizeError::Missing { name: name.clone() })?;
            if view.shape != first.shape || view.stored != first.stored {
                let (shape, want) = (view.shape.clone(), "the experts before it have another shape or type");
                return Err(QuantizeError::Shape { name, shape, want });
            }
            pieces.push((view.clone(), 0..view.bytes.len()));
        }
        let name = format!("{mlp}switch_mlp.{part}");
        let shape = [&[self.experts], &first.shape[..]].concat();
        targets.push(Target { name, shape, pieces, add_one: false });
        Ok(())
    }

    /// An expert beyond the configuration's would be lost.
    fn known(&self, view: &TensorView, expert: usize) -> Result<(), QuantizeError> {
        match expert < self.experts {
            true => Ok(()),
            false => Err(QuantizeError::Expert { name: view.name.clone(), expert, count: self.experts }),
        }
    }
}

/// `..mlp.experts.3.up_proj.weight` as (`..mlp.`, 3, `up_proj.weight`).
fn single_expert(name: &str) -> Option<(&str, usize, &str)> {
    let (mlp, rest) = name.split_once("experts.")?;
    let (expert, part) = rest.split_once('.')?;
    Some((mlp, expert.parse().ok()?, part))
}

/// `[E, 2I, H]` becomes gate `[E, I, H]` and up `[E, I, H]`.
fn split_gate_up(view: &TensorView, mlp: &str, targets: &mut Vec<Target>) -> Result<(), QuantizeError> {
    let &[experts, both, hidden] = &view.shape[..] else {
        let (shape, want) = (view.shape.clone(), "fused experts are [E, 2 I, H]");
        return Err(QuantizeError::Shape { name: view.name.clone(), shape, want });
    };
    // Without values there may be any number of experts.
    if !both.is_multiple_of(2) || view.bytes.is_empty() {
        let (shape, want) = (view.shape.clone(), "gate and up rows are as many, and not none");
        return Err(QuantizeError::Shape { name: view.name.clone(), shape, want });
    }
    let half = view.bytes.len() / experts / 2;
    for (index, part) in ["gate_proj", "up_proj"].iter().enumerate() {
        let piece = |expert: usize| (2 * expert + index) * half..(2 * expert + index + 1) * half;
        let pieces = (0..experts).map(|expert| (view.clone(), piece(expert))).collect();
        let name = format!("{mlp}switch_mlp.{part}.weight");
        targets.push(Target { name, shape: vec![experts, both / 2, hidden], pieces, add_one: false });
    }
    Ok(())
}

fn is_offset_norm(name: &str) -> bool {
    let norms = [
        ".input_layernorm.weight",
        ".post_attention_layernorm.weight",
        "model.norm.weight",
        ".q_norm.weight",
        ".k_norm.weight",
    ];
    norms.iter().any(|norm| name.ends_with(norm))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_of_a_hybrid_without_convolutions_get_their_1() {
        for (model_type, want) in [("qwen3_5_text", true), ("qwen3_next", true), ("qwen3", false)] {
            let folder = tempfile::tempdir().unwrap();
            let header = br#"{"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat();
            std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
            let config = format!(r#"{{"model_type": "{model_type}"}}"#);
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            let targets = targets(&Checkpoint::open(folder.path()).unwrap()).unwrap();
            assert_eq!(
                targets.iter().map(|target| target.add_one).collect::<Vec<_>>(),
                [want],
                "{model_type}"
            );
        }
    }
}
