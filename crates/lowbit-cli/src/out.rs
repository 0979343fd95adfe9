//! What the program prints. `println!` and `eprintln!` panic where a pipe is closed or a disk is full, so nothing else
//! writes to standard output and standard error; clippy's `print_stdout` and `print_stderr` watch over that.

use std::fmt::{self, Arguments, Display, Formatter};
use std::io::{self, ErrorKind, Write};

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

/// Prints what clap has to say: help and versions on standard output, complaints on standard error.
///
/// # Errors
/// [`Unwritable`], for standard output alone.
pub fn print_clap(error: &clap::Error) -> Result<(), Unwritable> {
    let printed = error.print().and_then(|()| io::stdout().flush());
    if error.use_stderr() { Ok(()) } else { printed.map_err(Unwritable) }
}

/// Writes a line to standard error. When that fails there is nowhere left to say so, and the work goes on without it.
pub fn tell(text: Arguments<'_>) {
    // In one piece: standard error is not buffered, and other programs may write to it.
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
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
