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
    /// Bits per code [default: 4; mxfp8: 8].
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
    let mut options = QuantizeOptions::for_mode(&arguments.mode).with_replace(arguments.force);
    options.bits = arguments.bits.unwrap_or(options.bits);
    options.group_size = arguments.group_size.unwrap_or(options.group_size);
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
    let Summary { parameters, bytes, .. } = result?;
    let bits = bytes as f64 * 8.0 / (parameters as f64).max(1.0);
    let output = lowbit_files::shown_path(&arguments.output);
    out::line!("{output}: {:.1} MB, {bits:.3} bits per weight", bytes as f64 / 1e6)?;
    Ok(())
}
