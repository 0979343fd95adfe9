//! The state of learning on disk, from which an interrupted run goes on.
//!
//! ```text
//! lowbit learning 3\n
//! a line of JSON: what is learned from what (a run of something else is refused), what blocks have learned, and where it is
//! of each weight of these blocks in the order of names: its components
//! of each weight that learns now in the order of names, as it is now and as it was best: its numbers, f32,
//!   little-endian, and its components
//! SHA-256 of all before it
//! ```

use super::adam::Learned;
use super::data::Order;
use super::trainer::Position;
use super::{BlockReport, Data, LearnOptions, LearnedWeight, Weights};
use crate::QuantizeError;
use lowbit_files::shown_path;
use lowbit_files::staging::{Content, Existing, Staged};
use lowbit_kernels::{QuantizedTensor, Tensor};
use lowbit_models::tape::Named;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8] = b"lowbit learning 3\n";
const DIGEST: usize = 32;
/// States of all versions.
const CONTENT: Content = Content { name: "the state of learning", begins: b"lowbit learning " };

/// The file that a run of learning saves its state to: after each block that learned by itself,
/// after each validation of the whole model, and when it is stopped.
#[derive(Clone, Copy, Debug)]
pub struct Saving<'a> {
    /// The file, which is gone when the run ends.
    pub path: &'a Path,
    /// The treatment of a state that exists already.
    pub found: Found,
}

/// The treatment of the state of an earlier run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Refuse it, so that it is neither lost nor used unasked.
    Refuse,
    /// Go on from it. The result is that of an uninterrupted run, bit for bit.
    Resume,
    /// Replace it and start from the beginning.
    Replace,
}

/// The identity of a run: a state of another one is refused.
#[derive(Debug)]
pub(super) struct Identity(Map<String, Value>);

impl Identity {
    /// `targets` is the digest of the file with what the teacher says, where there is one.
    pub fn new(
        options: &LearnOptions,
        data: &Data,
        weights: &[Named<QuantizedTensor>],
        targets: Option<&str>,
    ) -> Self {
        let LearnOptions { learn, by_block, steps, batch, rate, temperature, seed, validate_every, .. } =
            options;
        let LearnOptions { block_batch, block_rate, activations, .. } = options;
        let text = digest(data.train().iter().chain([&vec![]]).chain(data.held_out()));
        let mut rounded = Sha256::new();
        for Named { name, value } in weights {
            rounded.update(name.as_bytes());
            value.components().iter().for_each(|component| rounded.update(component.bytes()));
        }
        let identity = json!({
            "learn": format!("{learn:?}"), "steps": steps, "batch": batch, "rate": rate, "temperature": temperature,
            "by_block": by_block, "block_batch": block_batch, "block_rate": block_rate,
            "seed": seed, "validate_every": validate_every, "activations": activations.map(|dtype| format!("{dtype:?}")),
            "data": hexadecimal(text), "weights": hexadecimal(rounded), "targets": targets,
        });
        let Value::Object(identity) = identity else { unreachable!("it was written as an object") };
        Self(identity)
    }

    /// The first key in which another run differs.
    fn difference(&self, other: &Value) -> Option<String> {
        difference(self.0.iter().map(|(key, mine)| (key.as_str(), mine)), other)
    }
}

/// The first key whose value `other` does not have, in words. A key that is not there is null.
pub(super) fn difference<'a>(
    mine: impl IntoIterator<Item = (&'a str, &'a Value)>,
    other: &Value,
) -> Option<String> {
    let other = |key: &str| other.get(key).unwrap_or(&Value::Null);
    let different = mine.into_iter().find(|(key, mine)| other(key) != *mine);
    different.map(|(key, mine)| format!("{key} was {}, and is {mine}", other(key)))
}

/// That of the tokens of some windows, and of where each ends.
pub(super) fn digest<'a>(windows: impl Iterator<Item = &'a Vec<u32>>) -> Sha256 {
    let mut digest = Sha256::new();
    for window in windows {
        digest.update((window.len() as u64).to_le_bytes());
        window.iter().for_each(|id| digest.update(id.to_le_bytes()));
    }
    digest
}

pub(super) fn hexadecimal(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl<'a> Saving<'a> {
    /// The state to go on from.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a state that must not be there, that is damaged, or of another
    /// run.
    pub(super) fn load(&self, identity: &Identity) -> Result<Option<Saved<'a>>, QuantizeError> {
        if !self.resumes()? {
            return Ok(None);
        }
        let read = std::fs::read(self.path);
        let bytes = read.map_err(|error| QuantizeError::Io { path: self.path.to_path_buf(), error })?;
        let damaged = || self.refuse("is damaged");
        let (content, digest) =
            bytes.split_at_checked(bytes.len().wrapping_sub(DIGEST)).ok_or_else(damaged)?;
        if Sha256::digest(content)[..] != *digest {
            return Err(damaged());
        }
        let rest =
            content.strip_prefix(MAGIC).ok_or_else(|| self.refuse("is of another version of lowbit"))?;
        let line = rest.iter().position(|&byte| byte == b'\n').ok_or_else(damaged)?;
        let (header, numbers) = (&rest[..line], rest[line + 1..].to_vec());
        let header: Value = serde_json::from_slice(header).map_err(|_| damaged())?;
        if let Some(difference) = identity.difference(&header["run"]) {
            return Err(self.refuse(&format!("is of another run: {difference}")));
        }
        Ok(Some(Saved { saving: *self, header, numbers, read: 0 }))
    }

    /// True if there is a state that the run resumes from.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a state that must not be there; [`QuantizeError::File`] for
    /// what is no regular file, or another's.
    pub(super) fn resumes(&self) -> Result<bool, QuantizeError> {
        match std::fs::symlink_metadata(self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            _ => CONTENT.check(self.path)?,
        }
        match self.found {
            Found::Replace => Ok(false),
            Found::Refuse => {
                Err(self.refuse("is the state of a run that was interrupted: resume that one, or replace it"))
            }
            Found::Resume => Ok(true),
        }
    }

    /// Writes the state, so that the one before is there until this one is whole.
    pub(super) fn save(
        &self,
        identity: &Identity,
        finished: &Finished,
        phase: Option<(&Weights, &Position)>,
    ) -> Result<(), QuantizeError> {
        let mut staged = Staged::file(self.path, Existing::Replace(CONTENT))?;
        let mut out = Hashed { out: BufWriter::new(staged.file_handle()), digest: Sha256::new() };
        let position = phase.map(|(_, position)| position.to_json());
        let header = json!({ "run": identity.0, "finished": finished.to_json(), "position": position });
        let write = |out: &mut Hashed<BufWriter<&mut File>>| {
            out.put(MAGIC)?;
            out.put(format!("{header}\n").as_bytes())?;
            let mut components = finished.learned.values().flat_map(QuantizedTensor::components);
            components.try_for_each(|component| out.put(component.bytes()))?;
            if let Some((weights, position)) = phase {
                for (latest, best) in weights.values().zip(position.best.1.values()) {
                    latest.write(|bytes| out.put(bytes))?;
                    best.write(|bytes| out.put(bytes))?;
                }
            }
            let digest = out.digest.clone().finalize();
            out.put(&digest)?;
            out.out.flush()
        };
        write(&mut out).map_err(|error| QuantizeError::Io { path: self.path.to_path_buf(), error })?;
        drop(out);
        Ok(staged.commit()?)
    }

    /// Removes the state, when the run has ended.
    pub(crate) fn remove(&self) -> Result<(), QuantizeError> {
        match std::fs::remove_file(self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(QuantizeError::Io { path: self.path.to_path_buf(), error })
            }
            _ => Ok(()),
        }
    }

    fn refuse(&self, problem: &str) -> QuantizeError {
        QuantizeError::Learn(format!("{} {problem}", shown_path(self.path)))
    }
}

/// A state that was read, of the run that goes on.
pub(super) struct Saved<'a> {
    saving: Saving<'a>,
    header: Value,
    numbers: Vec<u8>,
    /// Bytes of them that were used.
    read: usize,
}

impl Saved<'_> {
    /// The finished part of the run: at most `blocks` blocks of at most `steps` steps each. Call
    /// this first.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a damaged state.
    pub fn finished(
        &mut self,
        rounded: &[Named<QuantizedTensor>],
        (blocks, steps): (usize, u32),
    ) -> Result<Finished, QuantizeError> {
        let mut numbers = &self.numbers[self.read..];
        let finished = Finished::read(&self.header["finished"], &mut numbers, rounded);
        let left = numbers.len();
        let of_steps = |block: &BlockReport| block.best_step <= steps && block.went_back <= steps;
        let finished =
            finished.filter(|done| done.blocks.len() <= blocks && done.blocks.iter().all(of_steps));
        self.read = self.numbers.len() - left;
        finished.ok_or_else(|| self.saving.refuse("is damaged"))
    }

    /// The run's position in the phase that it had not finished, if it had begun. `weights` are
    /// those that the phase begins with, and become the saved ones.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a damaged state, and one that cannot be of a run of `steps`
    /// over so many `windows`.
    pub fn position(
        self,
        weights: &mut Weights,
        (windows, steps): (usize, u32),
    ) -> Result<Option<Position>, QuantizeError> {
        let damaged = || self.saving.refuse("is damaged");
        let (mut numbers, json) = (&self.numbers[self.read..], &self.header["position"]);
        if json.is_null() {
            return if numbers.is_empty() { Ok(None) } else { Err(damaged()) };
        }
        let mut best = weights.clone();
        for (latest, best) in weights.values_mut().zip(best.values_mut()) {
            latest.read(&mut numbers).and_then(|()| best.read(&mut numbers)).ok_or_else(damaged)?;
        }
        let position = Position::from_json(json, best).filter(|_| numbers.is_empty()).ok_or_else(damaged)?;
        position
            .check(windows, steps)
            .map_err(|problem| self.saving.refuse(&format!("is damaged: {problem}")))?;
        Ok(Some(position))
    }
}

/// A file, and the digest of what was written.
struct Hashed<W> {
    out: W,
    digest: Sha256,
}

impl<W: Write> Hashed<W> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.digest.update(bytes);
        self.out.write_all(bytes)
    }
}

impl Learned {
    fn write<E>(&self, put: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        for numbers in [&self.values, &self.mean, &self.square] {
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            put(&bytes)?;
        }
        Ok(())
    }

    fn read(&mut self, from: &mut &[u8]) -> Option<()> {
        for numbers in [&mut self.values, &mut self.mean, &mut self.square] {
            let bytes = from.split_off(..4 * numbers.len())?;
            for (x, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
        Some(())
    }
}

impl LearnedWeight {
    /// Hands over all that changes while it learns. Its components have the codes, and the scales
    /// that the next rounding depends on.
    fn write<E>(&self, mut put: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        self.learned().try_for_each(|learned| learned.write(&mut put))?;
        self.components().iter().try_for_each(|bytes| put(bytes))
    }

    /// The inverse: `None` where `from` ends too early.
    fn read(&mut self, from: &mut &[u8]) -> Option<()> {
        self.learned_mut().try_for_each(|learned| learned.read(from))?;
        let lengths = self.component_bytes().ok()?;
        let components = lengths.into_iter().map(|length| from.split_off(..length));
        self.set_components(&components.collect::<Option<Vec<_>>>()?).ok()
    }
}

/// The phases that are over.
#[derive(Default)]
pub(super) struct Finished {
    /// The result of each block.
    pub blocks: Vec<BlockReport>,
    /// Their weights, as they are written.
    pub learned: BTreeMap<Arc<str>, QuantizedTensor>,
    pub tokens: u64,
}

impl Finished {
    fn to_json(&self) -> Value {
        let of = |block: &BlockReport| {
            let BlockReport { before, after, best_step, went_back } = block;
            json!([before.to_bits(), after.to_bits(), best_step, went_back])
        };
        let names: Vec<&str> = self.learned.keys().map(|name| &**name).collect();
        json!({ "blocks": self.blocks.iter().map(of).collect::<Vec<_>>(), "learned": names, "tokens": self.tokens })
    }

    /// `None` where `from` ends too early, or is of other weights than `rounded`.
    fn read(json: &Value, from: &mut &[u8], rounded: &[Named<QuantizedTensor>]) -> Option<Self> {
        let block = |json: &Value| {
            let small = |i: usize| json[i].as_u64().and_then(|x| u32::try_from(x).ok());
            let [before, after] = [json[0].as_u64()?, json[1].as_u64()?].map(f64::from_bits);
            Some(BlockReport { before, after, best_step: small(2)?, went_back: small(3)? })
        };
        let blocks = json["blocks"].as_array()?.iter().map(block).collect::<Option<_>>()?;
        let mut finished = Self { blocks, tokens: json["tokens"].as_u64()?, ..Self::default() };
        for name in json["learned"].as_array()? {
            let Named { name, value } = rounded.iter().find(|weight| name.as_str() == Some(&weight.name))?;
            let components = value.components().iter().map(|component| {
                let bytes = from.split_off(..component.bytes().len())?.to_vec();
                let (shape, dtype) = (component.shape(), component.dtype());
                Tensor::mapped(bytes.into(), shape, dtype, component.device()).ok()
            });
            let components = components.collect::<Option<_>>()?;
            let learned = QuantizedTensor::new(value.format(), value.shape(), components).ok()?;
            finished.learned.insert(name.clone(), learned);
        }
        Some(finished)
    }
}

impl Position {
    fn to_json(&self) -> Value {
        let Self { step, tokens, factor, order, best, best_step, before, begun, went_back } = self;
        // Floats by their bits: the state is to be the same to the last one.
        json!({
            "step": step, "tokens": tokens, "factor": factor.to_bits(), "order": order.to_json(),
            "best": best.0.to_bits(), "best_step": best_step, "before": before.to_bits(), "begun": begun.to_bits(),
            "went_back": went_back,
        })
    }

    fn from_json(json: &Value, best: Weights) -> Option<Self> {
        let number = |key: &str| json[key].as_u64();
        let small = |key: &str| number(key).and_then(|x| u32::try_from(x).ok());
        Some(Self {
            step: small("step")?,
            tokens: number("tokens")?,
            factor: f32::from_bits(small("factor")?),
            order: Order::from_json(&json["order"])?,
            best: (f64::from_bits(number("best")?), best),
            best_step: small("best_step")?,
            before: f64::from_bits(number("before")?),
            begun: f64::from_bits(number("begun")?),
            went_back: small("went_back")?,
        })
    }

    /// Checks what the steps to come rely on.
    fn check(&self, windows: usize, steps: u32) -> Result<(), String> {
        let Self { step, best_step, went_back, factor, order, .. } = self;
        order.check(windows)?;
        if *step > steps || best_step > step || went_back > step {
            return Err(format!(
                "it is at step {step} of {steps}, was best at step {best_step}, and went back {went_back} times"
            ));
        }
        match *factor > 0.0 && *factor <= 1.0 {
            true => Ok(()),
            false => Err(format!(
                "its rates are multiplied by {factor}, but a factor above 0 and up to 1 is wanted"
            )),
        }
    }
}

impl Order {
    fn to_json(&self) -> Value {
        let (random, rest, count) = self.parts();
        json!({ "random": random, "rest": rest, "count": count })
    }

    fn from_json(json: &Value) -> Option<Self> {
        let number = |json: &Value| json.as_u64().and_then(|x| usize::try_from(x).ok());
        let rest = json["rest"].as_array()?.iter().map(number).collect::<Option<Vec<_>>>()?;
        let count = number(&json["count"])?;
        Some(Self::from_parts((json["random"].as_u64()?, rest, count)))
    }
}
