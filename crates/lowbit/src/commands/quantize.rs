use crate::interrupt::{Doing, Interrupts};
use crate::options::ModelOptions;
use crate::{Failure, out, progress};
use lowbit_quantize::{QuantizeError, QuantizeOptions, Summary, quantize};
use std::ops::ControlFlow::{Break, Continue};
use std::path::PathBuf;

/// Flags of `quantize`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// The directory to make. It has this name when all of it is written.
    #[arg(long, short)]
    output: PathBuf,
    /// Replace a checkpoint that has the output's name already.
    #[arg(long)]
    force: bool,
    /// MLX's mode.
    #[arg(long, visible_alias = "q-mode", default_value = "affine", value_parser = ["affine", "mxfp4", "mxfp8", "nvfp4"])]
    mode: String,
    /// Bits a code [default: 4; mxfp8: 8].
    #[arg(long, visible_alias = "q-bits")]
    bits: Option<usize>,
    /// Values that share a scale [default: 64; mxfp4 and mxfp8: 32; nvfp4: 16].
    #[arg(long, visible_alias = "q-group-size")]
    group_size: Option<usize>,
}

/// Quantises round-to-nearest into MLX's layout.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    interrupts.enter(Doing::Saving);
    let checkpoint = arguments.model.open()?;
    let (bits, group_size) = match arguments.mode.as_str() {
        "mxfp8" => (8, 32),
        "mxfp4" => (4, 32),
        "nvfp4" => (4, 16),
        _ => (4, 64),
    };
    let options = QuantizeOptions {
        mode: arguments.mode.clone(),
        bits: arguments.bits.unwrap_or(bits),
        group_size: arguments.group_size.unwrap_or(group_size),
        replace: arguments.force,
    };
    let bar = progress::bar("tensors", 0);
    let result = quantize(&checkpoint, &arguments.output, &options, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        if interrupts.stop() { Break(()) } else { Continue(()) }
    });
    bar.finish_and_clear();
    if matches!(result, Err(QuantizeError::Interrupted)) {
        interrupts.obey();
    }
    let Summary { parameters, bytes } = result?;
    let bits = bytes as f64 * 8.0 / (parameters as f64).max(1.0);
    let output = lowbit_files::shown_path(&arguments.output);
    out::line!("{output}: {:.1} MB, {bits:.3} bits a weight", bytes as f64 / 1e6)?;
    Ok(())
}
