use super::{SampleParams, sample};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};

/// What a decode step reads and leaves for the next one. It lives on the device, so that a step can be captured once and
/// replayed: nothing that changes from step to step comes from the host.
#[derive(Debug)]
pub struct DecodeState {
    /// u32 `[1]`: the token drawn last.
    token: Tensor,
    /// u32 `[1]`: where it stands in the text.
    position: Tensor,
    /// u32 `[1]`: tokens drawn so far.
    step: Tensor,
    /// u32 `[window]`, or `[1]` for no window: the last tokens, in a ring. Places not used yet hold [`NONE`].
    history: Tensor,
    /// The places of `history` that were used before the first step.
    used: usize,
    window: usize,
}

/// No token has this id: an empty place of the history, and what is drawn from logits without a right answer.
pub(super) const NONE: u32 = u32::MAX;

impl DecodeState {
    /// After `tokens`, the last `window` of which count for the repetition penalty.
    ///
    /// # Errors
    /// [`KernelError::Value`] for no tokens; [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn new(tokens: &[u32], window: usize, device: &Device) -> Result<Self, KernelError> {
        let Some((&last, before)) = tokens.split_last() else {
            return Err(Check("decode state").value("tokens", "empty", "there is a token to go on from"));
        };
        let used = tokens.len().min(window);
        let mut history = tokens[tokens.len() - used..].to_vec();
        history.resize(window.max(1), NONE);
        let one = |value: u32| Tensor::new(&[value], &[1], device);
        Ok(Self {
            token: one(last)?,
            position: one(before.len() as u32)?,
            step: one(0)?,
            history: Tensor::new(&history, &[history.len()], device)?,
            used,
            window,
        })
    }

    /// u32 `[1]`: the token drawn last, on the device.
    pub fn token(&self) -> &Tensor {
        &self.token
    }

    /// u32 `[1]`: where that token stands in the text, on the device.
    pub fn position(&self) -> &Tensor {
        &self.position
    }

    /// Waits for the token drawn last.
    ///
    /// # Errors
    /// [`KernelError::Value`] when the logits were NaN or infinite, or -inf altogether; [`KernelError::Gpu`].
    pub fn drawn(&self, host: &Device) -> Result<u32, KernelError> {
        match self.token.to_device(host)?.as_slice::<u32>()?[0] {
            NONE => Err(Check("sample").value(
                "logits",
                "NaN, infinite, or -inf altogether",
                "every logit is to be finite, or -inf beside finite ones",
            )),
            token => Ok(token),
        }
    }

    #[cfg(feature = "gpu")]
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.token, &self.position, &self.step, &self.history]
    }

    /// The length of the ring, or 0, and the place in it for the token of step 0.
    #[cfg(feature = "gpu")]
    pub(super) fn ring(&self) -> (usize, usize) {
        (self.window, self.used)
    }

    /// The tokens that the repetition penalty looks at.
    fn penalised(&self) -> Result<Vec<u32>, KernelError> {
        let history = self.history.as_slice::<u32>()?;
        Ok(history.iter().copied().filter(|&id| id != NONE).collect())
    }

    /// Takes up a token as the GPU's kernel does.
    fn push(&mut self, token: u32) -> Result<(), KernelError> {
        let step = self.step.as_slice::<u32>()?[0];
        if self.window > 0 {
            let place = (self.used + step as usize) % self.window;
            self.history.as_mut_slice::<u32>()?[place] = token;
        }
        self.step.as_mut_slice::<u32>()?[0] = step + 1;
        self.position.as_mut_slice::<u32>()?[0] += 1;
        self.token.as_mut_slice::<u32>()?[0] = token;
        Ok(())
    }
}

/// Draws a token as [`sample()`] does, with `state`'s history and step, and moves `state` on to it: all on the device.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[V]` (or `[1, V]`, ..) | f32, f16, bf16 |
///
/// A GPU draws what the CPU draws, but for the last place of an exponential in devices without fused multiplication: a
/// draw that close to the border between two tokens may be the other one. Logits without a right answer show in
/// [`DecodeState::drawn`] there.
///
/// # Errors
/// As [`sample()`]; [`KernelError::Value`] for more than 2^24 logits on a GPU; [`KernelError::Device`] when `state` is on another device.
pub fn sample_next(
    logits: &Tensor,
    state: &mut DecodeState,
    params: &SampleParams,
) -> Result<(), KernelError> {
    let check = Check("sample");
    params.check(check)?;
    check.float("logits", logits)?;
    super::one_row(check, logits)?;
    check.same_device("state", state.token.device(), logits.device())?;
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => super::gpu::sample_next(check, gpu, logits, state, params),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let step = u64::from(state.step.as_slice::<u32>()?[0]);
            let token = sample(logits, &state.penalised()?, params, step)?;
            state.push(token)
        }
    }
}
