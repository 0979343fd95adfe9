//! The program's output. `println!` and `eprintln!` panic where a pipe is closed or a disk is full,
//! so nothing else writes to standard output and standard error; clippy's `print_stdout` and
//! `print_stderr` watch over that.

#[cfg(feature = "serve")]
mod background;

#[cfg(feature = "serve")]
pub use background::{in_background, settle};

use std::fmt::{self, Arguments, Display, Formatter};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Standard output cannot be written to.
#[derive(Debug)]
pub struct Unwritable(io::Error);

impl Unwritable {
    /// A reader such as `head` that closes the pipe is no failure.
    pub fn is_closed_pipe(&self) -> bool {
        self.0.kind() == ErrorKind::BrokenPipe
    }
}

impl Display for Unwritable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "standard output: {}", self.0)
    }
}

impl std::error::Error for Unwritable {}

/// Writes to standard output and flushes it.
///
/// # Errors
/// [`Unwritable`].
pub fn print(text: Arguments<'_>) -> Result<(), Unwritable> {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(Unwritable)
}

/// Writes what a model wrote, a piece at a time. A terminal, which obeys control characters, gets
/// them escaped, but for line breaks and tabs; a file or a pipe gets them as they are.
///
/// # Errors
/// [`Unwritable`].
pub fn from_model(text: &str) -> Result<(), Unwritable> {
    match is_terminal() {
        true => print(format_args!("{}", escaped(text))),
        false => print(format_args!("{text}")),
    }
}

/// Turns grey on or off for the output that follows, on a terminal that has colours.
///
/// # Errors
/// [`Unwritable`].
pub fn grey(on: bool) -> Result<(), Unwritable> {
    static HAS_COLOURS: LazyLock<bool> = LazyLock::new(|| {
        let is = |name, value| std::env::var_os(name).is_some_and(|found| found == value);
        let has = |name| std::env::var_os(name).is_some_and(|found| !found.is_empty());
        is_terminal() && !has("NO_COLOR") && !is("TERM", "dumb")
    });
    if !*HAS_COLOURS || IS_GREY.swap(on, Ordering::Relaxed) == on {
        return Ok(());
    }
    print(format_args!("{}", if on { "\x1b[90m" } else { PLAIN }))
}

/// Ends all colour.
pub const PLAIN: &str = "\x1b[0m";

static IS_GREY: AtomicBool = AtomicBool::new(false);

/// True if output is grey now.
pub fn is_grey() -> bool {
    IS_GREY.load(Ordering::Relaxed)
}

/// True if standard output is a terminal.
pub fn is_terminal() -> bool {
    static IS_TERMINAL: LazyLock<bool> = LazyLock::new(|| io::stdout().is_terminal());
    *IS_TERMINAL
}

/// `text` with its control characters as Rust spells them, but for line breaks and tabs.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => escaped.push(character),
            _ if character.is_control() => escaped.extend(character.escape_default()),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Prints what clap has to say: help and versions on standard output, complaints on standard error.
///
/// # Errors
/// [`Unwritable`], for standard output alone.
pub fn print_clap(error: &clap::Error) -> Result<(), Unwritable> {
    let printed = error.print().and_then(|()| io::stdout().flush());
    if error.use_stderr() { Ok(()) } else { printed.map_err(Unwritable) }
}

/// Writes a line to standard error. When that fails there is nowhere left to say so, and the work
/// goes on without it. A reader that is slow is waited for, unless a server has its lines written
/// `in_background`.
pub fn tell(text: Arguments<'_>) {
    let line = format!("{text}\n");
    #[cfg(feature = "serve")]
    let Some(line) = background::take(line) else { return };
    // In one piece: standard error is not buffered, and other programs may write to it.
    let _ = io::stderr().lock().write_all(line.as_bytes());
}

/// A line on standard output, as [`print()`] writes it.
macro_rules! line {
    () => { $crate::out::print(format_args!("\n")) };
    ($($text:tt)*) => { $crate::out::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// A line on standard error, as [`tell()`] writes it.
macro_rules! note {
    ($($text:tt)*) => { $crate::out::tell(format_args!($($text)*)) };
}

pub(crate) use {line, note};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let text = "a\tb\nc\u{1b}[2J\r\u{7f}\u{9b}31m\u{0} \u{e9}\u{1f469}\u{200d}\u{1f469}";
        let want = "a\tb\nc\\u{1b}[2J\\r\\u{7f}\\u{9b}31m\\u{0} \u{e9}\u{1f469}\u{200d}\u{1f469}";
        assert_eq!(escaped(text), want);
    }
}
