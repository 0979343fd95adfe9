//! Hugging Face's and MLX's tensors as llama.cpp's converter stores them.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/{base,llama,qwen}.py`.

use super::{Planned, sort};
use crate::QuantizeError;
use crate::computed::Computed;
use crate::heads::{Heads, UNFIT, Unfit};
use crate::mlx::{self, Known};
use crate::rope_divisors::Llama3;
use crate::source::Source;
use crate::tensor::{Change, Function, Tensor};
use lowbit_files::Layout;
use lowbit_formats::{FloatType, Format};
use lowbit_kernels::ops::{ChannelDecay, RopeScaling};
use lowbit_models::ModelError;
use lowbit_models::arch::LONG_ROPE;
use lowbit_models::layers::{KimiDeltaConfig, Mamba2Config, STILL};
use lowbit_models::names::{
    A_LOG, CONV1D, IN_PROJ_QKV, IN_PROJ_QKVZ, IN_PROJ_Z, K_CONV, KDA_A_LOG, MAMBA_A_LOG, MAMBA_CONV, MAMBA_D,
    MAMBA_NORM, Name, Q_CONV, ROUTER, SHARED_EXPERT_GATE, SHORT_CONV, V_CONV,
};

/// All tensors of a directory as GGUF has them, in `llama-quantize`'s order, `predictors` layers of
/// multi-token prediction among them.
///
/// # Errors
/// [`QuantizeError`] for sizes that are missing, and tensors that do not have them.
pub(super) fn tensors(computed: &Computed<'_>, predictors: usize) -> Result<Vec<Planned>, QuantizeError> {
    let Computed { checkpoint, config, architecture, .. } = computed;
    let heads = Heads::new(config, architecture)?;
    let mut tensors = vec![];
    for mut tensor in mlx::targets(checkpoint, &Known { predictors, ..Known::new(computed, Layout::Gguf)? })?
    {
        let original = (tensor.name.clone(), tensor.shape.clone());
        let refuse =
            |want| QuantizeError::Shape { name: original.0.clone(), shape: original.1.clone(), want };
        let (layer, name) = split(&original.0);
        let is = |other: Name<'_>| name == other.0 || name.strip_suffix(".weight") == Some(other.0);
        // The converter's sums of f16 are f16; bf16 is widened first. It does not read MLX's
        // layout, from which a model's own sums stay as they are.
        let is_converters = checkpoint.layout() == Layout::HuggingFace;
        if is_converters && tensor.source.format == Format::Float(FloatType::F16) {
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
        if computed.has_bounded_decay() && name == KDA_A_LOG.0 {
            tensor.change.function = Function::Exp;
        }
        if let Some(mamba) = computed.mamba() {
            shape_mamba(mamba, &mut tensor, name).map_err(|Unfit| refuse(UNFIT))?;
        }
        if let Some(kimi) = computed.kimi_delta() {
            shape_kimi_delta(kimi, &mut tensor, name).map_err(|Unfit| refuse(UNFIT))?;
        }
        tensor.name = match layer {
            Some(layer) => format!("blk.{layer}.{known}"),
            None => known,
        };
        tensors.push(tensor);
    }
    tensors.extend(rope_divisors(computed)?);
    let mut planned: Vec<_> =
        tensors.into_iter().map(|tensor| Planned::Values(tensor.into(), None)).collect();
    sort(&mut planned);
    Ok(planned)
}

/// Divisors of the rotary embedding's frequencies, which GGUF has as tensors: Llama 3's, and
/// LongRoPE's two, and those of heads that are rotated in part.
fn rope_divisors(computed: &Computed<'_>) -> Result<Vec<Tensor>, QuantizeError> {
    let tensor = |name: &str, values: &[f32]| {
        let (name, shape) = (name.into(), vec![values.len()]);
        Tensor { name, shape, source: Source::values(values), change: Change::default() }
    };
    let rope = computed.rope()?;
    let llama3 = match rope.scaling {
        RopeScaling::Llama3(llama3) => llama3,
        RopeScaling::LongRope(long) => {
            return Ok(vec![
                tensor(LONG_ROPE[0], &long.short_factor),
                tensor(LONG_ROPE[1], &long.long_factor),
            ]);
        }
        _ if computed.has_two_sizes() => {
            let all = rope.freq_factors.unwrap_or_else(|| vec![1.0; rope.rotary_dim / 2]);
            let divisors: Vec<f32> = all.into_iter().map(|divisor| divisor.min(STILL)).collect();
            return Ok(vec![tensor(ROPE_FREQS, &divisors)]);
        }
        _ => return Ok(vec![]),
    };
    let llama3 = Llama3 {
        factor: llama3.factor,
        low_freq_factor: llama3.low_freq_factor.into(),
        high_freq_factor: llama3.high_freq_factor.into(),
        original_max_position_embeddings: llama3.original_max_position_embeddings as f64,
    };
    let values = llama3.divisors(rope.theta, rope.rotary_dim);
    Ok(vec![tensor(ROPE_FREQS, &values)])
}

/// True if this tensor has divisors of the rotary embedding's frequencies.
pub(super) fn is_rope_divisors(name: &str) -> bool {
    name == ROPE_FREQS || LONG_ROPE.contains(&name)
}

/// The divisors of the rotary embedding's frequencies.
const ROPE_FREQS: &str = "rope_freqs.weight";

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
    if [CONV1D.0, SHORT_CONV.0, MAMBA_CONV.0, Q_CONV.0, K_CONV.0, V_CONV.0].contains(&name) {
        // [C, W, 1] in MLX's shapes.
        let &[channels, width, 1] = &tensor.shape[..] else { return Err(Unfit) };
        tensor.shape = vec![channels, width];
        tensor.source = tensor.source.clone().with_k(width);
    }
    if [A_LOG.0, MAMBA_A_LOG.0, KDA_A_LOG.0].contains(&name) {
        tensor.change.function = Function::NegativeExp;
    }
    let n = *tensor.shape.first().ok_or(Unfit)?;
    heads.order(name, n, tensor.k())?.map_or(Ok(()), |order| order.apply(tensor))
}

/// Gives a Mamba-2 layer's vectors the shapes that llama.cpp wants: a row for each head, and for
/// each group of its norm.
fn shape_mamba(mamba: &Mamba2Config, tensor: &mut Tensor, name: &str) -> Result<(), Unfit> {
    let rows = match name {
        _ if [MAMBA_A_LOG.0, MAMBA_D.0].contains(&name) => mamba.num_heads,
        _ if name.strip_suffix(".weight") == Some(MAMBA_NORM.0) => mamba.n_groups,
        _ => return Ok(()),
    };
    let &[values] = &tensor.shape[..] else { return Err(Unfit) };
    if !values.is_multiple_of(rows) {
        return Err(Unfit);
    }
    tensor.shape = vec![rows, values / rows];
    tensor.source = tensor.source.clone().with_k(values / rows);
    Ok(())
}

/// Gives the parameters of Kimi Delta Attention the shapes of llama.cpp's converter: `[1, C, 1, W]`
/// for a convolution, `[1, 1, H, 1]` for the rates of decay, or `[H, 1]` where that has a bound.
fn shape_kimi_delta(kimi: &KimiDeltaConfig, tensor: &mut Tensor, name: &str) -> Result<(), Unfit> {
    if [Q_CONV.0, K_CONV.0, V_CONV.0].contains(&name) {
        let &[channels, width] = &tensor.shape[..] else { return Err(Unfit) };
        tensor.shape = vec![1, channels, 1, width];
    } else if name == KDA_A_LOG.0 {
        if tensor.shape.iter().product::<usize>() != kimi.num_heads {
            return Err(Unfit);
        }
        tensor.shape = match kimi.decay {
            ChannelDecay::Softplus => vec![1, 1, kimi.num_heads, 1],
            ChannelDecay::Bounded(_) => vec![kimi.num_heads, 1],
        };
        tensor.source = tensor.source.clone().with_k(1);
    }
    Ok(())
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

/// The type of a tensor that is not quantised: f32 for all but matrices that only some converters
/// keep.
pub(super) fn unquantised(tensor: &Tensor) -> Format {
    let Tensor { name, shape, source, .. } = tensor;
    let kept = [SHARED_EXPERT_GATE.1, ROUTER.1, CONV1D.1, SHORT_CONV.1, Q_CONV.1, K_CONV.1, V_CONV.1];
    let is_f32 = shape.len() <= 1
        || name.ends_with("_norm.weight")
        || !name.ends_with(".weight")
        || kept.iter().any(|part| name.contains(part));
    match source.format {
        Format::Float(float) if !is_f32 => Format::Float(float),
        _ => Format::Float(FloatType::F32),
    }
}
