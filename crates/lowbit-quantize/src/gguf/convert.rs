//! Hugging Face's and MLX's tensors as llama.cpp's converter stores them.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/{base,llama,qwen}.py`.

use super::{Planned, sort};
use crate::heads::{Heads, UNFIT, Unfit};
use crate::rope_divisors::Llama3;
use crate::source::Source;
use crate::tensor::{Change, Function, Tensor};
use crate::{QuantizeError, mlx};
use lowbit_files::Checkpoint;
use lowbit_formats::{FloatType, Format};
use lowbit_models::arch::Architecture;
use lowbit_models::names::{
    A_LOG, CONV1D, IN_PROJ_QKV, IN_PROJ_QKVZ, IN_PROJ_Z, Name, ROUTER, SHARED_EXPERT_GATE,
};
use lowbit_models::{Config, ModelError};

/// All tensors of a directory as GGUF has them, in `llama-quantize`'s order.
///
/// # Errors
/// [`QuantizeError`] for sizes that are missing, and tensors that do not have them.
pub(super) fn tensors(
    checkpoint: &Checkpoint,
    config: &Config<'_>,
    architecture: &Architecture,
) -> Result<Vec<Planned>, QuantizeError> {
    let heads = Heads::new(config, architecture)?;
    let mut tensors = vec![];
    for mut tensor in mlx::targets(checkpoint)? {
        let original = (tensor.name.clone(), tensor.shape.clone());
        let refuse =
            |want| QuantizeError::Shape { name: original.0.clone(), shape: original.1.clone(), want };
        let (layer, name) = split(&original.0);
        let is = |other: Name<'_>| name == other.0 || name.strip_suffix(".weight") == Some(other.0);
        // What the converter computes in f16 is rounded to it; bf16 is widened first.
        if tensor.source.format == Format::Float(FloatType::F16) {
            tensor.change.sum = FloatType::F16;
        }
        if is(IN_PROJ_QKVZ) {
            let delta_net = heads.delta_net.ok_or_else(|| refuse("this architecture has no delta nets"))?;
            let n = tensor.shape.first().copied().unwrap_or(0);
            let rows = delta_net.split_qkvz(n).map_err(|Unfit| refuse(UNFIT))?;
            for (name, rows) in [IN_PROJ_QKV, IN_PROJ_Z].into_iter().zip(rows) {
                let mut part = tensor.clone();
                part.name = format!("blk.{}.{}.weight", layer.unwrap_or(0), name.1);
                select_rows(&mut part, rows).map_err(|Unfit| refuse(UNFIT))?;
                tensors.push(part);
            }
            continue;
        }
        let known = architecture.gguf_name(name).ok_or_else(|| {
            let (path, name) = (checkpoint.path().to_path_buf(), tensor.name.clone());
            ModelError::Surplus { path, name, count: 1 }
        })?;
        change(&heads, &mut tensor, name).map_err(|Unfit| refuse(UNFIT))?;
        tensor.name = match layer {
            Some(layer) => format!("blk.{layer}.{known}"),
            None => known,
        };
        tensors.push(tensor);
    }
    tensors.extend(rope_divisors(config)?);
    let mut planned: Vec<_> = tensors.into_iter().map(|tensor| Planned::Values(tensor, None)).collect();
    sort(&mut planned);
    Ok(planned)
}

/// Far more than any model has.
const MOST_HEAD_DIM: usize = 1 << 16;

/// Llama 3's scaling of the rotary embedding, which GGUF has as divisors of the frequencies.
fn rope_divisors(config: &Config<'_>) -> Result<Option<Tensor>, QuantizeError> {
    let section = match config.section("rope_parameters")? {
        None => config.section("rope_scaling")?,
        section => section,
    };
    let Some(section) = section else { return Ok(None) };
    let kind = match section.text("rope_type", "")? {
        None => section.text("type", "")?,
        kind => kind,
    };
    if kind.as_deref() != Some("llama3") {
        return Ok(None);
    }
    let dim = match config.optional_size("head_dim", "")? {
        Some(dim) => dim,
        None => config.size("hidden_size", "")? / config.size("num_attention_heads", "")?,
    };
    if dim > MOST_HEAD_DIM {
        let want = format!("at most {MOST_HEAD_DIM} elements of a head are supported");
        return Err(config.refuse("head_dim", &dim.to_string(), &want).into());
    }
    let theta = match section.optional_float("rope_theta", "")? {
        None => config.optional_float("rope_theta", "")?.unwrap_or(10000.0),
        Some(theta) => theta,
    };
    let number =
        |key: &str, default: f64| Ok::<_, QuantizeError>(section.optional_float(key, "")?.unwrap_or(default));
    let (factor, low, high) =
        (number("factor", 8.0)? as f32, number("low_freq_factor", 1.0)?, number("high_freq_factor", 4.0)?);
    let original = number("original_max_position_embeddings", 8192.0)?;
    let llama3 = Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: original,
    };
    let values = llama3.divisors(theta, dim);
    let (name, shape) = ("rope_freqs.weight".into(), vec![values.len()]);
    Ok(Some(Tensor { name, shape, source: Source::values(&values), change: Change::default() }))
}

/// The layer, and the name in it, without what stands before.
fn split(name: &str) -> (Option<usize>, &str) {
    if let Some((_, rest)) = name.split_once("layers.")
        && let Some((layer, rest)) = rest.split_once('.')
        && let Ok(layer) = layer.parse()
    {
        return (Some(layer), rest);
    }
    let prefixes = ["language_model.model.", "language_model.", "model."];
    (None, prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name))
}

/// Makes of `tensor`, which MLX calls `name` in its layer, what GGUF has.
fn change(heads: &Heads, tensor: &mut Tensor, name: &str) -> Result<(), Unfit> {
    if name == CONV1D.0 {
        // [C, W, 1] in MLX's shapes.
        let &[channels, width, 1] = &tensor.shape[..] else { return Err(Unfit) };
        tensor.shape = vec![channels, width];
        tensor.source = tensor.source.clone().with_k(width);
    }
    if name == A_LOG.0 {
        tensor.change.function = Function::NegativeExp;
    }
    let n = *tensor.shape.first().ok_or(Unfit)?;
    heads.order(name, n, tensor.k())?.map_or(Ok(()), |order| order.apply(tensor))
}

/// Takes the rows `order` of a matrix, all of which are there.
fn select_rows(tensor: &mut Tensor, order: Vec<usize>) -> Result<(), Unfit> {
    let &[rows, k] = &tensor.shape[..] else { return Err(Unfit) };
    if order.iter().any(|&row| row >= rows) {
        return Err(Unfit);
    }
    tensor.shape = vec![order.len(), k];
    tensor.change.rows = Some(order);
    Ok(())
}

/// The type of a tensor that is not quantised: f32 for all but matrices that only some converters keep.
pub(super) fn unquantised(tensor: &Tensor) -> Format {
    let Tensor { name, shape, source, .. } = tensor;
    let kept = [SHARED_EXPERT_GATE.1, ROUTER.1, CONV1D.1];
    let is_f32 = shape.len() <= 1
        || name.ends_with("_norm.weight")
        || !name.ends_with(".weight")
        || kept.iter().any(|part| name.contains(part));
    match source.format {
        Format::Float(float) if !is_f32 => Format::Float(float),
        _ => Format::Float(FloatType::F32),
    }
}
