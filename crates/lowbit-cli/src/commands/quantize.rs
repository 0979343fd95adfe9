use super::learn::{self, LearnArguments};
use crate::interrupt::{Doing, Interrupts};
use crate::options::ModelOptions;
use crate::paths::Paths;
use crate::{Failure, json, out, progress};
use lowbit_files::Checkpoint;
use lowbit_files::staging::beside;
use lowbit_quantize::{
    Budget, Data, Fallback, GgufOptions, KindSummary, LearnProgress, Learning, Mix, Progress, QuantizeError,
    QuantizeOptions, Rule, Saving, Summary, allocate_bits, plan, plan_gguf, quantize, quantize_and_learn,
    quantize_to_gguf, quantize_to_gguf_and_learn,
};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The suffix of the state of learning, after the output's name.
const STATE: &str = ".lowbit-learning";

/// MLX's modes.
const MODES: [&str; 4] = ["affine", "mxfp4", "mxfp8", "nvfp4"];

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
        value_parser = clap::builder::PossibleValuesParser::new(MODES.into_iter().chain(Mix::names())))]
    format: String,
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

    /// For a mode of MLX's.
    fn options(&self) -> QuantizeOptions {
        let mut options = QuantizeOptions::for_mode(self.format.to_lowercase())
            .with_replace(self.force)
            .with_rules(self.rules.clone());
        options.bits = self.bits.unwrap_or(options.bits);
        options.group_size = self.group_size.unwrap_or(options.group_size);
        options
    }

    /// The same, with the rules that share out `--target-bpw`.
    fn options_within(
        &self,
        checkpoint: &Checkpoint,
        data: Option<&Data>,
        interrupts: &Interrupts,
    ) -> Result<Result<QuantizeOptions, QuantizeError>, Failure> {
        let options = self.options();
        let (Some(bits_per_weight), Some(data)) = (self.learn.target_bpw(), data) else {
            return Ok(Ok(options));
        };
        if self.bits.is_some() {
            return Err(
                "--bits and --target-bpw are one too many: --target-bpw chooses the bits of each weight"
                    .into(),
            );
        }
        if Mix::from_name(&self.format).is_some() {
            return Err(format!("--target-bpw goes with affine, not with {}", self.format).into());
        }
        let device = self.model.device()?;
        let bar = progress::bar("sharing out bits", "windows", 0);
        let budget = Budget { bits_per_weight, data, device: &device };
        let rules = allocate_bits(checkpoint, &self.output, &options, budget, |done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
            if interrupts.stop() { Break(()) } else { Continue(()) }
        });
        bar.finish_and_clear();
        Ok(rules.map(|rules| options.with_rules(rules)))
    }

    fn quantize(
        &self,
        checkpoint: &Checkpoint,
        options: &QuantizeOptions,
        progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Result<Summary, QuantizeError>, Failure> {
        Ok(match self.gguf_options()? {
            None => quantize(checkpoint, &self.output, options, progress),
            Some(options) => quantize_to_gguf(checkpoint, &self.output, &options, progress),
        })
    }

    /// For a type of llama.cpp's, if that is what was asked for.
    fn gguf_options(&self) -> Result<Option<GgufOptions>, Failure> {
        let Some(mix) = Mix::from_name(&self.format) else { return Ok(None) };
        for (flag, given) in [("--bits", self.bits), ("--group-size", self.group_size)] {
            if let Some(given) = given {
                let (name, modes) = (mix.name(), MODES.join(", "));
                return Err(
                    format!("{flag} {given} goes with {modes}; {name} has its own bits and blocks").into()
                );
            }
        }
        Ok(Some(GgufOptions::new(mix).with_replace(self.force).with_rules(self.rules.clone())))
    }

    /// The summary of a run, without writing the output.
    fn plan(&self, checkpoint: &Checkpoint) -> Result<Summary, Failure> {
        Ok(match self.gguf_options()? {
            None => plan(checkpoint, &self.output, &self.options())?,
            Some(options) => plan_gguf(checkpoint, &self.output, &options)?,
        })
    }

    /// Quantises and learns, if that was asked for.
    fn learn(
        &self,
        checkpoint: &Checkpoint,
        (quantize_options, data): (&QuantizeOptions, Option<&Data>),
        interrupts: &Interrupts,
    ) -> Result<Option<Finished>, Failure> {
        let (Some(mut options), Some(data)) = (self.learn.options(), data) else { return Ok(None) };
        options.activations = self.model.activations();
        let gguf = self.gguf_options()?;
        let (device, mut log) = (self.model.device()?, self.learn.log(self.force)?);
        let state = self.state();
        let saving = Saving { path: &state, found: self.learn.found(self.force) };
        let learning = Learning { data, options: &options, device: &device, saving: Some(saving) };
        let bar = progress::bar("rounding", "tensors", 0);
        let (mut failure, mut speed, mut start) = (None, 0.0, Instant::now());
        let mut learned = 0;
        let progress = |progress: Progress<'_>| {
            match progress {
                Progress::Targets(done, all) => {
                    progress::show(&bar, "the source's targets", "windows", (done as u64, all as u64));
                }
                Progress::Tensors(done, all) => {
                    interrupts.pass_to(Doing::Saving);
                    let doing = if learned == 0 { "rounding" } else { "writing" };
                    progress::show(&bar, doing, "tensors", (done as u64, all as u64));
                    start = Instant::now();
                }
                Progress::Learning(done) => {
                    interrupts.pass_to(Doing::Learning);
                    let LearnProgress { step, steps, block, loss, step_tokens, .. } = *done;
                    learned += step_tokens;
                    speed = learned as f64 / start.elapsed().as_secs_f64();
                    let block = block.map(|(block, of)| format!("block {block}/{of}, ")).unwrap_or_default();
                    let doing = format!("learning, {block}loss {loss:.4}, {speed:.0} tokens/s");
                    progress::show(&bar, doing, "steps", (step.into(), steps.into()));
                    failure = log.as_mut().and_then(|log| log.step(done).err());
                }
            }
            if interrupts.stop() || failure.is_some() { Break(()) } else { Continue(()) }
        };
        let result = match gguf {
            None => quantize_and_learn(checkpoint, &self.output, quantize_options, learning, progress),
            Some(gguf) => quantize_to_gguf_and_learn(checkpoint, &self.output, &gguf, learning, progress),
        };
        bar.finish_and_clear();
        if let (Err(_), Some(log)) = (&result, &log) {
            log.remove_if_unused();
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let told = result.map(|(summary, report)| {
            let json = self.json.then(|| learn::to_json(&report, &options, speed));
            let printed = if self.json { Ok(()) } else { learn::print(&report, &options, speed) };
            printed.map(|()| (summary, json))
        });
        match told {
            Err(error) => Ok(Some(Err(error))),
            Ok(printed) => printed.map(|made| Some(Ok(made))),
        }
    }
}

/// The summary of the output, and the results of learning for JSON.
type Finished = Result<(Summary, Option<Value>), QuantizeError>;

/// Quantises into MLX's layout or GGUF.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    interrupts.enter(Doing::Saving);
    let checkpoint = arguments.model.open()?;
    arguments.check_paths(&checkpoint)?;
    let start = Instant::now();
    let data = arguments.learn.data(&checkpoint)?;
    if arguments.dry_run {
        let made = Made { summary: &arguments.plan(&checkpoint)?, learning: None, seconds: None };
        return made.print(arguments, &checkpoint);
    }
    let result = match arguments.options_within(&checkpoint, data.as_ref(), &interrupts)? {
        Err(error) => Err(error),
        Ok(options) => match arguments.learn(&checkpoint, (&options, data.as_ref()), &interrupts)? {
            Some(result) => result,
            None => {
                let bar = progress::bar("quantising", "tensors", 0);
                let result = arguments.quantize(&checkpoint, &options, |done, all| {
                    bar.set_length(all as u64);
                    bar.set_position(done as u64);
                    if interrupts.stop() { Break(()) } else { Continue(()) }
                });
                bar.finish_and_clear();
                result?.map(|summary| (summary, None))
            }
        },
    };
    let seconds = Some(start.elapsed().as_secs_f64());
    if matches!(result, Err(QuantizeError::Interrupted)) {
        interrupts.obey();
    }
    let (summary, learning) = result?;
    Made { summary: &summary, learning, seconds }.print(arguments, &checkpoint)
}

/// The report on an output that was made, or would be.
struct Made<'a> {
    summary: &'a Summary,
    /// The results of learning, for JSON.
    learning: Option<Value>,
    /// The time it took; `None` where nothing was written.
    seconds: Option<f64>,
}

impl Made<'_> {
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
