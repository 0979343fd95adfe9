//! The message for a mapped file that became shorter than its map: reading past its end raises
//! SIGBUS.

use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use libc::{c_int, c_void, siginfo_t};

use crate::shown;

/// The most maps in the table; a fault in any other ends the process as without a handler.
/// Published models have up to 200 files.
const MAPS: usize = 512;
/// The most bytes of a file's path that are kept: its end.
const NAME: usize = 200;

/// A map, as a signal handler can read it: without locks and without memory of its own.
struct Slot {
    /// [`FREE`], [`TAKEN`] while it is filled, or [`IN_USE`].
    state: AtomicU8,
    start: AtomicUsize,
    end: AtomicUsize,
    name: [AtomicU8; NAME],
}

const FREE: u8 = 0;
const TAKEN: u8 = 1;
const IN_USE: u8 = 2;

static SLOTS: [Slot; MAPS] = [const {
    Slot {
        state: AtomicU8::new(FREE),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        name: [const { AtomicU8::new(0) }; NAME],
    }
}; MAPS];

/// The previous handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A place in the table, until it is dropped.
pub(super) struct Entry(&'static Slot);

impl Entry {
    /// None when the table is full.
    pub fn new(map: &[u8], path: &Path) -> Option<Self> {
        let take = |slot: &&Slot| {
            slot.state.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let slot = SLOTS.iter().find(take)?;
        let range = map.as_ptr_range();
        slot.start.store(range.start.addr(), Ordering::Relaxed);
        slot.end.store(range.end.addr(), Ordering::Relaxed);
        let name = shown(path.display()).to_string();
        // The end of a path says more than its start.
        let tail = (0..=name.len()).find(|&at| name.is_char_boundary(at) && name.len() - at <= NAME);
        let bytes = name[tail.unwrap_or(name.len())..].bytes().chain(std::iter::repeat(0));
        slot.name.iter().zip(bytes).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
        slot.state.store(IN_USE, Ordering::Release);
        Some(Self(slot))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.state.store(FREE, Ordering::Release);
    }
}

/// The map that `address` is in.
fn find(address: usize) -> Option<&'static Slot> {
    SLOTS.iter().find(|slot| {
        let range = slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed);
        slot.state.load(Ordering::Acquire) == IN_USE && range.contains(&address)
    })
}

/// True if `bytes` lie in one map of the table.
pub(super) fn contains(bytes: &[u8]) -> bool {
    let end = bytes.as_ptr_range().end.addr();
    find(bytes.as_ptr().addr()).is_some_and(|slot| end <= slot.end.load(Ordering::Relaxed))
}

/// From now on the process says which file it was, and ends with status 1, when a mapped model file
/// has been cut or its disk fails while it is read. For programs: a library's user decides about
/// signals.
///
/// # Errors
/// When the system refuses a signal handler.
#[allow(unsafe_code)]
pub fn report_cut_files() -> io::Result<()> {
    // SAFETY: the struct is plain numbers and pointers, for which zeros mean nothing set.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handle as *const () as usize;
    // The stack may be what has overflowed: some systems say that by this signal.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both pointers are to whole structs, and `handle` only reads atomics and calls
    // functions that POSIX allows in a handler.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    _ = BEFORE.set(before);
    Ok(())
}

#[allow(unsafe_code)]
extern "C" fn handle(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: with SA_SIGINFO the system passes a valid pointer, whose address is that of the
    // access.
    let (address, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
    // Codes outside of this range say that a process sent the signal.
    let slot = if (1..=0xffff).contains(&code) { find(address) } else { None };
    let Some(slot) = slot else {
        // Not ours. The access runs again, into what was done about the signal before. SAFETY:
        // zeros are SIG_DFL; sigaction may be called in a handler, and what was there before is as
        // good as it was.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, BEFORE.get().unwrap_or(&default), std::ptr::null_mut());
        }
        if !(1..=0xffff).contains(&code) {
            // No access will run again.
            // SAFETY: raise may be called in a handler.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        return;
    };
    let mut name = [0; NAME];
    name.iter_mut().zip(&slot.name).for_each(|(byte, place)| *byte = place.load(Ordering::Relaxed));
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(NAME);
    for text in [
        b"error: a model file was cut or cannot be read any more while it was in use: ",
        &name[..length],
        b"\n",
    ] {
        // SAFETY: the bytes are there; write may be called in a handler.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
    // SAFETY: _exit may be called in a handler. Nothing else can be done: the access has no value.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_found_while_they_live() {
        let bytes = vec![0u8; 1000];
        let inside = bytes.as_ptr().addr() + 999;
        assert!(find(inside).is_none());
        let path = format!("/{}/evil\u{1b}[2J.gguf", "long".repeat(100));
        let entry = Entry::new(&bytes, Path::new(&path)).unwrap();
        let name: Vec<u8> = find(inside).unwrap().name.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let name = String::from_utf8(name).unwrap();
        assert!(!name.contains('\u{1b}'), "{name}");
        assert!(find(inside + 1).is_none());
        drop(entry);
        assert!(find(inside).is_none());
    }
}
