//! The names and shapes that mlx-lm gives a Hugging Face checkpoint's tensors: what the `sanitize`
//! methods of mlx-lm 0.32 `models/{qwen3_5,qwen3_5_moe,qwen3_next,qwen3_moe}.py` do.

use crate::QuantizeError;
use crate::computed::Computed;
use crate::config_json::{TextConfig, wrapped};
use crate::converted::Converted;
use crate::from_gguf;
use crate::latents::{self, Latents};
use crate::left_out::extras;
use crate::mlx_lm;
use crate::source::Source;
use crate::tensor::{Change, Tensor};
use lowbit_files::{Checkpoint, Layout, Stored, TensorView};
use lowbit_models::arch::{self, Architecture, Extra};
use lowbit_models::names::{FUSED_MLP, FUSED_SHARED_EXPERT, MLP, NEXTN, SHARED_EXPERT};
use serde_json::Value as Json;
use std::borrow::Cow;

/// Converts `computed` to MLX's layout.
///
/// # Errors
/// [`QuantizeError`] for what that cannot say.
pub fn convert(computed: &Computed<'_>) -> Result<Converted, QuantizeError> {
    let checkpoint = computed.checkpoint;
    let Converted { config, tensors, mut warnings } = match checkpoint.metadata() {
        Some(metadata) => from_gguf::convert(computed, metadata)?,
        None => {
            let mut tensors = targets(checkpoint, &Known::new(computed, Layout::Mlx)?)?;
            for tensor in &mut tensors {
                tensor.name = stored(&tensor.name, computed.architecture);
            }
            let kept: &[Extra] =
                if keeps_predictors(computed.architecture) { &[Extra::Prediction] } else { &[] };
            Converted { config: config(computed)?, tensors, warnings: extras(computed, kept) }
        }
    };
    warnings.extend(mlx_lm::differences(computed)?);
    warnings.extend(latents::other_eps(computed, Layout::Mlx));
    Ok(Converted { config, tensors, warnings })
}

/// A directory's own `config.json`, with what it leaves out.
fn config(computed: &Computed<'_>) -> Result<Json, QuantizeError> {
    let root = computed.checkpoint.config()?.as_object().cloned().unwrap_or_default();
    let json = match root.get("text_config").and_then(Json::as_object) {
        Some(text) if computed.config.is_wrapped() => text.clone(),
        _ => root.clone(),
    };
    let mut text = TextConfig { source: computed, json };
    text.fill_in();
    text.sizes()?;
    let rope = computed.rope()?;
    let scaling = text.scaling(&rope)?;
    text.rope(&rope, scaling)?;
    let text_alone = computed.config.is_wrapped() && computed.architecture.conversion.mlx_is_text;
    let mut made = wrapped(text);
    if computed.config.is_wrapped() && !text_alone {
        let mut whole = root;
        whole.extend(made);
        made = whole;
    } else if made.contains_key("text_config") || text_alone {
        // Readers look for these keys at the top level.
        for key in [
            "architectures",
            "dtype",
            "torch_dtype",
            "eos_token_id",
            "bos_token_id",
            "pad_token_id",
            "quantization",
        ] {
            made.extend(root.get(key).map(|value| (key.into(), value.clone())));
        }
    }
    if computed.has_two_sizes() {
        // mlx-lm knows one of Gemma 4's types; all that their defaults differ in is written.
        made.insert("model_type".into(), computed.architecture.text_type(None).name.into());
    }
    if text_alone {
        if !computed.has_two_sizes() {
            made.insert("model_type".into(), computed.text_type().name.into());
        }
        // The multimodal class.
        made.shift_remove("architectures");
    }
    Ok(Json::Object(made))
}

/// The facts that renaming depends on.
pub struct Known {
    pub architecture: &'static Architecture,
    pub layers: usize,
    pub experts: usize,
    /// True if the output layer is the embedding.
    pub tied: bool,
    /// Layers that predict further tokens, if they are kept as layers after the others.
    pub predictors: usize,
    /// The layout that the tensors are for.
    pub target: Layout,
    /// The projections from latents, if that layout has them per head.
    pub latents: Option<Latents>,
    /// For each layer whether it is one of latent attention.
    pub latent_layers: Vec<bool>,
}

impl Known {
    /// # Errors
    /// As [`lowbit_models::Config::size`].
    pub fn new(computed: &Computed<'_>, target: Layout) -> Result<Self, QuantizeError> {
        let decoder = computed.decoder();
        let key = computed.experts_key();
        let experts = match computed.config.computes(key) {
            true => computed.config.optional_size(key, "")?,
            false => None,
        };
        let (layers, tied) = (decoder.num_hidden_layers, decoder.tie_word_embeddings);
        let architecture = computed.architecture;
        Ok(Self {
            architecture,
            layers,
            experts: experts.unwrap_or(0),
            tied,
            predictors: 0,
            target,
            latents: Latents::per_head(computed, target),
            latent_layers: computed.latent_layers().collect(),
        })
    }
}

struct Names<'a> {
    checkpoint: &'a Checkpoint,
    known: &'a Known,
    /// The prefix of the layers' names.
    text_prefix: &'static str,
}

/// The name in MLX's checkpoints of the tensor that conversions call `name`.
pub fn stored(name: &str, architecture: &Architecture) -> String {
    let name = in_layer(name, |name| architecture.stored_name(name, Layout::Mlx));
    let Some(prefix) = architecture.conversion.text_prefix else { return name };
    match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("layers.") => format!("{prefix}{rest}"),
        Some(rest) => format!("{prefix}{}", architecture.stored_name(rest, Layout::Mlx)),
        None => name,
    }
}

/// `name` with what follows its layer's number as `rename` makes it.
fn in_layer(name: &str, rename: impl FnOnce(&str) -> Cow<'_, str>) -> String {
    let of_layer = |(before, rest): (&str, &str)| {
        let (index, rest) = rest.split_once('.')?;
        index.parse::<usize>().ok()?;
        Some(name.len() - rest.len()).filter(|_| before.is_empty() || before.ends_with('.'))
    };
    match name.split_once("layers.").and_then(of_layer) {
        Some(start) => format!("{}{}", &name[..start], rename(&name[start..])),
        None => name.into(),
    }
}

/// All tensors of a directory by the names that layers ask for, in MLX's shapes, sorted by name.
///
/// # Errors
/// [`QuantizeError`] for shapes that do not split, and experts that are missing or surplus.
pub fn targets(checkpoint: &Checkpoint, known: &Known) -> Result<Vec<Tensor>, QuantizeError> {
    let text_prefix = arch::text_prefix(|name| checkpoint.tensors().get(name).is_some());
    let names = Names { checkpoint, known, text_prefix };
    let mut targets = vec![];
    for view in checkpoint.tensors().iter().filter(|view| names.is_kept(&view.name)) {
        names.rename(view, &mut targets)?;
    }
    if let Some(latents) = known.latents {
        let mut split = Vec::with_capacity(targets.len());
        for target in targets {
            match latents.split(&target)? {
                Some(parts) => split.extend(parts),
                None => split.push(target),
            }
        }
        targets = split;
    }
    targets.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(targets)
}

impl Names<'_> {
    fn is_kept(&self, name: &str) -> bool {
        match self.known.architecture.extra(name, self.known.layers) {
            None => true,
            Some(Extra::Prediction) => {
                let in_mlx = self.known.target == Layout::Mlx && keeps_predictors(self.known.architecture);
                in_mlx || self.known.predictors > 0
            }
            Some(_) => false,
        }
    }

    fn rename(&self, view: &TensorView, targets: &mut Vec<Tensor>) -> Result<(), QuantizeError> {
        // In MLX's layout they keep their names.
        let behind = (self.known.predictors > 0).then(|| predictor(&view.name, self.known.layers));
        let predicted = behind.flatten();
        let name = predicted.clone().unwrap_or_else(|| self.nest(&view.name));
        let name = self.of_kind(in_layer(&name, |name| self.known.architecture.known_name(name)));
        if self.is_part_of_another(view) {
            return Ok(());
        }
        if self.known.tied && name.ends_with("lm_head.weight") {
            return Ok(());
        }
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        if let Some(mlp) = module.strip_suffix("experts.gate_up_proj") {
            return split_gate_up(view, mlp, targets);
        }
        if let Some((mlp, expert, part)) = single_expert(&name) {
            return if expert == 0 {
                self.stack(view, mlp, &part, targets)
            } else {
                self.known(view, expert)
            };
        }
        if let Some(tensor) = self.quantised(view, &name)? {
            return self.push(tensor, targets);
        }
        let mut shape = view.shape.clone();
        let experts = ["down_proj", "up_proj"].into_iter().find_map(|part| {
            let mlp = module.strip_suffix(part)?.strip_suffix("experts.")?;
            Some(format!("{mlp}switch_mlp.{part}.weight"))
        });
        let mut name = name;
        if let Some(stack) = experts {
            name = stack;
        } else if is_convolution(&name) && shape.len() == 3 && self.checkpoint.layout() != Layout::Mlx {
            shape.swap(1, 2);
        }
        // MLX stores `w` where this checkpoint has `w - 1`.
        let change = Change {
            add_one: self.is_offset_norm(predicted.as_ref().unwrap_or(&view.name)),
            ..Change::default()
        };
        let source = Source::new(view)?.with_k(shape.last().copied().unwrap_or(1));
        self.push(Tensor { name, shape, source, change }, targets)
    }

    /// `name` as layers of its kind call it.
    fn of_kind(&self, name: String) -> String {
        let layer =
            name.split_once("layers.").and_then(|(_, rest)| rest.split('.').next()?.parse::<usize>().ok());
        match layer.and_then(|layer| self.known.latent_layers.get(layer)) {
            Some(true) => in_layer(&name, |name| {
                self.known.architecture.latent_name(name).map_or(Cow::Borrowed(name), Cow::Owned)
            }),
            _ => name,
        }
    }

    /// Appends a tensor, or two, of gate's rows and of up's, where the target has these apart.
    fn push(&self, tensor: Tensor, targets: &mut Vec<Tensor>) -> Result<(), QuantizeError> {
        let apart = [(FUSED_MLP, MLP), (FUSED_SHARED_EXPERT, SHARED_EXPERT)].into_iter().find_map(
            |(fused, [gate, up, _])| {
                let layer = tensor.name.strip_suffix(&format!("{}.weight", fused.0))?;
                // GGUF's name of a fused shared expert is empty.
                let known = self.known.architecture.gguf_name(fused.0);
                let whole = known.is_some_and(|gguf| !gguf.is_empty() || self.known.target == Layout::Mlx);
                (!whole).then(|| [gate, up].map(|part| format!("{layer}{}.weight", part.0)))
            },
        );
        let Some(names) = apart else {
            targets.push(tensor);
            return Ok(());
        };
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        let want = "gate and up rows are as many";
        targets.extend(tensor.row_halves(names).ok_or(QuantizeError::Shape { name, shape, want })?);
        Ok(())
    }

    /// True if these are the scales or biases of a quantised weight.
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
        let norms = self.known.architecture.offset_norms;
        let Some((norms, module)) = norms.zip(name.strip_suffix(".weight")) else { return false };
        norms.contain(self.checkpoint.layout(), module) && !norms.contain(self.known.target, module)
    }

    /// The name where MLX has the text model.
    fn nest(&self, name: &str) -> String {
        let prefix = self.known.architecture.mlx_prefix;
        let beside = ["lm_head.", "language_model.lm_head."].iter().any(|head| name.starts_with(head));
        match name.strip_prefix(self.text_prefix).filter(|_| !beside) {
            Some(rest) if self.known.architecture.conversion.text_prefix.is_some() => {
                let known = self.known.architecture.known_name(rest);
                format!("model.{}", if rest.starts_with("layers.") { rest } else { &*known })
            }
            Some(rest) => format!("{prefix}model.{rest}"),
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
        for expert in 0..self.known.experts {
            let name = of_expert(&first.name, expert);
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
        let shape = [&[self.known.experts], &shape[..]].concat();
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
        match expert < self.known.experts {
            true => Ok(()),
            false => {
                Err(QuantizeError::Expert { name: view.name.clone(), expert, count: self.known.experts })
            }
        }
    }
}

/// True for the kernel of a convolution, whose taps are the last dimension but one in MLX.
pub fn is_convolution(name: &str) -> bool {
    ["conv1d", "conv.conv"].iter().any(|module| name.trim_end_matches(".weight").ends_with(module))
}

/// `..mlp.experts.3.up_proj.weight` as (`..mlp.`, 3, `up_proj.weight`), and so
/// `..mlp.experts.up_proj.3.weight`, as ModelOpt has exported some.
fn single_expert(name: &str) -> Option<(&str, usize, String)> {
    let (mlp, rest) = name.split_once("experts.")?;
    let (first, rest) = rest.split_once('.')?;
    if let Ok(expert) = first.parse() {
        return Some((mlp, expert, rest.into()));
    }
    let (expert, parameter) = rest.split_once('.')?;
    Some((mlp, expert.parse().ok()?, format!("{first}.{parameter}")))
}

/// The name of expert `expert`'s tensor, of the first one's.
fn of_expert(first: &str, expert: usize) -> String {
    match first.split_once(".experts.") {
        Some((mlp, rest)) if rest.starts_with("0.") => format!("{mlp}.experts.{expert}{}", &rest[1..]),
        Some((mlp, rest)) => format!("{mlp}.experts.{}", rest.replacen(".0.", &format!(".{expert}."), 1)),
        None => first.into(),
    }
}

/// True if conversions keep the layers of `architecture` that predict further tokens. (mlx-lm drops
/// what is below `mtp.` when it reads a checkpoint.)
pub fn keeps_predictors(architecture: &Architecture) -> bool {
    architecture.gguf_name(NEXTN[0].0).is_some()
}

/// The name of a tensor below `mtp.` when its layer comes after `layers` others.
fn predictor(name: &str, layers: usize) -> Option<String> {
    let (_, name) = name.split_once("mtp.")?;
    if let Some((index, rest)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        return Some(format!("model.layers.{}.{rest}", layers.checked_add(index.parse().ok()?)?));
    }
    let (module, parameter) = name.rsplit_once('.')?;
    let module = match module {
        "fc" => "eh_proj",
        "pre_fc_norm_embedding" => "enorm",
        "pre_fc_norm_hidden" => "hnorm",
        "norm" => "shared_head.norm",
        other => other,
    };
    Some(format!("model.layers.{layers}.{module}.{parameter}"))
}

/// The number of layers of `checkpoint` that predict further tokens.
pub fn predictors(checkpoint: &Checkpoint) -> usize {
    let layer = |name: &str| name.split_once("mtp.layers.")?.1.split('.').next()?.parse::<usize>().ok();
    let layers =
        checkpoint.tensors().names().filter_map(layer).filter(|&layer| layer < checkpoint.tensors().len());
    layers.max().map_or(0, |layer| layer + 1)
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
    let (whole, half) = (Source::new(view)?, both / 2);
    for (index, part) in ["gate_proj", "up_proj"].iter().enumerate() {
        let mut source = whole.empty();
        for expert in 0..experts {
            let first = (2 * expert + index) * half;
            source.append(whole.part(first..first + half)?);
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
            let (architecture, _) = arch::model_type(model_type, None, arch::JsonFacts::default()).unwrap();
            let known = Known {
                architecture,
                layers: 0,
                experts: 0,
                tied: false,
                predictors: 0,
                target: Layout::Mlx,
                latents: None,
                latent_layers: vec![],
            };
            let targets = targets(&Checkpoint::open(folder.path()).unwrap(), &known).unwrap();
            assert_eq!(
                targets.iter().map(|target| target.change.add_one).collect::<Vec<_>>(),
                [want],
                "{model_type}"
            );
        }
    }
}
