use crate::layers::{DeltaNetConfig, PagedRows};
use lowbit_formats::DType;
use lowbit_kernels::ops::{self, CacheType, Pages, PagesMut, RmsNormRope};
use lowbit_kernels::{Device, KernelError, Tensor};

/// The state of one sequence in each layer. A clone is a fork: both share memory until one of them
/// writes.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// None before the first token.
    layers: Vec<LayerCache>,
    position: usize,
}

/// One layer's part.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum LayerCache {
    Attention(KvCache),
    DeltaNet(DeltaCache),
}

/// Keys and values of all tokens so far, `[Hkv, capacity, row]` each, of
/// [`Target::cache`](crate::Target::cache)'s type, whose rows have head_dim values. Latents have
/// one head of keys, and values without elements.
#[derive(Clone, Debug)]
pub struct KvCache {
    keys: Tensor,
    values: Tensor,
}

/// A gated delta net's or a Mamba-2 layer's state: the convolution's last inputs, f32
/// `[S, C, W - 1]`, and the recurrence's matrix, f32 `[S, Hv, Dk, Dv]`. In a [`Cache`], which is
/// one sequence's, S is 1. A short convolution has the first alone, and the second without values.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaCache {
    pub conv: Tensor,
    pub state: Tensor,
    /// In a pool, `[marks, ..]` for each of the two that has values: states that are kept.
    pub(crate) marked: Vec<Tensor>,
}

/// The data that a [`Cache`] needs to go back to a place: its delta nets' states there, one per
/// such layer, which it shares until it writes. Keys and values need nothing: those of later tokens
/// are not read, and are overwritten.
#[derive(Clone, Debug)]
pub struct Mark {
    position: usize,
    states: Vec<DeltaCache>,
}

impl Mark {
    /// Tokens before it.
    pub fn position(&self) -> usize {
        self.position
    }
}

/// The first capacity of a [`KvCache`]; it doubles from there.
const FIRST_CAPACITY: usize = 256;

/// The size of one sequence's state, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheSize {
    /// Keys and values of a token, in all layers.
    pub per_token: usize,
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
        self.per_token.saturating_mul(capacity).saturating_add(self.fixed)
    }

    /// That of these layers.
    pub(crate) fn of(layers: &[LayerCache]) -> Self {
        let mut size = Self { granule: FIRST_CAPACITY, ..Self::default() };
        for layer in layers {
            match layer {
                LayerCache::Attention(KvCache { keys, values }) => {
                    let row = |tensor: &Tensor| tensor.dim(0) * tensor.dim(2) * tensor.dtype().size();
                    size.per_token += row(keys) + row(values);
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
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let all = self.layers.iter().flat_map(|layer| match layer {
            LayerCache::Attention(cache) => [&cache.keys, &cache.values],
            LayerCache::DeltaNet(cache) => [&cache.conv, &cache.state],
        });
        all.filter(|tensor| !tensor.is_empty())
    }

    /// Forgets all tokens and keeps the memory. Keys and values are not cleared: attention only
    /// reads those written since.
    pub(crate) fn clear(&mut self) -> Result<(), KernelError> {
        self.position = 0;
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

    /// True if it has no states that need a [`Mark`] to go back.
    pub fn goes_back_anywhere(&self) -> bool {
        self.layers.iter().all(|layer| matches!(layer, LayerCache::Attention(_)))
    }

    /// This place.
    pub fn mark(&self) -> Mark {
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Attention(_) => None,
            LayerCache::DeltaNet(cache) => Some(cache.clone()),
        });
        Mark { position: self.position, states: states.collect() }
    }

    /// Goes back to `mark`, which is of this text: this cache's, or one that it is a fork of.
    pub fn go_back(&mut self, mark: &Mark) {
        self.position = mark.position;
        let nets = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::Attention(_) => None,
            LayerCache::DeltaNet(cache) => Some(cache),
        });
        for (cache, state) in nets.zip(&mark.states) {
            *cache = state.clone();
        }
    }

    /// Every layer's part, with room for `tokens` more; `new` makes them before the first.
    pub(crate) fn reserve(
        &mut self,
        tokens: usize,
        new: impl FnOnce() -> Result<Vec<LayerCache>, KernelError>,
    ) -> Result<&mut [LayerCache], KernelError> {
        if self.layers.is_empty() {
            self.layers = new()?;
        }
        let wanted = self.position + tokens;
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer {
                cache.reserve(wanted)?;
            }
        }
        Ok(&mut self.layers)
    }

    /// Goes back to the first `tokens` tokens. False if it has not seen so many, or has states and
    /// needs a [`Mark`]: then nothing changes.
    pub fn go_back_to(&mut self, tokens: usize) -> bool {
        let reaches = tokens == self.position || (tokens < self.position && self.goes_back_anywhere());
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
        if self.layers.is_empty() {
            self.layers = new()?;
        }
        for layer in &mut self.layers {
            if let LayerCache::Attention(cache) = layer
                && tokens > cache.keys.dim(1)
            {
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
                let capacity = tokens.next_multiple_of(FIRST_CAPACITY).max(cache.keys.dim(1));
                cache.grow(capacity)?;
            }
        }
        Ok(fork)
    }

    /// True if `tokens` more fit without reallocation.
    pub fn has_room(&self, tokens: usize) -> bool {
        self.layers.iter().all(|layer| match layer {
            LayerCache::Attention(cache) => self.position + tokens <= cache.keys.dim(1),
            LayerCache::DeltaNet(_) => true,
        })
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
            Self::Attention(KvCache { keys, values }) => {
                let paged = |x: &Tensor| zeros(x, &[pages, x.dim(0), ops::PAGE_TOKENS, x.dim(2)]);
                Self::Attention(KvCache { keys: paged(keys)?, values: paged(values)? })
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
        Ok(Self { keys: empty()?, values: empty()? })
    }

    /// Of latents `[1, capacity, width]`, which are keys and values in one: there are no values
    /// besides.
    pub(crate) fn of_latents(width: usize, dtype: DType, device: &Device) -> Result<Self, KernelError> {
        Ok(Self {
            keys: Tensor::allocate_zeros(&[1, 0, width], dtype, device)?,
            values: Tensor::allocate_zeros(&[1, 0, 0], dtype, device)?,
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

    /// Writes `k`, normed and rotated as `keys` says, and `v`, both `[T, Hkv, head_dim]`, to
    /// `positions` of the cache. Returns `q`, normed and rotated as `queries` says, and the whole
    /// cache.
    pub(crate) fn append(
        &mut self,
        qkv: [&Tensor; 3],
        positions: &Tensor,
        [queries, keys]: [&RmsNormRope<'_>; 2],
    ) -> Result<(Tensor, [&Tensor; 2]), KernelError> {
        let caches = [&mut self.keys, &mut self.values];
        let q = ops::rms_norm_rope_append(caches, qkv, positions, [queries, keys])?;
        Ok((q, [&self.keys, &self.values]))
    }

    /// As [`Self::append`] into the pages of a pool. Returns `q`, normed and rotated.
    pub(crate) fn append_paged(
        &mut self,
        qkv: [&Tensor; 3],
        rows: &PagedRows,
        [queries, keys]: [&RmsNormRope<'_>; 2],
    ) -> Result<Tensor, KernelError> {
        let pages = PagesMut { keys: &mut self.keys, values: &mut self.values, table: &rows.table };
        ops::rms_norm_rope_append_paged(pages, qkv, &rows.positions, [queries, keys])
    }

    /// Keys, and values.
    pub(crate) fn tensors(&self) -> [&Tensor; 2] {
        [&self.keys, &self.values]
    }

    /// A pool's pages, by the table of these rows.
    pub(crate) fn pages<'a>(&'a self, rows: &'a PagedRows) -> Pages<'a> {
        Pages { keys: &self.keys, values: &self.values, table: &rows.table }
    }

    fn reserve(&mut self, tokens: usize) -> Result<(), KernelError> {
        let capacity = self.keys.dim(1);
        if tokens > capacity {
            self.grow(tokens.max(2 * capacity).next_multiple_of(FIRST_CAPACITY))?;
        }
        Ok(())
    }

    /// Moves to memory for `capacity` tokens.
    fn grow(&mut self, capacity: usize) -> Result<(), KernelError> {
        self.keys = ops::grow(&self.keys, capacity)?;
        self.values = ops::grow(&self.values, capacity)?;
        Ok(())
    }
}

impl DeltaCache {
    /// Of so many sequences that have not begun.
    pub(crate) fn new(
        config: &DeltaNetConfig,
        sequences: usize,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let conv = [sequences, config.conv_dim(), config.linear_conv_kernel_dim - 1];
        let state = [
            sequences,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        ];
        Self::of_sizes(conv, state, device)
    }

    /// Of a convolution, `[S, C, W - 1]`, and of a recurrence, `[S, Hv, Dk, Dv]`.
    pub(crate) fn of_sizes(
        conv: [usize; 3],
        state: [usize; 4],
        device: &Device,
    ) -> Result<Self, KernelError> {
        Ok(Self {
            conv: Tensor::allocate_zeros(&conv, DType::F32, device)?,
            state: Tensor::allocate_zeros(&state, DType::F32, device)?,
            marked: vec![],
        })
    }

    /// A short convolution's, `[S, C, W - 1]`.
    pub(crate) fn of_convolution(conv: [usize; 3], device: &Device) -> Result<Self, KernelError> {
        Self::of_sizes(conv, [conv[0], 0, 0, 0], device)
    }

    /// Of a pool's: copies the states in these slots to these marks.
    pub(crate) fn mark(&mut self, marks: &[(usize, usize)]) -> Result<(), KernelError> {
        let Self { conv, state, marked } = self;
        let states = [&*conv, &*state].into_iter().filter(|tensor| !tensor.is_empty());
        for (states, marked) in states.zip(marked) {
            marks.iter().try_for_each(|&(slot, mark)| ops::copy_rows(states, slot, marked, mark))?;
        }
        Ok(())
    }

    /// Of a pool's: sets the states in `slot` to those of a mark, or to zero.
    pub(crate) fn restore(
        &mut self,
        slot: usize,
        mark: Option<usize>,
        blank: &Self,
    ) -> Result<(), KernelError> {
        let Self { conv, state, marked } = self;
        let blank = [&blank.conv, &blank.state];
        let states = [conv, state].into_iter().zip(blank).filter(|(tensor, _)| !tensor.is_empty());
        for (index, (states, blank)) in states.enumerate() {
            match mark {
                Some(mark) => ops::copy_rows(&marked[index], mark, states, slot)?,
                None => ops::copy_rows(blank, 0, states, slot)?,
            }
        }
        Ok(())
    }
}
