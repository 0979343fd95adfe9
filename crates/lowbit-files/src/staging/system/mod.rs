//! The parts of staging that each operating system does in its own way: opening what is at a path
//! without following links, telling files apart, locks, syncing, and renaming.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as native;
#[cfg(windows)]
use windows as native;

pub(super) use native::{
    Held, NameLock, exchange, is_unsupported, no_replace, open_itself, special, sync_folder, sync_path,
};
pub use native::{is_same_file, sync};

/// The rights that a file is opened with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// Reading and writing.
    Write,
}
