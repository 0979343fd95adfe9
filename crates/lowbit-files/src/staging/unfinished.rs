//! The outputs that this process has not finished, for a program that ends without unwinding:
//! because of a signal, say.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{remove, remove_folders};

/// An output's place in the list, until it is dropped.
#[derive(Debug)]
pub(super) struct Unfinished(u64);

#[derive(Debug)]
struct Listed {
    number: u64,
    path: PathBuf,
    /// Folders that were made for it.
    made: Vec<PathBuf>,
}

#[derive(Debug)]
pub(super) struct List {
    next: u64,
    outputs: Vec<Listed>,
}

static LIST: Mutex<List> = Mutex::new(List { next: 0, outputs: vec![] });

fn list() -> MutexGuard<'static, List> {
    LIST.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Unfinished {
    pub fn add(path: &Path, made: &[PathBuf]) -> Self {
        let mut list = list();
        let number = list.next;
        list.next += 1;
        list.outputs.push(Listed { number, path: path.into(), made: made.into() });
        Self(number)
    }

    /// Takes it out of the list, which no other thread reads while the result lives.
    pub fn lock(self) -> MutexGuard<'static, List> {
        let mut list = list();
        list.outputs.retain(|listed| listed.number != self.0);
        std::mem::forget(self);
        list
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        list().outputs.retain(|listed| listed.number != self.0);
    }
}

/// Removes all outputs that this process has begun and not finished, but for those that
/// [stay](super::Staged::continued). For a program that is about to end: no other output can be
/// finished any more.
pub fn remove_unfinished() {
    let list = list();
    for Listed { path, made, .. } in &list.outputs {
        // The writer may add a file meanwhile. The next writer removes files that cannot be removed
        // now.
        let _ = (0..10).find(|_| remove(path).is_ok());
        remove_folders(made);
    }
    // A writer that is about to finish waits for the end of the program.
    std::mem::forget(list);
}
