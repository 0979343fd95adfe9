//! Causal attention over a key-value cache.

mod bench;
mod cpu;
#[cfg(feature = "gpu")]
mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
#[cfg(all(test, feature = "gpu"))]
mod gpu_times;
mod gradient;
#[cfg(test)]
mod int8_tests;
mod paged;
mod paged_bench;
#[cfg(test)]
mod paged_tests;
#[cfg(feature = "gpu")]
mod policy;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use gradient::{AttentionGradient, attention_backward};
pub use paged::attention_paged;

use super::Check;
use super::cache_rows::CacheType;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

const CHECK: Check = Check("attention");

/// Options of [`attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// Multiplies the scores; usually `head_dim^-0.5`.
    pub scale: f32,
    /// A query sees this many keys at most up to its own, which is among them.
    pub sliding_window: Option<usize>,
    /// A query sees this many keys after its own at most: 0 in causal attention. The keys end where
    /// k does, which must have no more than were written.
    pub look_ahead: usize,
    /// Bends scores towards this bound: a scaled score s becomes `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// True if a CPU computes in f32 even where it could round the operands of scores and sums to
    /// bf16. A GPU computes as its operands' types say.
    pub exact: bool,
}

/// `y[t, h] = sum_j softmax_j(scale * q[t, h] . k[g, j]) v[g, j]` over the keys that query t sees:
/// `j <= positions[t] + look_ahead`, and `j > positions[t] - sliding_window` where there is a
/// window. Query head h reads key head `g = h / (Hq / Hkv)`. With a `softcap` c, scores are
/// `c tanh(scale * q . k / c)`. With `sinks`, `exp(sinks[h])` is one more term of the softmax's
/// denominator: a score that belongs to a value of zero.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q | `[T, Hq, D]` | f32, f16, bf16 |
/// | k | `[Hkv, capacity, D]`, Hq a multiple of Hkv | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | v | `[Hkv, capacity, Dv]` | k's |
/// | positions | `[T]`, in any order | u32 |
/// | sinks | `[Hq]`, or none | f32 |
/// | y | `[T, Hq, Dv]` | q's |
///
/// The keys and values of all positions that a query sees must have been written
/// ([`kv_append`](super::kv_append())); others are not read. Scores, softmax and sums are f32, each
/// score less the row's greatest (of those met so far), so that none overflows; the result is
/// rounded once to q's dtype. On a GPU a token whose position is beyond the capacity sees nothing,
/// and its rows are NaN.
///
/// Keys and values of 8 bits are `code / 128 * scale` in f32. For tensor cores and cooperative
/// matrices they are rounded to q's type; prompts expand the whole cache for them first, into a
/// workspace of `2 Hkv capacity (D + Dv)` bytes.
///
/// Tensor cores and cooperative matrices compute what is f16 in q and the caches, or bf16: the
/// softmax's weights are then rounded to that type too, and a value that is not finite may make the
/// whole rows that see it NaN. On a CPU with tiles of bf16 (AMX) scaled queries, keys, weights and
/// values are rounded to bf16 where caches are f16 or bf16, a key head has 16 rows of queries or
/// more, and `exact` is not set.
///
/// Source: transformers 5.24 `eager_attention_forward` (gpt-oss' has sinks, Gemma 2's a soft cap),
/// `sliding_window_overlay` and `sliding_window_bidirectional_overlay`; mlx 0.32
/// `fast.scaled_dot_product_attention`.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and
/// [`KernelError::Value`] for other dtypes, [`KernelError::Id`] for a position beyond the capacity,
/// [`KernelError::Value`] for a window of 0, a scale that is not finite, and a cap that is not a
/// finite number above 0.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    positions: &Tensor,
    sinks: Option<&Tensor>,
    params: &AttentionParams,
) -> Result<Tensor, KernelError> {
    check_operands(CHECK, [q, k, v], positions, params)?;
    check_sinks(CHECK, sinks, q)?;
    match q.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::attention(gpu, [q, k, v, positions], sinks, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let (dtype, q) = (q.dtype(), CHECK.widened("q", q)?);
            let sinks = sinks.map(Tensor::as_slice).transpose()?;
            cpu::attention(cpu, [&q, k, v], positions.as_slice()?, sinks, params)?.cast(dtype)
        }
    }
}

/// Checks that the op takes these operands.
fn check_operands(
    check: Check,
    [q, k, v]: [&Tensor; 3],
    positions: &Tensor,
    params: &AttentionParams,
) -> Result<(), KernelError> {
    let [tokens, query_heads, width] = check.dims("q", q, "[T, Hq, D]")?;
    if width == 0 {
        return Err(check.shape_error("q", q, "heads of at least 1 are wanted".into()));
    }
    let [heads, capacity, _] = check.dims("k", k, "[Hkv, capacity, D]")?;
    let cache = CacheType::of(check, "k", k)?;
    check.shape("k", k, &[heads, capacity, cache.row(width)], || format!("q {:?}", q.shape()))?;
    if heads == 0 || query_heads % heads != 0 {
        return Err(check.shape_error("k", k, format!("its heads must divide the {query_heads} of q")));
    }
    let [.., value_width] = check.dims::<3>("v", v, "[Hkv, capacity, Dv]")?;
    check.shape("v", v, &[heads, capacity, value_width], || format!("k {:?}", k.shape()))?;
    check.dtype("v", v, k.dtype())?;
    CacheType::of(check, "v", v)?;
    check.shape("positions", positions, &[tokens], || format!("q {:?}", q.shape()))?;
    check.ids("positions", positions, capacity)?;
    check_params(check, params)?;
    check.float("q", q)?;
    for (operand, x) in [("k", k), ("v", v), ("positions", positions)] {
        check.same_device(operand, x.device(), q.device())?;
    }
    Ok(())
}

fn check_params(check: Check, params: &AttentionParams) -> Result<(), KernelError> {
    if params.sliding_window == Some(0) {
        return Err(check.value("sliding_window", 0, "a query sees itself at least"));
    }
    if !params.scale.is_finite() {
        return Err(check.value("scale", params.scale, "a finite number is wanted"));
    }
    if let Some(cap) = params.softcap.filter(|cap| !cap.is_finite() || *cap <= 0.0) {
        return Err(check.value("softcap", cap, "a finite number above 0 is wanted"));
    }
    Ok(())
}

/// Checks that each query head has a sink, if there are any.
fn check_sinks(check: Check, sinks: Option<&Tensor>, q: &Tensor) -> Result<(), KernelError> {
    let Some(sinks) = sinks else { return Ok(()) };
    check.shape("sinks", sinks, &[q.dim(1)], || format!("q {:?}", q.shape()))?;
    check.dtype("sinks", sinks, DType::F32)?;
    check.same_device("sinks", sinks.device(), q.device())
}

impl AttentionParams {
    /// Causal attention to all earlier keys, whose scores are multiplied by `scale`.
    pub fn causal(scale: f32) -> Self {
        Self { scale, sliding_window: None, look_ahead: 0, softcap: None, exact: false }
    }

    /// The keys that a query at `position` sees of `capacity` that there are.
    fn visible(&self, position: u32, capacity: usize) -> std::ops::Range<usize> {
        let end = position as usize + 1;
        let begin = self.sliding_window.map_or(0, |window| end.saturating_sub(window));
        begin..end.saturating_add(self.look_ahead).min(capacity)
    }
}
