//! `--explain`: prints which kernel each product takes and why, and what Vulkan's driver made of
//! each kernel, as `lowbit-kernels` logs it.

use crate::out;
use log::{LevelFilter, Log, Metadata, Record};
use std::sync::{Mutex, PoisonError};

/// The logs that [`lowbit_kernels`] has for it.
const LOGS: [&str; 2] = ["lowbit::plan", "lowbit::vulkan"];

/// The line that was printed last: the same product is not explained twice in a row.
struct Explain(Mutex<String>);

impl Log for Explain {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        LOGS.contains(&metadata.target())
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let line = record.args().to_string();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != line {
            out::note!("{line}");
            *last = line;
        }
    }

    fn flush(&self) {}
}

/// Explains all products from now on, on standard error.
pub fn start() {
    static EXPLAIN: Explain = Explain(Mutex::new(String::new()));
    // The program has no other logger.
    if log::set_logger(&EXPLAIN).is_ok() {
        log::set_max_level(LevelFilter::Trace);
    }
}
