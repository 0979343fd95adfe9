//! `rms_norm_rope_append` on a GPU: one launch norms and rotates the query heads, norms and rotates
//! the new keys into their cache, and copies the new values into theirs.
//!
//! The first cubes take query heads, the next ones key heads, the rest copy values: which of them a
//! cube belongs to follows from its number alone. Queries take part only where they share the
//! config with the keys; else they get a launch of their own. Places beyond the caches' capacity
//! are computed and stored nowhere. Caches are contiguous, or pages of a pool. Caches of integers
//! get their rows by a second launch, which transforms what the first one leaves of queries and
//! keys, and encodes keys and values.

use super::{Head, HeadConfig, HeadCounts, HeadSizes, Params, norm_and_rotate};
use crate::gpu::compile::Target;
use crate::gpu::float::with_storage;
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::{Gpu, rows};
use crate::ops::Check;
use crate::ops::cache_rows::{self, CacheType};
use crate::ops::hadamard_transform::hadamard_transform;
use crate::ops::kv_append::gpu::append_vector;
use crate::ops::kv_append::kv_append;
use crate::ops::pages::gpu::{PoolSizes, Table, cache_row};
use crate::ops::rms_norm_rope::rms_norm_rope;
use crate::ops::rope::gpu::{Rotation, RotationArgs};
use crate::{KernelError, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;

/// The heads of the new tokens.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct NewHeads<X: Int, V: Size> {
    queries: Box<[Vector<X, V>]>,
    keys: Box<[Vector<X, V>]>,
    values: Box<[Vector<X, V>]>,
}

/// The norms' weights, in f32.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct NormWeights<V: Size> {
    queries: Box<[Vector<u32, V>]>,
    keys: Box<[Vector<u32, V>]>,
}

#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct Caches<Y: Int, V: Size> {
    keys: Box<[Vector<Y, V>]>,
    values: Box<[Vector<Y, V>]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct AppendCounts {
    queries: HeadCounts,
    /// New key heads, and as many value heads.
    keys: u32,
    /// Of them, those of each token.
    keys_per_token: u32,
    /// Tokens that a contiguous cache has room for.
    capacity: u32,
}

/// As [`HeadSizes`], with the bits of f32s; `width` and `value_width` are vectors of a query or key
/// head and of a value head.
#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct AppendSizes {
    width: u32,
    value_width: u32,
    pairs: u32,
    query_eps: u32,
    eps: u32,
    factor: u32,
}

/// A unit's head among `count` heads, `per_token` for each token, that start at cube `first_cube`:
/// its number, whether it exists, and its position.
#[cube]
fn head_of_unit(
    count: u32,
    per_token: u32,
    first_cube: usize,
    positions: &[u32],
    #[comptime] config: HeadConfig,
) -> (u32, bool, u32) {
    let row = rows::row(config.rows) - first_cube * config.rows.rows;
    let exists = row < count as usize;
    // Units past the last head compute the first, but do not store it.
    let row = select(exists, row, 0usize) as u32;
    (row, exists, positions[(row / per_token) as usize])
}

/// `y` are the queries.
#[kernel]
fn rms_norm_rope_append<X: Int, Y: Int, V: Size>(
    new: &NewHeads<X, V>,
    weights: &NormWeights<V>,
    rotation: &Rotation,
    y: &mut [Vector<X, V>],
    caches: &mut Caches<Y, V>,
    places: &[u32],
    table: &[u32],
    counts: AppendCounts,
    sizes: AppendSizes,
    pool: PoolSizes,
    #[comptime] config: HeadConfig,
) {
    let heads_per_cube = comptime!(config.rows.rows as u32);
    let query_cubes = counts.queries.count.div_ceil(heads_per_cube) as usize;
    let cubes = query_cubes + counts.keys.div_ceil(heads_per_cube) as usize;
    let of_queries = CUBE_POS < query_cubes;
    let heads = HeadSizes {
        width: sizes.width as usize,
        pairs: sizes.pairs as usize,
        eps: f32::reinterpret(select(of_queries, sizes.query_eps, sizes.eps)),
        factor: f32::reinterpret(sizes.factor),
    };
    let (positions, inv_freq) = (&rotation.positions, &rotation.inv_freq);
    if of_queries {
        let (count, per_token) = (counts.queries.count, counts.queries.per_token);
        let (row, exists, position) = head_of_unit(count, per_token, 0usize.runtime(), positions, config);
        let (from, to) = (row * counts.queries.pitch, row * sizes.width);
        let head = Head { from: from as usize, to: to as usize, live: exists, position };
        let config = comptime!(HeadConfig { y: config.x, ..config });
        norm_and_rotate::<X, X, V>(&new.queries, &weights.queries, inv_freq, y, &head, &heads, config);
    } else if CUBE_POS < cubes {
        let per_token = counts.keys_per_token;
        let (row, exists, position) = head_of_unit(counts.keys, per_token, query_cubes, positions, config);
        let token = row / per_token;
        let place = (token, row % per_token, places[token as usize]);
        let mut to = row;
        let mut has = true.runtime();
        if comptime!(!config.staged) {
            let (at, within) = cache_row(table, place, counts.capacity, &pool, comptime!(config.paged));
            to = at;
            has = within;
        }
        let (from, to) = (row * sizes.width, to * sizes.width);
        let head = Head { from: from as usize, to: to as usize, live: exists && has, position };
        norm_and_rotate::<X, Y, V>(
            &new.keys,
            &weights.keys,
            inv_freq,
            &mut caches.keys,
            &head,
            &heads,
            config,
        );
    } else {
        let i = (CUBE_POS - cubes) as u32 * CUBE_DIM_X + UNIT_POS_X;
        if i < counts.keys * sizes.value_width {
            let (row, column) = (i / sizes.value_width, i % sizes.value_width);
            let (token, head) = (row / counts.keys_per_token, row % counts.keys_per_token);
            let place = (token, head, places[token as usize]);
            let (to, has) = cache_row(table, place, counts.capacity, &pool, comptime!(config.paged));
            if has {
                let to = to * sizes.value_width + column;
                append_vector::<X, Y, V>(&new.values, i, &mut caches.values, to, config.x, config.y);
            }
        }
    }
}

fn compiled(target: &Target, config: HeadConfig) -> Kernel<RmsNormRopeAppend<'static>> {
    with_storage!(config.x, X => with_storage!(config.y, Y => {
        RmsNormRopeAppend::kernel::<X, Y>(target, config.rows.units, config.rows.vector, config)
    }))
}

/// The kernel's code alone, to compile it.
#[cfg(test)]
pub(super) fn code(target: &Target, config: HeadConfig) -> Box<dyn CubeKernel> {
    compiled(target, config).code()
}

/// See [`super::super::rms_norm_rope_append`] and [`super::super::rms_norm_rope_append_paged`];
/// everything was checked.
pub(in crate::ops::rms_norm_rope) fn launch(
    check: Check,
    gpu: &Gpu,
    ([keys, values], table): ([&mut Tensor; 2], Option<Table<'_>>),
    [q, k, v]: [&Tensor; 3],
    [positions, places]: [&Tensor; 2],
    [queries, new_keys]: [&Params<'_>; 2],
) -> Result<Tensor, KernelError> {
    if k.is_empty() || keys.is_empty() {
        // Pages have no sizes of 0: there are no new tokens then.
        if table.is_none() {
            kv_append(values, v, places)?;
        }
        let y = rms_norm_rope(q, positions, queries)?;
        return match CacheType::of(check, "keys", keys)? {
            CacheType::Int8 => hadamard_transform(&y),
            CacheType::Float(_) => Ok(y),
        };
    }
    let together = queries.is_like(new_keys);
    let y = match together {
        true => Tensor::allocate(&[q.dim(0), q.dim(1), queries.head_dim], q.dtype(), q.device())?,
        false => rms_norm_rope(q, positions, queries)?,
    };
    let query_count = if together { q.dim(0) * q.dim(1) } else { 0 };
    let new = [q, k, v];
    if CacheType::of(check, "keys", keys)? == CacheType::Int8 {
        let made = Tensor::allocate(k.shape(), k.dtype(), k.device())?;
        let caches = [&made; 2];
        let append = Append { check, gpu, caches, table, new, positions, places, query_count, staged: true };
        append.launch([queries, new_keys], &y)?;
        let rows = cache_rows::gpu::Append { x: &[&made, v], queries: Some(&y), positions: places, table };
        rows.launch(check, gpu, &mut [keys, values])?;
        return Ok(y);
    }
    keys.unshare()?;
    values.unshare()?;
    let caches = [&*keys, &*values];
    let append = Append { check, gpu, caches, table, new, positions, places, query_count, staged: false };
    append.launch([queries, new_keys], &y)?;
    Ok(y)
}

/// One launch's operands.
struct Append<'a> {
    check: Check,
    gpu: &'a Gpu,
    /// Of keys and values; not shared. If `staged`, new keys twice: values are not written then.
    caches: [&'a Tensor; 2],
    table: Option<Table<'a>>,
    /// q, k and v.
    new: [&'a Tensor; 3],
    positions: &'a Tensor,
    /// The new tokens' places in contiguous caches; in pages their positions.
    places: &'a Tensor,
    /// Query heads that the launch takes: all or none.
    query_count: usize,
    /// See [`HeadConfig::staged`].
    staged: bool,
}

impl Append<'_> {
    fn launch(&self, [queries, new_keys]: [&Params<'_>; 2], y: &Tensor) -> Result<(), KernelError> {
        let Self { check, gpu, caches: [keys, values], table, new: [q, k, v], positions, .. } = *self;
        let Self { places, query_count, staged, .. } = *self;
        let (heads, width) = (k.dim(1), keys.dim(-1));
        let value_width = if staged { 0 } else { values.dim(-1) };
        let count = k.dim(0) * heads;
        let inv_freq = new_keys.rope.uploaded(k.device())?;
        let norm = |params: &Params<'_>| match params.norm {
            Some((weight, eps)) => Ok((weight.cast(DType::F32)?, eps)),
            // A placeholder: without a norm there is no weight to read.
            None => Ok::<_, KernelError>((inv_freq.clone(), 0.0)),
        };
        let ((query_weight, query_eps), (weight, eps)) = (norm(queries)?, norm(new_keys)?);
        let types = [check.float("k", k)?, check.float("keys", keys)?];
        let tensors = [q, k, v, &query_weight, &weight, y, keys, values];
        let query_pitch = if query_count > 0 { q.dim(2) } else { width };
        // In pages a head's bits must not depend on how many there are: units are then shared out
        // as among many.
        let many = if table.is_some() { usize::MAX } else { count.max(query_count) };
        let sizes = [many, value_width, query_pitch];
        let config = HeadConfig::of(gpu.target(), new_keys, sizes, types, &tensors);
        let config = config.in_pages(table.is_some() && !staged).staged(staged);
        let vector = config.rows.vector;
        // The caches' last elements must have an index too.
        check.index(keys.len().max(values.len()).max(q.len()))?;
        let copies = (count * value_width / vector).div_ceil(config.rows.units);
        let [query_cubes, key_cubes] = [query_count, count].map(|count| count.div_ceil(config.rows.rows));
        let arguments = RmsNormRopeAppend {
            new: NewHeadsArgs { queries: q.buffer()?, keys: k.buffer()?, values: v.buffer()? },
            weights: NormWeightsArgs { queries: query_weight.buffer()?, keys: weight.buffer()? },
            rotation: RotationArgs { positions: positions.buffer()?, inv_freq: inv_freq.buffer()? },
            y: y.buffer()?,
            caches: CachesArgs { keys: keys.buffer()?, values: values.buffer()? },
            places: places.buffer()?,
            // An unused operand gets a placeholder buffer.
            table: table.map_or(positions, |(table, _)| table).buffer()?,
            counts: AppendCounts {
                queries: HeadCounts {
                    count: check.index(query_count)?,
                    per_token: check.index(q.dim(1))?,
                    pitch: check.index(q.dim(2) / vector)?,
                },
                keys: check.index(count)?,
                keys_per_token: check.index(heads)?,
                capacity: if table.is_some() { 0 } else { check.index(keys.dim(1))? },
            },
            sizes: AppendSizes {
                width: check.index(width / vector)?,
                value_width: check.index(value_width / vector)?,
                pairs: check.index(inv_freq.len() / vector)?,
                query_eps: query_eps.to_bits(),
                eps: eps.to_bits(),
                factor: new_keys.rope.attention_factor().to_bits(),
            },
            pool: table.map_or_else(PoolSizes::none, |(_, pool)| pool),
        };
        let cubes = rows::cubes(query_cubes + key_cubes + copies);
        // SAFETY: the op checked the shapes of all operands against each other and that each token
        // has a position and a place; the kernel stores nothing at places beyond the capacity or
        // the table, nor in pages beyond the pool.
        unsafe { gpu.launch(compiled(gpu.target(), config), cubes, arguments) }
    }
}
