//! Signals and the terminal's mode on Unix.

use crate::Failure;
use nix::libc;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::io::{IsTerminal, Write};
use std::sync::Arc;

/// Calls `heard` with each signal that asks the program to end, on a thread of its own.
///
/// # Errors
/// When the system refuses a handler or the thread.
pub fn each_signal(heard: impl Fn(i32) + Send + 'static) -> Result<(), Failure> {
    // A program that was started with a signal ignored (nohup) goes on ignoring it.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !is_ignored(signal)))?;
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    std::thread::Builder::new().name("signals".into()).spawn(move || signals.forever().for_each(heard))?;
    Ok(())
}

/// True if this process ignores `signal`. A signal that cannot be asked about is left alone.
#[allow(unsafe_code)]
fn is_ignored(signal: i32) -> bool {
    // SAFETY: the struct is plain numbers and pointers, for which zeros mean nothing set.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action the call changes nothing, and `now` is a whole struct.
    let said = unsafe { libc::sigaction(signal, std::ptr::null(), &mut now) };
    said != 0 || now.sa_sigaction == libc::SIG_IGN
}

/// Ends the program as `signal` does by default, so that the parent process sees that signal.
pub fn end_by(signal: i32) -> ! {
    let _ = low_level::emulate_default_handler(signal);
    low_level::exit(128 + signal)
}

/// True while a line is edited: Ctrl-C is a key then.
pub fn is_editing() -> bool {
    tcgetattr(std::io::stdin()).is_ok_and(|now| is_raw(&now))
}

fn is_raw(terminal: &Termios) -> bool {
    !terminal.local_flags.contains(LocalFlags::ISIG)
}

/// The terminal's mode, as the program found it; `None` without a terminal.
pub struct Terminal(Option<Termios>);

impl Terminal {
    /// The present mode.
    pub fn found() -> Self {
        Self(tcgetattr(std::io::stdin()).ok())
    }

    /// Gives the terminal this mode if a line was being edited.
    pub fn restore(&self) {
        let stdin = std::io::stdin();
        let Some(found) = &self.0 else { return };
        // A terminal that belongs to another program by now is left alone.
        let ours = tcgetpgrp(&stdin) == Ok(getpgrp()) && is_editing();
        if ours && !is_raw(found) {
            let _ = tcsetattr(&stdin, SetArg::TCSANOW, found);
            // The editor had turned bracketed paste on.
            if std::io::stderr().is_terminal() {
                let _ = std::io::stderr().write_all(b"\x1b[?2004l\n");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGPIPE, SIGWINCH};

    #[test]
    fn ignored_signals_are_known() {
        // Rust's start-up code ignores it.
        assert!(is_ignored(SIGPIPE));
        assert!(!is_ignored(SIGWINCH));
        assert!(is_ignored(-1), "no signal");
    }
}
