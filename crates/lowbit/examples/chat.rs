//! A conversation on standard input, a message per line, with answers that appear as they are
//! written.
//!
//!     cargo run --release -p lowbit --example chat -- [MODEL]

use lowbit::{GenerationOptions, LanguageModel, Message, Progress, SampleParams};
use std::io::{self, BufRead, Write};
use std::ops::ControlFlow::{Break, Continue};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "models/demo-chat".into());
    run(&model, io::stdin().lock(), &mut io::stdout())
}

/// Answers every line of `messages` on `out`.
pub fn run(
    model: &str,
    messages: impl BufRead,
    out: &mut impl Write,
) -> Result<(), Box<dyn std::error::Error>> {
    let model = LanguageModel::open(model)?;
    let mut chat = model.chat().with_message(Message::new("system", "Answer in one sentence."));
    let sampling = SampleParams { temperature: 0.7, top_p: 0.9, seed: 1, ..SampleParams::default() };
    let options = GenerationOptions::default().with_sampling(sampling).with_max_tokens(60).into();
    for message in messages.lines() {
        chat.say(&message?, &options, |progress| {
            let Progress::Text(piece) = progress else { return Continue(()) };
            // A reader that has gone away ends the answer.
            match out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
                Ok(()) => Continue(()),
                Err(_) => Break(()),
            }
        })?;
        writeln!(out)?;
    }
    Ok(())
}
