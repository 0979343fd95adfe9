//! Hugging Face's and MLX's tensors as llama.cpp's converter stores them.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/{base,llama,qwen}.py`.

use super::{Planned, sort};
use crate::source::Source;
use crate::tensor::{Change, Tensor};
use crate::{QuantizeError, mlx};
use lowbit_files::Checkpoint;
use lowbit_formats::{FloatType, Format};
use lowbit_models::arch::Architecture;
use lowbit_models::names::{
    A_LOG, CONV1D, DT_BIAS, IN_PROJ_A, IN_PROJ_B, IN_PROJ_QKV, IN_PROJ_QKVZ, IN_PROJ_Z, K_PROJ, Name,
    OUT_PROJ, Q_PROJ, ROUTER, SHARED_EXPERT_GATE,
};
use lowbit_models::{Config, ModelError};

/// The sizes by which rows are reordered.
struct Sizes {
    /// Query heads and key heads whose rows are permuted: Llama's, because GGUF rotates neighbours together.
    permuted: Option<[usize; 2]>,
    delta_net: Option<DeltaNet>,
}

/// The heads of gated delta nets.
#[derive(Clone, Copy)]
struct DeltaNet {
    key_heads: usize,
    /// Value heads per key head.
    ratio: usize,
    key_dim: usize,
    value_dim: usize,
    /// Whether GGUF has value heads in another order: those of one key head are not neighbours, but `key_heads` apart.
    tiled: bool,
}

/// All tensors of a directory as GGUF has them, in `llama-quantize`'s order.
///
/// # Errors
/// [`QuantizeError`] for sizes that are missing, and tensors that do not have them.
pub(super) fn tensors(
    checkpoint: &Checkpoint,
    config: &Config<'_>,
    architecture: &Architecture,
) -> Result<Vec<Planned>, QuantizeError> {
    let sizes = Sizes::new(config, architecture)?;
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
            let delta_net = sizes.delta_net.ok_or_else(|| refuse("this architecture has no delta nets"))?;
            let n = tensor.shape.first().copied().unwrap_or(0);
            let wrong = || refuse("the configuration's heads do not make up its rows");
            let rows = delta_net.split_qkvz(n).ok_or_else(wrong)?;
            for (name, rows) in [IN_PROJ_QKV, IN_PROJ_Z].into_iter().zip(rows) {
                let mut part = tensor.clone();
                part.name = format!("blk.{}.{}.weight", layer.unwrap_or(0), name.1);
                select_rows(&mut part, rows).ok_or_else(wrong)?;
                tensors.push(part);
            }
            continue;
        }
        let known = architecture.gguf_name(name).ok_or_else(|| {
            let (path, name) = (checkpoint.path().to_path_buf(), tensor.name.clone());
            ModelError::Surplus { path, name, count: 1 }
        })?;
        let changed = sizes.change(&mut tensor, name);
        changed.ok_or_else(|| refuse("the configuration's heads do not make up its rows"))?;
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
    let divisor = |pair: usize| {
        let exponent = (2 * pair) as f32 / dim as f32;
        let frequency = 1.0 / (theta.powf(exponent.into()) as f32);
        let wavelength = std::f32::consts::TAU / frequency;
        if f64::from(wavelength) < original / high {
            1.0
        } else if f64::from(wavelength) > original / low {
            factor
        } else {
            let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    let values: Vec<f32> = (0..dim / 2).map(divisor).collect();
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

impl Sizes {
    fn new(config: &Config<'_>, architecture: &Architecture) -> Result<Self, QuantizeError> {
        let has = |name: Name<'_>| architecture.gguf_name(name.0).is_some();
        let permuted = match architecture.gguf {
            "llama" => {
                let heads = config.size("num_attention_heads", "")?;
                let keys = config.optional_size("num_key_value_heads", "")?.unwrap_or(heads);
                Some([heads, keys])
            }
            _ => None,
        };
        let delta_net = match has(A_LOG) {
            true => Some(DeltaNet::new(config, architecture)?),
            false => None,
        };
        Ok(Self { permuted, delta_net })
    }

    /// Makes of `tensor`, which is called `name` in its layer, what GGUF has; `None` when its shape does not fit.
    fn change(&self, tensor: &mut Tensor, name: &str) -> Option<()> {
        let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
        let is = |other: Name<'_>| other.0 == module || other.0 == name;
        if is(CONV1D) {
            // [C, W, 1] in MLX's shapes.
            let &[channels, width, 1] = &tensor.shape[..] else { return None };
            tensor.shape = vec![channels, width];
            tensor.source = tensor.source.clone().with_k(width);
        }
        let n = *tensor.shape.first()?;
        if let Some(heads) = self.permuted {
            let heads = [(Q_PROJ, heads[0]), (K_PROJ, heads[1])].into_iter().find(|(name, _)| is(*name));
            if let Some((_, heads)) = heads {
                select(tensor, interleaved_halves(n, heads)?)?;
            }
        }
        if is(A_LOG) {
            tensor.change.negative_exp = true;
        }
        if let Some(delta_net) = self.delta_net.filter(|delta_net| delta_net.tiled) {
            match () {
                () if is(IN_PROJ_QKV) || is(CONV1D) => {
                    let keys = 2 * delta_net.key_heads * delta_net.key_dim;
                    let values = delta_net.tiled_values(n.checked_sub(keys)?, delta_net.value_dim)?;
                    select(tensor, (0..keys).chain(values.into_iter().map(|value| keys + value)).collect())?;
                }
                () if is(IN_PROJ_Z) => select(tensor, delta_net.tiled_values(n, delta_net.value_dim)?)?,
                () if is(IN_PROJ_A) || is(IN_PROJ_B) || is(A_LOG) || is(DT_BIAS) => {
                    select(tensor, delta_net.tiled_values(n, 1)?)?;
                }
                () if is(OUT_PROJ) => {
                    let order = delta_net.tiled_values(tensor.k(), delta_net.value_dim)?;
                    select_columns(tensor, order)?;
                }
                () => {}
            }
        }
        Some(())
    }
}

/// Of `heads` heads, of each the rows of its first and its second half in turn; `None` when there are no such heads.
fn interleaved_halves(rows: usize, heads: usize) -> Option<Vec<usize>> {
    let dim = rows.checked_div(heads).filter(|dim| dim * heads == rows && dim.is_multiple_of(2))?;
    let of = |head: usize| (0..dim).map(move |i| head * dim + i % 2 * (dim / 2) + i / 2);
    Some((0..heads).flat_map(of).collect())
}

impl DeltaNet {
    fn new(config: &Config<'_>, architecture: &Architecture) -> Result<Self, QuantizeError> {
        let key_heads = config.size("linear_num_key_heads", "")?;
        let value_heads = config.size("linear_num_value_heads", "")?;
        let ratio = value_heads / key_heads;
        if ratio * key_heads != value_heads {
            let want = format!("a multiple of the {key_heads} key heads is wanted");
            return Err(config.refuse("linear_num_value_heads", &value_heads.to_string(), &want).into());
        }
        let (key_dim, value_dim) =
            (config.size("linear_key_head_dim", "")?, config.size("linear_value_head_dim", "")?);
        let rows = key_dim.checked_add(ratio.saturating_mul(value_dim));
        if rows.and_then(|rows| rows.checked_mul(2)?.checked_mul(key_heads)).is_none() {
            let got = format!("{value_dim} * {value_heads} heads");
            return Err(config
                .refuse("linear_value_head_dim", &got, "that is more than memory can hold")
                .into());
        }
        Ok(Self {
            key_heads,
            ratio,
            key_dim,
            value_dim,
            tiled: architecture.gguf != "qwen3next" && ratio > 1,
        })
    }

    /// The `rows` rows of all value heads, of `dim` each, in GGUF's order: new head `j * key_heads + k` is old head
    /// `k * ratio + j`. `None` when there are not as many.
    fn tiled_values(&self, rows: usize, dim: usize) -> Option<Vec<usize>> {
        (self.ratio * self.key_heads * dim == rows).then_some(())?;
        let heads = (0..self.ratio).flat_map(|j| (0..self.key_heads).map(move |k| k * self.ratio + j));
        Some(heads.flat_map(|head| head * dim..(head + 1) * dim).collect())
    }

    /// The rows of q, k and v, and those of z, in `in_proj_qkvz` of `rows` rows, which has them one key head after another.
    fn split_qkvz(&self, rows: usize) -> Option<[Vec<usize>; 2]> {
        let values = self.ratio * self.value_dim;
        let widths = [self.key_dim, self.key_dim, values, values];
        let head: usize = widths.iter().sum();
        (head * self.key_heads == rows).then_some(())?;
        let part = |part: usize| {
            let start: usize = widths[..part].iter().sum();
            let of = move |k: usize| k * head + start..k * head + start + widths[part];
            (0..self.key_heads).flat_map(of).collect::<Vec<_>>()
        };
        Some([[part(0), part(1), part(2)].concat(), part(3)])
    }
}

/// Reorders the rows of a matrix, or the values of a vector.
fn select(tensor: &mut Tensor, order: Vec<usize>) -> Option<()> {
    match tensor.shape.len() {
        1 => select_columns(tensor, order),
        _ if order.len() == tensor.shape[0] => select_rows(tensor, order),
        _ => None,
    }
}

/// Takes the rows `order`, all of which are there.
fn select_rows(tensor: &mut Tensor, order: Vec<usize>) -> Option<()> {
    let &[rows, k] = &tensor.shape[..] else { return None };
    order.iter().all(|&row| row < rows).then_some(())?;
    tensor.shape = vec![order.len(), k];
    tensor.change.rows = Some(order);
    Some(())
}

fn select_columns(tensor: &mut Tensor, order: Vec<usize>) -> Option<()> {
    (order.len() == tensor.k()).then_some(())?;
    tensor.change.columns = Some(order);
    Some(())
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
