//! The program: `lowbit generate`, `chat`, `inspect`, `perplexity`, `quantize` and `bench`.

mod commands;
mod memory;
mod options;
mod progress;

use clap::{Parser, Subcommand};
use commands::{bench, chat, generate, inspect, perplexity, quantize};
use std::process::ExitCode;

/// Low-bit language models.
#[derive(Parser)]
#[command(name = "lowbit", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write text from a prompt.
    Generate(generate::Arguments),
    /// Talk with a model.
    Chat(chat::Arguments),
    /// Show what a checkpoint holds.
    Inspect(inspect::Arguments),
    /// Measure how well a model predicts a text.
    Perplexity(perplexity::Arguments),
    /// Make a quantised checkpoint.
    Quantize(quantize::Arguments),
    /// Check and time the ops.
    Bench(bench::Arguments),
}

/// Any error, to be printed with its causes.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    // Without it such a file ends the program without a word; nothing else is lost.
    _ = lowbit_files::report_cut_files();
    let result = match Arguments::parse().command {
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Chat(arguments) => chat::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Perplexity(arguments) => perplexity::run(&arguments),
        Command::Quantize(arguments) => quantize::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if is_closed_pipe(failure.as_ref()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", lowbit_files::shown_message(&failure, 8000));
            ExitCode::FAILURE
        }
    }
}

/// A reader such as `head` that has seen enough is no failure.
fn is_closed_pipe(failure: &(dyn std::error::Error + 'static)) -> bool {
    let error = failure.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
