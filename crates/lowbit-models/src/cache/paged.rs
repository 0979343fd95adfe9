//! The places of rows of a pass in a pool's pages.

use lowbit_kernels::Tensor;
use std::ops::Range;

/// Rows of a pass whose sequences have as many of them each, and the pages of these sequences.
#[derive(Clone, Debug)]
pub(crate) struct PagedRows {
    pub rows: Range<usize>,
    /// u32 `[T]`, of these rows alone.
    pub positions: Tensor,
    /// u32 `[S, N]`.
    pub table: Tensor,
    /// In models with layers that keep a window: what these have instead.
    pub window: Option<PagedWindow>,
}

/// The pages of sequences in layers that keep a window.
#[derive(Clone, Debug)]
pub(crate) struct PagedWindow {
    /// u32 `[S, N]`: 0 for pages that were given back, which nobody sees.
    pub table: Tensor,
    /// Of one sequence, u32 `[n]` and `[T]`: the pages that its rows see, and the rows' places in
    /// these.
    pub seen: Option<[Tensor; 2]>,
}

impl PagedRows {
    /// The pages in layers of this kind.
    pub(crate) fn table_of(&self, windowed: bool) -> &Tensor {
        self.window.as_ref().filter(|_| windowed).map_or(&self.table, |window| &window.table)
    }
}
