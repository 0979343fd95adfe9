//! The caches of layers whose queries see a window: they keep the last keys and values alone.
//!
//! The buffer of such a layer is contiguous and has a fixed size. Its first row is of position
//! [`Window::first`], so that a token's *place* in it is its position less that. When it is full,
//! the rows that can still be seen are copied to its front, and `first` moves on by a multiple of
//! [`STRIDE`]. A pass with more tokens than that leaves room for runs on a buffer of its own, which
//! begins with the rows that its first token sees, and whose last rows are copied back when the
//! last layer that reads it has run: one layer at a time has such a buffer.
//!
//! Queries and keys are rotated by their positions before they are stored: only attention's mask
//! counts rows, and it counts them from a place.

use super::LayerCache;
use lowbit_kernels::ops::{self, PAGE_TOKENS};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::ops::Range;

/// The tokens that a cache can always go back by, besides where it has forgotten nothing: drafts
/// that a model was offered and refused.
pub const WINDOW_ROLLBACK: usize = 16;

/// The tokens that a buffer has room for beside those that it keeps: it moves on by so many.
const STRIDE: usize = 256;

/// The rows that a buffer keeps when it moves on.
fn kept(window: usize) -> usize {
    let rows = window.saturating_sub(1).saturating_add(WINDOW_ROLLBACK);
    rows.div_ceil(PAGE_TOKENS).saturating_mul(PAGE_TOKENS)
}

/// The rows of a window's buffer.
pub(crate) fn capacity(window: usize) -> usize {
    kept(window).saturating_add(STRIDE)
}

/// The pages of a pool that a sequence keeps between two passes, where buffers would have so many
/// rows; 0 for none.
pub(crate) fn pages(capacity: usize) -> usize {
    capacity.checked_sub(STRIDE).map_or(0, |kept| kept / PAGE_TOKENS + 1)
}

/// The first position, a multiple of [`STRIDE`], of a buffer that holds the token at `last`: a
/// function of it alone, so that buffers stand alike however a text was cut into passes.
fn first_for(window: usize, last: usize) -> usize {
    match last.checked_sub(capacity(window)) {
        None => 0,
        Some(beyond) => (beyond / STRIDE + 1) * STRIDE,
    }
}

/// The first position that a query at `position` sees.
fn sees_from(window: usize, position: usize) -> usize {
    (position + 1).saturating_sub(window)
}

/// The buffers of a cache's layers with one size of windows: they move together.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// Keys that a query sees.
    tokens: usize,
    /// The position of the buffers' first row.
    first: usize,
    /// The first position whose rows are there; 0 where nothing was forgotten.
    known: usize,
    /// `first` on the device, u32 `[1]`: a captured step reads it.
    start: Tensor,
    /// The buffers that the pass under way runs on, if they are its own.
    pass: Option<WidePass>,
}

/// A pass on buffers of its own.
#[derive(Clone, Debug)]
pub(crate) struct WidePass {
    /// The rows that they have room for.
    capacity: usize,
    /// The rows that the pass begins with: their places in the layer's buffer, and in its own.
    before: [Tensor; 2],
    /// The first position of the layer's buffer after the pass.
    next: usize,
    /// The rows that stay: their places in the pass's buffer, and in the layer's.
    after: [Tensor; 2],
}

/// The part of a layer's cache that makes it a window's.
#[derive(Clone, Debug)]
pub(crate) struct WindowRows {
    /// Keys that a query sees.
    pub tokens: usize,
    /// The layer's own buffers, keys and values, while a pass runs on others.
    pub resting: Option<[Tensor; 2]>,
    /// That pass.
    pub pass: Option<WidePass>,
    /// u32 `[T]`: the places of the tokens of the pass under way.
    pub places: Option<Tensor>,
}

/// The rows of a window before a place: what a cache needs to go back there.
#[derive(Clone, Debug)]
pub(crate) struct WindowMark {
    /// The position of the first.
    from: usize,
    /// Keys and values `[rows, Hkv, head_dim]` of each layer with this window.
    rows: Vec<[Tensor; 2]>,
}

/// Numbers of rows on a device.
fn ids(rows: Range<usize>, device: &Device) -> Result<Tensor, KernelError> {
    let ids: Vec<u32> = rows.map(|row| row as u32).collect();
    Tensor::new(&ids, &[ids.len()], device)
}

/// Copies rows of one buffer to places of another.
fn copy(from: &Tensor, to: &mut Tensor, [rows, places]: [&Tensor; 2]) -> Result<(), KernelError> {
    ops::kv_append(to, &ops::kv_gather(from, rows)?, places)
}

impl WindowRows {
    pub(crate) fn new(tokens: usize) -> Self {
        Self { tokens, resting: None, pass: None, places: None }
    }

    /// Moves the layer to buffers of the pass's own.
    fn open(&mut self, buffers: [&mut Tensor; 2], pass: &WidePass) -> Result<(), KernelError> {
        let [rows, places] = &pass.before;
        let wide = |x: &Tensor| {
            let shape = [x.dim(0), pass.capacity, x.dim(2)];
            let mut wide = Tensor::allocate_zeros(&shape, x.dtype(), x.device())?;
            copy(x, &mut wide, [rows, places])?;
            Ok::<_, KernelError>(wide)
        };
        let [keys, values] = buffers;
        let [wide_keys, wide_values] = [wide(keys)?, wide(values)?];
        let own = [std::mem::replace(keys, wide_keys), std::mem::replace(values, wide_values)];
        (self.resting, self.pass) = (Some(own), Some(pass.clone()));
        Ok(())
    }

    /// Copies the rows that stay to the layer's own buffers, and moves it back there.
    pub(crate) fn close(&mut self, [keys, values]: [&mut Tensor; 2]) -> Result<(), KernelError> {
        let (Some(mut own), Some(pass)) = (self.resting.take(), self.pass.take()) else { return Ok(()) };
        let [rows, places] = &pass.after;
        for (wide, own) in [&*keys, &*values].into_iter().zip(&mut own) {
            copy(wide, own, [rows, places])?;
        }
        [*keys, *values] = own;
        Ok(())
    }

    /// Forgets a pass that did not come to its end.
    fn abandon(&mut self, [keys, values]: [&mut Tensor; 2]) {
        if let Some(own) = self.resting.take() {
            [*keys, *values] = own;
        }
        (self.pass, self.places) = (None, None);
    }
}

/// The layers of a cache that have this window.
fn of_window(
    layers: &mut [LayerCache],
    tokens: usize,
) -> impl Iterator<Item = ([&mut Tensor; 2], &mut WindowRows)> {
    layers.iter_mut().filter_map(LayerCache::windowed).filter(move |(_, rows)| rows.tokens == tokens)
}

impl Window {
    /// One for each size of windows among `layers`, which are empty.
    pub(crate) fn all(layers: &mut [LayerCache]) -> Result<Vec<Self>, KernelError> {
        let mut all: Vec<Self> = vec![];
        for ([keys, _], rows) in layers.iter_mut().filter_map(LayerCache::windowed) {
            if !all.iter().any(|window| window.tokens == rows.tokens) {
                let start = Tensor::new(&[0u32], &[1], keys.device())?;
                all.push(Self { tokens: rows.tokens, first: 0, known: 0, start, pass: None });
            }
        }
        Ok(all)
    }

    /// The tensor of its own that captured steps read.
    pub(crate) fn start(&self) -> &Tensor {
        &self.start
    }

    fn capacity(&self) -> usize {
        capacity(self.tokens)
    }

    /// True if this is the window of a layer.
    pub(crate) fn is_of(&self, rows: &WindowRows) -> bool {
        self.tokens == rows.tokens
    }

    /// Rows of buffers that hold `tokens` tokens of a text from its start, or all that they keep.
    pub(crate) fn rows_for(&self, tokens: usize) -> usize {
        tokens.min(self.capacity())
    }

    /// True if buffers of so many rows take `tokens` more after `position` tokens where they are.
    pub(crate) fn has_room(&self, rows: usize, position: usize, tokens: usize) -> bool {
        rows == self.capacity() || position + tokens <= self.first + rows
    }

    /// True if the rows are there that a token at `position` sees.
    pub(crate) fn reaches(&self, position: usize) -> bool {
        self.known == 0 || self.known <= sees_from(self.tokens, position)
    }

    /// A copy's own place on the device.
    pub(crate) fn unshare(&mut self) -> Result<(), KernelError> {
        if self.start.is_shared() {
            self.start = Tensor::new(&[self.first as u32], &[1], self.start.device())?;
        }
        Ok(())
    }

    fn set_first(&mut self, first: usize) -> Result<(), KernelError> {
        self.known = self.known.max(first);
        if self.first != first {
            self.first = first;
            self.unshare()?;
            self.start.write_at(0, &[first as u32])?;
        }
        Ok(())
    }

    /// Makes room for `tokens` after `position` tokens, as far as it can without a pass on buffers
    /// of its own: the layers' buffers grow until they are full, then move on.
    pub(crate) fn make_ready(
        &mut self,
        layers: &mut [LayerCache],
        position: usize,
        tokens: usize,
    ) -> Result<(), KernelError> {
        self.unshare()?;
        let end = position + tokens;
        let rows = self.rows_for(end - self.first);
        for (buffers, _) in of_window(layers, self.tokens) {
            grow(buffers, rows, self.capacity())?;
        }
        let next = first_for(self.tokens, end.saturating_sub(1));
        let is_full = end - self.first > self.capacity();
        if is_full && next <= sees_from(self.tokens, position) {
            let (device, count) = (self.start.device().clone(), position - next);
            let from = ids(next - self.first..next - self.first + count, &device)?;
            let to = ids(0..count, &device)?;
            for (buffers, _) in of_window(layers, self.tokens) {
                for buffer in buffers {
                    let rows = ops::kv_gather(buffer, &from)?;
                    ops::kv_append(buffer, &rows, &to)?;
                }
            }
            self.set_first(next)?;
        }
        Ok(())
    }

    /// Begins a pass of tokens at `positions`, of which `position` is the first. Returns true if it
    /// has buffers of its own.
    pub(crate) fn begin(
        &mut self,
        layers: &mut [LayerCache],
        position: usize,
        positions: &Tensor,
    ) -> Result<bool, KernelError> {
        let (tokens, device) = (positions.len(), positions.device());
        let end = position + tokens;
        let is_wide = end - self.first > self.capacity();
        let mut start = self.start.clone();
        if is_wide {
            let page = |position: usize| position - position % PAGE_TOKENS;
            let first = page(sees_from(self.tokens, position)).max(self.first);
            start = Tensor::new(&[first as u32], &[1], device)?;
            let next = first_for(self.tokens, end - 1);
            let pass = WidePass {
                capacity: (end - first).next_multiple_of(PAGE_TOKENS),
                before: [
                    ids(first - self.first..position - self.first, device)?,
                    ids(0..position - first, device)?,
                ],
                next,
                after: [ids(next - first..end - first, device)?, ids(0..end - next, device)?],
            };
            for (buffers, rows) in of_window(layers, self.tokens) {
                rows.open(buffers, &pass)?;
            }
            self.pass = Some(pass);
        }
        // The step may be captured now and replayed when the buffers have moved on.
        let places = ops::cache_places(positions, &start)?;
        of_window(layers, self.tokens).for_each(|(_, rows)| rows.places = Some(places.clone()));
        Ok(is_wide)
    }

    /// Ends the pass.
    pub(crate) fn finish(&mut self, layers: &mut [LayerCache]) -> Result<(), KernelError> {
        of_window(layers, self.tokens).for_each(|(_, rows)| rows.places = None);
        self.pass.take().map_or(Ok(()), |pass| self.set_first(pass.next))
    }

    /// Forgets all tokens, and a pass that did not come to its end.
    pub(crate) fn clear(&mut self, layers: &mut [LayerCache]) -> Result<(), KernelError> {
        of_window(layers, self.tokens).for_each(|(buffers, rows)| rows.abandon(buffers));
        self.pass = None;
        self.set_first(0)?;
        self.known = 0;
        Ok(())
    }

    /// The rows that the tokens after the first `position` see.
    pub(crate) fn mark(&self, layers: &[LayerCache], position: usize) -> Result<WindowMark, KernelError> {
        let page = |position: usize| position - position % PAGE_TOKENS;
        let from = page(sees_from(self.tokens, position)).max(self.first);
        let at = ids(from - self.first..position - self.first, self.start.device())?;
        let of_layer = |layer: &LayerCache| {
            let buffers = layer.buffers_of_window(self.tokens)?;
            let [keys, values] = buffers.map(|buffer| ops::kv_gather(buffer, &at));
            Some(keys.and_then(|keys| Ok([keys, values?])))
        };
        Ok(WindowMark { from, rows: layers.iter().filter_map(of_layer).collect::<Result<_, _>>()? })
    }

    /// Goes back to `mark`, which was made after `position` tokens.
    pub(crate) fn go_back(
        &mut self,
        layers: &mut [LayerCache],
        position: usize,
        mark: &WindowMark,
    ) -> Result<(), KernelError> {
        self.clear(layers)?;
        let first = first_for(self.tokens, position.saturating_sub(1));
        let places = ids(mark.from - first..position - first, self.start.device())?;
        let (rows, most) = (self.rows_for(position - first), self.capacity());
        for ((mut buffers, _), marked) in of_window(layers, self.tokens).zip(&mark.rows) {
            grow(buffers.each_mut().map(|buffer| &mut **buffer), rows, most)?;
            for (buffer, rows) in buffers.into_iter().zip(marked) {
                ops::kv_append(buffer, rows, &places)?;
            }
        }
        self.set_first(first)?;
        self.known = mark.from;
        Ok(())
    }
}

/// Moves buffers to memory for so many rows, doubled up to `most`.
fn grow(buffers: [&mut Tensor; 2], rows: usize, most: usize) -> Result<(), KernelError> {
    for buffer in buffers {
        let now = buffer.dim(1);
        if rows > now {
            *buffer = ops::grow(buffer, super::grown(now, rows).min(most))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer that has just moved on keeps the window and [`WINDOW_ROLLBACK`] tokens before it,
    /// and stands where the last token alone says.
    #[test]
    fn buffers_keep_their_windows() {
        for window in [1, 19, 128, 512, 1024, 4096] {
            let capacity = capacity(window);
            assert!(capacity < window + WINDOW_ROLLBACK + STRIDE + PAGE_TOKENS);
            for last in (0..capacity + 3 * STRIDE).step_by(7).chain([capacity - 1, capacity]) {
                let first = first_for(window, last);
                assert!(first <= last && last - first < capacity, "{last} of {window}");
                let back = (last + 1).saturating_sub(WINDOW_ROLLBACK);
                assert!(first <= sees_from(window, back.max(first)) || first == 0, "{last} of {window}");
                assert!(first == 0 || first <= sees_from(window, last - WINDOW_ROLLBACK));
                assert!(first.is_multiple_of(STRIDE) && first_for(window, last + 1) >= first);
            }
        }
    }
}
