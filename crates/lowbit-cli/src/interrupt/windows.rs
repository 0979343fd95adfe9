//! Ctrl-C and the console's mode on Windows.

use crate::Failure;
use signal_hook::consts::SIGINT;
use signal_hook::low_level;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use winapi_util::{HandleRef, console};

/// The time between two looks at whether Ctrl-C was pressed: nothing waits for it there.
const LOOK: Duration = Duration::from_millis(20);

/// Calls `heard` with each Ctrl-C, on a thread of its own.
///
/// # Errors
/// When the system refuses the handler or the thread.
pub fn each_signal(heard: impl Fn(i32) + Send + 'static) -> Result<(), Failure> {
    let pressed = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, pressed.clone())?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        loop {
            std::thread::sleep(LOOK);
            if pressed.swap(false, Ordering::Relaxed) {
                heard(SIGINT);
            }
        }
    })?;
    Ok(())
}

/// Ends the program with the status that shells give for `signal`.
pub fn end_by(signal: i32) -> ! {
    low_level::exit(128 + signal)
}

/// True while a line is edited: Ctrl-C is a key then.
pub fn is_editing() -> bool {
    console::mode(HandleRef::stdin()).is_ok_and(is_raw)
}

/// `ENABLE_PROCESSED_INPUT` is off.
fn is_raw(mode: u32) -> bool {
    mode & 1 == 0
}

/// The console's mode, as the program found it; `None` without a console.
pub struct Terminal(Option<u32>);

impl Terminal {
    /// The present mode.
    pub fn found() -> Self {
        Self(console::mode(HandleRef::stdin()).ok())
    }

    /// Gives the console this mode if a line was being edited.
    pub fn restore(&self) {
        if let Some(found) = self.0.filter(|&found| is_editing() && !is_raw(found)) {
            let _ = console::set_mode(HandleRef::stdin(), found);
        }
    }
}
