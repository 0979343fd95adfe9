//! Passes that run again and again with new values in the same tensors.

use lowbit_kernels::gpu::Pass;
use lowbit_kernels::{Device, KernelError};

/// The most captured passes: the one that ran least recently goes. Each keeps its activations.
const MOST: usize = 16;

/// On a GPU, passes that are captured once for each key, and replayed; they have results `T`.
#[derive(Debug)]
pub(super) struct Passes<K, T> {
    /// The last one ran last.
    captured: Vec<Ran<K, T>>,
    /// Passes captured so far.
    pub captures: usize,
}

/// A pass that has run.
#[derive(Debug)]
pub(super) struct Ran<K, T> {
    key: K,
    pub results: T,
    /// On a GPU: the captured pass, and the results of its replays if they are not those above.
    captured: Option<(Pass, Option<T>)>,
}

impl<K, T> Default for Passes<K, T> {
    fn default() -> Self {
        Self { captured: vec![], captures: 0 }
    }
}

impl<K: PartialEq, T> Passes<K, T> {
    /// Runs the pass of this key: what was captured of it, or else `record`.
    ///
    /// # Errors
    /// Those of `record` and of a GPU.
    pub fn run(
        &mut self,
        key: K,
        device: &Device,
        mut record: impl FnMut() -> Result<T, KernelError>,
    ) -> Result<Ran<K, T>, KernelError> {
        if let Some(known) = self.captured.iter().position(|ran| ran.key == key) {
            let ran = self.captured.remove(known);
            ran.captured.as_ref().map_or(Ok(()), |(pass, _)| pass.replay())?;
            return Ok(ran);
        }
        let mut runs = vec![];
        let pass = device.capture(|| {
            runs.push(record()?);
            Ok(())
        });
        // The first run is this pass; the second was recorded for those that follow. Without memory
        // for that one, which keeps all its activations, the next pass tries again.
        let mut runs = runs.into_iter();
        let Some(results) = runs.next() else {
            return Err(pass.err().unwrap_or_else(|| unreachable!("a capture runs its work")));
        };
        let pass = pass.ok().flatten();
        self.captures += usize::from(pass.is_some());
        Ok(Ran { key, results, captured: pass.map(|pass| (pass, runs.next())) })
    }

    /// Keeps a captured pass for the next time.
    pub fn keep(&mut self, mut ran: Ran<K, T>) {
        let Some((_, of_replays)) = &mut ran.captured else { return };
        if let Some(results) = of_replays.take() {
            ran.results = results;
        }
        if self.captured.len() == MOST {
            self.captured.remove(0);
        }
        self.captured.push(ran);
    }

    /// Forgets all passes: nobody knows how far the last one came.
    pub fn clear(&mut self) {
        self.captured.clear();
    }
}

impl<K, T> Ran<K, T> {
    /// True if the results are those of each later replay, too.
    pub fn is_replay(&self) -> bool {
        matches!(self.captured, Some((_, None)))
    }
}
