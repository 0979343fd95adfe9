use super::{DecodeBatch, DrawnRows, SampleParams, sample};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};

/// The state that decode steps of one sequence read and leave for the next one: a [`DecodeBatch`]
/// of one row.
#[derive(Debug)]
pub struct DecodeState(DecodeBatch);

impl DecodeState {
    /// After `tokens`, the last `window` of which count for the penalties.
    ///
    /// # Errors
    /// [`KernelError::Value`] for no tokens or a window of more than 2^24; [`KernelError::Gpu`]
    /// when a GPU has no such memory left.
    pub fn new(tokens: &[u32], window: usize, device: &Device) -> Result<Self, KernelError> {
        let mut state = Self(DecodeBatch::new(1, window, device)?);
        state.restart(tokens)?;
        Ok(state)
    }

    /// Starts anew after `tokens`, with the same window, in the memory that a captured step reads.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn restart(&mut self, tokens: &[u32]) -> Result<(), KernelError> {
        let params = self.0.params(0).copied().unwrap_or_default();
        self.0.set_row(0, tokens, 0, &params, self.0.window())
    }

    /// The last tokens that count for the penalties.
    pub fn window(&self) -> usize {
        self.0.window()
    }

    /// u32 `[1]`: the token drawn last, on the device.
    pub fn token(&self) -> &Tensor {
        self.0.tokens()
    }

    /// u32 `[1]`: where that token stands in the text, on the device.
    pub fn position(&self) -> &Tensor {
        self.0.positions()
    }

    /// Asks for the token drawn last. Steps recorded after that change nothing about it.
    ///
    /// # Errors
    /// [`KernelError::Gpu`].
    pub fn drawn(&self) -> Result<Drawn, KernelError> {
        Ok(Drawn(self.0.drawn(0..1)?))
    }

    /// All that a step reads and writes here, as [`DecodeBatch::tensors`].
    pub fn tensors(&self) -> [&Tensor; 5] {
        self.0.tensors()
    }
}

/// A drawn token, which may still be on its way to the host.
#[derive(Debug)]
pub struct Drawn(DrawnRows);

impl Drawn {
    /// Waits for the token.
    ///
    /// # Errors
    /// [`KernelError::Value`] when the logits were NaN or infinite, or -inf altogether;
    /// [`KernelError::Gpu`].
    pub fn wait(self) -> Result<u32, KernelError> {
        self.0.wait()?.pop().expect("a row was asked for")
    }
}

/// Draws a token as [`sample()`] does, with `state`'s history and step, and moves `state` on to it:
/// all on the device.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[V]` (or `[1, V]`, ..) | f32, f16, bf16 |
///
/// A GPU draws what the CPU draws, but for the last place of an exponential in devices without
/// fused multiplication: a draw that close to the border between two tokens may be the other one.
/// Logits without a right answer show in [`Drawn::wait`] there.
///
/// A captured pass draws with the parameters that `state` was last given, here or in a pass
/// captured later: they are a tensor of `state`.
///
/// # Errors
/// As [`sample()`]; [`KernelError::Value`] for more than 2^24 logits on a GPU;
/// [`KernelError::Device`] when `state` is on another device.
pub fn sample_next(
    logits: &Tensor,
    state: &mut DecodeState,
    params: &SampleParams,
) -> Result<(), KernelError> {
    let check = Check("sample");
    params.check(check)?;
    check.float("logits", logits)?;
    super::one_row(check, logits)?;
    let batch = &mut state.0;
    check.same_device("state", batch.tokens().device(), logits.device())?;
    batch.set_params(0, params)?;
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let mut kind = super::SampleKind::of(params);
            kind.top_k &= params.top_k < logits.len();
            super::gpu::sample(check, gpu, logits, batch, kind)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let (history, step) = batch.draw_of(0)?;
            let token = sample(logits, &history, params, step)?;
            batch.push(0, token)
        }
    }
}
