//! Signals. What Ctrl-C ends depends on what the program is doing:
//!
//! | during | Ctrl-C |
//! |---|---|
//! | loading; a prompt of `generate`; waiting for piped input | ends the program with status 130 |
//! | a text of `generate` | stops the text; a second one ends the program |
//! | a reply of `chat`, its prompt too | stops the reply; one that is not heeded for a second ends the program |
//! | editing a line | is a key, which the line editor reads |
//!
//! SIGTERM and SIGHUP end the program as they do without a handler, but with the terminal as it was found.

use crate::Failure;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{getpgrp, tcgetpgrp};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::fmt::{self, Display, Formatter};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The status of a program that Ctrl-C ended, as shells count it.
pub const STATUS: u8 = 128 + SIGINT as u8;

/// What the program is doing.
#[derive(Clone, Copy)]
pub enum Doing {
    /// Something that Ctrl-C ends together with the program.
    Work,
    /// Reading a line in a terminal.
    Editing,
    /// What can be stopped. Ctrl-C that comes again within `patience` says no more than the first.
    Writing { patience: Duration },
}

/// Listens to signals from when it is made.
pub struct Interrupts(Arc<State>);

struct State {
    doing: Mutex<(Doing, Option<Instant>)>,
    stop: AtomicBool,
}

/// The error of a run that Ctrl-C stopped: its output is there, so there is nothing to say.
#[derive(Debug)]
pub struct Interrupted;

impl Display for Interrupted {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Interrupts {
    /// Handles signals from here on; [`Doing::Work`] at first.
    pub fn listen() -> Result<Self, Failure> {
        let state = Arc::new(State { doing: Mutex::new((Doing::Work, None)), stop: AtomicBool::new(false) });
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        if !hangup_is_ignored() {
            signals.add_signal(SIGHUP)?;
        }
        let found = tcgetattr(std::io::stdin()).ok();
        let shared = state.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                if !shared.absorbs(signal) {
                    end(signal, found.as_ref());
                }
            }
        })?;
        Ok(Self(state))
    }

    /// Says what the program is doing from here on. What was asked of it before is forgotten.
    pub fn enter(&self, doing: Doing) {
        let mut now = self.0.lock();
        *now = (doing, None);
        self.0.stop.store(false, Ordering::Relaxed);
    }

    /// Whether what is being written should stop.
    pub fn stop(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, (Doing, Option<Instant>)> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the program goes on after `signal`.
    fn absorbs(&self, signal: i32) -> bool {
        let (doing, asked) = &mut *self.lock();
        match *doing {
            Doing::Writing { patience } if signal == SIGINT => match *asked {
                Some(before) => before.elapsed() < patience,
                None => {
                    *asked = Some(Instant::now());
                    self.stop.store(true, Ordering::Relaxed);
                    true
                }
            },
            // A Ctrl-C for a reply that had just ended: while a line is edited it would have been a key.
            Doing::Editing => signal == SIGINT && !tcgetattr(std::io::stdin()).is_ok_and(|now| is_raw(&now)),
            _ => false,
        }
    }
}

/// Whether nohup wants this program to outlive its terminal.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Where the system does not say, hangups are left alone.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_none_or(|mask| mask & 1 << (SIGHUP - 1) != 0)
}

fn is_raw(terminal: &Termios) -> bool {
    !terminal.local_flags.contains(LocalFlags::ISIG)
}

/// Ends the program, with the terminal as it was `found`.
fn end(signal: i32, found: Option<&Termios>) -> ! {
    restore(found);
    if signal != SIGINT {
        // Who waits for this process should see which signal it was.
        let _ = low_level::emulate_default_handler(signal);
    }
    low_level::exit(128 + signal)
}

fn restore(found: Option<&Termios>) {
    let stdin = std::io::stdin();
    let Some(found) = found else { return };
    // A terminal that another program has by now is left alone.
    let ours = tcgetpgrp(&stdin) == Ok(getpgrp()) && tcgetattr(&stdin).is_ok_and(|now| is_raw(&now));
    if ours && !is_raw(found) {
        let _ = tcsetattr(&stdin, SetArg::TCSANOW, found);
        // Pasted text was to be marked as such.
        if std::io::stderr().is_terminal() {
            let _ = std::io::stderr().write_all(b"\x1b[?2004l\n");
        }
    }
}
