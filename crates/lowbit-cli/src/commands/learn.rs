//! The data that `quantize` learns from, and its reports.

use crate::options::at_least_one;
use crate::paths::Paths;
use crate::{Failure, habits, out};
use lowbit::{ChatTemplate, Checkpoint, FileError, Tokenizer};
use lowbit_files::shown;
use lowbit_files::staging::{Content, open_to_write};
use lowbit_quantize::{BlockReport, Data, Found, Learn, LearnOptions, LearnProgress, LearnReport, Targets};
use serde_json::{Map, Value, json};
use std::cmp::Ordering;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Flags of learning.
#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub struct LearnArguments {
    /// Learn what rounding lost, by distillation from the model that is quantised: its scales and
    /// biases, or its codes as well.
    #[arg(long, value_enum, requires = "data")]
    learn: Option<Learned>,
    /// Give each weight a number of bits of its own, more where rounding costs more on the data, so
    /// that all together have at most this many bits per weight, scales included.
    #[arg(long, value_name = "BITS", requires = "data")]
    target_bpw: Option<f64>,
    /// The text to learn from; in a .jsonl file each line is an object with a `text` or with
    /// `messages`. A twentieth of it is held out, and what scores best on that is kept.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Learn codes one block of the model at a time, each from what the source's block gives, then
    /// scales and biases end to end: takes the memory of one block where --learn codes takes that
    /// of the whole model. The states of all windows are in memory, too: 4 bytes per token and
    /// value of the hidden size.
    #[arg(long, requires = "learn")]
    by_block: bool,
    /// Windows of text per step of a block; it takes as many steps as --steps of --windows have
    /// windows. More windows per step are faster where a block is large, and win back less.
    #[arg(long, value_name = "WINDOWS", default_value_t = 1, value_parser = at_least_one(), requires = "by_block")]
    block_windows: usize,
    /// The highest learning rate of a block
    /// [default: by the format of each weight, as --learn codes has for the whole model].
    #[arg(long, value_name = "RATE", requires = "by_block")]
    block_rate: Option<f32>,
    /// Steps of learning.
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..), requires = "learn")]
    steps: u32,
    /// Windows of text per step.
    #[arg(long, default_value_t = 16, value_parser = at_least_one(), requires = "learn")]
    windows: usize,
    /// Tokens per window.
    #[arg(long, short, default_value_t = 512, value_parser = at_least_one(), requires = "data")]
    context: usize,
    /// The highest learning rate, of the whole model
    /// [default: by the format of each weight, 2e-3 to 3e-6; a tenth of that after --by-block].
    #[arg(long, requires = "learn")]
    rate: Option<f32>,
    /// Decides in which order windows are learned from.
    #[arg(long, default_value_t = 0, requires = "learn")]
    seed: u64,
    /// Go on where this command was interrupted: the result is that of an uninterrupted run, to the
    /// last bit. Without a state from an earlier run, which is beside the output, it begins at the
    /// first step.
    #[arg(long, requires = "learn")]
    resume: bool,
    /// Learn from what the source says of each token as this file has it, instead of asking the
    /// source in each step: made first where it is not there or not finished, by the source alone,
    /// and used again by later runs. The source and its rounded form are then never in memory
    /// together. Of each token it has the most likely next ones; per token of the text and next
    /// token it takes 4 bytes, or 6 where the vocabulary is more than 65536.
    #[arg(long, value_name = "FILE", requires = "learn")]
    targets: Option<PathBuf>,
    /// Next tokens per token in --targets; all others together are one.
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_one(), requires = "targets")]
    targets_top_k: usize,
    /// Write a line per step to this CSV file.
    #[arg(long, value_name = "FILE", requires = "learn")]
    log: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Learned {
    Scales,
    Codes,
}

impl LearnArguments {
    /// The data, if any is given.
    pub fn data(&self, checkpoint: &Checkpoint) -> Result<Option<Data>, Failure> {
        let Some(file) = &self.data else { return Ok(None) };
        if self.learn.is_none() && self.target_bpw.is_none() {
            return Err("--data goes with --learn or --target-bpw".into());
        }
        Ok(Some(Data::new(&texts(file, checkpoint)?, self.context)?))
    }

    /// The bits per weight that are shared out.
    pub fn target_bpw(&self) -> Option<f64> {
        self.target_bpw
    }

    /// The options of learning, if there is any.
    pub fn options(&self) -> Option<LearnOptions> {
        let learn = self.learn?;
        let mut options = LearnOptions::new(match learn {
            Learned::Scales => Learn::Scales,
            Learned::Codes => Learn::Codes,
        });
        (options.steps, options.batch, options.seed) = (self.steps, self.windows, self.seed);
        (options.by_block, options.block_batch, options.rate) =
            (self.by_block, self.block_windows, self.rate);
        options.validate_every = self.steps.div_ceil(10);
        options.targets = self.targets.as_ref().map(|path| {
            let mut targets = Targets::new(path);
            targets.top_k = self.targets_top_k;
            targets
        });
        Some(options)
    }

    /// The treatment of the state of an earlier run.
    pub fn found(&self, replace: bool) -> Found {
        match (self.resume, replace) {
            (true, _) => Found::Resume,
            (false, true) => Found::Replace,
            (false, false) => Found::Refuse,
        }
    }

    /// Adds the files that these flags name, and the `state`.
    pub fn add_paths(&self, paths: &mut Paths, state: &Path) {
        let Self { data, targets, log, .. } = self;
        data.iter().for_each(|data| paths.input("--data", data));
        targets.iter().for_each(|targets| paths.staged("--targets", targets));
        log.iter().for_each(|log| paths.output("--log", log));
        if self.learn.is_some() {
            paths.staged("the state of learning", state);
        }
    }

    /// The file that each step is written to, which must be new unless it is a log that may be
    /// replaced or that the run goes on with. Nothing is written before the first step.
    pub fn log(&self, replace: bool) -> Result<Option<Log>, Failure> {
        let Some(path) = &self.log else { return Ok(None) };
        let (mut file, is_new) = match File::create_new(path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && (self.resume || replace) => {
                let file = open_to_write(path)?;
                LOG.check_file(&file, path)?;
                (file, false)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(FileError::Exists { path: path.clone() }.into());
            }
            Err(error) => return Err(failed(path, &error)),
        };
        let mut earlier = String::new();
        if self.resume {
            let read = file.rewind().and_then(|()| file.read_to_string(&mut earlier));
            read.map_err(|error| failed(path, &error))?;
        }
        let (path, start) = (path.clone(), Instant::now());
        Ok(Some(Log { file, path, is_new, earlier: Some(earlier), start, before: 0.0 }))
    }
}

fn failed(path: &Path, problem: &dyn std::fmt::Display) -> Failure {
    format!("{}: {problem}", lowbit_files::shown_path(path)).into()
}

/// A line per step.
pub struct Log {
    file: File,
    path: PathBuf,
    /// True if the file did not exist.
    is_new: bool,
    /// The file's earlier content, until the first step: if a run goes on, the steps before that
    /// stay.
    earlier: Option<String>,
    start: Instant,
    /// Seconds until the last step that stays.
    before: f64,
}

/// The block is empty where the whole model learns.
const HEADER: &str = "step,block,loss,held_out,tokens,seconds";
const LOG: Content = Content { name: "a log of learning", begins: HEADER.as_bytes() };

impl Log {
    /// # Errors
    /// The file's; a file that is no log.
    pub fn step(&mut self, done: &LearnProgress) -> Result<(), Failure> {
        let LearnProgress { step, block, loss, validation, tokens, .. } = done;
        if let Some(earlier) = self.earlier.take() {
            self.begin(&earlier, *step)?;
        }
        let block = block.map(|(block, _)| block.to_string()).unwrap_or_default();
        let validation = validation.map(|loss| loss.to_string()).unwrap_or_default();
        let seconds = self.before + self.start.elapsed().as_secs_f64();
        self.line(&format!("{step},{block},{loss},{validation},{tokens},{seconds:.3}"))
    }

    /// Removes the file again where there were no steps: of a run that was refused.
    pub fn remove_if_unused(&self) {
        if self.is_new && self.earlier.is_some() {
            // The run's own error is the one to tell.
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Writes what stays of an earlier run: all before `step`.
    fn begin(&mut self, earlier: &str, step: u32) -> Result<(), Failure> {
        let mut lines = earlier.lines();
        if lines.next().is_some_and(|line| line != HEADER) {
            return Err(failed(&self.path, &"is no log of learning that could be gone on with"));
        }
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|error| failed(&self.path, &error))?;
        self.line(HEADER)?;
        let column = |line: &str, i: usize| line.split(',').nth(i).and_then(|x| x.parse::<f64>().ok());
        for line in lines.take_while(|line| column(line, 0).is_some_and(|earlier| earlier < step.into())) {
            self.before = column(line, 5).unwrap_or(self.before);
            self.line(line)?;
        }
        Ok(())
    }

    fn line(&mut self, line: &str) -> Result<(), Failure> {
        writeln!(self.file, "{line}").map_err(|error| failed(&self.path, &error))
    }
}

/// The tokens of each text in a file.
fn texts(file: &Path, checkpoint: &Checkpoint) -> Result<Vec<Vec<u32>>, Failure> {
    let (tokenizer, text) = (Tokenizer::from_checkpoint(checkpoint)?, habits::read_marked_text(file)?);
    if file.extension().is_none_or(|end| end != "jsonl") {
        return Ok(vec![tokenizer.encode(&text, true)?]);
    }
    let (mut template, mut texts) = (None, vec![]);
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let refuse =
            |problem: &dyn std::fmt::Display| failed(file, &format_args!("line {}: {problem}", index + 1));
        let object: Map<String, Value> = serde_json::from_str(line).map_err(|error| refuse(&error))?;
        texts.push(match (object.get("text"), object.get("messages")) {
            (Some(Value::String(text)), None) => tokenizer.encode(text, true)?,
            (None, Some(Value::Array(messages))) => {
                if template.is_none() {
                    template = ChatTemplate::from_checkpoint(checkpoint)?;
                }
                let none = || refuse(&"there are messages, but the model has no chat template");
                let tools = object.get("tools").cloned().unwrap_or_default();
                let with_tools = template.take().ok_or_else(none)?.with("tools", tools);
                let chat = template.insert(with_tools).render(messages, false);
                tokenizer.encode_chat(&chat.map_err(|error| refuse(&error))?)?
            }
            _ => {
                let keys: Vec<&str> = object.keys().map(String::as_str).collect();
                let problem = format!(
                    "its keys are {}; a text as \"text\" or an array as \"messages\" is wanted, and not both",
                    shown(keys.join(", "))
                );
                return Err(refuse(&problem));
            }
        });
    }
    Ok(texts)
}

/// The results of learning, for JSON: divergences in nats per token.
pub fn to_json(report: &LearnReport, options: &LearnOptions, tokens_per_second: f64) -> Value {
    let LearnReport { before, after, after_blocks, best_step, weights, skipped, went_back, .. } = report;
    let block = |of: &BlockReport| {
        let BlockReport { before, after, best_step, went_back, .. } = of;
        json!({ "before": before, "after": after, "best_step": best_step, "went_back": went_back })
    };
    json!({
        "weights": weights, "before": before, "after": after, "after_blocks": after_blocks,
        "best_step": best_step, "steps": options.steps, "went_back": went_back, "skipped": skipped,
        "tokens_per_second": tokens_per_second,
        "blocks": report.blocks.iter().map(block).collect::<Vec<_>>(),
    })
}

/// Prints the result of learning on a line, and the weights that could not learn.
pub fn print(report: &LearnReport, options: &LearnOptions, tokens_per_second: f64) -> Result<(), Failure> {
    let LearnReport { before, after, blocks, after_blocks, best_step, weights, skipped, .. } = report;
    let (steps, block_steps) = (options.steps, options.for_blocks().steps);
    for (index, BlockReport { before, after, best_step, .. }) in blocks.iter().enumerate() {
        let block = index + 1;
        out::line!(
            "block {block}: held-out error {before:.6} rounded, {after:.6} after step {best_step} of {block_steps}"
        )?;
    }
    let by_block = after_blocks.map(|loss| format!("{loss:.5} with blocks learned, ")).unwrap_or_default();
    out::line!(
        "{weights} weights learned, {tokens_per_second:.0} tokens/s: held-out divergence {before:.5} rounded, {by_block}{after:.5} \
         after step {best_step} of {steps}"
    )?;
    // NaN is no gain either.
    if !matches!(after.partial_cmp(before), Some(Ordering::Less)) {
        out::line!(
            "learning won nothing back: the weights are written as they were rounded; try more --steps, more --data, or another --rate"
        )?;
    }
    let went_back = report.went_back + blocks.iter().map(|block| block.went_back).sum::<u32>();
    if went_back > 0 {
        out::line!("diverged and went back to the best weights {went_back} times; try a lower --rate")?;
    }
    if let Some(first) = skipped.first() {
        out::line!("{} weights have nothing to learn, the first of them {}", skipped.len(), shown(first))?;
    }
    Ok(())
}
