//! The limits of a template: steps, bytes, depth and time. Everything that costs counts here before
//! it is done.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Evaluated nodes and visited elements; bytes count in [`Meter::take`] and [`Meter::scan`]. A chat
/// of a thousand messages takes about a hundredth of it.
const STEPS: u64 = 10_000_000;
/// All that a rendering allocates, freed or not.
const BYTES: u64 = 256 << 20;
/// The text of a chat: ten times the longest context.
pub(super) const OUTPUT: usize = 64 << 20;
/// Nested evaluations, macro calls and loops included. Python, too, stops at a thousand frames.
const DEPTH: usize = 2000;
/// A value's nested lists and dictionaries.
pub(super) const VALUE_DEPTH: u16 = 200;
/// The most time, for machines on which steps say too little: busy or slow ones.
const TIME: Duration = Duration::from_secs(4);

/// Why a template is refused, or stopped.
#[derive(Debug)]
pub(super) struct Fault(Box<(String, Option<u32>)>);

pub(super) type Fallible<T> = Result<T, Fault>;

impl Fault {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self(Box::new((message.into(), None)))
    }

    /// The line, unless an inner one is known.
    pub(super) fn at(mut self, line: u32) -> Self {
        self.0.1.get_or_insert(line);
        self
    }

    pub(super) fn message(&self) -> &str {
        &self.0.0
    }

    pub(super) fn line(&self) -> Option<u32> {
        self.0.1
    }
}

/// Counts what one rendering uses.
pub(super) struct Meter {
    steps: Cell<u64>,
    bytes: Cell<u64>,
    depth: Cell<usize>,
    end: Instant,
}

impl Meter {
    pub(super) fn new() -> Self {
        let [steps, bytes] = [(); 2].map(|()| Cell::new(0));
        Self { steps, bytes, depth: Cell::new(0), end: Instant::now() + TIME }
    }

    /// `count` elements are looked at.
    pub(super) fn step(&self, count: usize) -> Fallible<()> {
        let before = self.steps.get();
        let steps = before.saturating_add(count as u64);
        self.steps.set(steps);
        if steps > STEPS {
            return Err(Fault::new(format!("the template takes more than {STEPS} steps")));
        }
        // The clock is read now and then only.
        if before >> 12 != steps >> 12 && Instant::now() > self.end {
            return Err(Fault::new(format!("the template takes more than {} seconds", TIME.as_secs())));
        }
        Ok(())
    }

    /// `bytes` of text are looked at.
    pub(super) fn scan(&self, bytes: usize) -> Fallible<()> {
        self.step(1 + bytes / 64)
    }

    /// `bytes` are about to be allocated.
    pub(super) fn take(&self, bytes: usize) -> Fallible<()> {
        let all = self.bytes.get().saturating_add(bytes as u64);
        if all > BYTES {
            return Err(Fault::new(format!("the template takes more than {} MB of memory", BYTES >> 20)));
        }
        self.bytes.set(all);
        self.scan(bytes)
    }

    /// `count` elements of a list or a dictionary are about to be allocated.
    pub(super) fn take_elements(&self, count: usize) -> Fallible<()> {
        self.step(count)?;
        self.take(count.saturating_mul(48))
    }

    /// One level down, until the guard is dropped.
    pub(super) fn deeper(&self) -> Fallible<Level<'_>> {
        let depth = self.depth.get() + 1;
        if depth > DEPTH {
            return Err(Fault::new("the template recurses too deeply"));
        }
        self.depth.set(depth);
        Ok(Level(&self.depth))
    }
}

/// See [`Meter::deeper`].
pub(super) struct Level<'m>(&'m Cell<usize>);

impl Drop for Level<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
