//! Protection from the tokenizers crate: it panics on some files and texts, so panics become errors
//! here, and it does not terminate on some, so encoding has a time limit. All that can be checked
//! in advance is (`json/`).

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::FileError;

/// Processor time that encoding may take: many times what any published tokenizer needs.
const BASE: Duration = Duration::from_secs(2);
const PER_BYTE: Duration = Duration::from_micros(20);

thread_local! {
    /// True while panics of this thread are caught, so that the hook prints nothing.
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static BUDGET: RefCell<Budget> = const { RefCell::new(Budget { end: None, processor_end: Duration::ZERO, failure: None }) };
}

/// The time left to the encoding that runs on this thread.
struct Budget {
    /// Before this, the time cannot be up; the processor's clock takes longer to read than this
    /// one.
    end: Option<Instant>,
    /// When it is up, by [`processor_time`].
    processor_end: Duration,
    /// The crate drops a normalizer's errors: the first one is kept here.
    failure: Option<String>,
}

/// Runs `work`; a panic in it is an error that names `file`, and prints nothing.
pub(super) fn guarded<T>(file: &Path, work: impl FnOnce() -> Result<T, FileError>) -> Result<T, FileError> {
    install_hook();
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(outer);
    result.unwrap_or_else(|panic| {
        Err(FileError::tokenizer(file, format_args!("the tokenizers library panicked: {}", message(&*panic))))
    })
}

/// As [`guarded`], for encoding `bytes` bytes of text in limited time.
pub(super) fn guarded_encoding<T>(
    file: &Path,
    bytes: usize,
    work: impl FnOnce() -> Result<T, FileError>,
) -> Result<T, FileError> {
    let limit = BASE + PER_BYTE.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX));
    let end = Instant::now().checked_add(limit);
    let processor_end = processor_time().saturating_add(limit);
    BUDGET.with_borrow_mut(|budget| *budget = Budget { end, processor_end, failure: None });
    let result = guarded(file, work);
    let failure = BUDGET.with_borrow_mut(|budget| {
        budget.end = None;
        budget.failure.take()
    });
    match failure {
        Some(failure) => Err(FileError::tokenizer(file, failure)),
        None => result,
    }
}

/// To be called from code that runs often while encoding.
///
/// # Errors
/// When the time is up, or a step before failed.
pub(super) fn check_budget() -> tokenizers::Result<()> {
    BUDGET.with_borrow_mut(|budget| {
        if let Some(failure) = &budget.failure {
            return Err(failure.clone().into());
        }
        let now = Instant::now();
        if budget.end.is_some_and(|end| now > end) {
            let left = budget.processor_end.saturating_sub(processor_time());
            if left.is_zero() {
                let failure =
                    "encoding takes too long: a pattern of this tokenizer does not end on this text";
                budget.failure = Some(failure.into());
                return Err(failure.into());
            }
            budget.end = now.checked_add(left);
        }
        Ok(())
    })
}

/// Processor time of this thread: a busy machine is no reason to fail.
#[cfg(unix)]
pub(super) fn processor_time() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Without a clock for the thread's processor time, all time counts.
#[cfg(not(unix))]
pub(super) fn processor_time() -> Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed()
}

/// Keeps the first failure of an encoding, whoever drops the error.
pub(super) fn keep_failure<T>(result: tokenizers::Result<T>) -> tokenizers::Result<T> {
    if let Err(error) = &result {
        BUDGET.with_borrow_mut(|budget| {
            budget.failure.get_or_insert_with(|| error.to_string());
        });
    }
    result
}

/// The process' hook stays in charge of all panics that are not caught here.
fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous(info);
            }
        }));
    });
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors() {
        let error = guarded::<()>(Path::new("f.json"), || panic!("at {}", 3)).unwrap_err().to_string();
        assert_eq!(error, "f.json: tokenizer: the tokenizers library panicked: at 3");
        assert!(!QUIET.get());
    }

    #[test]
    fn a_dropped_failure_is_found() {
        let error = guarded_encoding(Path::new("f.json"), 1, || {
            let _ = keep_failure::<()>(Err("lost".into()));
            assert!(check_budget().is_err());
            Ok(())
        });
        assert_eq!(error.unwrap_err().to_string(), "f.json: tokenizer: lost");
        assert!(check_budget().is_ok());
    }
}
