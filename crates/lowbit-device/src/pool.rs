//! The CPU's threads. A decoded token is some hundred products of about 0.1 ms each, one after the
//! other, and a thread that sleeps in the system takes longer to wake than its part of one takes.
//! So threads look for the next job for a while before they sleep.
//!
//! A job is cut into pieces, which the threads and the caller take one by one: a thread that
//! another process holds up takes fewer. The caller takes them from the front and the threads from
//! the back, so that each core meets the same weights and states again at the next token. The
//! caller waits for pieces that have begun, never for a thread to come, and takes part in nothing
//! but its own job: jobs may start jobs, and any number of callers may share a pool.
//!
//! Small jobs stay with their caller ([`HANDOVER`]), and threads that sleep are woken once what
//! they miss is worth it ([`WAKE`]): a model of small products is then as fast as with one thread,
//! and a larger one has all threads after its first products.
#![allow(unsafe_code)] // `Job` keeps a closure whose lifetime the compiler cannot follow.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// The time that a thread looks for the next job, and a caller for the end of its own, before it
/// sleeps: longer than a model's steps between products, and too short to be seen in a process that
/// rests.
const PATIENCE: Duration = Duration::from_micros(200);

/// Nanoseconds of work below which a job stays with its caller. Handing one to a thread that looks
/// for jobs takes 400 (Zen 5).
const HANDOVER: u64 = 2_000;

/// Nanoseconds of work that a sleeping thread may miss before it is woken. Waking one costs the
/// caller 3,000, and 13,000 where other processes keep the cores busy; the thread comes 3,000 or
/// 30,000 after that (Zen 5, in a virtual machine).
const WAKE: u64 = 200_000;

/// Threads that run the pieces of jobs.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Jobs begun so far: a thread that waits sees it change without a lock.
    begun: AtomicUsize,
    wake: Condvar,
    patience: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// Jobs that may have pieces left.
    jobs: Vec<Arc<Job>>,
    /// Threads that sleep, and those among them that shall wake and have not yet.
    asleep: usize,
    woken: usize,
    /// Nanoseconds of work done since a thread was woken that sleeping ones could have taken part
    /// in.
    missed: u64,
    stop: bool,
}

impl Pool {
    /// A pool of `threads` threads, the caller's own among them.
    ///
    /// # Errors
    /// When the system refuses one.
    pub fn new(threads: usize) -> io::Result<Self> {
        // If threads share cores, one that waits holds up one that works.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let patience = if threads <= cores { PATIENCE } else { Duration::ZERO };
        let shared =
            Shared { state: Mutex::default(), begun: AtomicUsize::new(0), wake: Condvar::new(), patience };
        let mut pool = Self { shared: Arc::new(shared), threads: Vec::with_capacity(threads - 1) };
        for i in 1..threads {
            let shared = pool.shared.clone();
            let builder = thread::Builder::new().name(format!("lowbit-{i}"));
            // If the system refuses one, those before it end with the pool.
            pool.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(pool)
    }

    /// The number of threads that take part, the caller's own among them.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// True if there are threads to share a job of `work` nanoseconds with.
    pub fn shares(&self, work: u64) -> bool {
        !self.threads.is_empty() && work >= HANDOVER
    }

    /// Calls `piece` with every number below `pieces`, on all threads and in no order, and returns
    /// when all have ended. Together they take one thread about `work` nanoseconds.
    ///
    /// # Panics
    /// With a piece's own panic, after the others have ended.
    pub fn run(&self, pieces: usize, work: u64, piece: &(dyn Fn(usize) + Sync)) {
        if pieces <= 1 || !self.shares(work) {
            return (0..pieces).for_each(piece);
        }
        let job = Arc::new(Job::new(piece, pieces));
        if !self.shared.begin(&job, work, self.threads.len()) {
            return (0..pieces).for_each(piece);
        }
        job.take_part(Job::front);
        self.shared.state().jobs.retain(|other| !Arc::ptr_eq(other, &job));
        job.wait(self.shared.patience);
        let panic = job.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.begun.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread catches what its pieces panic with.
            thread.join().expect("a thread of the pool ends by itself");
        }
    }
}

impl Shared {
    /// Nothing panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers `job`, of `work` nanoseconds, to `threads` threads. False if all of them sleep on:
    /// then nobody was told.
    fn begin(&self, job: &Arc<Job>, work: u64, threads: usize) -> bool {
        let mut state = self.state();
        let awake = threads - (state.asleep - state.woken);
        let missing = (job.pieces - 1).min(threads).saturating_sub(awake);
        let mut woken = 0;
        if missing > 0 {
            state.missed = state.missed.saturating_add(work);
            woken = missing.min(usize::try_from(state.missed / WAKE).unwrap_or(missing));
        }
        if awake + woken == 0 {
            return false;
        }
        if woken > 0 {
            state.missed = 0;
            state.woken += woken;
        }
        state.jobs.push(job.clone());
        drop(state);
        self.begun.fetch_add(1, Ordering::Release);
        (0..woken).for_each(|_| self.wake.notify_one());
        true
    }

    /// A thread's loop.
    fn work(&self) {
        while let Some(job) = self.next() {
            job.take_part(Job::back);
        }
    }

    /// A job with pieces left, as soon as there is one; `None` when the pool ends.
    fn next(&self) -> Option<Arc<Job>> {
        loop {
            let begun = self.begun.load(Ordering::Acquire);
            let state = self.state();
            // `Some` of what a thread goes on with. Others take pieces meanwhile: a job is looked
            // at once.
            let found = |state: &State| match state.stop {
                true => Some(None),
                false => state.jobs.iter().find(|job| job.is_open()).cloned().map(Some),
            };
            if let Some(found) = found(&state) {
                return found;
            }
            drop(state);
            if spin(self.patience, || self.begun.load(Ordering::Acquire) != begun) {
                continue;
            }
            let mut state = self.state();
            if let Some(found) = found(&state) {
                return found;
            }
            state.asleep += 1;
            let sleeps = |state: &mut State| state.woken == 0 && !state.stop;
            let mut state = self.wake.wait_while(state, sleeps).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
            state.woken = state.woken.saturating_sub(1);
        }
    }
}

/// Waits until `ready`, for `patience` at most; whether it came to be.
fn spin(patience: Duration, ready: impl Fn() -> bool) -> bool {
    /// Looks between two at the clock.
    const TURNS: usize = 16;
    if patience.is_zero() {
        return ready();
    }
    let start = Instant::now();
    loop {
        for _ in 0..TURNS {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > patience {
            return false;
        }
    }
}

/// One caller's work.
struct Job {
    piece: *const (dyn Fn(usize) + Sync),
    pieces: usize,
    /// The number of pieces asked for from the front, and in the upper half from the back.
    asked: AtomicU64,
    /// Pieces that have ended.
    ended: AtomicUsize,
    owner: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `piece` is the only field that is not Send and Sync by itself. It points to a closure
// that is Sync, and it is read in `take_part` alone, whose comment says why the closure lives.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("pieces", &self.pieces).field("ended", &self.ended).finish()
    }
}

impl Job {
    fn new<'a>(piece: &'a (dyn Fn(usize) + Sync + 'a), pieces: usize) -> Self {
        let piece: *const (dyn Fn(usize) + Sync + 'a) = piece;
        // SAFETY: the two types differ in a lifetime alone.
        let piece: *const (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(piece) };
        assert!(pieces <= 1 << 31, "{pieces} pieces: more than can be counted");
        let (asked, ended) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { piece, pieces, asked, ended, owner: thread::current(), panic: Mutex::default() }
    }

    /// Pieces asked for from the front and from the back.
    fn halves(asked: u64) -> (usize, usize) {
        (asked as u32 as usize, (asked >> 32) as usize)
    }

    fn is_open(&self) -> bool {
        let (front, back) = Self::halves(self.asked.load(Ordering::Relaxed));
        front + back < self.pieces
    }

    /// The first piece that nobody has taken.
    fn front(&self) -> Option<usize> {
        let (front, back) = Self::halves(self.asked.fetch_add(1, Ordering::Relaxed));
        (front + back < self.pieces).then_some(front)
    }

    /// The last one.
    fn back(&self) -> Option<usize> {
        let (front, back) = Self::halves(self.asked.fetch_add(1 << 32, Ordering::Relaxed));
        (front + back < self.pieces).then(|| self.pieces - 1 - back)
    }

    /// Runs pieces until all are taken.
    fn take_part(&self, next: impl Fn(&Self) -> Option<usize>) {
        while let Some(index) = next(self) {
            // SAFETY: this piece has not ended, so `Pool::run`, which borrows the closure, still
            // waits in `Job::wait`: nothing before that panics or returns.
            let piece = unsafe { &*self.piece };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| piece(index))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            }
            // The owner, which reads this count, sees everything that the piece wrote.
            if self.ended.fetch_add(1, Ordering::AcqRel) + 1 == self.pieces {
                self.owner.unpark();
            }
        }
    }

    /// Waits for the pieces that others have taken.
    fn wait(&self, patience: Duration) {
        let ended = || self.ended.load(Ordering::Acquire) == self.pieces;
        if !spin(patience, ended) {
            while !ended() {
                thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work for which all threads are woken.
    const LARGE: u64 = u64::MAX;

    fn sum(pool: &Pool, pieces: usize) -> u64 {
        let sum = AtomicU64::new(0);
        pool.run(pieces, LARGE, &|i| {
            sum.fetch_add(i as u64 + 1, Ordering::Relaxed);
        });
        sum.into_inner()
    }

    #[test]
    fn every_piece_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for pieces in [0, 1, 2, 3, 100] {
                for _ in 0..100 {
                    assert_eq!(sum(&pool, pieces), (pieces * (pieces + 1) / 2) as u64);
                }
            }
        }
    }

    /// Jobs that end while a thread looks at them end no thread.
    #[test]
    fn threads_stay() {
        let pool = Pool::new(4).unwrap();
        for _ in 0..20_000 {
            pool.run(2, LARGE, &|_| ());
        }
        assert!(!pool.threads.iter().any(JoinHandle::is_finished));
    }

    /// Threads that sleep are woken.
    #[test]
    fn work_after_a_rest() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            thread::sleep(2 * PATIENCE);
            assert_eq!(sum(&pool, 10), 55);
            while pool.shared.state().asleep < 2 {
                thread::yield_now();
            }
        }
    }

    /// A sleeping thread is woken once it has missed enough.
    #[test]
    fn small_jobs_stay_with_their_caller() {
        let pool = Pool::new(2).unwrap();
        while pool.shared.state().asleep == 0 {
            thread::yield_now();
        }
        let caller = thread::current().id();
        for work in [0, HANDOVER - 1, HANDOVER, WAKE / 2] {
            pool.run(4, work, &|_| assert_eq!(thread::current().id(), caller));
        }
        assert_eq!(pool.shared.state().missed, HANDOVER + WAKE / 2);
        pool.run(4, WAKE / 2, &|_| ());
        assert_eq!(pool.shared.state().missed, 0);
        assert!(!pool.shares(HANDOVER - 1) && pool.shares(HANDOVER));
    }

    #[test]
    fn jobs_within_jobs_and_beside_each_other() {
        let pool = Pool::new(3).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let total = AtomicU64::new(0);
                        pool.run(4, LARGE, &|_| {
                            total.fetch_add(sum(&pool, 10), Ordering::Relaxed);
                        });
                        assert_eq!(total.into_inner(), 4 * 55);
                    }
                });
            }
        });
    }

    /// All other pieces end before the panic reaches the caller, and the pool goes on.
    #[test]
    fn a_panic_reaches_the_caller() {
        let pool = Pool::new(2).unwrap();
        for bad in [0, 7] {
            let ended = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, LARGE, &|i| {
                    assert_ne!(i, bad, "the bad piece");
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let payload = caught.unwrap_err();
            assert!(payload.downcast_ref::<String>().unwrap().contains("the bad piece"));
            assert_eq!(ended.into_inner(), 7);
            assert_eq!(sum(&pool, 4), 10);
        }
    }
}
