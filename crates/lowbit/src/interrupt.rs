//! Signals that ask the program to end, for work that has something to put in order first.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The first signal that came; the second one ends the program at once.
pub struct Interrupt(Arc<AtomicUsize>);

/// From now on SIGINT, SIGTERM and SIGHUP are noted, unless the program was started to ignore them (nohup), and a file
/// that grows past its limit is an error, no signal.
///
/// # Errors
/// When the system refuses a handler.
pub fn watch() -> io::Result<Interrupt> {
    let (came, which) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !is_ignored(signal)) {
        signal_hook::flag::register_conditional_default(signal, came.clone())?;
        signal_hook::flag::register(signal, came.clone())?;
        signal_hook::flag::register_usize(signal, which.clone(), signal as usize)?;
    }
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    Ok(Interrupt(which))
}

impl Interrupt {
    /// Whether one has come.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Does what the signal does by default: whoever started the program sees what ended it.
    pub fn obey(&self) {
        let signal = self.0.load(Ordering::Relaxed) as c_int;
        if signal != 0 {
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    }
}

/// Whether the program was started with `signal` ignored. Where the system does not tell, SIGHUP is taken to be.
fn is_ignored(signal: c_int) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return signal == SIGHUP };
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
