mod delta;
mod paged;
pub(crate) mod window;

use lowbit_formats::DType;
use lowbit_kernels::ops::{self, CacheType, Pages, PagesMut, RmsNormRope};
use lowbit_kernels::{Device, KernelError, Tensor};

pub use delta::DeltaCache;
pub(crate) use paged::{PagedRows, PagedWindow};
use window::{Window, WindowMark, WindowRows};

/// The state of one sequence in each layer. A clone is a fork: both share memory until one of them
/// writes.
///
/// Layers whose queries see a window keep that, and little more: see [`Self::go_back_to`].
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// None before the first token.
    layers: Vec<LayerCache>,
    position: usize,
    /// The windows of the layers that have one.
    windows: Vec<Window>,
    /// True if layers with a window keep everything, too.
    whole: bool,
    /// True while a pass has buffers of its own, and after one that did not come to its end.
    unfinished: bool,
}

/// One layer's part.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum LayerCache {
    Attention(KvCache),
    DeltaNet(DeltaCache),
}

/// Keys and values of all tokens so far, or of the last ones where queries see a window,
/// `[Hkv, capacity, row]` each, of [`Target::cache`](crate::Target::cache)'s type, whose rows have
/// head_dim values. Latents have one head of keys, and values without elements.
#[derive(Clone, Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
    /// In layers that keep a window.
    window: Option<Box<WindowRows>>,
}

/// The data that a [`Cache`] needs to go back to a place: its delta nets' states there, one per
/// such layer, which it shares until it writes, and a copy of the windows before it. Other keys and
/// values need nothing: those of later tokens are not read, and are overwritten.
#[derive(Clone, Debug)]
pub struct Mark {
    position: usize,
    states: Vec<DeltaCache>,
    windows: Vec<WindowMark>,
}

impl Mark {
    /// Tokens before it.
    pub fn position(&self) -> usize {
        self.position
    }
}

/// The first capacity of a [`KvCache`]; it doubles from there.
const FIRST_CAPACITY: usize = 256;

/// The capacity, now `capacity`, that has room for more `tokens` than that.
pub(crate) fn grown(capacity: usize, tokens: usize) -> usize {
    tokens.max(2 * capacity).next_multiple_of(FIRST_CAPACITY)
}

/// The size of one sequence's state, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheSize {
    /// Keys and values of a token, in all layers that keep those of the whole text.
    pub per_token: usize,
    /// Keys and values of a token, in all layers that keep a window.
    pub windowed: usize,
    /// The tokens that these layers have room for at most; 0 where there are none.
    pub window: usize,
    /// The part that does not grow: states of gated delta nets.
    pub fixed: usize,
    /// Layers with keys and values, also where these are an earlier layer's.
    pub attention_layers: usize,
    /// Keys and values are allocated for multiples of this many tokens.
    pub granule: usize,
    /// Elements of a token's keys, or values, in the layer that has most.
    pub widest: usize,
}

impl CacheSize {
    /// Bytes with room for `tokens`.
    pub fn bytes(&self, tokens: usize) -> usize {
        let capacity = tokens.checked_next_multiple_of(FIRST_CAPACITY).unwrap_or(tokens);
        let windows = self.windowed.saturating_mul(capacity.min(self.window));
        self.per_token.saturating_mul(capacity).saturating_add(windows).saturating_add(self.fixed)
    }

    /// Keys and values of a token where all layers keep those of the whole text.
    pub fn whole_per_token(&self) -> usize {
        self.per_token + self.windowed
    }

    /// The pages that a sequence in a [`CachePool`](crate::CachePool) has in layers with a window
    /// between two passes, and a mark, at most.
    pub fn window_pages(&self) -> usize {
        window::pages(self.window)
    }

    /// That of these layers.
    pub(crate) fn of(layers: &[LayerCache]) -> Self {
        let mut size = Self { granule: FIRST_CAPACITY, ..Self::default() };
        for layer in layers {
            match layer {
                LayerCache::Attention(KvCache { keys, values, window }) => {
                    let row = |tensor: &Tensor| tensor.dim(0) * tensor.dim(2) * tensor.dtype().size();
                    match window {
                        None => size.per_token += row(keys) + row(values),
                        Some(rows) => {
                            size.windowed += row(keys) + row(values);
                            size.window = size.window.max(window::capacity(rows.tokens));
                        }
                    }
                    let elements = |x: &Tensor| x.dim(0) * x.dim(2);
                    size.widest = size.widest.max(elements(keys)).max(elements(values));
                    size.attention_layers += 1;
                }
                LayerCache::DeltaNet(DeltaCache { conv, state, .. }) => {
                    size.fixed += conv.size_bytes() + state.size_bytes();
                }
            }
        }
        size
    }
}

impl Cache {
    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes in use.
    pub fn size_bytes(&self) -> usize {
        self.tensors().map(Tensor::size_bytes).sum()
    }

    /// All layers' tensors that have values.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let all = self.layers.iter().flat_map(|layer| match layer {
            LayerCache::Attention(cache) => [&cache.keys, &cache.values],
            LayerCache::DeltaNet(cache) => [&cache.conv, &cache.state],
        });
        all.filter(|tensor| !tensor.is_empty())
    }

    /// All tensors that a captured step reads or writes.
    pub(crate) fn captured(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors().chain(self.windows.iter().map(Window::start))
    }

    /// An empty cache that forgets nothing.
    pub(crate) fn that_keeps_all() -> Self {
        Self { whole: true, ..Self::default() }
    }

    /// True if layers with a window keep everything, too.
    pub(crate) fn keeps_all(&self) -> bool {
        self.whole
    }

    /// True if a layer keeps a window alone.
    pub(crate) fn forgets(&self) -> bool {
        !self.windows.is_empty()
    }

    /// Forgets all tokens and keeps the memory. Keys and values are not cleared: attention only
    /// reads those written since.
    pub(crate) fn clear(&mut self) -> Result<(), KernelError> {
        (self.position, self.unfinished) = (0, false);
        self.windows.iter_mut().try_for_each(|window| window.clear(&mut self.layers))?;
        for layer in &mut self.layers {
            if let LayerCache::DeltaNet(cache) = layer {
                let filled =
                    [&mut cache.conv, &mut cache.state].into_iter().filter(|tensor| !tensor.is_empty());
                for tensor in filled {
                    tensor.clear()?;
                }
            }
        }
        Ok(())
    }

    /// True if it has neither states nor windows that need a [`Mark`] to go back.
    pub fn goes_back_anywhere(&self) -> bool {
        self.windows.is_empty() && !self.has_states()
    }

    fn has_states(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer, LayerCache::DeltaNet(_)))
    }

    /// This place.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no memory left for a copy of the windows;
    /// [`KernelError::Value`] after a pass that did not come to its end.
    pub fn mark(&self) -> Result<Mark, KernelError> {
        self.check_finished()?;
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Attention(_) => None,
            LayerCache::DeltaNet(cache) => Some(cache.clone()),
        });
        let windows = self.windows.iter().map(|window| window.mark(&self.layers, self.position));
        let (states, windows) = (states.collect(), windows.collect::<Result<_, _>>()?);
        Ok(Mark { position: self.position, states, windows })
    }

    /// Goes back to `mark`, which is of this text: this cache's, or one that it is a fork of.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU fails.
    pub fn go_back(&mut self, mark: &Mark) -> Result<(), KernelError> {
        for (index, window) in self.windows.iter_mut().enumerate() {
            match mark.windows.get(index) {
                Some(marked) => window.go_back(&mut self.layers, mark.position, marked)?,
                // Before the first token there were none.
                None => window.clear(&mut self.layers)?,
            }
        }
        (self.position, self.unfinished) = (mark.position, false);
        let nets = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::Attention(_) => None,
            LayerCache::DeltaNet(cache) => Some(cache),
        });
        for (cache, state) in nets.zip(&mark.states) {
            *cache = state.clone();
        }
        Ok(())
    }

    /// Every layer's part, made by `new` before the first token.
    fn make(
        &mut self,
        new: impl FnOnce() -> Result<Vec<LayerCache>, KernelError>,
    ) -> Result<(), KernelError> {
        if self.layers.is_empty() {
            let mut layers = new()?;
            self.windows = Window::all(&mut layers)?;
            self.layers = layers;
        }
        Ok(())
    }

    /// Every layer's part, with room for `tokens` more; `new` makes them before the first.
    pub(crate) fn reserve(
        &mut self,
        tokens: usize,
        new: impl FnOnce() -> Result<Vec<LayerCache>, KernelError>,
    ) -> Result<&mut [LayerCache], KernelError> {
        self.check_finished()?;
        self.make(new)?;
        let wanted = self.position + tokens;
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache @ KvCache { window: None, .. }) = layer {
                cache.reserve(wanted)?;
            }
        }
        for window in &mut self.windows {
            window.make_ready(&mut self.layers, self.position, tokens)?;
        }
        Ok(&mut self.layers)
    }

    /// As [`Self::reserve`], for a pass over tokens at these positions, which [`Self::finish`]
    /// ends. Each layer is [settled](LayerCache::settle) after its last use.
    pub(crate) fn begin(
        &mut self,
        positions: &Tensor,
        new: impl FnOnce() -> Result<Vec<LayerCache>, KernelError>,
    ) -> Result<&mut [LayerCache], KernelError> {
        self.reserve(positions.len(), new)?;
        for window in &mut self.windows {
            self.unfinished |= window.begin(&mut self.layers, self.position, positions)?;
        }
        Ok(&mut self.layers)
    }

    /// Ends a pass of `tokens` tokens.
    pub(crate) fn finish(&mut self, tokens: usize) -> Result<(), KernelError> {
        self.windows.iter_mut().try_for_each(|window| window.finish(&mut self.layers))?;
        self.unfinished = false;
        self.advance(tokens);
        Ok(())
    }

    /// Refuses to go on after a pass whose windows are half those of before it.
    fn check_finished(&self) -> Result<(), KernelError> {
        let (got, want) = ("left by a pass that failed".into(), "one that goes back, or begins anew".into());
        match self.unfinished {
            false => Ok(()),
            true => Err(KernelError::Value { op: "forward", operand: "cache", got, want }),
        }
    }

    /// Goes back to the first `tokens` tokens. False if it has not seen so many, or needs a
    /// [`Mark`]: because it has states, or has forgotten a part of a window before that place. Then
    /// nothing changes. It always reaches the last [`WINDOW_ROLLBACK`](crate::WINDOW_ROLLBACK)
    /// places that it came through, if it has no states.
    pub fn go_back_to(&mut self, tokens: usize) -> bool {
        let is_back = tokens < self.position && !self.has_states() && !self.unfinished;
        let reaches =
            tokens == self.position || (is_back && self.windows.iter().all(|window| window.reaches(tokens)));
        if reaches {
            self.position = tokens;
        }
        reaches
    }

    /// Makes room for `tokens` in all, of which it has seen some; without the room to spare that
    /// [`Self::reserve`] makes. `new` makes the layers' parts before the first.
    pub(crate) fn make_room(
        &mut self,
        tokens: usize,
        new: impl FnOnce() -> Result<Vec<LayerCache>, KernelError>,
    ) -> Result<(), KernelError> {
        self.make(new)?;
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.grow(tokens.next_multiple_of(FIRST_CAPACITY))?;
            }
        }
        Ok(())
    }

    /// A fork whose keys and values have memory of their own, with room for `tokens` in all.
    pub(crate) fn fork(&self, tokens: usize) -> Result<Self, KernelError> {
        let mut fork = self.clone();
        for layer in &mut fork.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.copy(tokens.next_multiple_of(FIRST_CAPACITY))?;
            }
        }
        fork.windows.iter_mut().try_for_each(Window::unshare)?;
        Ok(fork)
    }

    /// True if `tokens` more fit without reallocation.
    pub fn has_room(&self, tokens: usize) -> bool {
        self.layers.iter().all(|layer| match layer {
            LayerCache::Attention(KvCache { keys, window: None, .. }) => {
                self.position + tokens <= keys.dim(1)
            }
            LayerCache::Attention(KvCache { keys, window: Some(rows), .. }) => {
                let mut windows = self.windows.iter().filter(|window| window.is_of(rows));
                windows.all(|window| window.has_room(keys.dim(1), self.position, tokens))
            }
            LayerCache::DeltaNet(_) => true,
        })
    }

    /// Tokens that fit without reallocation, those included that it has seen; `None` without keys
    /// and values.
    pub(crate) fn capacity(&self) -> Option<usize> {
        let capacities = self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Attention(cache) => Some(cache.keys.dim(1)),
            LayerCache::DeltaNet(_) => None,
        });
        capacities.max()
    }

    /// Sets the number of tokens seen: recording a pass counts tokens that have not run.
    pub(crate) fn set_position(&mut self, position: usize) {
        self.position = position;
    }

    pub(crate) fn advance(&mut self, tokens: usize) {
        self.position += tokens;
    }
}

impl LayerCache {
    /// The buffers of keys and values of a layer that keeps a window.
    pub(crate) fn windowed(&mut self) -> Option<([&mut Tensor; 2], &mut WindowRows)> {
        match self {
            Self::Attention(KvCache { keys, values, window: Some(rows) }) => Some(([keys, values], rows)),
            Self::Attention(_) | Self::DeltaNet(_) => None,
        }
    }

    /// The keys that a query sees, if the layer keeps these alone.
    pub(crate) fn window(&self) -> Option<usize> {
        match self {
            Self::Attention(cache) => Some(cache.window.as_ref()?.tokens),
            Self::DeltaNet(_) => None,
        }
    }

    /// The same of a layer that keeps this window.
    pub(crate) fn buffers_of_window(&self, tokens: usize) -> Option<[&Tensor; 2]> {
        match self {
            Self::Attention(KvCache { keys, values, window: Some(rows) }) if rows.tokens == tokens => {
                Some([keys, values])
            }
            Self::Attention(_) | Self::DeltaNet(_) => None,
        }
    }

    /// From now on the layer keeps what a query sees, whose window is `tokens`. It is empty.
    pub(crate) fn keep_window(&mut self, tokens: usize) {
        if let Self::Attention(cache) = self {
            cache.window = Some(Box::new(WindowRows::new(tokens)));
        }
    }

    /// Nobody reads the layer in this pass any more.
    pub(crate) fn settle(&mut self) -> Result<(), KernelError> {
        self.windowed().map_or(Ok(()), |(buffers, rows)| rows.close(buffers))
    }

    /// The tensors that have values, and that a sequence reads and writes whole, one row for each
    /// sequence.
    pub(crate) fn states(&self) -> impl Iterator<Item = &Tensor> {
        match self {
            Self::Attention(_) => None,
            Self::DeltaNet(DeltaCache { conv, state, .. }) => Some([conv, state]),
        }
        .into_iter()
        .flatten()
        .filter(|tensor| !tensor.is_empty())
    }

    /// The same layer's part of a pool: keys and values `[pages, Hkv, 64, head_dim]`, states
    /// `[slots, ..]`, all zero, and room for `marks` of them.
    pub(crate) fn in_pool(
        &self,
        [pages, slots, marks]: [usize; 3],
        device: &Device,
    ) -> Result<Self, KernelError> {
        let zeros = |like: &Tensor, shape: &[usize]| Tensor::allocate_zeros(shape, like.dtype(), device);
        Ok(match self {
            Self::Attention(KvCache { keys, values, window }) => {
                let paged = |x: &Tensor| zeros(x, &[pages, x.dim(0), ops::PAGE_TOKENS, x.dim(2)]);
                let (keys, values, window) = (paged(keys)?, paged(values)?, window.clone());
                Self::Attention(KvCache { keys, values, window })
            }
            Self::DeltaNet(DeltaCache { conv, state, .. }) => {
                let of = |rows, x: &Tensor| [&[rows], &x.shape()[1..]].concat();
                let marked = self.states().map(|x| Tensor::allocate(&of(marks, x), x.dtype(), device));
                let marked = marked.collect::<Result<_, _>>()?;
                let slots = |x: &Tensor| zeros(x, &of(slots, x));
                Self::DeltaNet(DeltaCache { conv: slots(conv)?, state: slots(state)?, marked })
            }
        })
    }
}

impl KvCache {
    pub(crate) fn new(
        kv_heads: usize,
        head_dim: usize,
        cache: CacheType,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let empty = || Tensor::allocate_zeros(&[kv_heads, 0, cache.row(head_dim)], cache.dtype(), device);
        Ok(Self { keys: empty()?, values: empty()?, window: None })
    }

    /// One like it, with room for `tokens` and no more.
    pub(crate) fn emptied(&self, tokens: usize) -> Result<Self, KernelError> {
        let empty = |like: &Tensor| {
            Tensor::allocate_zeros(&[like.dim(0), tokens, like.dim(2)], like.dtype(), like.device())
        };
        Ok(Self { keys: empty(&self.keys)?, values: empty(&self.values)?, window: None })
    }

    /// Of latents `[1, capacity, width]`, which are keys and values in one: there are no values
    /// besides.
    pub(crate) fn of_latents(width: usize, dtype: DType, device: &Device) -> Result<Self, KernelError> {
        Ok(Self {
            keys: Tensor::allocate_zeros(&[1, 0, width], dtype, device)?,
            values: Tensor::allocate_zeros(&[1, 0, 0], dtype, device)?,
            window: None,
        })
    }

    /// Writes latents `x`, `[T, 1, width]`, to `positions` of the cache. Returns the whole cache.
    pub(crate) fn append_latents(&mut self, x: &Tensor, positions: &Tensor) -> Result<&Tensor, KernelError> {
        ops::kv_append(&mut self.keys, x, positions)?;
        Ok(&self.keys)
    }

    /// As [`Self::append_latents`] into the pages of a pool, all of which it returns.
    pub(crate) fn append_latents_paged(
        &mut self,
        x: &Tensor,
        PagedRows { positions, table, .. }: &PagedRows,
    ) -> Result<&Tensor, KernelError> {
        ops::kv_append_paged(&mut self.keys, table, x, positions)?;
        Ok(&self.keys)
    }

    /// The places of the tokens of this pass among the cache's rows; they are at `positions`.
    pub(crate) fn places(&self, positions: &Tensor) -> Tensor {
        let of_window = self.window.as_ref().and_then(|rows| rows.places.clone());
        of_window.unwrap_or_else(|| positions.clone())
    }

    /// Writes `k`, normed and rotated as `keys` says, and `v`, both `[T, Hkv, head_dim]`, to
    /// `places` of the cache. Returns `q`, normed and rotated as `queries` says, and the whole
    /// cache.
    pub(crate) fn append(
        &mut self,
        qkv: [&Tensor; 3],
        [positions, places]: [&Tensor; 2],
        [queries, keys]: [&RmsNormRope<'_>; 2],
    ) -> Result<(Tensor, [&Tensor; 2]), KernelError> {
        let caches = [&mut self.keys, &mut self.values];
        let q = ops::rms_norm_rope_append(caches, qkv, [positions, places], [queries, keys])?;
        Ok((q, [&self.keys, &self.values]))
    }

    /// As [`Self::append`] into the pages of a pool. Returns `q`, normed and rotated.
    pub(crate) fn append_paged(
        &mut self,
        qkv: [&Tensor; 3],
        rows: &PagedRows,
        [queries, keys]: [&RmsNormRope<'_>; 2],
    ) -> Result<Tensor, KernelError> {
        let table = rows.table_of(self.window.is_some());
        let pages = PagesMut { keys: &mut self.keys, values: &mut self.values, table };
        ops::rms_norm_rope_append_paged(pages, qkv, &rows.positions, [queries, keys])
    }

    /// Keys, and values.
    pub(crate) fn tensors(&self) -> [&Tensor; 2] {
        [&self.keys, &self.values]
    }

    /// A pool's pages, by the table of these rows.
    pub(crate) fn pages<'a>(&'a self, rows: &'a PagedRows) -> Pages<'a> {
        let table = rows.table_of(self.window.is_some());
        Pages { keys: &self.keys, values: &self.values, table }
    }

    /// Of rows of one sequence, u32 `[n]` and `[T]`: the pages that they see, and the rows' places
    /// in these.
    pub(crate) fn pages_seen(&self, rows: &PagedRows) -> Result<[Tensor; 2], KernelError> {
        match rows.window.as_ref().filter(|_| self.window.is_some()) {
            Some(PagedWindow { seen: Some(seen), .. }) => Ok(seen.clone()),
            _ => {
                let table = rows.table_of(self.window.is_some());
                Ok([table.reshape(&[table.len()])?, rows.positions.clone()])
            }
        }
    }

    fn reserve(&mut self, tokens: usize) -> Result<(), KernelError> {
        let capacity = self.keys.dim(1);
        match tokens > capacity {
            true => self.copy(grown(capacity, tokens)),
            false => Ok(()),
        }
    }

    /// The capacity for so many tokens of a text from its start.
    fn rows_for(&self, tokens: usize) -> usize {
        self.window.as_ref().map_or(tokens, |rows| tokens.min(window::capacity(rows.tokens)))
    }

    /// Moves to memory for `tokens` tokens, if there is less.
    fn grow(&mut self, tokens: usize) -> Result<(), KernelError> {
        match self.rows_for(tokens) > self.keys.dim(1) {
            true => self.copy(tokens),
            false => Ok(()),
        }
    }

    /// Moves to memory of its own for `tokens` tokens, and for no fewer than before.
    fn copy(&mut self, tokens: usize) -> Result<(), KernelError> {
        let capacity = self.rows_for(tokens).max(self.keys.dim(1));
        self.keys = ops::grow(&self.keys, capacity)?;
        self.values = ops::grow(&self.values, capacity)?;
        Ok(())
    }
}
