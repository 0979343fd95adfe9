//! A checkpoint in f32, f16 or bf16 to one in MLX's 4-bit layout, round-to-nearest, and a text from
//! the new one.
//!
//!     cargo run --release -p lowbit --example quantize -- [MODEL] OUTPUT

use lowbit::quantize::{MlxFormat, Recipe};
use lowbit::{Checkpoint, Error};
use std::io::{self, Write};
use std::ops::ControlFlow::Continue;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let (model, output) = match &arguments[..] {
        [output] => ("models/demo", output),
        [model, output] => (&model[..], output),
        _ => return Err("usage: quantize [MODEL] OUTPUT".into()),
    };
    run(model.as_ref(), output.as_ref(), &mut io::stdout())
}

/// Quantises `model` into the new directory `output` and says on `out` what came of it.
pub fn run(model: &Path, output: &Path, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let checkpoint = Checkpoint::open(model)?;
    let recipe = Recipe::new(MlxFormat::new("affine", 4, 64));
    let summary = recipe.run(&checkpoint, output, |_| Continue(())).map_err(Error::from)?.summary;
    let bits = summary.bytes as f64 * 8.0 / summary.parameters as f64;
    writeln!(out, "{:.1} MB, {bits:.2} bits per weight", summary.bytes as f64 / 1e6)?;
    let output = output.to_str().ok_or("the output's name is not UTF-8")?;
    writeln!(out, "A vector is{}", lowbit::generate(output, "A vector is")?)?;
    Ok(())
}
