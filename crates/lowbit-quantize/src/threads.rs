//! Independent pieces of work on several threads.

use lowbit_kernels::KernelError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// `f` of each item, in their order. After an error no more items are begun; those before it are,
/// so that the first error is the one that is told.
///
/// # Errors
/// The first of `f`'s; [`KernelError::ThreadPool`] when the system refuses a thread.
pub fn try_map<T: Send, R: Send, E: Send + From<KernelError>>(
    threads: usize,
    items: Vec<T>,
    f: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    try_map_on(Builder::new, threads, items, f)
}

/// [`try_map`] on threads that `builder` makes.
fn try_map_on<T: Send, R: Send, E: Send + From<KernelError>>(
    builder: impl Fn() -> Builder,
    threads: usize,
    items: Vec<T>,
    f: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let threads = threads.min(items.len());
    let (rest, done) = (Mutex::new(items.into_iter().enumerate()), Mutex::new(vec![]));
    let failed = AtomicBool::new(false);
    let next = || rest.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let Some((index, item)) = next() else { return };
            let result = f(item);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
        }
    };
    std::thread::scope(|scope| {
        let spawned = (1..threads).try_for_each(|_| builder().spawn_scoped(scope, work).map(drop));
        match spawned {
            Ok(()) => work(),
            Err(_) => failed.store(true, Ordering::Relaxed),
        }
        spawned.map_err(KernelError::ThreadPool)
    })?;
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Failure {
        At(usize),
        Kernel(KernelError),
    }

    impl From<KernelError> for Failure {
        fn from(error: KernelError) -> Self {
            Self::Kernel(error)
        }
    }

    impl std::fmt::Debug for Failure {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            match self {
                Self::At(index) => write!(f, "at {index}"),
                Self::Kernel(error) => write!(f, "{error}"),
            }
        }
    }

    #[test]
    fn results_are_in_order_and_the_first_error_is_told() {
        for threads in [1, 3, 100] {
            let items: Vec<usize> = (0..50).collect();
            let squares = try_map(threads, items.clone(), |i| Ok::<_, Failure>(i * i)).unwrap();
            assert_eq!(squares, items.iter().map(|i| i * i).collect::<Vec<_>>());
            let at = |i| if i % 20 == 19 { Err(Failure::At(i)) } else { Ok(()) };
            assert!(matches!(try_map(threads, items, at), Err(Failure::At(19))));
        }
        assert!(try_map(2, Vec::<u8>::new(), Ok::<_, Failure>).unwrap().is_empty());
    }

    #[test]
    fn a_thread_that_cannot_be_had_is_an_error() {
        // No address space has room for such a stack.
        let builder = || Builder::new().stack_size(1 << 60);
        let result = try_map_on(builder, 3, (0..50).collect(), Ok::<i32, Failure>);
        assert!(matches!(result, Err(Failure::Kernel(KernelError::ThreadPool(_)))));
    }
}
