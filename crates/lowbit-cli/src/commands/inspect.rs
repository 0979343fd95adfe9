use crate::options::ModelOptions;
use crate::{Failure, out};
use lowbit::{Checkpoint, Device, Format};
use lowbit_files::{Layout, Stored, TensorView, shown};
use lowbit_kernels::simd::Isa;
use lowbit_models::{Config, arch};
use serde::Serialize;
use std::collections::BTreeMap;

/// Flags of `inspect`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What a checkpoint holds.
#[derive(Serialize)]
struct Report {
    path: String,
    architecture: String,
    layout: &'static str,
    parameters: u64,
    bytes: u64,
    bits_per_weight: f64,
    formats: BTreeMap<String, Total>,
    tensors: Vec<Weight>,
    /// What lowbit would not compute, or why it would refuse the checkpoint.
    warnings: Vec<String>,
}

/// One weight, including its scales and biases.
#[derive(Serialize)]
struct Weight {
    name: String,
    format: String,
    shape: Vec<usize>,
    bytes: u64,
}

#[derive(Serialize, Default)]
struct Total {
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

/// Prints what a checkpoint holds; with `--device`, what the device is instead.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.model.device.is_named() {
        return Ok(out::line!("{}", described(&arguments.model.device()?))?);
    }
    let report = report(&arguments.model.open()?)?;
    if arguments.json {
        out::line!("{}", serde_json::to_string(&report)?)?;
        return Ok(());
    }
    out::line!("{}: {} in {} layout", shown(&report.path), shown(&report.architecture), report.layout)?;
    let megabytes = report.bytes as f64 / 1e6;
    out::line!(
        "{} parameters, {megabytes:.1} MB, {:.3} bits per weight\n",
        report.parameters,
        report.bits_per_weight
    )?;
    for warning in &report.warnings {
        out::line!("warning: {warning}\n")?;
    }
    out::line!("{:<12} {:>8} {:>14} {:>12}", "format", "tensors", "parameters", "bytes")?;
    for (format, total) in &report.formats {
        out::line!("{format:<12} {:>8} {:>14} {:>12}", total.tensors, total.parameters, total.bytes)?;
    }
    out::line!()?;
    let names: Vec<String> = report.tensors.iter().map(|weight| shown(&weight.name).to_string()).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    for (name, Weight { format, shape, bytes, .. }) in names.iter().zip(&report.tensors) {
        out::line!("{name:<width$}  {format:<12} {bytes:>12}  {shape:?}")?;
    }
    Ok(())
}

/// A device in a line: of a CPU its threads and its instruction sets, of which one is used.
fn described(device: &Device) -> String {
    let Device::Cpu(cpu) = device else { return device.to_string() };
    let all: Vec<_> = Isa::all().into_iter().map(Isa::name).collect();
    format!("{device}: {} threads, {} (of {})", cpu.threads(), cpu.isa().name(), all.join(", "))
}

/// Bytes of all tensors, in bits, by the number of their values.
pub fn bits_per_weight(checkpoint: &Checkpoint) -> Result<f64, Failure> {
    Ok(report(checkpoint)?.bits_per_weight)
}

fn report(checkpoint: &Checkpoint) -> Result<Report, Failure> {
    let tensors = checkpoint.tensors().iter().filter_map(|view| weight(checkpoint, view).transpose());
    let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    let mut formats = BTreeMap::<String, Total>::new();
    let (mut parameters, mut bytes) = (0, 0);
    for weight in &tensors {
        let total = formats.entry(weight.format.clone()).or_default();
        // A tensor with a dimension of 0 may claim any size for the others.
        let count = weight.shape.iter().fold(1u64, |count, &n| count.saturating_mul(n as u64));
        total.tensors += 1;
        total.parameters = total.parameters.saturating_add(count);
        total.bytes += weight.bytes;
        parameters = count.saturating_add(parameters);
        bytes += weight.bytes;
    }
    Ok(Report {
        path: checkpoint.path().display().to_string(),
        architecture: Config::new(checkpoint)?.architecture()?,
        layout: match checkpoint.layout() {
            Layout::HuggingFace => "Hugging Face",
            Layout::Mlx => "MLX",
            Layout::Gguf => "GGUF",
        },
        parameters,
        bytes,
        bits_per_weight: bytes as f64 * 8.0 / (parameters as f64).max(1.0),
        formats,
        tensors,
        warnings: warnings(checkpoint),
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

/// `None` for the scales and biases of an MLX weight: they are counted with it.
fn weight(checkpoint: &Checkpoint, view: &TensorView) -> Result<Option<Weight>, Failure> {
    let tensors = checkpoint.tensors();
    let bytes = |view: &TensorView| view.bytes.len() as u64;
    let (name, mut shape) = (view.name.clone(), view.shape.clone());
    let companion = |suffix: &str| {
        name.strip_suffix(suffix).filter(|module| tensors.get(&format!("{module}.scales")).is_some())
    };
    if companion(".scales").is_some() || companion(".biases").is_some() {
        return Ok(None);
    }
    let Some(module) = companion(".weight") else {
        let format = view.stored.to_string();
        return Ok(Some(Weight { name, format, shape, bytes: bytes(view) }));
    };
    let scales = tensors.get(&format!("{module}.scales")).ok_or("scales are gone")?;
    let quantization = checkpoint.quantization(module)?;
    let quantization = quantization.ok_or_else(|| {
        format!("{} has scales, but config.json does not say how it is quantised", shown(module))
    })?;
    let Stored::Plain(dtype) = scales.stored else {
        let module = shown(module);
        return Err(format!("{module}.scales are {}, but a plain type is wanted", scales.stored).into());
    };
    let format: Format = quantization.format(dtype)?;
    if let Some(k) = shape.last_mut() {
        *k = k.saturating_mul(32) / format.scheme().bits;
    }
    let biases = tensors.get(&format!("{module}.biases")).map_or(0, bytes);
    let total = bytes(view) + bytes(scales) + biases;
    Ok(Some(Weight { name: module.to_string(), format: format.to_string(), shape, bytes: total }))
}
