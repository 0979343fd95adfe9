//! GGUF's tensors by MLX's names, in MLX's shapes and order: the inverse of `gguf/convert.rs`.

use super::Source as Gguf;
use crate::QuantizeError;
use crate::heads::{Heads, Order, UNFIT, Unfit};
use crate::latents::Latents;
use crate::mlx::{split_gate_up, stored};
use crate::source::Source;
use crate::tensor::{Change, Function, Tensor};
use lowbit_files::{Layout, TensorView};
use lowbit_models::ModelError;
use lowbit_models::names::{
    A_LOG, CONV1D, EMBED_Q, EMBED_TOKENS, EMBEDDING_NORM, FUSED_GATE_UP, FUSED_SHARED_EXPERT, IN_PROJ_A,
    IN_PROJ_B, IN_PROJ_BA, IN_PROJ_QKV, IN_PROJ_QKVZ, IN_PROJ_Z, K_CONV, KDA_A_LOG, MAMBA_A_LOG, MAMBA_CONV,
    MAMBA_D, MAMBA_NORM, NORM, Name, PER_LAYER_TOP, Q_CONV, SHARED_EXPERT, SHORT_CONV, UNEMBED_OUT, V_CONV,
};

/// All tensors but the rotary embedding's divisors, which `config.json` describes, sorted by name.
///
/// # Errors
/// [`QuantizeError`] for tensors that MLX's checkpoints of this architecture do not have.
pub(super) fn tensors(gguf: &Gguf<'_>) -> Result<Vec<Tensor>, QuantizeError> {
    let heads = Heads::new(&gguf.computed.config, gguf.computed.architecture)?;
    let names = Names { heads, latents: Latents::per_head(gguf.computed, Layout::Mlx), gguf };
    let mut tensors = vec![];
    let is_kept = |view: &&TensorView| {
        !ROPE_DIVISORS.contains(&&*view.name)
            && !gguf.computed.architecture.is_extra(&view.name, gguf.computed.decoder().num_hidden_layers)
    };
    for view in gguf.computed.checkpoint.tensors().iter().filter(is_kept) {
        names.add(view, &mut tensors)?;
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

/// Tensors that `config.json` describes.
const ROPE_DIVISORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

struct Names<'a> {
    gguf: &'a Gguf<'a>,
    heads: Heads,
    /// Those whose projections MLX has per head, too.
    latents: Option<Latents>,
}

impl Names<'_> {
    fn add(&self, view: &TensorView, tensors: &mut Vec<Tensor>) -> Result<(), QuantizeError> {
        let refuse = |want| {
            let (name, shape) = (view.name.clone(), view.shape.clone());
            QuantizeError::Shape { name, shape, want }
        };
        let (layer, name) = split(&view.name);
        let is = |other: Name<'_>| name.strip_suffix(".weight") == Some(other.1);
        let fused = self.has_fused_projections();
        // A part of the one before.
        if fused && is(IN_PROJ_Z) {
            return Ok(());
        }
        let [shared_gate, shared_up, _] = SHARED_EXPERT;
        let fused_shared = self.gguf.computed.architecture.gguf_name(FUSED_SHARED_EXPERT.0).is_some();
        if fused_shared && is(shared_up) {
            return Ok(());
        }
        if fused_shared && is(shared_gate) {
            let name = format!("{}.weight", FUSED_SHARED_EXPERT.0);
            tensors.push(self.joined(view, shared_up, self.prefixed(layer, &name))?);
            return Ok(());
        }
        // A part of the one behind.
        let joins = self.latents.is_none();
        if joins && is(EMBED_Q) {
            return Ok(());
        }
        if is(FUSED_GATE_UP) {
            let first = tensors.len();
            split_gate_up(&with_rank(view, 3), "mlp.", tensors)?;
            for tensor in &mut tensors[first..] {
                tensor.name = self.prefixed(layer, &tensor.name);
            }
            return Ok(());
        }
        let other = [IN_PROJ_A, IN_PROJ_B].into_iter().any(is) && fused || is(IN_PROJ_BA) && !fused;
        let known = self.gguf.computed.architecture.mlx_name(name).filter(|_| !other).ok_or_else(|| {
            let (path, name) = (self.gguf.computed.checkpoint.path().to_path_buf(), view.name.clone());
            ModelError::Surplus { path, name, count: 1 }
        })?;
        let latent = layer.is_some_and(|layer| self.gguf.computed.latent_layers().nth(layer) == Some(true));
        let own = self.gguf.computed.architecture.latent_name(&known).filter(|_| latent);
        let known = own.unwrap_or(known);
        let view = with_rank(view, rank(&known));
        let mut tensor = Tensor {
            name: self.prefixed(layer, &known),
            shape: view.shape.clone(),
            source: Source::new(&view)?,
            change: Change::default(),
        };
        if fused && is(IN_PROJ_QKV) {
            tensor.name = format!("{}.weight", self.prefixed(layer, IN_PROJ_QKVZ.0));
            self.fuse(&view, &mut tensor)?;
        } else {
            self.change(&mut tensor, &known).map_err(|Unfit| refuse(UNFIT))?;
        }
        let norms = self.gguf.computed.architecture.offset_norms;
        let module = known.strip_suffix(".weight");
        if norms.zip(module).is_some_and(|(norms, module)| norms.contain(Layout::Mlx, module)) {
            tensor.change.function = Function::LessOne;
        }
        if [A_LOG.0, MAMBA_A_LOG.0, KDA_A_LOG.0].contains(&&*known) {
            let values = tensor.source_values()?;
            let bounded = self.gguf.computed.has_bounded_decay();
            let (sign, want, function) = match bounded {
                true => (1.0, "exp(A_log) is above 0", Function::Log),
                false => (-1.0, "-exp(A_log) is below 0", Function::LogOfNegative),
            };
            // A value without a logarithm would become NaN.
            if let Some(index) = values.iter().position(|value| !(value.is_finite() && sign * value > 0.0)) {
                let (name, value) = (view.name, values[index]);
                return Err(QuantizeError::Value { name, index, value, want });
            }
            tensor.change.function = function;
        }
        if let Some(latents) = Latents::of(self.gguf.computed).filter(|_| joins && is(UNEMBED_OUT)) {
            tensors.push(latents.join(tensor, &self.beside(&view, layer)?)?);
            return Ok(());
        }
        match self.latents.map_or(Ok(None), |latents| latents.split(&tensor))? {
            Some(parts) => tensors.extend(parts),
            None => tensors.push(tensor),
        }
        Ok(())
    }

    /// The projection to keys from latents, beside that of values.
    fn beside(&self, values: &TensorView, layer: Option<usize>) -> Result<Tensor, QuantizeError> {
        let name = values.name.replace(UNEMBED_OUT.1, EMBED_Q.1);
        let missing = || QuantizeError::Missing { name: name.clone() };
        let view = with_rank(self.gguf.computed.checkpoint.tensors().get(&name).ok_or_else(missing)?, 3);
        let (shape, source) = (view.shape.clone(), Source::new(&view)?);
        Ok(Tensor { name: self.prefixed(layer, EMBED_Q.0), shape, source, change: Change::default() })
    }

    /// True if MLX has q, k, v and z of a gated delta net in one matrix, and b and a in another.
    fn has_fused_projections(&self) -> bool {
        self.gguf.computed.architecture.conversion.fused_delta_nets
    }

    /// The full name of what is called `name` in a layer or outside of them.
    fn prefixed(&self, layer: Option<usize>, name: &str) -> String {
        let architecture = self.gguf.computed.architecture;
        let prefix = architecture.mlx_prefix;
        if architecture.conversion.text_prefix.is_some() {
            return stored(&self.canonical(layer, name), architecture);
        }
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        match layer {
            Some(layer) => {
                let name = architecture.stored_name(name, Layout::Mlx);
                format!("{prefix}model.layers.{layer}.{name}")
            }
            None if [EMBED_TOKENS, NORM, EMBEDDING_NORM]
                .iter()
                .chain(PER_LAYER_TOP)
                .any(|it| it.0 == module) =>
            {
                format!("{prefix}model.{name}")
            }
            None => format!("{prefix}{name}"),
        }
    }

    /// The name that conversions have for it.
    fn canonical(&self, layer: Option<usize>, name: &str) -> String {
        match layer {
            Some(layer) => format!("model.layers.{layer}.{name}"),
            None if name.starts_with("lm_head") => name.into(),
            None => format!("model.{name}"),
        }
    }

    /// Undoes what GGUF's converter does to the tensor that MLX calls `name` in its layer.
    fn change(&self, tensor: &mut Tensor, name: &str) -> Result<(), Unfit> {
        let n = *tensor.shape.first().ok_or(Unfit)?;
        if let Some(order) = self.heads.order(name, n, tensor.k())? {
            order.inverse().apply(tensor)?;
        }
        if [MAMBA_A_LOG.0, MAMBA_D.0].contains(&name) || name.strip_suffix(".weight") == Some(MAMBA_NORM.0) {
            let values = tensor.shape.iter().product();
            tensor.shape = vec![values];
            tensor.source = tensor.source.clone().with_k(values);
        }
        if name == KDA_A_LOG.0 {
            let heads = tensor.shape.iter().product();
            tensor.shape = match self.gguf.computed.has_bounded_decay() {
                true => vec![heads],
                false => vec![1, 1, heads, 1],
            };
            let k = *tensor.shape.last().ok_or(Unfit)?;
            tensor.source = tensor.source.clone().with_k(k);
        }
        let of_kimi = [Q_CONV.0, K_CONV.0, V_CONV.0].contains(&name);
        if of_kimi {
            // [1, C, 1, W], or without the first.
            let width = tensor.k();
            tensor.shape =
                vec![tensor.shape.iter().product::<usize>().checked_div(width).ok_or(Unfit)?, width];
        }
        if of_kimi || [CONV1D.0, SHORT_CONV.0, MAMBA_CONV.0].contains(&name) {
            // [C, W] becomes [C, W, 1], rows of one value.
            let &[channels, width] = &tensor.shape[..] else { return Err(Unfit) };
            tensor.shape = vec![channels, width, 1];
            tensor.source = tensor.source.clone().with_k(1);
            let each =
                |rows: Vec<usize>| rows.into_iter().flat_map(|row| row * width..(row + 1) * width).collect();
            tensor.change.rows = tensor.change.rows.take().map(each);
        }
        Ok(())
    }

    /// The rows of the gate `view` of a layer's MLP, and those of `up` in the same layer after
    /// them, as `name`.
    fn joined(&self, view: &TensorView, up: Name<'_>, name: String) -> Result<Tensor, QuantizeError> {
        let [gate_part, up_part] = [SHARED_EXPERT[0].1, up.1];
        let other = view.name.replace(gate_part, up_part);
        let missing = || QuantizeError::Missing { name: other.clone() };
        let gate = with_rank(view, 2);
        let up = with_rank(self.gguf.computed.checkpoint.tensors().get(&other).ok_or_else(missing)?, 2);
        if gate.shape != up.shape || gate.stored != up.stored {
            let want = "gate and up have one shape and type";
            return Err(QuantizeError::Shape { name: up.name, shape: up.shape, want });
        }
        let shape = vec![2 * gate.shape[0], gate.shape[1]];
        let mut source = Source::new(&gate)?;
        source.append(Source::new(&up)?);
        Ok(Tensor { name, shape, source, change: Change::default() })
    }

    /// Makes of q, k and v, and of z beside them, the one matrix that MLX has, one key head after
    /// another.
    fn fuse(&self, qkv: &TensorView, tensor: &mut Tensor) -> Result<(), QuantizeError> {
        let name = qkv.name.replace(IN_PROJ_QKV.1, IN_PROJ_Z.1);
        let missing = || QuantizeError::Missing { name: name.clone() };
        let z = with_rank(self.gguf.computed.checkpoint.tensors().get(&name).ok_or_else(missing)?, 2);
        let refuse = |view: &TensorView, want| {
            let (name, shape) = (view.name.clone(), view.shape.clone());
            QuantizeError::Shape { name, shape, want }
        };
        let (&[qkv_rows, k], &[z_rows, z_k]) = (&qkv.shape[..], &z.shape[..]) else {
            return Err(refuse(qkv, "a matrix is wanted"));
        };
        if k != z_k {
            return Err(refuse(&z, "the projection of q, k and v has rows of another length"));
        }
        let delta_net = self.heads.delta_net.ok_or_else(|| refuse(qkv, UNFIT))?;
        let rows = qkv_rows.checked_add(z_rows).ok_or_else(|| refuse(qkv, UNFIT))?;
        let order = delta_net.split_qkvz(rows).map_err(|Unfit| refuse(qkv, UNFIT))?;
        if order[0].len() != qkv_rows {
            return Err(refuse(qkv, UNFIT));
        }
        tensor.shape = vec![rows, k];
        tensor.source.append(Source::new(&z)?);
        Order::Rows(order.concat()).inverse().apply(tensor).map_err(|Unfit| refuse(qkv, UNFIT))
    }
}

/// The layer, and the name in it.
fn split(name: &str) -> (Option<usize>, &str) {
    let in_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    match in_layer.and_then(|(layer, rest)| Some((layer.parse().ok()?, rest))) {
        Some((layer, rest)) => (Some(layer), rest),
        None => (None, name),
    }
}

/// The number of dimensions of the tensor that MLX calls `name` in its layer; of a convolution
/// without its last one.
fn rank(name: &str) -> usize {
    let of_heads = [EMBED_Q, UNEMBED_OUT].iter().any(|module| name.starts_with(module.0));
    let of_experts = name.contains("switch_mlp.") || of_heads;
    match name.strip_suffix(".weight") {
        Some(_) if of_experts => 3,
        // Some are numbered.
        Some(module) if !module.trim_end_matches(['_', '1', '2']).ends_with("norm") => 2,
        None if of_experts => 2,
        _ => 1,
    }
}

/// With the leading dimensions of 1 that GGUF leaves out.
fn with_rank(view: &TensorView, rank: usize) -> TensorView {
    let mut view = view.clone();
    while view.shape.len() < rank {
        view.shape.insert(0, 1);
    }
    view
}
