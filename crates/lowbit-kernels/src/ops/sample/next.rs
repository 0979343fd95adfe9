use super::{SampleParams, sample};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};

/// The state that a decode step reads and leaves for the next one. It lives on the device, so that
/// a step can be captured once and replayed: nothing that changes from step to step comes from the
/// host.
#[derive(Debug)]
pub struct DecodeState {
    /// u32 `[1]`: the token drawn last.
    token: Tensor,
    /// u32 `[1]`: where it stands in the text.
    position: Tensor,
    /// u32 `[1]`: tokens drawn so far.
    step: Tensor,
    /// u32 `[window]`, or `[1]` for no window: the last tokens, that of position `p` at
    /// `p % window`. Places not used yet hold [`NONE`].
    history: Tensor,
    window: usize,
}

/// No token has this id: an empty place of the history, and what is drawn from logits without a
/// right answer.
pub(super) const NONE: u32 = u32::MAX;

/// The longest window that a [`DecodeState`] keeps.
const LONGEST: usize = 1 << 24;

impl DecodeState {
    /// After `tokens`, the last `window` of which count for the penalties.
    ///
    /// # Errors
    /// [`KernelError::Value`] for no tokens or a window of more than 2^24; [`KernelError::Gpu`]
    /// when a GPU has no such memory left.
    pub fn new(tokens: &[u32], window: usize, device: &Device) -> Result<Self, KernelError> {
        let tensor = |values: Vec<u32>| Tensor::new(&values, &[values.len()], device);
        let [token, position, step, history] = values(tokens, window)?.map(tensor);
        Ok(Self { token: token?, position: position?, step: step?, history: history?, window })
    }

    /// Starts anew after `tokens`, with the same window, in the memory that a captured step reads.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn restart(&mut self, tokens: &[u32]) -> Result<(), KernelError> {
        let values = values(tokens, self.window)?;
        let tensors = [&mut self.token, &mut self.position, &mut self.step, &mut self.history];
        tensors.into_iter().zip(values).try_for_each(|(tensor, values)| tensor.write(&values))
    }

    /// The last tokens that count for the penalties.
    pub fn window(&self) -> usize {
        self.window
    }

    /// u32 `[1]`: the token drawn last, on the device.
    pub fn token(&self) -> &Tensor {
        &self.token
    }

    /// u32 `[1]`: where that token stands in the text, on the device.
    pub fn position(&self) -> &Tensor {
        &self.position
    }

    /// Asks for the token drawn last. Steps recorded after that change nothing about it.
    ///
    /// # Errors
    /// [`KernelError::Gpu`].
    pub fn drawn(&self) -> Result<Drawn, KernelError> {
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = self.token.device() {
            let (memory, start) = self.token.memory()?;
            return Ok(Drawn(Word::Coming(gpu.read_later(memory, start)?)));
        }
        Ok(Drawn(Word::Here(self.token.as_slice::<u32>()?[0])))
    }

    /// All that a step reads and writes here: the token, its position, the step's number and the
    /// tokens that count for the penalties.
    pub fn tensors(&self) -> [&Tensor; 4] {
        [&self.token, &self.position, &self.step, &self.history]
    }

    /// The tokens that the penalties look at.
    fn penalised(&self) -> Result<Vec<u32>, KernelError> {
        let history = self.history.as_slice::<u32>()?;
        Ok(history.iter().copied().filter(|&id| id != NONE).collect())
    }

    /// Takes up a token as the GPU's kernel does.
    fn push(&mut self, token: u32) -> Result<(), KernelError> {
        let position = self.position.as_slice::<u32>()?[0] + 1;
        if self.window > 0 {
            self.history.as_mut_slice::<u32>()?[position as usize % self.window] = token;
        }
        self.step.as_mut_slice::<u32>()?[0] += 1;
        self.position.as_mut_slice::<u32>()?[0] = position;
        self.token.as_mut_slice::<u32>()?[0] = token;
        Ok(())
    }
}

/// The contents of the tensors of a [`DecodeState`] after `tokens`.
fn values(tokens: &[u32], window: usize) -> Result<[Vec<u32>; 4], KernelError> {
    if window > LONGEST {
        return Err(Check("decode state").value(
            "window",
            window,
            format!("{LONGEST} tokens at most are wanted"),
        ));
    }
    let Some((&last, before)) = tokens.split_last() else {
        return Err(Check("decode state").value("tokens", "empty", "there is a token to go on from"));
    };
    let mut history = vec![NONE; window.max(1)];
    for (position, &token) in tokens.iter().enumerate().skip(tokens.len().saturating_sub(window)) {
        history[position % window] = token;
    }
    Ok([vec![last], vec![before.len() as u32], vec![0], history])
}

/// A drawn token, which may still be on its way to the host.
#[derive(Debug)]
pub struct Drawn(Word);

#[derive(Debug)]
enum Word {
    Here(u32),
    #[cfg(feature = "gpu")]
    Coming(Box<dyn crate::gpu::Pending>),
}

impl Word {
    fn wait(self) -> Result<u32, KernelError> {
        match self {
            Self::Here(word) => Ok(word),
            #[cfg(feature = "gpu")]
            Self::Coming(word) => word.wait(),
        }
    }
}

impl Drawn {
    /// Waits for the token.
    ///
    /// # Errors
    /// [`KernelError::Value`] when the logits were NaN or infinite, or -inf altogether;
    /// [`KernelError::Gpu`].
    pub fn wait(self) -> Result<u32, KernelError> {
        match self.0.wait()? {
            NONE => Err(Check("sample").value(
                "logits",
                "NaN, infinite, or -inf altogether",
                "every logit is to be finite, or -inf beside finite ones",
            )),
            token => Ok(token),
        }
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
