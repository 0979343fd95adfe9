use super::{SampleKind, SampleParams, cpu};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;
use std::ops::Range;

/// No token has this id: an empty place of the history, and what is drawn from logits without a
/// right answer.
pub(super) const NONE: u32 = u32::MAX;

/// The longest window that a [`DecodeBatch`] keeps.
const LONGEST: usize = 1 << 24;

const CHECK: Check = Check("decode state");

/// The words of a row of the parameters.
pub(super) mod word {
    /// 1 / temperature as an f32, or 0 for temperature 0.
    pub const RATE: usize = 0;
    /// An f32, 0 or less: min-p keeps logits at least this above the greatest one.
    pub const FLOOR: usize = 1;
    /// [`ALL`] keeps all.
    pub const TOP_K: usize = 2;
    /// top-p in units of 2^-32; [`ALL`] keeps all.
    pub const SHARE: usize = 3;
    /// The repetition penalty, an f32.
    pub const REPETITION: usize = 4;
    /// The presence penalty, an f32.
    pub const PRESENCE: usize = 5;
    /// The frequency penalty, an f32.
    pub const FREQUENCY: usize = 6;
    /// The key of the random numbers, its low and its high word.
    pub const SEED: usize = 7;
    /// The last tokens that count for the penalties.
    pub const WINDOW: usize = 9;
    /// 0 in a row that nobody uses.
    pub const USED: usize = 10;
    /// Words of a row.
    pub const COUNT: usize = 11;
    /// A filter that is off.
    pub const ALL: u32 = u32::MAX;
}

/// The state that decode steps of a batch read and leave for the next one. It lives on the device,
/// so that a step can be captured once and replayed: nothing that changes from step to step comes
/// from the host. Rows are those of the batch's logits; a row belongs to one sequence, or to
/// nobody.
///
/// Rows are written in place, also where a clone of a tensor sees it: captured steps go on.
#[derive(Debug)]
pub struct DecodeBatch {
    /// u32 `[B]`: the token drawn last.
    tokens: Tensor,
    /// u32 `[B]`: where it stands in the text.
    positions: Tensor,
    /// u32 `[B]`: tokens drawn so far.
    steps: Tensor,
    /// u32 `[B, window]`, or `[B, 1]` for no window: the last tokens, that of position `p` at `p`
    /// modulo the row's window. Places not used yet hold [`NONE`].
    histories: Tensor,
    /// u32 `[B, word::COUNT]`.
    parameters: Tensor,
    /// The longest window of a row.
    window: usize,
    /// The rows, as far as the host knows them; `None` for those that nobody uses.
    rows: Vec<Option<Row>>,
}

/// A row, as far as the host knows it.
#[derive(Clone, Copy, Debug)]
struct Row {
    params: SampleParams,
    window: usize,
}

/// A text that has a row of a [`DecodeBatch`], see [`DecodeBatch::set_row`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RowText<'a> {
    /// Its last tokens, at least `window` of them or all.
    pub tokens: &'a [u32],
    /// The number of all its tokens.
    pub length: usize,
    pub step: u32,
    pub params: &'a SampleParams,
    pub window: usize,
}

impl DecodeBatch {
    /// `rows` rows that nobody uses, whose windows have up to `window` tokens.
    ///
    /// # Errors
    /// [`KernelError::Value`] for no rows or a window of more than 2^24; [`KernelError::TooLarge`]
    /// and [`KernelError::Gpu`] when there is no such memory.
    pub fn new(rows: usize, window: usize, device: &Device) -> Result<Self, KernelError> {
        if rows == 0 {
            return Err(CHECK.value("rows", rows, "a batch has one at least"));
        }
        check_window(window, LONGEST)?;
        let words = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::U32, device);
        Ok(Self {
            tokens: words(&[rows])?,
            positions: words(&[rows])?,
            steps: words(&[rows])?,
            histories: words(&[rows, window.max(1)])?,
            parameters: words(&[rows, word::COUNT])?,
            window,
            rows: vec![None; rows],
        })
    }

    /// Gives row `row` to a sequence after `tokens`, the last `window` of which count for the
    /// penalties, and of which `step` were drawn: the next one is drawn as step `step`.
    ///
    /// # Errors
    /// [`KernelError::Value`] for a row that is not there, no tokens, a longer window than that of
    /// the batch, or parameters out of range; [`KernelError::Gpu`].
    pub fn set_row(
        &mut self,
        row: usize,
        tokens: &[u32],
        step: u32,
        params: &SampleParams,
        window: usize,
    ) -> Result<(), KernelError> {
        self.set_rows(row, &[RowText { tokens, length: tokens.len(), step, params, window }])
    }

    /// Gives the rows from `first` on to these texts: each tensor is written once.
    ///
    /// # Errors
    /// As [`Self::set_row`], and [`KernelError::Value`] for too few of a text's tokens: then
    /// nothing is written.
    pub fn set_rows(&mut self, first: usize, texts: &[RowText<'_>]) -> Result<(), KernelError> {
        let Some(last) = texts.len().checked_sub(1) else { return Ok(()) };
        self.check_row(first + last)?;
        let stride = self.window.max(1);
        let (mut tokens, mut positions, mut steps) = (vec![], vec![], vec![]);
        let (mut parameters, mut rows) = (vec![], vec![]);
        let mut histories = vec![NONE; texts.len() * stride];
        for (text, history) in texts.iter().zip(histories.chunks_exact_mut(stride)) {
            let RowText { params, window, .. } = *text;
            params.check(Check("sample"))?;
            check_window(window, self.window)?;
            tokens.push(text.remember(history)?);
            positions.push((text.length - 1) as u32);
            steps.push(text.step);
            let row = Row { params: *params, window };
            parameters.extend(row.words());
            rows.push(Some(row));
        }
        self.tokens.write_at(first, &tokens)?;
        self.positions.write_at(first, &positions)?;
        self.steps.write_at(first, &steps)?;
        self.histories.write_at(first * stride, &histories)?;
        self.parameters.write_at(first * word::COUNT, &parameters)?;
        self.rows[first..][..rows.len()].copy_from_slice(&rows);
        Ok(())
    }

    /// Changes how row `row`, which a sequence has, is drawn from the next draw on.
    ///
    /// # Errors
    /// [`KernelError::Value`] for a row that nobody uses or parameters out of range;
    /// [`KernelError::Gpu`].
    pub fn set_params(&mut self, row: usize, params: &SampleParams) -> Result<(), KernelError> {
        self.check_row(row)?;
        params.check(Check("sample"))?;
        match self.rows[row] {
            None => Err(CHECK.value("row", row, "a row that a sequence uses is wanted")),
            Some(old) if old.params == *params => Ok(()),
            Some(old) => self.set_parameters(row, Row { params: *params, ..old }),
        }
    }

    fn set_parameters(&mut self, row: usize, new: Row) -> Result<(), KernelError> {
        self.parameters.write_at(row * word::COUNT, &new.words())?;
        self.rows[row] = Some(new);
        Ok(())
    }

    /// Makes row `row` one that nobody uses: it stays at token 0 and position 0, and nothing is
    /// drawn for it.
    ///
    /// # Errors
    /// [`KernelError::Value`] for a row that is not there; [`KernelError::Gpu`].
    pub fn clear_row(&mut self, row: usize) -> Result<(), KernelError> {
        self.check_row(row)?;
        if self.rows[row].is_none() {
            return Ok(());
        }
        self.parameters.write_at(row * word::COUNT, &[0u32; word::COUNT])?;
        for tensor in [&mut self.tokens, &mut self.positions, &mut self.steps] {
            tensor.write_at(row, &[0u32])?;
        }
        self.rows[row] = None;
        Ok(())
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The longest window of a row.
    pub fn window(&self) -> usize {
        self.window
    }

    /// The kind that the used ones of these rows need together.
    pub fn kind(&self, rows: Range<usize>) -> SampleKind {
        let used = self.rows.get(rows).into_iter().flatten().flatten();
        used.fold(SampleKind::default(), |kind, row| kind.union(SampleKind::of(&row.params)))
    }

    /// u32 `[B]`: the tokens drawn last, on the device; 0 in rows that nobody uses.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// u32 `[B]`: where those tokens stand in their texts, on the device; 0 in rows that nobody
    /// uses.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// All that draws read and write here: the tokens, their positions, the steps' numbers, the
    /// tokens that count for the penalties, and the parameters.
    pub fn tensors(&self) -> [&Tensor; 5] {
        [&self.tokens, &self.positions, &self.steps, &self.histories, &self.parameters]
    }

    /// Asks for the tokens drawn last in these rows. Steps recorded after that change nothing about
    /// them.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for rows that are not there; [`KernelError::Gpu`].
    pub fn drawn(&self, rows: Range<usize>) -> Result<DrawnRows, KernelError> {
        let tokens = self.tokens.rows(rows.start, rows.end)?;
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = tokens.device() {
            let (memory, start) = tokens.memory()?;
            return Ok(DrawnRows(Words::Coming(gpu.read_later(memory, start, tokens.len())?)));
        }
        Ok(DrawnRows(Words::Here(tokens.as_slice::<u32>()?.to_vec())))
    }

    pub(super) fn check_row(&self, row: usize) -> Result<(), KernelError> {
        match row < self.rows.len() {
            true => Ok(()),
            false => Err(CHECK.value("row", row, format!("the batch has {}", self.rows.len()))),
        }
    }

    /// The parameters of a row that a sequence uses.
    pub(super) fn params(&self, row: usize) -> Option<&SampleParams> {
        self.rows[row].as_ref().map(|row| &row.params)
    }

    /// On the CPU: the tokens of a row that the penalties look at, and the number of its next draw.
    pub(super) fn draw_of(&self, row: usize) -> Result<(Vec<u32>, u64), KernelError> {
        let window = self.rows[row].map_or(0, |row| row.window);
        let history = &self.histories.as_slice::<u32>()?[row * self.window.max(1)..][..window];
        let history = history.iter().copied().filter(|&id| id != NONE).collect();
        Ok((history, u64::from(self.steps.as_slice::<u32>()?[row])))
    }

    /// On the CPU: moves a row on to a token as a GPU's kernel does.
    pub(super) fn push(&mut self, row: usize, token: u32) -> Result<(), KernelError> {
        let position = self.positions.as_slice::<u32>()?[row].wrapping_add(1);
        let window = self.rows[row].map_or(0, |row| row.window);
        if window > 0 {
            let place = row * self.window + position as usize % window;
            self.histories.as_mut_slice::<u32>()?[place] = token;
        }
        let step = &mut self.steps.as_mut_slice::<u32>()?[row];
        *step = step.wrapping_add(1);
        self.positions.as_mut_slice::<u32>()?[row] = position;
        self.tokens.as_mut_slice::<u32>()?[row] = token;
        Ok(())
    }
}

impl RowText<'_> {
    /// Writes the tokens that count for penalties to their places. Returns the last token.
    fn remember(&self, history: &mut [u32]) -> Result<u32, KernelError> {
        let Self { tokens, length, window, .. } = *self;
        let Some(&last) = tokens.last() else {
            return Err(CHECK.value("tokens", "empty", "there is a token to go on from"));
        };
        if tokens.len() > length || tokens.len() < window.min(length) {
            let want = format!("{} to {length} last tokens are wanted", window.min(length).max(1));
            return Err(CHECK.value("tokens", format!("{} tokens", tokens.len()), want));
        }
        let kept = window.min(tokens.len());
        for (position, &token) in (length - kept..).zip(&tokens[tokens.len() - kept..]) {
            history[position % window] = token;
        }
        Ok(last)
    }
}

impl Row {
    /// The row of the parameters' tensor.
    fn words(&self) -> [u32; word::COUNT] {
        let Self { params, window } = self;
        let mut words = [0; word::COUNT];
        // Filters of a greedy row are off, so that no threshold is searched for it.
        let draws = params.temperature > 0.0;
        words[word::RATE] = if draws { cpu::rate(params.temperature).to_bits() } else { 0 };
        words[word::FLOOR] = params.min_p.ln().to_bits();
        words[word::TOP_K] = match params.top_k {
            1.. if draws => params.top_k.min(word::ALL as usize) as u32,
            _ => word::ALL,
        };
        words[word::SHARE] = if draws && params.top_p < 1.0 { cpu::share(params.top_p) } else { word::ALL };
        words[word::REPETITION] = params.repetition_penalty.to_bits();
        words[word::PRESENCE] = params.presence_penalty.to_bits();
        words[word::FREQUENCY] = params.frequency_penalty.to_bits();
        words[word::SEED] = params.seed as u32;
        words[word::SEED + 1] = (params.seed >> 32) as u32;
        words[word::WINDOW] = *window as u32;
        words[word::USED] = 1;
        words
    }
}

fn check_window(window: usize, longest: usize) -> Result<(), KernelError> {
    match window <= longest {
        true => Ok(()),
        false => Err(CHECK.value("window", window, format!("{longest} tokens at most are wanted"))),
    }
}

/// Words that may still be on their way to the host.
#[derive(Debug)]
enum Words {
    Here(Vec<u32>),
    #[cfg(feature = "gpu")]
    Coming(Box<dyn crate::gpu::Pending>),
}

impl Words {
    fn wait(self) -> Result<Vec<u32>, KernelError> {
        match self {
            Self::Here(words) => Ok(words),
            #[cfg(feature = "gpu")]
            Self::Coming(words) => words.wait(),
        }
    }
}

/// The tokens drawn in some rows, which may still be on their way to the host.
#[derive(Debug)]
pub struct DrawnRows(Words);

impl DrawnRows {
    /// Waits for the tokens: of each row its token (0 where nobody uses the row), or a
    /// [`KernelError::Value`] where its logits were NaN or infinite, or -inf altogether.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU fails: then no row has a token.
    pub fn wait(self) -> Result<Vec<Result<u32, KernelError>>, KernelError> {
        Ok(self.0.wait()?.into_iter().map(token).collect())
    }
}

/// A drawn token, or the error of logits without a right answer.
fn token(word: u32) -> Result<u32, KernelError> {
    match word {
        NONE => Err(Check("sample").value(
            "logits",
            "NaN, infinite, or -inf altogether",
            "every logit is to be finite, or -inf beside finite ones",
        )),
        token => Ok(token),
    }
}
