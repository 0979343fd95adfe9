//! The rows of passes over sequences in a pool.

use crate::PoolCache;
use crate::layers::Step;
use lowbit_kernels::ops::DecodeBatch;
use lowbit_kernels::{Device, KernelError, Tensor};
use std::iter::once;

/// Rows that a device knows. All that changes from pass to pass is in tensors.
#[derive(Debug)]
pub(super) struct Rows {
    /// Each row's token, position, number of the step, and sampling.
    pub state: DecodeBatch,
    table: Table,
    /// In models with layers that keep a window: theirs.
    windows: Option<Table>,
}

/// The pages of rows.
#[derive(Debug)]
struct Table {
    /// u32 `[rows, N]`, as [`Step::rows`] takes it.
    pages: Tensor,
    /// The pages that the device was last told of each row.
    written: Vec<Vec<u32>>,
}

impl Table {
    fn new([rows, columns]: [usize; 2], device: &Device) -> Result<Self, KernelError> {
        let pages = Tensor::new(&vec![0u32; rows * columns], &[rows, columns], device)?;
        Ok(Self { pages, written: vec![vec![]; rows] })
    }

    /// Writes a row, if it has changed.
    fn write(
        &mut self,
        row: usize,
        pages: impl ExactSizeIterator<Item = u32> + Clone,
    ) -> Result<(), KernelError> {
        let written = &mut self.written[row];
        if !written.iter().copied().eq(pages.clone()) {
            written.clear();
            written.extend(pages);
            self.pages.write_at(row * self.pages.dim(1), written)?;
        }
        Ok(())
    }
}

impl Rows {
    /// `rows` rows that are nobody's, of up to `columns` pages, and penalties that look at up to
    /// `window` last tokens; `windows` if there are layers that keep a window.
    pub fn new(
        [rows, columns]: [usize; 2],
        window: usize,
        windows: bool,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let table = || Table::new([rows, columns], device);
        let state = DecodeBatch::new(rows, window, device)?;
        Ok(Self { state, table: table()?, windows: windows.then(table).transpose()? })
    }

    /// Rows, and the pages that each may have.
    pub fn shape(&self) -> [usize; 2] {
        [self.table.pages.dim(0), self.table.pages.dim(1)]
    }

    /// Tells the device the pages of a row.
    pub fn write_pages(&mut self, row: usize, cache: &PoolCache) -> Result<(), KernelError> {
        self.table.write(row, cache.pages())?;
        match (&mut self.windows, cache.window_pages()) {
            (Some(table), Some(pages)) => table.write(row, pages),
            _ => Ok(()),
        }
    }

    /// Makes a row nobody's: it runs token 0 at place 0 of page 0.
    pub fn clear(&mut self, row: usize) -> Result<(), KernelError> {
        self.state.clear_row(row)?;
        [&mut self.table].into_iter().chain(&mut self.windows).try_for_each(|table| table.write(row, once(0)))
    }

    /// u32 `[count]`: the tokens of the first `count` rows.
    pub fn ids(&self, count: usize) -> Result<Tensor, KernelError> {
        self.state.tokens().rows(0, count)
    }

    /// A step over these rows, with the slots and offsets of its recurrences, as [`Step::rows`]
    /// takes them.
    pub fn step(&self, count: usize, [slots, cu_seqlens]: [&Tensor; 2]) -> Result<Step, KernelError> {
        let first = |table: &Table| table.pages.rows(0, count);
        let tables = (first(&self.table)?, self.windows.as_ref().map(first).transpose()?);
        Ok(Step::rows(self.state.positions().rows(0, count)?, tables, slots.clone(), cu_seqlens.clone()))
    }
}
