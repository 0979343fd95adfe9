//! The names and shapes that mlx-lm gives a Hugging Face checkpoint's tensors: what the `sanitize` methods of
//! mlx-lm 0.32 `models/{qwen3_5,qwen3_5_moe,qwen3_next,qwen3_moe}.py` do.

use crate::QuantizeError;
use crate::source::Source;
use crate::tensor::{Change, Tensor};
use lowbit_files::{Checkpoint, Layout, Stored, TensorView};
use lowbit_models::arch::{self, Architecture, is_extra};

/// What the renaming depends on.
struct Names<'a> {
    checkpoint: &'a Checkpoint,
    layers: usize,
    experts: usize,
    tied: bool,
    architecture: Option<&'static Architecture>,
}

/// All tensors of `checkpoint` as MLX has them, sorted by name.
///
/// # Errors
/// [`QuantizeError`] for shapes that do not split, and experts that are missing or surplus.
pub fn targets(checkpoint: &Checkpoint) -> Result<Vec<Tensor>, QuantizeError> {
    let config = checkpoint.config()?;
    let text = config.get("text_config").unwrap_or(config);
    let size = |key: &str| text.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    let model_type = config.get("model_type").and_then(|name| name.as_str()).unwrap_or_default();
    let names = Names {
        checkpoint,
        layers: size("num_hidden_layers"),
        experts: size("num_experts"),
        tied: is_flag(text, "tie_word_embeddings") && has_no_other_head(checkpoint),
        architecture: arch::model_type(model_type).map(|(architecture, _)| architecture),
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

/// Whether the output layer may be dropped as the same as the embedding. One that differs stays, and loading then refuses
/// it as contradicting the configuration.
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
    fn rename(&self, view: &TensorView, targets: &mut Vec<Tensor>) -> Result<(), QuantizeError> {
        let name = self.nest(&view.name);
        if self.is_part_of_another(view) {
            return Ok(());
        }
        if self.tied && name.ends_with("lm_head.weight") {
            return Ok(());
        }
        if let Some(mlp) = name.strip_suffix("experts.gate_up_proj") {
            return split_gate_up(view, mlp, targets);
        }
        if let Some((mlp, expert, part)) = single_expert(&name) {
            return if expert == 0 { self.stack(view, mlp, part, targets) } else { self.known(view, expert) };
        }
        if let Some(tensor) = self.quantised(view, &name)? {
            targets.push(tensor);
            return Ok(());
        }
        let (mut name, mut shape) = (name, view.shape.clone());
        if let Some(mlp) = name.strip_suffix("experts.down_proj") {
            name = format!("{mlp}switch_mlp.down_proj.weight");
        } else if name.ends_with("conv1d.weight")
            && shape.len() == 3
            && self.checkpoint.layout() != Layout::Mlx
        {
            shape.swap(1, 2);
        }
        // MLX stores `w` where this checkpoint has `w - 1`.
        let change = Change { add_one: self.is_offset_norm(&view.name), ..Change::default() };
        let source = Source::new(view)?.with_k(shape.last().copied().unwrap_or(1));
        targets.push(Tensor { name, shape, source, change });
        Ok(())
    }

    /// Whether these are the scales or biases of a quantised weight.
    fn is_part_of_another(&self, view: &TensorView) -> bool {
        let module = view.name.strip_suffix(".scales").or_else(|| view.name.strip_suffix(".biases"));
        module.is_some_and(|module| {
            self.checkpoint.tensors().get(&format!("{module}.weight")).is_some()
                && self.checkpoint.tensors().get(&format!("{module}.scales")).is_some()
        })
    }

    /// A weight that MLX quantised.
    fn quantised(&self, weight: &TensorView, name: &str) -> Result<Option<Tensor>, QuantizeError> {
        let part = |part: &str| {
            let module = weight.name.strip_suffix(".weight")?;
            self.checkpoint.tensors().get(&format!("{module}.{part}"))
        };
        let Some(scales) = part("scales") else { return Ok(None) };
        let module = weight.name.trim_end_matches(".weight");
        let refuse = |view: &TensorView| QuantizeError::Type {
            name: view.name.clone(),
            stored: view.stored.to_string(),
        };
        let quantization = self.checkpoint.quantization(module)?.ok_or_else(|| refuse(weight))?;
        let Stored::Plain(dtype) = scales.stored else { return Err(refuse(scales)) };
        let format = quantization.format(dtype)?;
        let groups = scales.shape.last().copied().unwrap_or(1);
        let k = groups.checked_mul(format.block()).ok_or_else(|| refuse(scales))?;
        let mut views = vec![];
        for component in format.components(k)? {
            let missing = || QuantizeError::Missing { name: format!("{module}.{}", component.name) };
            views.push(part(component.name).ok_or_else(missing)?);
        }
        let rows = weight.shape.split_last().map_or(&[][..], |(_, rows)| rows);
        let shape = [rows, &[k]].concat();
        let source = Source::quantised(format, k, &views)?;
        let tensor = Tensor { name: name.into(), shape, source, change: Change::default() };
        match tensor.rows() == tensor.source.rows() {
            true => Ok(Some(tensor)),
            false => {
                let (name, shape) = (weight.name.clone(), weight.shape.clone());
                Err(QuantizeError::Shape { name, shape, want: "its scales say another number of rows" })
            }
        }
    }

    fn is_offset_norm(&self, name: &str) -> bool {
        let norms = self.architecture.and_then(|architecture| architecture.offset_norms);
        let Some((norms, module)) = norms.zip(name.strip_suffix(".weight")) else { return false };
        norms.contain(self.checkpoint.layout(), module)
    }

    /// The name where MLX has the text model.
    fn nest(&self, name: &str) -> String {
        let prefix = self.architecture.map_or("", |architecture| architecture.mlx_prefix);
        match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("language_model.model.{rest}"),
            None if !name.starts_with(prefix) => format!("{prefix}{name}"),
            None => name.to_string(),
        }
    }

    /// One tensor per expert becomes one stack.
    fn stack(
        &self,
        first: &TensorView,
        mlp: &str,
        part: &str,
        targets: &mut Vec<Tensor>,
    ) -> Result<(), QuantizeError> {
        let Tensor { shape, source, .. } = self.single(first)?;
        let mut source = source.empty();
        for expert in 0..self.experts {
            let name = first.name.replace(".experts.0.", &format!(".experts.{expert}."));
            let view = self.checkpoint.tensors().get(&name);
            // `.experts.00.` is not replaced above: every expert would be the first one.
            let view = view.filter(|view| expert == 0 || view.name != first.name);
            let view = view.ok_or(QuantizeError::Missing { name: name.clone() })?;
            let single = self.single(view)?;
            if single.shape != shape || single.source.format != source.format {
                let want = "the experts before it have another shape or type";
                return Err(QuantizeError::Shape { name, shape: single.shape, want });
            }
            source.append(single.source);
        }
        let name = format!("{mlp}switch_mlp.{part}");
        let shape = [&[self.experts], &shape[..]].concat();
        targets.push(Tensor { name, shape, source, change: Change::default() });
        Ok(())
    }

    /// One expert's weight, perhaps quantised.
    fn single(&self, view: &TensorView) -> Result<Tensor, QuantizeError> {
        if let Some(tensor) = self.quantised(view, &view.name)? {
            return Ok(tensor);
        }
        let (name, shape) = (view.name.clone(), view.shape.clone());
        Ok(Tensor { name, shape, source: Source::new(view)?, change: Change::default() })
    }

    /// Refuses an expert beyond the configuration's number, which would be dropped.
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

/// `[E, 2I, H]` becomes gate `[E, I, H]` and up `[E, I, H]`, in the module `mlp` (with its dot).
///
/// # Errors
/// [`QuantizeError::Shape`].
pub fn split_gate_up(view: &TensorView, mlp: &str, targets: &mut Vec<Tensor>) -> Result<(), QuantizeError> {
    let &[experts, both, hidden] = &view.shape[..] else {
        let (shape, want) = (view.shape.clone(), "fused experts are [E, 2 I, H]");
        return Err(QuantizeError::Shape { name: view.name.clone(), shape, want });
    };
    // A tensor without values may claim any number of experts.
    if !both.is_multiple_of(2) || view.bytes.is_empty() {
        let (shape, want) = (view.shape.clone(), "gate and up rows are as many, and not none");
        return Err(QuantizeError::Shape { name: view.name.clone(), shape, want });
    }
    let half = view.bytes.len() / experts / 2;
    for (index, part) in ["gate_proj", "up_proj"].iter().enumerate() {
        let mut source = Source::new(view)?.empty();
        for expert in 0..experts {
            source.push(view, (2 * expert + index) * half..(2 * expert + index + 1) * half);
        }
        let name = format!("{mlp}switch_mlp.{part}.weight");
        let shape = vec![experts, both / 2, hidden];
        targets.push(Tensor { name, shape, source, change: Change::default() });
    }
    Ok(())
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
                targets.iter().map(|target| target.change.add_one).collect::<Vec<_>>(),
                [want],
                "{model_type}"
            );
        }
    }
}
