//! Pages of layers with a window: a sequence gives back those that it will not see again.
//!
//! All layers with a window have one table, of pages of their own, for the widest of their windows.
//! A page is taken when a pass writes to it, and not before: what a sequence has at a time is
//! bounded by the window and by the pass, so that a pool with that much for each slot, for each
//! mark and for the longest pass never runs out of them. A mark keeps the pages before its place.

use super::{Place, Places};
use crate::ModelError;
use crate::cache::window::WINDOW_ROLLBACK;
use lowbit_kernels::KernelError;
use lowbit_kernels::ops::PAGE_TOKENS;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The pages of a pool's layers with a window.
#[derive(Debug)]
pub(super) struct WindowPool {
    /// Keys that a query sees.
    tokens: usize,
    pages: Places,
}

/// A sequence's pages in these layers.
#[derive(Clone, Debug, Default)]
pub(super) struct WindowPages {
    /// Keys that a query sees; none in models without windows.
    tokens: Option<usize>,
    /// By their place in the text; none where they are given back, or not taken yet.
    pages: Vec<Option<Arc<Place>>>,
}

/// The pages before a place of a text, and the place of the first.
pub(super) type MarkedPages = Arc<OnceLock<(usize, Vec<Arc<Place>>)>>;

/// The places of the pages that a token at `position`, and those before it that may be refused,
/// see before it.
fn seen(window: usize, position: usize) -> Range<usize> {
    let first = (position + 1).saturating_sub(window.saturating_add(WINDOW_ROLLBACK));
    first / PAGE_TOKENS..position.div_ceil(PAGE_TOKENS)
}

impl WindowPool {
    pub(super) fn new(tokens: usize, pages: usize) -> Self {
        Self { tokens, pages: Places::new(pages) }
    }

    pub(super) fn free_pages(&self) -> usize {
        self.pages.len()
    }

    /// No pages yet.
    pub(super) fn begin(&self) -> WindowPages {
        WindowPages { tokens: Some(self.tokens), pages: vec![] }
    }

    /// Takes the pages that tokens at `positions` write to.
    ///
    /// # Errors
    /// [`ModelError::PoolIsFull`].
    pub(super) fn take(&self, of: &mut WindowPages, positions: Range<usize>) -> Result<(), ModelError> {
        let columns = positions.start / PAGE_TOKENS..positions.end.div_ceil(PAGE_TOKENS);
        if of.pages.len() < columns.end {
            of.pages.resize(columns.end, None);
        }
        for page in of.pages[columns].iter_mut().filter(|page| page.is_none()) {
            *page = Some(Arc::new(self.pages.take().ok_or(ModelError::PoolIsFull)?));
        }
        Ok(())
    }

    /// The pages of a sequence that goes on after the first `tokens` tokens of `of`: its own or
    /// those of `mark`, which is of that place.
    ///
    /// # Errors
    /// [`KernelError::Value`] where neither has them.
    pub(super) fn at(
        &self,
        of: &WindowPages,
        tokens: usize,
        mark: Option<&MarkedPages>,
    ) -> Result<WindowPages, KernelError> {
        let marked = mark.and_then(|mark| mark.get());
        let needed = match tokens {
            0 => 0..0,
            // The next token's own window: a mark need not go back further.
            _ => (tokens + 1).saturating_sub(self.tokens) / PAGE_TOKENS..tokens.div_ceil(PAGE_TOKENS),
        };
        let mut pages = self.begin();
        pages.pages.resize(needed.end, None);
        for column in needed {
            let of_mark = marked.and_then(|(first, pages)| pages.get(column.checked_sub(*first)?));
            let page = of_mark.or_else(|| of.pages.get(column)?.as_ref()).ok_or_else(|| {
                let (op, operand, got) = ("go_back", "tokens", tokens.to_string());
                let want = "a mark of this place, or one whose window was not given back".into();
                KernelError::Value { op, operand, got, want }
            })?;
            pages.pages[column] = Some(page.clone());
        }
        Ok(pages)
    }
}

impl WindowPages {
    /// Gives back the pages that are not seen after `position` tokens.
    pub(super) fn forget(&mut self, position: usize) {
        let Some(window) = self.tokens else { return };
        let before = seen(window, position).start.min(self.pages.len());
        // Those before these were given back earlier.
        for page in self.pages[..before].iter_mut().rev() {
            if page.take().is_none() {
                break;
            }
        }
    }

    /// The pages that a token after `position` others sees.
    pub(super) fn marked(&self, position: usize) -> (usize, Vec<Arc<Place>>) {
        let columns = self.tokens.map_or(0..0, |window| seen(window, position));
        let pages = self.pages.iter().take(columns.end).skip(columns.start).flatten();
        (columns.start, pages.cloned().collect())
    }

    /// The numbers of the pages, 0 for those that are given back; none in models without windows.
    pub(super) fn numbers(&self) -> Option<impl ExactSizeIterator<Item = u32> + Clone> {
        self.tokens.map(|_| self.pages.iter().map(|page| page.as_ref().map_or(0, |page| page.number)))
    }

    /// The place of the first page that a token at `position` sees.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.tokens.map_or(0, |window| (position + 1).saturating_sub(window) / PAGE_TOKENS)
    }
}
