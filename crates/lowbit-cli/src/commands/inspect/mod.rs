//! `lowbit inspect`: what a checkpoint is and takes, and on request each of its tensors.

mod facts;
mod tensors;

use crate::options::ModelOptions;
use crate::{Failure, json, out};
use facts::{Facts, Memory};
use lowbit::{Checkpoint, Device};
use lowbit_files::{Layout, shown};
use lowbit_kernels::simd::Isa;
use lowbit_models::{Config, arch};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Display;
use tensors::{Total, Weight};

/// Flags of `inspect`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// List every tensor, with its format, bytes and shape.
    #[arg(long)]
    tensors: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The description of a checkpoint.
#[derive(Serialize)]
struct Report {
    path: String,
    architecture: String,
    layout: &'static str,
    /// The tool's method, where its tensors are not MLX's: GPTQ.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<&'static str>,
    parameters: u64,
    bytes: u64,
    bits_per_weight: f64,
    #[serde(flatten)]
    facts: Facts,
    formats: BTreeMap<String, Total>,
    /// Parts that lowbit would not compute, or the reason why it would refuse the checkpoint.
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<Weight>>,
}

/// Prints what a checkpoint is; with `--device`, what the device is instead.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.model.device.is_named() {
        return Ok(out::line!("{}", described(&arguments.model.device()?))?);
    }
    let report = report(&arguments.model.open()?, arguments.tensors)?;
    match arguments.json {
        true => json::print("inspect", &report),
        false => report.print(),
    }
}

/// A device in a line: of a CPU its threads and its instruction sets, of which one is used.
fn described(device: &Device) -> String {
    let Device::Cpu(cpu) = device else { return device.to_string() };
    let all: Vec<_> = Isa::all().into_iter().map(Isa::name).collect();
    format!("{device}: {} threads, {} (of {})", cpu.threads(), cpu.isa().name(), all.join(", "))
}

/// Bytes of all tensors, in bits, by the number of their values.
pub fn bits_per_weight(checkpoint: &Checkpoint) -> Result<f64, Failure> {
    Ok(tensors::sums(&tensors::all(checkpoint)?).bits_per_weight())
}

fn report(checkpoint: &Checkpoint, with_tensors: bool) -> Result<Report, Failure> {
    let tensors = tensors::all(checkpoint)?;
    let sums = tensors::sums(&tensors);
    let config = Config::new(checkpoint)?;
    Ok(Report {
        path: checkpoint.path().display().to_string(),
        architecture: config.architecture()?,
        layout: match checkpoint.layout() {
            Layout::HuggingFace => "Hugging Face",
            Layout::Mlx => "MLX",
            Layout::Gguf => "GGUF",
        },
        quantization: checkpoint.method(),
        parameters: sums.parameters,
        bytes: sums.bytes,
        bits_per_weight: sums.bits_per_weight(),
        facts: Facts::new(checkpoint, &config, sums.loaded),
        formats: tensors::by_format(&tensors),
        warnings: warnings(checkpoint),
        tensors: with_tensors.then_some(tensors),
    })
}

/// The warnings and errors that loading the configuration would give.
fn warnings(checkpoint: &Checkpoint) -> Vec<String> {
    let check = || {
        let config = Config::new(checkpoint)?;
        arch::find(&config)?;
        config.check()?;
        lowbit_models::warnings(checkpoint)
    };
    check().unwrap_or_else(|error| vec![format!("this checkpoint cannot be run: {error}")])
}

impl Report {
    fn print(&self) -> Result<(), Failure> {
        let Self { path, architecture, layout, facts, .. } = self;
        out::line!("{}", shown(path))?;
        if let Some(name) = &facts.name {
            row("name", shown(name))?;
        }
        let by = self.quantization.map(|method| format!(", quantised by {method}")).unwrap_or_default();
        row("model", format_args!("{} in {layout} layout{by}", shown(architecture)))?;
        let (parameters, bytes) = (count(self.parameters), size(self.bytes));
        row(
            "size",
            format_args!("{parameters} parameters, {bytes}, {:.3} bits per weight", self.bits_per_weight),
        )?;
        for (label, value) in facts.rows() {
            row(label, value)?;
        }
        if let Some(memory) = &facts.memory {
            print_memory(memory)?;
        }
        for warning in &self.warnings {
            row("warning", warning)?;
        }
        out::line!("\n{:<12} {:>8} {:>12} {:>12}", "format", "tensors", "parameters", "size")?;
        for (format, total) in &self.formats {
            let (parameters, bytes) = (count(total.parameters), size(total.bytes));
            out::line!(
                "{:<12} {:>8} {parameters:>12} {bytes:>12}",
                shown(format).to_string(),
                total.tensors
            )?;
        }
        match &self.tensors {
            Some(tensors) => print_tensors(tensors),
            None => Ok(out::line!("\n--tensors lists each tensor")?),
        }
    }
}

/// A line of the summary.
fn row(label: &str, value: impl Display) -> Result<(), Failure> {
    Ok(out::line!("  {label:<12} {value}")?)
}

fn print_memory(memory: &Memory) -> Result<(), Failure> {
    for (index, at) in memory.at.iter().enumerate() {
        let label = if index == 0 { "memory" } else { "" };
        let (total, cache) = (size(at.total_bytes), size(at.cache_bytes));
        row(label, format_args!("{total} at a context of {} tokens ({cache} of it for them)", at.tokens))?;
    }
    Ok(())
}

fn print_tensors(tensors: &[Weight]) -> Result<(), Failure> {
    out::line!()?;
    let names: Vec<String> = tensors.iter().map(|weight| shown(&weight.name).to_string()).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    for (name, Weight { format, shape, bytes, .. }) in names.iter().zip(tensors) {
        out::line!("{name:<width$}  {format:<12} {bytes:>12}  {shape:?}")?;
    }
    Ok(())
}

/// A number of parameters, in the unit that they are named by: 1.7B.
fn count(parameters: u64) -> String {
    match parameters {
        0..1_000_000 => parameters.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1}M", parameters as f64 / 1e6),
        _ => format!("{:.2}B", parameters as f64 / 1e9),
    }
}

/// Bytes, in units of powers of ten, as file managers and drives count them.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..100_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        100_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
