//! The ids of texts that were tokenised before: a long conversation that comes again, or is counted
//! before it is sent, is looked up.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Shorter texts are tokenised in less than a millisecond.
const SHORTEST: usize = 2 << 10;
/// Bytes of all texts and ids.
const MOST: usize = 64 << 20;

/// Texts and their ids, of which those go first that were not used for longest.
#[derive(Default)]
pub(crate) struct IdCache(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    texts: HashMap<Box<str>, (Arc<[u32]>, u64)>,
    bytes: usize,
    /// Counts uses, as the time of the last one.
    clock: u64,
}

fn bytes(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids)
}

impl IdCache {
    /// The ids of `text`, by `encode` if they are not here.
    ///
    /// # Errors
    /// Those of `encode`.
    pub(crate) fn get<E>(
        &self,
        text: &str,
        encode: impl FnOnce(&str) -> Result<Vec<u32>, E>,
    ) -> Result<Arc<[u32]>, E> {
        if text.len() < SHORTEST {
            return Ok(encode(text)?.into());
        }
        if let Some(ids) = self.lock(|kept| kept.find(text)) {
            return Ok(ids);
        }
        let ids: Arc<[u32]> = encode(text)?.into();
        self.lock(|kept| kept.keep(text, &ids));
        Ok(ids)
    }

    fn lock<T>(&self, look: impl FnOnce(&mut Kept) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Kept {
    fn find(&mut self, text: &str) -> Option<Arc<[u32]>> {
        self.clock += 1;
        let (ids, used) = self.texts.get_mut(text)?;
        *used = self.clock;
        Some(ids.clone())
    }

    fn keep(&mut self, text: &str, ids: &Arc<[u32]>) {
        let more = bytes(text, ids);
        // Another request may have brought it in between.
        if more > MOST || self.texts.contains_key(text) {
            return;
        }
        while self.bytes + more > MOST {
            let oldest = self.texts.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(text, _)| text.clone()) else { break };
            if let Some((ids, _)) = self.texts.remove(&oldest) {
                self.bytes -= bytes(&oldest, &ids);
            }
        }
        self.bytes += more;
        self.texts.insert(text.into(), (ids.clone(), self.clock));
    }
}

impl fmt::Debug for IdCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdCache")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_tokenised_once_within_the_budget() {
        let (cache, mut calls) = (IdCache::default(), 0);
        let mut get = |text: &str| {
            cache.get(text, |_| {
                calls += 1;
                if text.ends_with('!') { Err("no") } else { Ok(vec![text.len() as u32]) }
            })
        };
        let (short, long, wrong) = ("a".repeat(100), "b".repeat(5000), "c".repeat(5000) + "!");
        for text in [&short, &short, &long, &long, &wrong, &wrong] {
            assert_eq!(
                get(text),
                if text.ends_with('!') { Err("no") } else { Ok([text.len() as u32].into()) }
            );
        }
        // Each large text takes a fifth.
        let large: Vec<String> = (0..6).map(|i| i.to_string().repeat(MOST / 5 - 100)).collect();
        large.iter().for_each(|text| assert!(get(text).is_ok()));
        assert!(get(&large[5]).is_ok() && get(&large[0]).is_ok());
        assert_eq!(calls, 2 + 1 + 2 + 6 + 1);
        assert!(cache.0.lock().unwrap().bytes <= MOST);
    }
}
