//! Key-value caches of many sequences, in pages of one pool.

mod cpu;
#[cfg(feature = "gpu")]
pub(in crate::ops) mod gpu;
#[cfg(test)]
mod tests;

use super::Check;
use super::cache_rows::CacheType;
use crate::{Device, KernelError, Tensor};
use lowbit_formats::DType;

pub(super) use cpu::append;

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 64;

/// A layer's keys and values of all sequences, and the pages of the sequences of a pass. The key of
/// position p of sequence s is in page `table[s, p / 64]`, at `p % 64`; its value likewise.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | keys | `[P, Hkv, 64, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | values | `[P, Hkv, 64, Dv]` | that of keys |
/// | table | `[S, N]` | u32 |
///
/// A row of the table may be longer than its sequence: entries past the last position that a pass
/// uses are not read. Sequences may share pages that they only read.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// The pool of keys.
    pub keys: &'a Tensor,
    /// The pool of values.
    pub values: &'a Tensor,
    /// The pages of each sequence, in order.
    pub table: &'a Tensor,
}

/// As [`Pages`], to write new keys and values.
#[derive(Debug)]
pub struct PagesMut<'a> {
    /// The pool of keys.
    pub keys: &'a mut Tensor,
    /// The pool of values.
    pub values: &'a mut Tensor,
    /// The pages of each sequence, in order.
    pub table: &'a Tensor,
}

impl PagesMut<'_> {
    /// The same pages, to read.
    pub fn as_pages(&self) -> Pages<'_> {
        Pages { keys: self.keys, values: self.values, table: self.table }
    }
}

/// The sizes of [`Pages`] and of a pass over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolShape {
    /// P.
    pub pages: usize,
    /// Hkv.
    pub heads: usize,
    /// D and Dv.
    pub widths: [usize; 2],
    /// N: the most pages of a sequence.
    pub columns: usize,
    /// Tokens of each sequence in the pass.
    pub tokens: usize,
}

impl Pages<'_> {
    /// Checks the pool, its table, and that each of the sequences has as many of the tokens at
    /// `positions`: T divided by S. On the CPU also that each position has a page.
    pub(super) fn check(&self, check: Check, positions: &Tensor) -> Result<PoolShape, KernelError> {
        let Self { keys, values, table } = *self;
        let ([pages, heads, ..], width) = check_pool(check, "keys", keys)?;
        let ([.., value_row], value_width) = check_pool(check, "values", values)?;
        let wanted = [pages, heads, PAGE_TOKENS, value_row];
        check.shape("values", values, &wanted, || format!("keys {:?}", keys.shape()))?;
        check.dtype("values", values, keys.dtype())?;
        let [sequences, columns] = check.dims("table", table, "[S, N]")?;
        check.dtype("table", table, DType::U32)?;
        let [count] = check.dims("positions", positions, "[T]")?;
        if count > 0 && (sequences == 0 || !count.is_multiple_of(sequences)) {
            let want = format!("each of the {sequences} sequences of the table has as many tokens");
            return Err(check.shape_error("positions", positions, want));
        }
        check.ids("positions", positions, columns * PAGE_TOKENS)?;
        for (operand, x) in [("values", values), ("table", table), ("positions", positions)] {
            check.same_device(operand, x.device(), keys.device())?;
        }
        let tokens = count / sequences.max(1);
        let shape = PoolShape { pages, heads, widths: [width, value_width], columns, tokens };
        if let Device::Cpu(_) = keys.device() {
            shape.check_table(check, table.as_slice()?, positions.as_slice()?)?;
        }
        Ok(shape)
    }
}

/// The sizes of a pool of keys or values, and the values of its rows.
fn check_pool(check: Check, operand: &'static str, x: &Tensor) -> Result<([usize; 4], usize), KernelError> {
    let names = "[P, Hkv, 64, D]";
    let sizes: [usize; 4] = check.dims(operand, x, names)?;
    if sizes[2] != PAGE_TOKENS || x.is_empty() {
        return Err(check.shape_error(operand, x, format!("{names} with no size of 0 is wanted")));
    }
    let cache = CacheType::of(check, operand, x)?;
    Ok((sizes, cache.width(sizes[3])))
}

impl PoolShape {
    /// Checks that the pages of all positions exist.
    fn check_table(&self, check: Check, table: &[u32], positions: &[u32]) -> Result<(), KernelError> {
        // Tokens see those before them, too.
        for (sequence, positions) in positions.chunks(self.tokens.max(1)).enumerate() {
            let last = positions.iter().max().map_or(0, |&position| position as usize / PAGE_TOKENS + 1);
            let first = sequence * self.columns;
            let wrong = (first..first + last).find(|&entry| table[entry] as usize >= self.pages);
            if let Some(index) = wrong {
                let (id, count) = (table[index], self.pages);
                return Err(KernelError::Id { op: check.0, operand: "table", index, id, count });
            }
        }
        Ok(())
    }

    /// The row of the pool, `[P * Hkv * 64, D]`, that holds each token of its first head; those of
    /// the next heads are [`PAGE_TOKENS`] further each.
    pub fn places(&self, table: &[u32], positions: &[u32]) -> Vec<usize> {
        let place = |(token, &position): (usize, &u32)| {
            let (column, row) = (position as usize / PAGE_TOKENS, position as usize % PAGE_TOKENS);
            let page = table[token / self.tokens * self.columns + column] as usize;
            page * self.heads * PAGE_TOKENS + row
        };
        positions.iter().enumerate().map(place).collect()
    }
}

/// `y[h, 64 i + j, d] = pages[table[i], h, j, d]`: the keys or values of one sequence as a
/// contiguous cache, for [`attention()`](super::attention()) of many tokens.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | pages | `[P, Hkv, 64, D]` | f32, f16, bf16, [8 bits](CacheType::Int8) |
/// | table | `[n]` | u32 |
/// | y | `[Hkv, 64 n, D]` | that of pages |
///
/// Values are copied bit for bit. All n pages are read.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that are
/// not as the table says; [`KernelError::Device`] for operands on two devices; [`KernelError::Id`]
/// for a page beyond the pool, which on a GPU is no error: its rows of y are NaN.
pub fn gather_pages(pages: &Tensor, table: &Tensor) -> Result<Tensor, KernelError> {
    let check = Check("gather_pages");
    let ([count, heads, _, width], _) = check_pool(check, "pages", pages)?;
    let [n] = check.dims("table", table, "[n]")?;
    check.ids("table", table, count)?;
    check.same_device("table", table.device(), pages.device())?;
    let mut y = Tensor::allocate(&[heads, n * PAGE_TOKENS, width], pages.dtype(), pages.device())?;
    if y.is_empty() {
        return Ok(y);
    }
    match pages.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::gather(check, gpu, pages, table, &y)?,
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => cpu::gather(cpu, pages, table.as_slice()?, &mut y),
    }
    Ok(y)
}
