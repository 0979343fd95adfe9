//! The tokens that go through a model at a time while it learns.

use lowbit_kernels::Device;
use lowbit_models::Model;
use lowbit_models::tape::Kept;

/// Tokens that are in one pass on the CPU: what layers keep for their gradients grows with them.
const PASS: usize = 2048;
/// On a GPU more tokens take fewer launches, and products of more rows. Layers keep about so many
/// values of the hidden size per token,
const KEPT_VALUES: usize = 48;
/// for which there is half of the memory that the models and what works on the logits leave. Where
/// the device does not tell how much it has, it is taken for this. Memory that others use does not
/// count: sums depend on how texts are put together, and a run must be repeatable.
const GPU_MEMORY: usize = 8 << 30;
const LOGITS: usize = 12 << 30;
/// More tokens than this do not make products faster.
const GPU_PASS: usize = 1 << 15;
/// With fewer, blocks are computed twice instead: a pass decodes all weights, and sums up gradients
/// of all weights, whatever its tokens. On an H200 a step of Qwen3.5-9B's shapes took 2.4 times as
/// long in passes of 512 tokens as in passes of 4096.
const FEW: usize = 1 << 12;

/// The number of windows that have about this many tokens together, if the longest has `longest`.
pub fn windows_per_pass(tokens: usize, longest: usize) -> usize {
    (tokens / longest.max(1)).max(1)
}

/// The tokens that go through a model at a time.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Tokens.
    pub tokens: usize,
    /// The part of a pass that is kept for gradients.
    pub kept: Kept,
}

impl Pass {
    /// Of so many of the student's layers, where it and these others are on one device.
    pub fn new(others: &[&Model], student: &Model, layers: usize) -> Self {
        let Device::Gpu(_) = student.device() else { return Self { tokens: PASS, kept: Kept::Ops } };
        let weights = others.iter().chain([&student]).map(|model| model.inventory().weights);
        let used: usize = weights.flatten().map(|weight| weight.value.size_bytes()).sum();
        let left = student.device().gpu_memory().unwrap_or(GPU_MEMORY).saturating_sub(used);
        let free = left.saturating_sub(LOGITS).max(left / 4) / 2;
        let (hidden, size) = (student.config().hidden_size, student.activations().size());
        // The stream, which is f32, and what the layer before adds to it.
        let (layer, between) = (KEPT_VALUES * size * hidden, (size_of::<f32>() + size) * hidden);
        let tokens = |bytes: usize| (free / bytes.max(1)).min(GPU_PASS);
        match tokens(layer * layers) {
            few if few < FEW => Self { tokens: tokens(layer + between * layers), kept: Kept::Blocks },
            tokens => Self { tokens, kept: Kept::Ops },
        }
    }
}
