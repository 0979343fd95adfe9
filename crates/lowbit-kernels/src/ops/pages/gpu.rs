//! Pages on a GPU. Tables are on the device: the host does not know them, and a captured pass
//! replays with other ones.

#![allow(unsafe_code)] // Launches.

use super::{PAGE_TOKENS, PoolShape};
use crate::gpu::compile::Target;
use crate::gpu::copy::{UNITS, cubes};
use crate::gpu::float::{nan, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::ops::cache_rows::CacheType;
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// [`PAGE_TOKENS`], as kernels count.
pub(in crate::ops) const PAGE: u32 = PAGE_TOKENS as u32;

/// The sizes of [`Pages`](super::Pages) and of a pass over them.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops) struct PoolSizes {
    /// Pages of the pool.
    pub pages: u32,
    /// Key heads.
    pub heads: u32,
    /// Pages of a row of the table.
    pub columns: u32,
    /// Tokens of each sequence in the pass.
    pub tokens: u32,
}

impl PoolSizes {
    /// Placeholders, for a kernel of contiguous caches.
    pub fn none() -> Self {
        Self { pages: 0, heads: 0, columns: 0, tokens: 0 }
    }
}

/// A table of pages with its sizes, as a launch takes them.
pub(in crate::ops) type Table<'a> = (&'a Tensor, PoolSizes);

impl PoolShape {
    /// The sizes as kernels take them.
    pub fn sizes(&self, check: Check) -> Result<PoolSizes, KernelError> {
        let Self { pages, heads, columns, tokens, .. } = *self;
        // The last position must have an index, too.
        check.index(columns * PAGE_TOKENS)?;
        Ok(PoolSizes {
            pages: check.index(pages)?,
            heads: check.index(heads)?,
            columns: check.index(columns)?,
            tokens: check.index(tokens)?,
        })
    }
}

#[cube]
impl PoolSizes {
    /// The same sizes: a kernel's structs are moved.
    pub fn again(&self) -> PoolSizes {
        PoolSizes { pages: self.pages, heads: self.heads, columns: self.columns, tokens: self.tokens }
    }

    /// The page of a position of token `token`'s sequence, which the table must have a column for.
    /// It may be beyond the pool.
    pub fn page(&self, table: &[u32], token: u32, position: u32) -> u32 {
        table[(token / self.tokens * self.columns + position / PAGE) as usize]
    }

    /// The row of the pool that holds head `head` of the token at `position` in page `page`.
    pub fn row(&self, page: u32, head: u32, position: u32) -> u32 {
        (page * self.heads + head) * PAGE + position % PAGE
    }
}

/// The row of a cache for a token, a key head and a position, and true if the cache has it. The
/// table and its sizes are those of pages.
#[cube]
pub(in crate::ops) fn cache_row(
    table: &[u32],
    place: (u32, u32, u32),
    capacity: u32,
    pool: &PoolSizes,
    #[comptime] paged: bool,
) -> (u32, bool) {
    let (token, head, position) = place;
    if comptime!(paged) {
        let column = position / PAGE;
        // Positions past the table are not looked up.
        let within = select(column < pool.columns, position, 0u32);
        let page = pool.page(table, token, within);
        (pool.row(page, head, position), column < pool.columns && page < pool.pages)
    } else {
        (head * capacity + position, position < capacity)
    }
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct GatherSizes {
    /// Vectors of y.
    len: u32,
    /// Vectors of a page of a head.
    page: u32,
    /// Pages of the pool.
    pages: u32,
    heads: u32,
    /// Pages of y.
    count: u32,
}

/// A unit moves a vector at a time.
#[kernel]
fn gather_pages<X: Int, V: Size>(
    pages: &[Vector<X, V>],
    table: &[u32],
    y: &mut [Vector<X, V>],
    sizes: GatherSizes,
    #[comptime] dtype: FloatType,
) {
    let mut i = ABSOLUTE_POS as u32;
    while i < sizes.len {
        let part = i / sizes.page;
        let page = table[(part % sizes.count) as usize];
        let mut values = Vector::<X, V>::new(X::cast_from(comptime!(nan(dtype)).runtime()));
        if page < sizes.pages {
            values =
                pages[((page * sizes.heads + part / sizes.count) * sizes.page + i % sizes.page) as usize];
        }
        y[i as usize] = values;
        i += CUBE_COUNT_X * CUBE_DIM_X;
    }
}

fn compiled(target: &Target, dtype: FloatType, vector: usize) -> Kernel<GatherPages<'static>> {
    with_storage!(dtype, X => GatherPages::kernel::<X>(target, UNITS, vector, dtype))
}

#[cfg(test)]
inventory::submit!(crate::testing::kernels::Kernels(kernels));

/// Each type and vector length.
#[cfg(test)]
fn kernels(target: &Target) -> Vec<Box<dyn CubeKernel>> {
    let all = crate::ops::testing::FLOATS.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, rows::VECTOR)]);
    all.map(|(dtype, vector)| compiled(target, dtype, vector).code()).collect()
}

/// Fills `y`, which is not empty; everything was checked.
pub(super) fn gather(
    check: Check,
    gpu: &Gpu,
    pages: &Tensor,
    table: &Tensor,
    y: &Tensor,
) -> Result<(), KernelError> {
    let (float, size) = CacheType::of(check, "pages", pages)?.moved();
    let page = PAGE_TOKENS * pages.dim(3) / size;
    let vector = rows::vector(gpu.target(), rows::VECTOR, page, &[pages, y]);
    check.index(pages.len().max(y.len()))?;
    let len = y.len() / size / vector;
    let sizes = GatherSizes {
        len: check.index(len)?,
        page: check.index(page / vector)?,
        pages: check.index(pages.dim(0))?,
        heads: check.index(pages.dim(1))?,
        count: check.index(table.len())?,
    };
    let arguments = GatherPages { pages: pages.buffer()?, table: table.buffer()?, y: y.buffer()?, sizes };
    let kernel = compiled(gpu.target(), float, vector);
    // SAFETY: y has a page for each entry of the table and each head; pages beyond the pool are not
    // read.
    unsafe { gpu.launch(kernel, cubes(len), arguments) }
}
