use super::learn::{self, LearnArguments, Log};
use crate::interrupt::{Doing, Interrupts};
use crate::options::ModelOptions;
use crate::paths::Paths;
use crate::{Failure, json, out, progress};
use clap::builder::TypedValueParser;
use indicatif::ProgressBar;
use lowbit_files::Checkpoint;
use lowbit_files::staging::beside;
use lowbit_quantize::{
    Budget, Data, Fallback, KindSummary, LearnOptions, LearnProgress, LearnReport, Learning, Made, MlxFormat,
    OutputFormat, Progress, QuantizeError, Recipe, Rule, Saving, Summary,
};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The suffix of the state of learning, after the output's name.
const STATE: &str = ".lowbit-learning";

/// Flags of `quantize`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// The directory, or the GGUF file, to make. It has this name when all of it is written.
    #[arg(long, short)]
    output: PathBuf,
    /// Replace a checkpoint that has the output's name already.
    #[arg(long)]
    force: bool,
    /// A mode of MLX's, for a directory as mlx-lm has it, or a type of llama.cpp's, for a GGUF
    /// file.
    #[arg(long, visible_aliases = ["mode", "q-mode"], default_value = "affine", ignore_case = true,
        value_parser = format_parser())]
    format: OutputFormat,
    /// Bits per code, for a mode of MLX's [default: 4; mxfp8: 8].
    #[arg(long, visible_alias = "q-bits")]
    bits: Option<usize>,
    /// Values that share a scale, for a mode of MLX's
    /// [default: 64; mxfp4 and mxfp8: 32; nvfp4: 16].
    #[arg(long, visible_alias = "q-group-size")]
    group_size: Option<usize>,
    /// Another format for the tensors whose names contain PATTERN, in which * stands for any text:
    /// for a mode of MLX's a number of bits, a mode, or none; in GGUF a type. Of several rules the
    /// first that matches holds.
    #[arg(long = "rule", value_name = "PATTERN=FORMAT")]
    rules: Vec<Rule>,
    #[command(flatten)]
    learn: LearnArguments,
    /// Say what would be written, the tensors' formats, sizes and bits per weight, and write
    /// nothing.
    #[arg(long, conflicts_with = "target_bpw")]
    dry_run: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// The path of the state of learning.
    fn state(&self) -> PathBuf {
        beside(&self.output, STATE)
    }

    /// Checks that what is written is no file of another argument.
    fn check_paths(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let mut paths = Paths::default();
        paths.staged("--output", &self.output);
        paths.checkpoint("--model", checkpoint);
        self.learn.add_paths(&mut paths, &self.state());
        paths.check()
    }

    /// The recipe by the flags, without learning and without sharing out bits.
    fn recipe<'a>(&self) -> Result<Recipe<'a>, Failure> {
        let mut into = self.format.clone();
        match &mut into {
            OutputFormat::Mlx(format) => {
                format.bits = self.bits.unwrap_or(format.bits);
                format.group_size = self.group_size.unwrap_or(format.group_size);
            }
            OutputFormat::Gguf(mix) => {
                for (flag, given) in [("--bits", self.bits), ("--group-size", self.group_size)] {
                    if let Some(given) = given {
                        let (name, modes) = (mix.name(), MlxFormat::MODES.join(", "));
                        return Err(format!(
                            "{flag} {given} goes with {modes}; {name} has its own bits and blocks"
                        )
                        .into());
                    }
                }
            }
        }
        if let Some(problem) = self.learn.target_bpw().and_then(|_| self.no_budget()) {
            return Err(problem.into());
        }
        Ok(Recipe::new(into).with_replace(self.force).with_rules(self.rules.clone()))
    }

    /// The reason why bits cannot be shared out.
    fn no_budget(&self) -> Option<String> {
        match (&self.format, self.bits) {
            (OutputFormat::Mlx(_), None) => None,
            (_, Some(_)) => Some(
                "--bits and --target-bpw are one too many: --target-bpw chooses the bits of each weight"
                    .into(),
            ),
            (OutputFormat::Gguf(mix), None) => {
                Some(format!("--target-bpw goes with affine, not with {}", mix.name()))
            }
        }
    }

    /// Makes the new checkpoint by `recipe`, with a budget and learning where the flags ask for
    /// them and there is `data` for them.
    fn make(
        &self,
        (checkpoint, data): (&Checkpoint, Option<&Data>),
        recipe: &Recipe<'_>,
        interrupts: &Interrupts,
    ) -> Result<(Made, Option<Value>), Failure> {
        let device = data.map(|_| self.model.device()).transpose()?;
        let (data, mut recipe) = (data.zip(device.as_ref()), recipe.clone());
        if let (Some((data, device)), Some(bits_per_weight)) = (data, self.learn.target_bpw()) {
            recipe = recipe.with_budget(Budget { bits_per_weight, data, device });
        }
        let (Some((data, device)), Some(mut options)) = (data, self.learn.options()) else {
            let made = Run::new(interrupts, None).make(&recipe, checkpoint, &self.output)?;
            return Ok((made, None));
        };
        options.activations = self.model.activations();
        let state = self.state();
        let saving = Some(Saving { path: &state, found: self.learn.found(self.force) });
        let recipe = recipe.with_learning(Learning { data, options: &options, device, saving });
        let mut run = Run::new(interrupts, self.learn.log(self.force)?);
        let made = run.make(&recipe, checkpoint, &self.output)?;
        let json = made.learned.as_ref().map(|report| self.tell(report, &options, run.speed)).transpose()?;
        Ok((made, json.flatten()))
    }

    /// Prints the results of learning, or gives them back for JSON.
    fn tell(
        &self,
        report: &LearnReport,
        options: &LearnOptions,
        speed: f64,
    ) -> Result<Option<Value>, Failure> {
        if self.json {
            return Ok(Some(learn::to_json(report, options, speed)));
        }
        learn::print(report, options, speed)?;
        Ok(None)
    }
}

/// All formats, by their names.
fn format_parser() -> impl clap::builder::TypedValueParser<Value = OutputFormat> {
    clap::builder::PossibleValuesParser::new(OutputFormat::names())
        .try_map(|name| OutputFormat::from_name(&name).ok_or("is no format"))
}

/// A run with its progress bar and its log.
struct Run<'a> {
    interrupts: &'a Interrupts,
    log: Option<Log>,
    bar: ProgressBar,
    /// Tokens learned from, and since when.
    learned: u64,
    start: Instant,
    /// In tokens per second.
    speed: f64,
    /// The log's.
    failure: Option<Failure>,
}

impl<'a> Run<'a> {
    fn new(interrupts: &'a Interrupts, log: Option<Log>) -> Self {
        let bar = progress::bar("rounding", "tensors", 0);
        Self { interrupts, log, bar, learned: 0, start: Instant::now(), speed: 0.0, failure: None }
    }

    fn make(&mut self, recipe: &Recipe<'_>, checkpoint: &Checkpoint, output: &Path) -> Result<Made, Failure> {
        let made = recipe.run(checkpoint, output, |progress| self.show(progress));
        self.bar.finish_and_clear();
        if let (Err(_), Some(log)) = (&made, &self.log) {
            log.remove_if_unused();
        }
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        if matches!(made, Err(QuantizeError::Interrupted)) {
            self.interrupts.obey();
        }
        Ok(made?)
    }

    fn show(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        let show = |doing: Cow<'static, str>, counted, done: usize, all: usize| {
            progress::show(&self.bar, doing, counted, (done as u64, all as u64));
        };
        match progress {
            Progress::Budget(done, all) => show("sharing out bits".into(), "windows", done, all),
            Progress::Targets(done, all) => show("the source's targets".into(), "windows", done, all),
            Progress::Tensors(done, all) => {
                self.interrupts.pass_to(Doing::Saving);
                let doing = if self.learned == 0 { "rounding" } else { "writing" };
                show(doing.into(), "tensors", done, all);
                self.start = Instant::now();
            }
            Progress::Learning(done) => {
                self.interrupts.pass_to(Doing::Learning);
                let LearnProgress { step, steps, block, loss, step_tokens, .. } = *done;
                self.learned += step_tokens;
                self.speed = self.learned as f64 / self.start.elapsed().as_secs_f64();
                let block = block.map(|(block, of)| format!("block {block}/{of}, ")).unwrap_or_default();
                let doing = format!("learning, {block}loss {loss:.4}, {:.0} tokens/s", self.speed);
                show(doing.into(), "steps", step as usize, steps as usize);
                self.failure = self.log.as_mut().and_then(|log| log.step(done).err());
            }
        }
        if self.interrupts.stop() || self.failure.is_some() { Break(()) } else { Continue(()) }
    }
}

/// Quantises into MLX's layout or GGUF.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    interrupts.enter(Doing::Saving);
    let checkpoint = arguments.model.open()?;
    arguments.check_paths(&checkpoint)?;
    let start = Instant::now();
    let data = arguments.learn.data(&checkpoint)?;
    let recipe = arguments.recipe()?;
    if arguments.dry_run {
        let summary = &recipe.plan(&checkpoint, &arguments.output)?;
        return Report { summary, learning: None, seconds: None }.print(arguments, &checkpoint);
    }
    let (made, learning) = arguments.make((&checkpoint, data.as_ref()), &recipe, &interrupts)?;
    let seconds = Some(start.elapsed().as_secs_f64());
    Report { summary: &made.summary, learning, seconds }.print(arguments, &checkpoint)
}

/// The report on an output that was made, or would be.
struct Report<'a> {
    summary: &'a Summary,
    /// The results of learning, for JSON.
    learning: Option<Value>,
    /// The time it took; `None` where nothing was written.
    seconds: Option<f64>,
}

impl Report<'_> {
    fn print(self, arguments: &Arguments, checkpoint: &Checkpoint) -> Result<(), Failure> {
        for warning in &self.summary.warnings {
            out::note!("warning: {warning}");
        }
        if arguments.json {
            return json::print("quantize", &self.to_json(&arguments.output));
        }
        let output = lowbit_files::shown_path(&arguments.output);
        print(self.summary, self.seconds.is_some())?;
        let (bytes, bits) = (self.summary.bytes, bits(self.summary.bytes, self.summary.parameters));
        let size = format!("{:.1} MB, {bits:.3} bits per weight", bytes as f64 / 1e6);
        match self.seconds {
            None => out::line!("{output} would have {size}; nothing was written")?,
            Some(seconds) => {
                let speed = checkpoint.size_bytes() as f64 / 1e6 / seconds.max(1e-9);
                out::line!("{output}: {size}, written at {speed:.0} MB/s of the old checkpoint")?;
            }
        }
        Ok(())
    }

    fn to_json(&self, output: &Path) -> Value {
        let Self { summary, learning, seconds } = self;
        let kind = |kind: &KindSummary| {
            let formats: Map<String, Value> =
                kind.formats.iter().map(|(name, count)| (name.clone(), (*count).into())).collect();
            json!({
                "kind": kind.kind.name(), "tensors": kind.tensors(), "bytes": kind.bytes,
                "parameters": kind.parameters, "bits_per_weight": bits(kind.bytes, kind.parameters),
                "relative_error": seconds.map(|_| kind.relative_error()), "formats": formats,
            })
        };
        let fallback = |of: &Fallback| {
            let (wanted, taken) = (of.wanted.to_string(), of.taken.to_string());
            json!({ "tensor": of.tensor, "row": of.k, "wanted": wanted, "taken": taken })
        };
        json!({
            "output": output.display().to_string(), "written": seconds.is_some(), "seconds": seconds,
            "bytes": summary.bytes, "parameters": summary.parameters,
            "bits_per_weight": bits(summary.bytes, summary.parameters),
            "kinds": summary.kinds.iter().map(kind).collect::<Vec<_>>(),
            "fallbacks": summary.fallbacks.iter().map(fallback).collect::<Vec<_>>(),
            "warnings": summary.warnings, "learning": learning,
        })
    }
}

fn bits(bytes: u64, parameters: u64) -> f64 {
    bytes as f64 * 8.0 / (parameters as f64).max(1.0)
}

/// The table of what was made, or would be: then without errors.
fn print(summary: &Summary, is_made: bool) -> Result<(), Failure> {
    let error = |kind: &KindSummary| match is_made {
        true => format!("{:.3}%", 100.0 * kind.relative_error()),
        false => "-".into(),
    };
    out::line!(
        "{:<14}{:>8}{:>11}{:>16}{:>11}  formats",
        "kind",
        "tensors",
        "MB",
        "bits per weight",
        "RMS error"
    )?;
    for kind in &summary.kinds {
        let formats: Vec<_> = kind.formats.iter().map(|(name, count)| format!("{count} {name}")).collect();
        out::line!(
            "{:<14}{:>8}{:>11.2}{:>16.3}{:>11}  {}",
            kind.kind.name(),
            kind.tensors(),
            kind.bytes as f64 / 1e6,
            bits(kind.bytes, kind.parameters),
            error(kind),
            formats.join(", ")
        )?;
    }
    for (index, fallback) in summary.fallbacks.iter().enumerate() {
        let same = |other: &&Fallback| {
            (other.k, other.wanted, other.taken) == (fallback.k, fallback.wanted, fallback.taken)
        };
        if summary.fallbacks[..index].iter().any(|other| same(&other)) {
            continue;
        }
        let count = summary.fallbacks.iter().filter(same).count();
        out::line!(
            "{count} tensors with rows of {} values, which {} cannot hold, are {}: {}{}",
            fallback.k,
            fallback.wanted,
            fallback.taken,
            lowbit_files::shown(&fallback.tensor),
            if count > 1 { " and others" } else { "" }
        )?;
    }
    Ok(())
}
