//! Signals. The effect of Ctrl-C depends on what the program is doing:
//!
//! | during | Ctrl-C |
//! |---|---|
//! | loading; a prompt of `generate`; waiting for piped input | ends the program with status 130 |
//! | a text of `generate` | stops the text; a second one ends the program |
//! | a reply of `chat`, including its prompt | stops the reply; another one ends the program if the reply has not stopped within a second |
//! | editing a line | is a key, which the line editor reads |
//! | saving a checkpoint | stops it, so that what was written is removed, and ends the program in a second; a second one ends it at once |
//! | serving | takes no more requests, and ends the program when the running ones have ended; a second one ends it at once |
//! | learning | stops it after the step that it is in, so that its state is saved; a second one ends the program at once |
//!
//! While serving, SIGTERM and SIGHUP do what Ctrl-C does. Else SIGTERM and SIGHUP end the program
//! as they do without a handler, but with the terminal as it was found; while a checkpoint is saved
//! they do what Ctrl-C does. A file that grows past its limit is an error, not a signal. On Windows
//! there is Ctrl-C alone.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

use crate::{Failure, out};
use signal_hook::consts::SIGINT;
use signal_hook::low_level;
use std::fmt::{self, Display, Formatter};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

/// The status of a program that Ctrl-C ended, as shells count it.
pub const STATUS: u8 = 128 + SIGINT as u8;

/// The program's present work.
#[derive(Clone, Copy)]
pub enum Doing {
    /// Something that Ctrl-C ends together with the program.
    Work,
    /// Reading a line in a terminal.
    Editing,
    /// Something that can be stopped. A second Ctrl-C within `patience` is ignored.
    Writing { patience: Duration },
    /// Something that any signal stops and that cleans up its files then; after that it calls
    /// [`Interrupts::obey`]. Work that has not done so in [`PATIENCE`] ends without it.
    Saving,
    /// The same, but it takes its time: there is a state to save.
    Learning,
    /// Serving requests, which any signal ends in time; a second one ends the program at once.
    #[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "a program without a server"))]
    Serving,
}

/// The time that a save may take to stop, before the program removes its files and ends: below a
/// second in all.
const PATIENCE: Duration = Duration::from_millis(700);

/// Listens to signals from its creation on.
pub struct Interrupts(Arc<State>);

struct State {
    doing: Mutex<(Doing, Option<Asked>)>,
    stop: AtomicBool,
}

/// The signal that asked to stop, and when it came.
#[derive(Clone, Copy)]
struct Asked {
    signal: i32,
    when: Instant,
}

/// The error of a run that Ctrl-C stopped; nothing is printed for it.
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
        let (shared, found) = (state.clone(), system::Terminal::found());
        system::each_signal(move |signal| {
            if !shared.absorbs(signal) {
                end(signal, &found);
            }
            if matches!(shared.lock().0, Doing::Saving) {
                end_later(&shared);
            }
        })?;
        Ok(Self(state))
    }

    /// Sets what the program is doing from here on, and forgets earlier signals.
    pub fn enter(&self, doing: Doing) {
        let mut now = self.0.lock();
        *now = (doing, None);
        self.0.stop.store(false, Ordering::Relaxed);
    }

    /// As [`Self::enter`], but a signal that has asked to stop still does.
    pub fn pass_to(&self, doing: Doing) {
        self.0.lock().0 = doing;
    }

    /// True if what is being written should stop.
    pub fn stop(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }

    /// Ends the program as the signal that asked to stop does by default, so that the parent
    /// process sees that signal.
    pub fn obey(&self) {
        if let Some(asked) = self.0.lock().1 {
            system::end_by(asked.signal);
        }
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, (Doing, Option<Asked>)> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks what is being done to stop.
    fn ask(&self, asked: &mut Option<Asked>, signal: i32) -> bool {
        *asked = Some(Asked { signal, when: Instant::now() });
        self.stop.store(true, Ordering::Relaxed);
        true
    }

    /// True if the program goes on after `signal`.
    fn absorbs(&self, signal: i32) -> bool {
        let (doing, asked) = &mut *self.lock();
        match *doing {
            Doing::Writing { patience } if signal == SIGINT => match *asked {
                Some(before) => before.when.elapsed() < patience,
                None => self.ask(asked, signal),
            },
            Doing::Saving | Doing::Learning | Doing::Serving => asked.is_none() && self.ask(asked, signal),
            // A Ctrl-C for a reply that had just ended: while a line is edited it would have been a
            // key.
            Doing::Editing => signal == SIGINT && !system::is_editing(),
            _ => false,
        }
    }
}

/// Ends the program after a while if what is being saved has not stopped by then: a single product
/// may take longer.
fn end_later(state: &Arc<State>) {
    let state = state.clone();
    // Without a thread for it, the work itself stops as soon as it can.
    _ = std::thread::Builder::new().name("patience".into()).spawn(move || {
        std::thread::sleep(PATIENCE);
        if let (Doing::Saving, Some(asked)) = *state.lock() {
            lowbit_files::staging::remove_unfinished();
            system::end_by(asked.signal);
        }
    });
}

/// Ends the program, with the terminal as it was `found`.
fn end(signal: i32, found: &system::Terminal) -> ! {
    found.restore();
    if out::is_grey() && std::io::stderr().is_terminal() {
        let _ = std::io::stderr().write_all(out::PLAIN.as_bytes());
    }
    if signal == SIGINT {
        low_level::exit(128 + signal)
    }
    // The parent process should see which signal it was.
    system::end_by(signal)
}
