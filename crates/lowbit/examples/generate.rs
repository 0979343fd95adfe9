//! Text from a prompt, in one call.
//!
//!     cargo run --release -p lowbit --example generate -- [MODEL [PROMPT]]

use std::io::{self, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().unwrap_or_else(|| "models/demo-4bit".into());
    let prompt = arguments.next().unwrap_or_else(|| "A vector is".into());
    run(&model, &prompt, &mut io::stdout())
}

/// Writes what `model` makes of `prompt` to `out`.
pub fn run(model: &str, prompt: &str, out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    let text = lowbit::generate(model, prompt)?;
    writeln!(out, "{prompt}{text}")?;
    Ok(())
}
