//! A teacher's targets for each token, on the disk: it computes them once for all steps and runs,
//! and need not be in memory beside its student.
//!
//! Of each token the file has the `top_k` most likely next tokens at the temperature that is
//! learned at, with the logarithms of their probabilities, and that of what is left for all others
//! ([`ops::top_k_targets`](lowbit_kernels::ops::top_k_targets)). Logarithms are stored in f16 and
//! the probabilities made to sum to 1 again when they are read: that changes a mean divergence by
//! 2e-5 to 2e-4 of itself (`tests/learn_targets.rs` compares all tokens with the teacher). Knowing
//! only `top_k` tokens costs more: a sixth of the divergence if 128 tokens of a flat distribution
//! are known.

mod layout;

use super::pass::{Pass, windows_per_pass};
use super::{LearnOptions, Learning};
use crate::QuantizeError;
use layout::{Identity, Layout, WINDOWS_PER_CHUNK};
use lowbit_files::read::open_regular;
use lowbit_files::staging::{Existing, Staged, sync};
use lowbit_files::{Checkpoint, shown_path};
use lowbit_formats::DType;
use lowbit_kernels::ops::TopKTargets;
use lowbit_kernels::{Device, Tensor};
use lowbit_models::{Model, ModelError, top_k_targets};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A file of the teacher's targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets {
    /// The file. While it is made it is called `PATH.lowbit-partial`; after an interruption the
    /// next run goes on with it.
    pub path: PathBuf,
    /// The number of most likely next tokens that it has per token, at most the vocabulary.
    pub top_k: usize,
}

impl Targets {
    /// 128 tokens.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), top_k: 128 }
    }

    /// True if the file exists.
    ///
    /// # Errors
    /// [`QuantizeError::File`] for what is no regular file; links to one are followed.
    fn exist(&self) -> Result<bool, QuantizeError> {
        match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            _ => Ok(open_regular(&self.path).map(|_| true)?),
        }
    }

    /// Checks that the file is a regular one, if there is one.
    ///
    /// # Errors
    /// As [`Self::exist`].
    pub(super) fn check(&self) -> Result<(), QuantizeError> {
        self.exist().map(drop)
    }
}

/// A whole file of targets, whose every checksum was right when it was opened.
pub struct TargetsFile {
    file: File,
    path: PathBuf,
    layout: Layout,
    /// The place of each window in the file: of those to learn from, where they are drawn, and
    /// behind them of those held out.
    places: Vec<Option<usize>>,
    digest: String,
}

impl TargetsFile {
    /// The file that the options name, for this teacher and data. Where it is not there or not
    /// finished, `load` gives the teacher that it is made with; `progress` is then called with the
    /// number of windows that are on the disk, and of all.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a file that is damaged, or of another teacher, data or
    /// temperature, and a teacher that gives NaN; [`QuantizeError::Interrupted`];
    /// [`QuantizeError::Io`]; those of the teacher's passes.
    pub fn open_or_make(
        checkpoint: &Checkpoint,
        learning: Learning<'_>,
        load: impl FnOnce() -> Result<Model, QuantizeError>,
        progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Self, QuantizeError> {
        let Learning { data, options, .. } = learning;
        let Some(targets @ Targets { path, top_k }) = &options.targets else {
            return Err(QuantizeError::Learn("no file of targets is named".into()));
        };
        let drawn = data.drawn(options.batch.saturating_mul(options.steps as usize), options.seed);
        let (train, held_out) = (data.train().len(), data.held_out().len());
        let mut places = vec![None; train + held_out];
        let mut order: Vec<usize> = drawn.into_iter().chain(train..train + held_out).collect();
        order.sort_unstable();
        order.iter().enumerate().for_each(|(place, &window)| places[window] = Some(place));
        let all: Vec<&Vec<u32>> = data.train().iter().chain(data.held_out()).collect();
        let windows: Vec<&Vec<u32>> = order.iter().map(|&window| all[window]).collect();
        let identity = Identity::new(checkpoint, options, *top_k, (&windows, order.len() - held_out < train));
        let io = |error| QuantizeError::Io { path: path.clone(), error };
        if !targets.exist()? {
            Making { path, identity: &identity, windows: &windows, options }.run(load, progress)?;
        }
        let mut file = open_regular(path)?;
        let length = file.metadata().map_err(io)?.len();
        let layout = Layout::read(&mut file, path, &identity, &windows)?
            .ok_or_else(|| refuse(path, "is no file of a teacher's targets"))?;
        if length != layout.end() {
            let problem = format!("is damaged: it has {length} bytes, and should have {}", layout.end());
            return Err(refuse(path, &problem));
        }
        let digest = layout.check(&mut file, path, layout.chunks())?;
        Ok(Self { file, path: path.clone(), layout, places, digest })
    }

    /// That of the file.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// # Errors
    /// [`ModelError::Vocabulary`] where the student's is another one.
    pub fn check_vocabulary(&self, student: &Model) -> Result<(), ModelError> {
        let (model, teacher) = (student.config().vocab_size, self.layout.vocabulary());
        if model == teacher { Ok(()) } else { Err(ModelError::Vocabulary { model, teacher }) }
    }

    /// The teacher's targets for the tokens of these windows, one after the other, in `host`'s
    /// memory. Windows that are held out come behind those to learn from.
    ///
    /// # Errors
    /// [`QuantizeError::Io`]; [`QuantizeError::Learn`] for a window that the file does not have.
    pub fn read(&self, windows: &[usize], host: &Device) -> Result<TopKTargets, QuantizeError> {
        let mut values = Values::default();
        for &window in windows {
            let place = self.places.get(window).copied().flatten();
            let place = place.ok_or_else(|| refuse(&self.path, &format!("does not have window {window}")))?;
            let (start, length) = self.layout.window(place);
            let mut bytes = vec![0; length];
            let mut file = &self.file;
            let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
            read.map_err(|error| QuantizeError::Io { path: self.path.clone(), error })?;
            let decoded = self.layout.decode(&bytes, host, &mut values)?;
            decoded
                .map_err(|problem| refuse(&self.path, &format!("is damaged: window {window}: {problem}")))?;
        }
        let (tokens, k) = (values.ln_rest.len(), self.layout.top_k());
        Ok(TopKTargets {
            ids: Tensor::new(&values.ids, &[tokens, k], host)?,
            ln_p: Tensor::new(&values.ln_p, &[tokens, k], host)?,
            ln_rest: Tensor::new(&values.ln_rest, &[tokens], host)?,
        })
    }
}

/// Those of some tokens.
#[derive(Default)]
struct Values {
    ids: Vec<u32>,
    ln_p: Vec<f32>,
    ln_rest: Vec<f32>,
}

fn refuse(path: &Path, problem: &str) -> QuantizeError {
    QuantizeError::Learn(format!("{} {problem}", shown_path(path)))
}

/// A file that is made.
struct Making<'a> {
    path: &'a Path,
    identity: &'a Identity,
    windows: &'a [&'a Vec<u32>],
    options: &'a LearnOptions,
}

impl Making<'_> {
    /// Writes what is missing, chunk by chunk, each on the disk before the next is begun.
    fn run(
        &self,
        load: impl FnOnce() -> Result<Model, QuantizeError>,
        mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<(), QuantizeError> {
        let mut staged = Staged::continued(self.path, Existing::Refuse)?;
        let partial = staged.path().to_path_buf();
        let io = |error| QuantizeError::Io { path: partial.clone(), error };
        let file = staged.file_handle();
        let begun = Layout::read(file, &partial, self.identity, self.windows)?;
        let teacher = load()?;
        let (layout, done) = match begun {
            Some(layout) => {
                let done = layout.whole_chunks(file.metadata().map_err(io)?.len());
                layout.check(file, &partial, done)?;
                (layout, done)
            }
            None => (Layout::new(self.identity, teacher.config().vocab_size, self.windows)?, 0),
        };
        file.set_len(layout.chunk_end(done)).map_err(io)?;
        if done == 0 {
            file.rewind().map_err(io)?;
            file.write_all(layout.header()).map_err(io)?;
        }
        file.seek(SeekFrom::End(0)).map_err(io)?;
        let (count, mut written) = (self.windows.len(), (done * WINDOWS_PER_CHUNK).min(self.windows.len()));
        for (index, windows) in self.windows.chunks(WINDOWS_PER_CHUNK).enumerate().skip(done) {
            if progress(written, count).is_break() {
                return Err(QuantizeError::Interrupted);
            }
            let content = self.chunk(&teacher, &layout, windows, written)?;
            file.write_all(&content).map_err(io)?;
            file.write_all(&layout.checksum(index, &content)).map_err(io)?;
            sync(file).map_err(io)?;
            written += windows.len();
        }
        let stop = progress(written, count).is_break();
        staged.commit()?;
        if stop { Err(QuantizeError::Interrupted) } else { Ok(()) }
    }

    /// The teacher's targets for some windows, of which the first has the number `first`.
    fn chunk(
        &self,
        teacher: &Model,
        layout: &Layout,
        windows: &[&Vec<u32>],
        first: usize,
    ) -> Result<Vec<u8>, QuantizeError> {
        let longest = windows.iter().map(|window| window.len()).max().unwrap_or(1);
        // Without gradients, one layer's values exist at a time.
        let Pass { tokens, .. } = Pass::new(&[], teacher, 1);
        let mut content = vec![];
        for pass in windows.chunks(windows_per_pass(tokens, longest)) {
            let batch: Vec<&[u32]> = pass.iter().map(|window| window.as_slice()).collect();
            let targets = top_k_targets(teacher, &batch, layout.top_k(), self.options.temperature)?;
            let numbers = targets.ln_p.as_slice::<f32>()?.iter().chain(targets.ln_rest.as_slice()?);
            if { numbers }.any(|x| x.is_nan()) {
                let problem = format!(
                    "the teacher's logits have NaN, in one of the windows {first} to {}",
                    first + windows.len() - 1
                );
                return Err(QuantizeError::Learn(problem));
            }
            let mut start = 0;
            for window in pass {
                let end = start + window.len();
                layout.encode(&targets.rows(start, end)?, &mut content)?;
                start = end;
            }
        }
        Ok(content)
    }
}

impl Layout {
    /// Appends a window as it is stored.
    fn encode(&self, targets: &TopKTargets, to: &mut Vec<u8>) -> Result<(), QuantizeError> {
        let ids = targets.ids.as_slice::<u32>()?;
        match self.id_bytes() {
            2 => ids.iter().for_each(|&id| to.extend((id as u16).to_le_bytes())),
            _ => ids.iter().for_each(|id| to.extend(id.to_le_bytes())),
        }
        to.extend(targets.ln_p.cast(DType::F16)?.bytes());
        targets.ln_rest.as_slice::<f32>()?.iter().for_each(|x| to.extend(x.to_le_bytes()));
        Ok(())
    }

    /// Appends the values of a window, in which probabilities sum to 1; or what is wrong with them.
    fn decode(
        &self,
        bytes: &[u8],
        host: &Device,
        to: &mut Values,
    ) -> Result<Result<(), String>, QuantizeError> {
        let first = to.ids.len();
        let k = self.top_k();
        let tokens = bytes.len() / self.token_bytes();
        let (ids, rest) = bytes.split_at(tokens * k * self.id_bytes());
        let (halves, rest) = rest.split_at(tokens * k * 2);
        match self.id_bytes() {
            2 => to.ids.extend(ids.as_chunks::<2>().0.iter().map(|&id| u32::from(u16::from_le_bytes(id)))),
            _ => to.ids.extend(ids.as_chunks::<4>().0.iter().map(|&id| u32::from_le_bytes(id))),
        }
        let halves = Tensor::mapped(bytes::Bytes::copy_from_slice(halves), &[tokens * k], DType::F16, host)?;
        let (known, before) = (to.ln_p.len(), to.ln_rest.len());
        to.ln_p.extend_from_slice(halves.cast(DType::F32)?.as_slice()?);
        to.ln_rest.extend(rest.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)));
        if let Some(id) = to.ids[first..].iter().find(|&&id| id as usize >= self.vocabulary()) {
            return Ok(Err(format!("token id {id} is in no vocabulary of {}", self.vocabulary())));
        }
        let mut of_tokens = to.ln_p[known..].chunks_exact_mut(k).zip(&mut to.ln_rest[before..]).enumerate();
        Ok(of_tokens.try_for_each(|(token, (ln_p, ln_rest))| {
            normalise(ln_p, ln_rest).map_err(|sum| format!("the probabilities of token {token} sum to {sum}"))
        }))
    }
}

/// The possible sums of a token's probabilities after their logarithms were rounded to f16:
/// logarithms above -32 are off by 0.008 at most, and those below hardly count.
const SUM: std::ops::RangeInclusive<f64> = 0.98..=1.02;

/// Makes the probabilities sum to 1, which rounding has changed; their sum, where rounding cannot
/// have changed it so much.
fn normalise(ln_p: &mut [f32], ln_rest: &mut f32) -> Result<(), f64> {
    let sum: f64 = ln_p.iter().chain([&*ln_rest]).map(|&x| f64::from(x).exp()).sum();
    // NaN is in no range.
    if !SUM.contains(&sum) {
        return Err(sum);
    }
    for x in ln_p.iter_mut().chain([ln_rest]) {
        *x = (f64::from(*x) - sum.ln()) as f32;
    }
    Ok(())
}
