//! Independent pieces of work on several threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// `f` of each item, in their order. After an error no more items are begun; those before it are, so that the first error is the one that
/// is told.
///
/// # Errors
/// The first of `f`'s.
pub fn try_map<T: Send, R: Send, E: Send>(
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
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_the_first_error_is_told() {
        for threads in [1, 3, 100] {
            let items: Vec<usize> = (0..50).collect();
            let squares = try_map(threads, items.clone(), |i| Ok::<_, ()>(i * i)).unwrap();
            assert_eq!(squares, items.iter().map(|i| i * i).collect::<Vec<_>>());
            let error = try_map(threads, items, |i| if i % 20 == 19 { Err(i) } else { Ok(()) }).unwrap_err();
            assert_eq!(error, 19);
        }
        assert_eq!(try_map(2, Vec::<u8>::new(), Ok::<_, ()>), Ok(vec![]));
    }
}
