//! Rotary position embedding.

mod bench;
pub(in crate::ops) mod cpu;
mod frequencies;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(all(test, feature = "gpu"))]
mod gpu_tests;
mod gradient;
#[cfg(test)]
mod peer;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use super::Check;
use crate::{Device, KernelError, Tensor};
pub use frequencies::{Llama3, LongRope, Yarn};
pub use gradient::rope_backward;

/// The elements of a head that make a pair, which is rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// `(i, i + rotary_dim / 2)`: transformers, MLX's `traditional=False`, ggml's `NEOX`.
    HalfSplit,
    /// `(2 i, 2 i + 1)`: the paper, MLX's `traditional=True`, ggml's `NORMAL`.
    Interleaved,
}

/// The direction in which heads are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::ops) enum Direction {
    /// By the angle.
    Forth,
    /// By the angle's negative.
    Back,
}

/// The scaling of frequencies for contexts longer than the original training's.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unchanged.
    None,
    /// All divided by `factor`.
    Linear {
        /// The ratio of the new context's length to the original one's.
        factor: f32,
    },
    /// Low frequencies are divided, high ones are kept, with a ramp between.
    Llama3(Llama3),
    /// As Llama 3's, but the ramp is over rotations instead of wavelengths, and cosine and sine are
    /// scaled.
    Yarn(Yarn),
    /// Divided by factors that were searched for, one per frequency.
    LongRope(LongRope),
}

/// The parameters of frequencies, for [`Rope::new`]; names as in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParams {
    /// The base of the frequencies.
    pub theta: f64,
    /// The number of elements of a head, from its first one, that are rotated; even.
    pub rotary_dim: usize,
    /// The elements that make a pair.
    pub layout: RopeLayout,
    /// The scaling of frequencies.
    pub scaling: RopeScaling,
    /// Further divisors, one per frequency: GGUF's `rope_freqs.weight`, `[rotary_dim / 2]`. A pair
    /// whose divisor is infinite is not rotated.
    pub freq_factors: Option<Vec<f32>>,
}

/// The frequencies of a rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    layout: RopeLayout,
    inv_freq: Vec<f32>,
    attention_factor: f32,
    last: cpu::Last,
    #[cfg(feature = "gpu")]
    uploaded: gpu::Uploaded,
}

impl Rope {
    /// `inv_freq[i] = theta^(-2 i / rotary_dim)`, scaled, all in f32 and in transformers' order of
    /// operations.
    ///
    /// Source: transformers 5.23 `modeling_rope_utils` (`_compute_*_parameters`). Equal to it
    /// except for the last place of `theta^x`, which is correctly rounded here.
    ///
    /// # Errors
    /// [`KernelError::Value`] for an odd `rotary_dim`, a wrong number of `freq_factors`, and for
    /// parameters that are not positive, finite and in order; the message names the parameter.
    pub fn new(params: &RopeParams) -> Result<Self, KernelError> {
        let (inv_freq, attention_factor) = frequencies::compute(params)?;
        Ok(Self {
            layout: params.layout,
            inv_freq,
            attention_factor,
            last: Default::default(),
            #[cfg(feature = "gpu")]
            uploaded: Default::default(),
        })
    }

    /// Checks that heads of `width` elements can be rotated, and that each token of `x` `[T, ..]`
    /// has a position.
    pub(super) fn check(
        &self,
        check: Check,
        x: &Tensor,
        positions: &Tensor,
        width: usize,
    ) -> Result<(), KernelError> {
        if width < self.rotary_dim() {
            let want = format!("heads of at least {} are rotated", self.rotary_dim());
            return Err(check.shape_error("x", x, want));
        }
        check.shape("positions", positions, &[x.dim(0)], || format!("x {:?}", x.shape()))?;
        check.dtype("positions", positions, lowbit_formats::DType::U32)?;
        check.same_device("positions", positions.device(), x.device())
    }

    /// The elements that make a pair.
    pub fn layout(&self) -> RopeLayout {
        self.layout
    }

    /// Elements of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.inv_freq.len() * 2
    }

    /// Radians per position, for each pair.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// The factor of the rotated elements (YaRN; else 1).
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }
}

/// Rotates pair `i` of each head by `angle = positions[t] * inv_freq[i]`:
/// `y[a] = x[a] cos - x[b] sin`, `y[b] = x[b] cos + x[a] sin` for the pair `(a, b)`, with cos and
/// sin multiplied by the attention factor. Elements from `rotary_dim` on are copied.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | x | `[T, H, D]`, `D >= rotary_dim` | f32, f16, bf16 |
/// | positions | `[T]` | u32 |
/// | y | `[T, H, D]` | x's |
///
/// As in transformers, the position is rounded to f32 (exact up to 2^24) and the angle is the
/// rounded f32 product, so that far positions give transformers' results (the angle's error grows
/// to 2^-24 of the angle). Cosine and sine are within one unit in the last place, on a GPU within
/// 2^-23. Products and sum are f32, rounded once to x's dtype at the end.
///
/// The first rotation on a GPU uploads the frequencies, so it must not be part of a captured pass;
/// [`Gpu::capture`](crate::gpu::Gpu) runs its work once before it captures.
///
/// Source: transformers 5.23 `LlamaRotaryEmbedding`, `apply_rotary_pos_emb`.
///
/// # Errors
/// [`KernelError::Shape`] for sizes that do not fit, [`KernelError::DType`] and
/// [`KernelError::Value`] for other dtypes.
pub fn rope(x: &Tensor, positions: &Tensor, rope: &Rope) -> Result<Tensor, KernelError> {
    let check = Check("rope");
    let [_, _, width] = check.dims("x", x, "[T, H, D]")?;
    rope.check(check, x, positions, width)?;
    check.float("x", x)?;
    rotate(check, x, positions, (rope, Direction::Forth))
}

/// The op, its operands checked.
fn rotate(
    check: Check,
    x: &Tensor,
    positions: &Tensor,
    (rope, direction): (&Rope, Direction),
) -> Result<Tensor, KernelError> {
    match x.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::launch(check, gpu, x, positions, (rope, direction)),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let wide = check.widened("x", x)?;
            cpu::rope(cpu, (&wide, x.dim(2)), positions.as_slice()?, None, (rope, direction))?.cast(x.dtype())
        }
    }
}
