//! The program: `lowbit generate`, `chat`, `serve`, `embed`, `rerank`, `inspect`, `perplexity`,
//! `quantize`, `bench`, `devices` and `setup`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cache;
mod commands;
#[cfg(feature = "cuda")]
mod cuda;
mod demo;
mod device;
mod explain;
mod form;
mod habits;
mod interrupt;
mod json;
mod memory;
mod options;
mod out;
mod paths;
mod plot;
mod progress;
mod sampling;
mod speculation;
mod template;
mod texts;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
#[cfg(feature = "serve")]
use commands::serve;
use commands::{bench, chat, embed, generate, inspect, perplexity, quantize, rerank, setup};
use std::process::ExitCode;

/// Low-bit language models.
#[derive(Parser)]
#[command(name = "lowbit", version, propagate_version = true, after_help = EXAMPLES)]
// As in llama.cpp, the last of a flag that is given twice holds.
#[command(args_override_self = true)]
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
    /// Serve a model over HTTP: OpenAI's and Anthropic's APIs.
    #[cfg(feature = "serve")]
    Serve(serve::Arguments),
    /// Make embeddings of texts.
    Embed(embed::Arguments),
    /// Rank texts by how well they answer a query.
    Rerank(rerank::Arguments),
    /// Show what a checkpoint holds.
    Inspect(inspect::Arguments),
    /// Measure how well a model predicts a text.
    Perplexity(perplexity::Arguments),
    /// Make a quantised checkpoint.
    Quantize(quantize::Arguments),
    /// Check and time the ops.
    Bench(bench::Arguments),
    /// List the devices that this program can run on.
    Devices,
    /// Bring what a device needs and this machine lacks.
    Setup(setup::Arguments),
}

/// Below the list of commands.
const EXAMPLES: &str = "\
Examples:
  lowbit generate -m DIR -p \"A vector is\" -n 100 --temp 0.7
  lowbit chat -m model.gguf
  lowbit chat -hf org/name:Q4_K_M
  lowbit serve -m DIR --port 8080
  lowbit quantize -m DIR -o DIR-4bit --bits 4

Without a command, lowbit generates when it is given a prompt (-p, -f), else it chats.";

/// Any error, to be printed with its causes.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Characters of an error that are printed: enough for its causes and paths, however much of a file
/// it quotes.
const LONGEST_ERROR: usize = 8000;

fn main() -> ExitCode {
    // Without this handler, a mapped file that is cut kills the program without a message; nothing
    // else is lost.
    _ = lowbit_files::report_cut_files();
    let code = match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(failure.as_ref()),
    };
    #[cfg(feature = "serve")]
    out::settle();
    code
}

/// Parses the command line.
fn parse() -> Result<Command, Failure> {
    let mut program = Arguments::command();
    let typed = habits::translate(&program, std::env::args_os())?;
    let matches = program.try_get_matches_from_mut(&typed.arguments)?;
    typed.notes.iter().for_each(|note| out::note!("note: {note}"));
    Ok(Arguments::from_arg_matches(&matches)?.command)
}

fn run() -> Result<(), Failure> {
    match parse()? {
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Chat(arguments) => chat::run(&arguments),
        #[cfg(feature = "serve")]
        Command::Serve(arguments) => serve::run(arguments),
        Command::Embed(arguments) => embed::run(&arguments),
        Command::Rerank(arguments) => rerank::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Perplexity(arguments) => perplexity::run(&arguments),
        Command::Quantize(arguments) => quantize::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Devices => device::list(),
        Command::Setup(arguments) => setup::run(&arguments),
    }
}

/// Prints what ended the program and returns its exit status.
fn end(failure: &(dyn std::error::Error + 'static)) -> ExitCode {
    if failure.is::<interrupt::Interrupted>() {
        return ExitCode::from(interrupt::STATUS);
    }
    if failure.downcast_ref().is_some_and(out::Unwritable::is_closed_pipe) {
        return ExitCode::SUCCESS;
    }
    if let Some(said) = failure.downcast_ref::<clap::Error>() {
        return match out::print_clap(said) {
            Ok(()) => ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(1)),
            Err(unwritable) => end(&unwritable),
        };
    }
    out::note!("error: {}", lowbit_files::shown_message(failure, LONGEST_ERROR));
    ExitCode::FAILURE
}
