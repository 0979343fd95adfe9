use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::FileError;

/// A tensor's bytes: they lie in a mapped file, or they are computed from such when they are asked
/// for.
#[derive(Clone)]
pub struct Contents {
    source: Source,
    range: Range<usize>,
}

#[derive(Clone)]
enum Source {
    Mapped(Bytes),
    Computed(Arc<Computed>),
}

struct Computed {
    compute: Box<dyn Fn() -> Vec<u8> + Send + Sync>,
    /// The bytes computed last, until they are released.
    held: Mutex<Option<Bytes>>,
}

impl Contents {
    /// `len` bytes, which `compute` makes: when they are first asked for, and again after
    /// [`Self::release`].
    pub(crate) fn computed(len: usize, compute: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Self {
        let computed = Computed { compute: Box::new(compute), held: Mutex::new(None) };
        Self { source: Source::Computed(Arc::new(computed)), range: 0..len }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The bytes, sharing memory with the map, or with others that asked for what was computed.
    pub fn get(&self) -> Bytes {
        match &self.source {
            Source::Mapped(bytes) => bytes.slice(self.range.clone()),
            Source::Computed(computed) => computed.get().slice(self.range.clone()),
        }
    }

    /// For those who look at sizes alone: the same, but zeros that take up no memory instead of
    /// what would have to be computed.
    ///
    /// # Errors
    /// [`FileError::Io`] when not even addresses are left.
    pub fn unread(&self) -> Result<Bytes, FileError> {
        match &self.source {
            Source::Mapped(_) => Ok(self.get()),
            Source::Computed(_) => {
                crate::map::zeros(self.len()).map_err(FileError::io(std::path::Path::new("memory")))
            }
        }
    }

    /// Some of the bytes.
    ///
    /// # Panics
    /// When they are not there.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} bytes", self.len());
        let start = self.range.start;
        Self { source: self.source.clone(), range: start + range.start..start + range.end }
    }

    /// Says that they are not needed for now: what was computed is dropped, and the memory of a map
    /// may be used otherwise.
    pub(crate) fn release(&self) {
        match &self.source {
            Source::Mapped(bytes) => crate::map::release(&bytes[self.range.clone()]),
            Source::Computed(computed) => drop(computed.lock().take()),
        }
    }
}

impl Computed {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Bytes>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> Bytes {
        self.lock().get_or_insert_with(|| (self.compute)().into()).clone()
    }
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl From<Bytes> for Contents {
    fn from(bytes: Bytes) -> Self {
        let range = 0..bytes.len();
        Self { source: Source::Mapped(bytes), range }
    }
}

impl From<Vec<u8>> for Contents {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn bytes_are_computed_when_they_are_asked_for() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let contents = Contents::computed(4, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            vec![1, 2, 3, 4]
        });
        let part = contents.slice(1..4).slice(1..3);
        assert_eq!((contents.len(), part.len(), &contents.unread().unwrap()[..]), (4, 2, &[0; 4][..]));
        assert_eq!(count.load(Ordering::Relaxed), 0);
        assert_eq!((&part.get()[..], &contents.get()[..]), (&[3, 4][..], &[1, 2, 3, 4][..]));
        assert_eq!(count.load(Ordering::Relaxed), 1);
        contents.release();
        assert_eq!(&part.get()[..], [3, 4]);
        assert_eq!(count.load(Ordering::Relaxed), 2);
        assert!(Contents::from(vec![]).is_empty());
    }
}
